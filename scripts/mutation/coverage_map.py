"""The coverage map: which tests run which lines, and how long each of them takes.

It is made by running the tests once with coverage.py, and kept in a folder that git ignores. When test files have
changed since, only those are run again. When sources have changed, lines are found again by comparing the texts.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from coverage.numbits import numbits_to_nums

from .recording import CONTEXT, RECORD

__all__ = ["CoverageMap", "CoveringTest", "Measuring", "MeasuringError", "load"]

#: The tree that this script is part of.
ROOT: Final = Path(__file__).parents[2]
#: How pytest ends when all tests were run: they passed, some failed, or there were none of this tier.
_ENDED: Final = (0, 1, 5)
#: For lines without branches, which take a tenth of the room.
_CONFIG: Final = """\
[run]
branch = false
source = {source}
concurrency = thread
sigterm = true
parallel = true
data_file = {data}
context = ${{{context}-}}
"""


class MeasuringError(Exception):
    """The tests could not be measured."""


@dataclass(frozen=True, slots=True)
class CoveringTest:
    """A test that passes on the sources as they are."""

    id: str
    seconds: float
    is_quick: bool
    #: By the path of a source file: which of its lines the test runs.
    lines: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    @property
    def file(self) -> str:
        """The file that the test is in."""
        return self.id.partition("::")[0]


@dataclass(slots=True)
class CoverageMap:
    """The tests of a project, by the lines that they run."""

    tests: dict[str, CoveringTest] = field(default_factory=dict[str, CoveringTest])
    #: By path: the sources that were measured.
    sources: dict[str, str] = field(default_factory=dict[str, str])
    #: By path: a hash of each test file that was measured.
    test_files: dict[str, str] = field(default_factory=dict[str, str])

    def covering(self, path: str, lines: Iterable[int]) -> list[CoveringTest]:
        """Return the tests that run one of some lines of a source file."""
        wanted = set(lines)
        return [test for test in self.tests.values() if not wanted.isdisjoint(test.lines.get(path, ()))]

    def move_to(self, sources: Mapping[str, str]) -> None:
        """Find the lines that tests run in sources which have changed; of new lines it is not known who runs them."""
        for path, source in sources.items():
            measured = self.sources.get(path)
            if measured is not None and measured != source:
                places = _places(measured, source)
                for test in self.tests.values():
                    test.lines[path] = [places[line] for line in test.lines.get(path, ()) if line in places]
        self.sources = dict(sources)


def _places(old: str, new: str) -> dict[int, int]:
    """Return the lines that two texts have in common, as numbers from 1 on."""
    blocks = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_matching_blocks()
    return {block.a + number + 1: block.b + number + 1 for block in blocks for number in range(block.size)}


@dataclass(frozen=True, slots=True)
class Measuring:
    """How a project's tests are run to make the map."""

    root: Path
    #: Folder of the package, relative to the root.
    package: str
    #: File that the map is kept in.
    path: Path
    #: Arguments for pytest.
    options: Sequence[str] = ()
    #: Files or folders of the tests, relative to the root.
    tests: Sequence[str] = ("tests",)
    #: What is not run, by the beginning of its path.
    left_out: tuple[str, ...] = ()


def load(measuring: Measuring, *, rebuild: bool = False) -> CoverageMap:
    """Return the map of a project, after measuring the test files that are new or have changed."""
    found = CoverageMap() if rebuild or not measuring.path.exists() else _read(measuring.path)
    found.move_to(dict(_sources(measuring)))
    present = dict(_hashes(measuring))
    changed = sorted(path for path, digest in present.items() if found.test_files.get(path) != digest)
    gone = {path for path in found.test_files if not (measuring.root / path).exists()}
    _forget(found, {*changed, *gone})
    if changed:
        print(f"measuring what {len(changed)} test files cover", flush=True)
        found.tests |= {test.id: test for test in _measured(measuring, changed)}
        found.test_files |= {path: present[path] for path in changed}
        _write(measuring.path, found)
    # What was not asked for stays in the file, for other runs.
    asked_for = {name: test for name, test in found.tests.items() if test.file in present}
    return replace(found, tests=asked_for)


def _sources(measuring: Measuring) -> Iterator[tuple[str, str]]:
    for path in sorted((measuring.root / measuring.package).rglob("*.py")):
        yield path.relative_to(measuring.root).as_posix(), path.read_text()


def _hashes(measuring: Measuring) -> Iterator[tuple[str, str]]:
    for top in measuring.tests:
        place = measuring.root / top
        for path in sorted(place.rglob("test_*.py")) if place.is_dir() else [place]:
            name = path.relative_to(measuring.root).as_posix()
            if not name.startswith(measuring.left_out):
                yield name, hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _forget(found: CoverageMap, files: set[str]) -> None:
    found.tests = {name: test for name, test in found.tests.items() if test.file not in files}
    found.test_files = {name: digest for name, digest in found.test_files.items() if name not in files}


def _measured(measuring: Measuring, files: Sequence[str]) -> list[CoveringTest]:
    """Run test files, and return those of their tests that pass."""
    raw = measuring.path.with_suffix(".raw")
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    config, package = raw / "coveragerc", measuring.root / measuring.package
    config.write_text(_CONFIG.format(source=package, data=raw / "data", context=CONTEXT))
    environment = {
        # Whoever measures this process must not measure the tests in place of the map.
        **{name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
        # Coverage.py starts with every Python process that finds this, also with those that tests start.
        "COVERAGE_PROCESS_START": str(config),
        CONTEXT: "",
        RECORD: str(raw / "record"),
        "PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT)]),
    }
    options = ["-q", "-p", "scripts.mutation.recording", "-p", "no:cacheprovider", *measuring.options]
    command = [sys.executable, "-m", "pytest", *options, *files]
    code = subprocess.run(command, cwd=measuring.root, env=environment, check=False).returncode
    if code not in _ENDED:
        raise MeasuringError(f"pytest ended with {code}, so that nothing is known of what the tests cover")
    found = list(_recorded(raw, measuring.root))
    shutil.rmtree(raw)
    return found


def _recorded(raw: Path, root: Path) -> Iterator[CoveringTest]:
    covered: dict[str, dict[str, set[int]]] = {}
    for data in raw.glob("data.*"):
        for path, test, numbits in _rows(data):
            lines = covered.setdefault(test, {}).setdefault(Path(path).relative_to(root).as_posix(), set())
            lines.update(numbits_to_nums(numbits))
    record = raw / "record"
    for line in record.read_text().splitlines() if record.exists() else ():
        noted = json.loads(line)
        if noted.pop("has_passed"):
            by_path = {path: sorted(numbers) for path, numbers in covered.get(noted["id"], {}).items()}
            yield CoveringTest(**noted, lines=by_path)


def _rows(data: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield what coverage.py has recorded, whose own methods answer for one test at a time."""
    with closing(sqlite3.connect(data)) as connection:
        yield from connection.execute(
            """
            SELECT file.path, context.context, line_bits.numbits
            FROM line_bits JOIN file ON file.id = file_id JOIN context ON context.id = context_id
            WHERE context.context <> ''
            """
        )


def _read(path: Path) -> CoverageMap:
    stored = json.loads(path.read_text())
    tests = {one["id"]: CoveringTest(**one) for one in stored["tests"]}
    return CoverageMap(tests, stored["sources"], stored["test_files"])


def _write(path: Path, found: CoverageMap) -> None:
    stored = {
        "tests": [asdict(test) for test in found.tests.values()],
        "sources": found.sources,
        "test_files": found.test_files,
    }
    # In one step, so that a run that is interrupted leaves the map as it was.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(stored))
    part.replace(path)
