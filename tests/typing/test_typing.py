"""User code as the type checkers see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--no-incremental", "--no-error-summary"],
    "pyright": ["-m", "pyright", "--pythonpath", sys.executable],
}


def check(checker: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *CHECKERS[checker], str(path)]
    return subprocess.run(command, cwd=FOLDER.parent.parent, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.parametrize("checker", CHECKERS)
def test_user_code_is_understood_and_its_mistakes_are_found(checker: str) -> None:
    """S2-17, S4-03: sync gives the answer, async an awaitable, a list a list; a wrong option or connection is told."""
    pytest.importorskip(checker)

    done = check(checker, FOLDER / "user_code.py")

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_checkers_do_look_at_user_code(checker: str, tmp_path: Path) -> None:
    """S2-17: a checker that finds nothing wrong with anything would prove nothing."""
    pytest.importorskip(checker)
    wrong = tmp_path / "user_code_with_an_error.py"
    text = (FOLDER / "user_code.py").read_text()
    wrong.write_text(
        text.replace(
            "assert_type(outbox.add(session, message), Added)", "assert_type(outbox.add(session, message), int)"
        )
    )

    done = check(checker, wrong)

    assert done.returncode == 1
    assert done.stdout.count("error") >= 1
    assert "Added" in done.stdout
