"""Earlier commits of this repository, whose workers have to run beside those of the working tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import pytest

from postroom.testing.programs import ServerMissingError
from tests.support.server_fixtures import skip_or_fail

__all__ = ["Release", "checked_out", "previous", "previous_schema", "this"]

ROOT: Final = Path(__file__).parents[1]
#: The rendered SQL, of which the schema is the first part; a test keeps it up to date.
SNAPSHOTS: Final = ("tests/sql/mysql.sql", "tests/sql/postgresql.sql", "tests/sql/sqlite.sql")
GIT: Final = shutil.which("git") or "git"
_SCHEMA = re.compile(r"\A.*?(?=^-- add one message)", re.DOTALL | re.MULTILINE)


class Release:
    """The source of one commit, and how its programs are run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # What is run from another commit is not the source that coverage is measured of.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
        self.environment = {**kept, "PYTHONPATH": str(root / "src")}

    def start(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        """Start Python on this source; what it prints goes into a file, so that it never waits for a reader."""
        command = [sys.executable, *arguments]
        with log.open("wb") as out:
            return subprocess.Popen(command, env=self.environment, cwd=self.root, stdout=out, stderr=out)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the CLI to its end."""
        command = [sys.executable, "-m", "postroom.cli", *arguments]
        return subprocess.run(
            command, env=self.environment, cwd=self.root, capture_output=True, text=True, timeout=120, check=False
        )


def this() -> Release:
    """Return the working tree."""
    return Release(ROOT)


def previous() -> str:
    """Return the commit before the one that is checked out."""
    return _git("rev-parse", "--verify", "--quiet", "HEAD~1") or _missing("there is no commit before this one")


def previous_schema() -> str:
    """Return the newest ancestor whose schema differs from that of the working tree."""
    now = [_schema_in((ROOT / name).read_text()) for name in SNAPSHOTS]
    changed = _git("rev-list", "HEAD", "--", *SNAPSHOTS).split()
    for commit in ("HEAD", *(f"{commit}~1" for commit in changed)):
        then = [_schema_in(_git("show", f"{commit}:{name}")) for name in SNAPSHOTS]
        if all(then) and then != now:
            return _git("rev-parse", commit)
    return _missing("no ancestor has another schema")


def _schema_in(text: str) -> str:
    found = _SCHEMA.match(text)
    return found[0] if found else ""


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Release]:
    """Check a commit out into a worktree of its own."""
    command = [GIT, "worktree"]
    subprocess.run([*command, "add", "--quiet", "--detach", "--force", str(folder), commit], cwd=ROOT, check=True)
    try:
        yield Release(folder)
    finally:
        subprocess.run([*command, "remove", "--force", str(folder)], cwd=ROOT, check=True)


def _missing(why: str) -> NoReturn:
    """Skip: an unpacked source distribution and a shallow clone have no history; where there is one, CI fails."""
    advice = f"clone the whole repository ({why})"
    error = ServerMissingError("An earlier commit", "history", advice)
    if _git("rev-parse", "--is-shallow-repository") == "false":
        skip_or_fail(error)
    pytest.skip(f"SERVER MISSING: {error.title}: {error.advice}")


def _git(*arguments: str) -> str:
    """Return what git prints; nothing if it fails, or is not there."""
    try:
        done = subprocess.run([GIT, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
