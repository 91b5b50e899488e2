"""The runner: puts a mutant into a copy of the tree and runs tests there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from .mutant import Mutant

__all__ = ["Copy", "Ran", "Result", "StoppedError", "copied"]

#: What is large, made by tools or not needed to run tests.
_NOT_COPIED: Final = shutil.ignore_patterns(
    ".git", ".venv*", ".servers", ".mutation", ".hypothesis", ".*_cache", "__pycache__", "build", "dist", "*.egg-info"
)
#: What the copy has by a link.
_LINKED: Final = (".venv", ".servers")
_PASSED, _WRONG_ARGUMENTS, _NOTHING_RAN = 0, 4, 5
#: Nothing is written into the tree, and tests keep the order that they are named in.
_OPTIONS: Final = ("-x", "-q", "--tb=line", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly")

#: ``passed`` is bad news of a mutant: no test has noticed it. ``missing`` means that a test is not there.
Result: TypeAlias = Literal["passed", "failed", "timed out", "missing"]


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a run of tests."""

    result: Result
    seconds: float
    #: What pytest printed.
    output: str


class StoppedError(Exception):
    """Tests were to be run in a copy that was stopped."""


@dataclass(slots=True)
class Copy:
    """A copy of the tree, whose package is imported in place of the tree's own."""

    root: Path
    #: Folder that holds the package, relative to the root.
    sources: str = "src"
    _running: subprocess.Popen[str] | None = None
    _is_stopped: bool = False

    @contextmanager
    def changed(self, one: Mutant) -> Iterator[None]:
        """Have a mutant in the copy for a while."""
        path = self.root / one.path
        source = path.read_text()
        path.write_text(one.apply(source))
        try:
            yield
        finally:
            path.write_text(source)

    def run(self, tests: Sequence[str], *, timeout: float, each: float = 60.0) -> Ran:
        """Run tests, in their order, until one of them fails; all processes of the run end with it."""
        if self._is_stopped:
            raise StoppedError
        listed = self.root / ".tests"
        listed.write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", *_OPTIONS, f"--timeout={each:.0f}", f"@{listed}"]
        began = time.monotonic()
        with self._started(command) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                return Ran("timed out", time.monotonic() - began, "")
            finally:
                _kill(process)
        if self._is_stopped:
            raise StoppedError
        if process.returncode == _NOTHING_RAN:
            raise RuntimeError(f"none of these tests were run: {', '.join(tests)}\n{output}")
        return Ran(_result(process.returncode, output), time.monotonic() - began, output)

    def stop(self) -> None:
        """End the run that is under way, and let no other begin."""
        self._is_stopped = True
        if self._running is not None:
            _kill(self._running)

    def _started(self, command: Sequence[str]) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.root / self.sources), str(self.root)]),
            # Python takes a compiled module for current that was written in the same second and has the same size.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # A session of its own, so that everything that the tests start can be ended with them.
        self._running = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self._running


def _result(code: int, output: str) -> Result:
    if code == _WRONG_ARGUMENTS and "ERROR: not found: " in output:
        return "missing"
    return "passed" if code == _PASSED else "failed"


def _kill(process: subprocess.Popen[str]) -> None:
    """End a run and every process of its session; servers that it has started end with it by themselves."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def copied(root: Path, sources: str = "src") -> Iterator[Copy]:
    """Return a copy of a tree, which is deleted in the end."""
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=_NOT_COPIED, symlinks=True)
        for name in _LINKED:
            if (root / name).exists():
                (copy / name).symlink_to((root / name).resolve())
        yield Copy(copy, sources)
