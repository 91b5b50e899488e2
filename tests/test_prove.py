"""`make prove`: what it runs, and what it says at the end."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.prove import PYTHONS, Command, MissingError, Part, parts, prove, python_of
from scripts.servers import packages


def ending(code: int) -> Sequence[Command]:
    return [Command([sys.executable, "-c", f"raise SystemExit({code})"])]


def missing() -> Sequence[Command]:
    raise MissingError("no such program")


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)


def test_parts_after_a_failure_run_and_the_end_names_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    code = prove(
        [Part("first", lambda: ending(0)), Part("second", lambda: ending(3)), Part("third", lambda: ending(0))]
    )

    said = capsys.readouterr().out
    assert code == 1
    assert [line.split()[:2] for line in said.splitlines() if line.startswith(("first", "second", "third"))] == [
        ["first", "ok"],
        ["second", "FAILED"],
        ["third", "ok"],
    ]
    assert said.splitlines()[-1].endswith("FAILED: second")


def test_the_rest_of_a_part_is_left_out_after_a_failure(tmp_path: Path) -> None:
    note = tmp_path / "note"

    prove([Part("part", lambda: [*ending(1), Command(["touch", note])])])

    assert not note.exists()


def test_what_cannot_run_is_missing_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove([Part("server", missing)]) == 0
    assert re.search(r"^server +MISSING +0\.0  no such program$", capsys.readouterr().out, flags=re.MULTILINE)


def test_a_server_that_is_missing_fails_in_ci_and_a_python_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")

    assert prove([Part("server", missing)]) == 1
    assert prove([Part("python", missing, is_required=False)]) == 0


def test_the_newest_python_of_a_version_is_found_in_the_folders_of_pyenv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    for version in ("3.12.9", "3.12.10", "3.12.11", "3.13.0"):
        (tmp_path / "versions" / version / "bin").mkdir(parents=True)
        if version != "3.12.11":
            (tmp_path / "versions" / version / "bin" / "python").symlink_to(sys.executable)

    assert python_of("3.12") == tmp_path / "versions/3.12.10/bin/python"
    with pytest.raises(MissingError, match=r"python3\.14"):
        python_of("3.14")


def test_a_shim_that_runs_nothing_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(MissingError):
        python_of("3.12")


def test_tests_of_a_server_that_is_not_started_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part whose tests were all skipped would pass for a proof."""
    monkeypatch.setattr("scripts.prove.fetch", lambda package: package.bin)
    servers = [part for part in parts() if part.name.startswith(("postgres", "redis"))]

    assert [part.commands()[-1].environment["CI"] for part in servers] == ["true"] * 7


def test_every_major_of_postgresql_the_oldest_redis_and_every_python_is_a_part() -> None:
    names = [part.name for part in parts()]

    assert names[:2] == ["check", "tests"]
    assert names[2:] == [
        *(f"postgres-{major}" for major in range(13, 19)),
        "redis-6.0",
        *(f"python-{version}" for version in PYTHONS),
    ]
    assert all(one.version.startswith(one.name.partition("-")[2] + ".") for one in packages())
