"""What is printed: the progress, the survivors with their diffs, and the sum."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from .mutant import Mutant

__all__ = ["Fate", "Progress", "Verdict", "summary"]

#: How many tests are named of each survivor.
NAMED: Final = 10
#: ``killed`` means that a test has failed or hung, ``untested`` that no test runs the line, ``unproven`` that the tests
#: which should notice fail or are missing without the mutant too.
Fate: TypeAlias = Literal["killed", "survived", "untested", "unproven", "equivalent"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutant."""

    name: str
    mutant: Mutant
    fate: Fate
    #: Which pass of tests has noticed it, or why it counts as equivalent.
    note: str = ""
    tests: Sequence[str] = ()

    @property
    def has_survived(self) -> bool:
        """Whether a test is missing."""
        return self.fate in {"survived", "untested", "unproven"}


class Progress:
    """Prints a line for each mutant."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = self._survived = 0
        self._began = time.monotonic()

    def report(self, verdict: Verdict) -> None:
        """Print what became of a mutant, and how far the run is."""
        self._done += 1
        self._survived += verdict.has_survived
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        note = f" ({verdict.note})" if verdict.note else ""
        place = f"{verdict.mutant.path}:{verdict.mutant.line}"
        print(
            f"{self._done}/{self._total} {minutes}:{seconds:02} {self._survived} survived | "
            f"{verdict.fate}{note}: {verdict.name} {place}",
            flush=True,
        )


def summary(verdicts: Sequence[Verdict], sources: dict[str, str]) -> str:
    """Return the survivors with their diffs and the tests that ran, and a line that counts everything."""
    survivors = [one for one in verdicts if one.has_survived]
    parts = [_shown(one, sources[one.mutant.path]) for one in survivors]
    counts = {fate: sum(one.fate == fate for one in verdicts) for fate in get_args(Fate)}
    by_snapshots = sum(one.note == "snapshots" for one in verdicts)
    share = 100 * len(survivors) / len(verdicts) if verdicts else 0.0
    parts.append(
        f"{len(verdicts)} mutants: {counts['killed']} killed ({by_snapshots} by snapshots alone), "
        f"{counts['equivalent']} equivalent, {counts['survived']} survived, {counts['untested']} run by no test, "
        f"{counts['unproven']} unproven: {share:.1f} % survivors"
    )
    return "\n".join(parts)


def _shown(verdict: Verdict, source: str) -> str:
    one, tests = verdict.mutant, verdict.tests
    entry = [
        "[[mutant]]",
        *(f"{name} = {_quoted(getattr(one, name))}" for name in ("path", "place", "operator", "before", "after")),
    ]
    ran = [f"  {name}" for name in tests[:NAMED]] + [f"  … {len(tests)} in all"] * (len(tests) > NAMED)
    title = f"--- {verdict.fate}: {verdict.name} {one.path}:{one.line}"
    return "\n".join([title, one.diff(source), "tests that ran:" if tests else "no test runs it", *ran, *entry, ""])


def _quoted(text: str) -> str:
    """Return a text as TOML, whose basic strings are those of JSON."""
    return json.dumps(text, ensure_ascii=False)
