"""Judging a mutant: the tests that should notice it are run, the fastest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Final

from .coverage_map import CoverageMap
from .equivalent import Identity
from .fixed import Fixed
from .mutant import Mutant
from .report import Fate, Verdict
from .runner import Copy, Ran
from .selection import Pass, passes

__all__ = ["Baselines", "judge", "judge_fixed"]

#: How much longer tests may take than they did without the mutant, and what starting them may take besides.
SLOWER: Final = 5.0
STARTING: Final = 60.0
#: How long one test may take at least, in seconds.
SHORTEST: Final = 20.0
#: How long the tests of an entry of the fixed list may take without its mutant.
LONGEST: Final = 900.0


def judge(copy: Copy, one: Mutant, found: CoverageMap, known: Mapping[Identity, str]) -> Verdict:
    """Run the tests that should notice a mutant, pass by pass, until one fails or hangs."""
    name = one.operator
    if one.identity in known:
        return Verdict(name, one, "equivalent", known[one.identity])
    tests = list[str]()
    in_turn = passes(found, one, copy.root)
    with copy.changed(one):
        for part in in_turn:
            tests += [test.id for test in part.tests]
            if _run(copy, part).result != "passed":
                return Verdict(name, one, "killed", part.name)
    return Verdict(name, one, "survived" if tests else "untested", tests=tests)


def _run(copy: Copy, part: Pass) -> Ran:
    """Run a pass, without tests whose ids differ from run to run, which would pass for having noticed something."""
    each = max(SHORTEST, SLOWER * max(test.seconds for test in part.tests))
    tests = [test.id for test in part.tests]
    while True:
        ran = copy.run(tests, timeout=SLOWER * part.seconds + STARTING, each=each)
        there = [test for test in tests if f"/{test}\n" not in ran.output] if ran.result == "missing" else tests
        if there == tests:
            return ran
        if not there:
            return replace(ran, result="passed")
        tests = there


class Baselines:
    """How long the tests of the fixed list take without a mutant, once they have passed."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, ...], float | None] = {}
        self._lock = Lock()

    def seconds(self, copy: Copy, tests: Sequence[str]) -> float | None:
        """Return how long tests take, None if they do not pass; run them if that is not known yet."""
        key = tuple(tests)
        with self._lock:
            if key in self._seconds:
                return self._seconds[key]
        ran = copy.run(tests, timeout=LONGEST, each=LONGEST)
        with self._lock:
            self._seconds[key] = ran.seconds if ran.result == "passed" else None
            return self._seconds[key]


def judge_fixed(copy: Copy, entry: Fixed, baselines: Baselines) -> Verdict:
    """Run the tests that an entry of the fixed list names."""
    seconds = baselines.seconds(copy, entry.tests)
    if seconds is None:
        return Verdict(entry.name, entry.mutant, "unproven", entry.promise, entry.tests)
    with copy.changed(entry.mutant):
        ran = copy.run(entry.tests, timeout=SLOWER * seconds + STARTING, each=LONGEST)
    fate: Fate = "survived" if ran.result == "passed" else "killed"
    note = entry.promise if ran.result == "passed" else f"{entry.promise}, {ran.result}"
    return Verdict(entry.name, entry.mutant, fate, note, entry.tests)
