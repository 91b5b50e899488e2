"""The fixed list: mutants written by hand, one for each way in which a promise could be broken unnoticed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .mutant import Mutant, mutant

__all__ = ["LIST", "Fixed", "StaleError", "fixed"]

LIST: Final = Path(__file__).with_name("fixed.toml")


class StaleError(Exception):
    """An entry of the list no longer fits the sources."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A mutant of the list."""

    name: str
    #: The promise that it breaks, G1 to G13, or `use` for what the documentation shows.
    promise: str
    mutant: Mutant
    #: Files or ids of tests, one of which must fail.
    tests: Sequence[str]


def fixed(root: Path, path: Path = LIST) -> list[Fixed]:
    """Return the mutants of the list; raise `StaleError` if a text does not stand in its file exactly once."""
    entries = tomllib.loads(path.read_text())["mutant"]
    stale = list(_stale(entries, root))
    if stale:
        raise StaleError("\n".join(stale))
    return [_mutated(entry, (root / entry["path"]).read_text()) for entry in entries]


def _stale(entries: Sequence[Mapping[str, Any]], root: Path) -> Iterator[str]:
    for entry in entries:
        file = root / entry["path"]
        count = file.read_text().count(entry["old"]) if file.exists() else 0
        if count != 1:
            yield f"{entry['name']}: {entry['path']} holds this text {count} times instead of once: {entry['old']}"


def _mutated(entry: Mapping[str, Any], source: str) -> Fixed:
    start = source.index(entry["old"])
    change = (start, start + len(entry["old"]), entry["new"])
    return Fixed(
        entry["name"],
        entry["promise"],
        mutant(entry["path"], entry["name"], "fixed", source, change),
        entry["tests"],
    )
