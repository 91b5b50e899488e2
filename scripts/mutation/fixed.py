"""The fixed list: mutants written by hand, one for each way in which a promise could be broken unnoticed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .mutant import Mutant, mutant

__all__ = ["LIST", "Fixed", "StaleError", "fixed"]

LIST: Final = Path(__file__).with_name("fixed.toml")


class StaleError(Exception):
    """An entry of the list no longer fits the sources."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A mutant of the list."""

    name: str
    #: The promise that it breaks, G1 to G13.
    promise: str
    mutant: Mutant
    #: Files or ids of tests, one of which must fail.
    tests: Sequence[str]


def fixed(root: Path, path: Path = LIST) -> Iterator[Fixed]:
    """Yield the mutants of the list; raise `StaleError` for a text that its file does not hold exactly once."""
    for entry in tomllib.loads(path.read_text())["mutant"]:
        source = (root / entry["path"]).read_text()
        old: str = entry["old"]
        if source.count(old) != 1:
            found = source.count(old)
            raise StaleError(f"{entry['name']}: {entry['path']} holds this text {found} times instead of once:\n{old}")
        start = source.index(old)
        change = (start, start + len(old), entry["new"])
        yield Fixed(
            entry["name"],
            entry["promise"],
            mutant(entry["path"], entry["name"], "fixed", source, change),
            entry["tests"],
        )
