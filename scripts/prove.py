"""Runs everything that proves postroom: `make prove`.

Each part runs whether or not the ones before it have failed; the end says which ran, how long they took, and which
failed. ``ONLY=postgres,python-3.12`` runs the parts whose names begin so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import which
from typing import Final, Literal, TypeAlias

from .servers import FetchError, Package, fetch, packages

__all__ = ["PYTHONS", "Command", "MissingError", "Part", "main", "prove", "python_of"]

ROOT: Final = Path(__file__).parents[1]
#: The versions of Python that are tested beside the one that made `.venv`.
PYTHONS: Final = ("3.12", "3.13")
#: As many workers as in the `Makefile`.
PARALLEL: Final = ("-n", str((os.cpu_count() or 1) + 3), "--dist", "worksteal", "-q")
#: What does not depend on the version of Python, or runs the same code in processes again.
NOT_FOR_PYTHONS: Final = (
    "tests/chaos",
    "tests/crash",
    "tests/typing",
    "tests/test_bench.py",
    "tests/test_servers.py",
    "tests/test_variants.py",
)
CONTRACTS: Final = "tests/contracts/test_stores.py"

Result: TypeAlias = Literal["ok", "FAILED", "MISSING"]


class MissingError(Exception):
    """What a part needs is not on this machine."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run, and what it finds in its environment beside ours."""

    words: Sequence[str | Path]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the proof."""

    name: str
    #: Returns what is to be run, one after another; raises `MissingError`.
    commands: Callable[[], Sequence[Command]]
    #: Whether CI fails where this part cannot run.
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a part."""

    part: Part
    result: Result
    seconds: float
    note: str = ""

    @property
    def is_failed(self) -> bool:
        """Whether the whole proof fails because of it."""
        must_run = self.part.is_required and bool(os.environ.get("CI"))
        return self.result == "FAILED" or (self.result == "MISSING" and must_run)


def parts() -> Iterator[Part]:
    """Yield all parts, the ones that find most first."""
    yield Part("check", partial(_make, "check"))
    yield Part("tests", partial(_make, "prove-tests"))
    for package in packages():
        yield Part(package.name, partial(_contract_on, package))
    for version in PYTHONS:
        yield Part(f"python-{version}", partial(_tests_on, version), is_required=False)


def _make(target: str) -> Sequence[Command]:
    return [Command(["make", "--no-print-directory", target])]


def _contract_on(package: Package) -> Sequence[Command]:
    try:
        folder = fetch(package)
    except FetchError as error:
        raise MissingError(str(error)) from error
    if package.name.startswith("postgres"):
        program, variable = "postgres", "POSTROOM_POSTGRES_BIN"
        tests = [f"{CONTRACTS}::TestPostgresStoreOverAsyncpg"]
    else:
        program, variable = "redis-server", "POSTROOM_REDIS_BIN"
        tests = [f"{CONTRACTS}::TestRedisStore", f"{CONTRACTS}::TestRedisStreamStore", "-k", "redis_url"]
    pytest = Path(sys.executable).with_name("pytest")
    version = Command([folder / program, "--version"])
    # Where CI is set, tests fail instead of being skipped: skipped tests prove nothing about a server.
    return [version, Command([pytest, *PARALLEL, *tests], {variable: str(folder), "CI": "true"})]


def _tests_on(version: str) -> Sequence[Command]:
    python, venv = python_of(version), f".venv-{version}"
    setup = ["make", "--no-print-directory", "setup", f"VENV={venv}", f"PYTHON={python}"]
    left_out = [f"--ignore={path}" for path in NOT_FOR_PYTHONS]
    return [Command(setup), Command([Path(venv, "bin", "pytest"), *PARALLEL, *left_out])]


def python_of(version: str) -> Path:
    """Return an interpreter of a version, from pyenv's folders or the PATH; raise `MissingError` if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python"), key=lambda one: _patch(one.parts[-3]))
    on_path = which(f"python{version}")
    candidates = [*reversed(found), *([Path(on_path)] if on_path else [])]
    for python in candidates:
        # A shim of pyenv's is on the PATH also for versions that it will not run.
        if subprocess.run([python, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return python
    raise MissingError(f"no python{version} was found, neither on the PATH nor in {pyenv}/versions")


def _patch(version: str) -> int:
    number = version.split(".")[2]
    return int(number) if number.isdigit() else -1


def run(part: Part) -> Ran:
    """Run a part."""
    began = time.monotonic()
    try:
        commands = part.commands()
        is_done = all(_is_done(part, command) for command in commands)
    except MissingError as error:
        return Ran(part, "MISSING", time.monotonic() - began, str(error))
    return Ran(part, "ok" if is_done else "FAILED", time.monotonic() - began)


def _is_done(part: Part, command: Command) -> bool:
    print(f"\n=== {part.name}: {' '.join(map(str, command.words))}", flush=True)
    environment = {**os.environ, **command.environment}
    return subprocess.run(command.words, cwd=ROOT, env=environment, check=False).returncode == 0


def report(done: Sequence[Ran]) -> int:
    """Print what ran and how long it took; return the exit code."""
    print(f"\n{'part':14}{'result':10}minutes")
    for ran in done:
        print(f"{ran.part.name:14}{ran.result:10}{ran.seconds / 60:7.1f}  {ran.note}".rstrip())
    failed = [ran.part.name for ran in done if ran.is_failed]
    total = sum(ran.seconds for ran in done) / 60
    print(f"\n{total:.1f} minutes; " + (f"FAILED: {', '.join(failed)}" if failed else "everything that ran is proved"))
    return 1 if failed else 0


def prove(chosen: Iterable[Part]) -> int:
    """Run parts, each whether or not others have failed; return the exit code."""
    done: list[Ran] = []
    try:
        done.extend(map(run, chosen))
    except KeyboardInterrupt:
        report(done)
        return 130
    return report(done)


def main() -> int:
    """Run the parts that were asked for."""
    wanted = tuple(filter(None, os.environ.get("ONLY", "").split(",")))
    return prove([part for part in parts() if not wanted or part.name.startswith(wanted)])


if __name__ == "__main__":
    sys.exit(main())
