"""A mutant: one small change of one source file."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

__all__ = ["Mutant", "mutant"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file, and what identifies it when lines have moved."""

    #: Path of the file, relative to the root of the tree.
    path: str
    #: Qualified name of the function or class that is changed; empty at the level of the module.
    place: str
    #: Kind of change.
    operator: str
    #: First line that is changed, counted from 1.
    line: int
    #: The changed lines without their indentation, as they are and as they become.
    before: str
    after: str
    #: The change itself: from which character of the file to which, and what stands there afterwards.
    start: int
    end: int
    text: str

    @property
    def identity(self) -> tuple[str, str, str, str, str]:
        """What stays the same when unrelated lines of the file change."""
        return self.path, self.place, self.operator, self.before, self.after

    def apply(self, source: str) -> str:
        """Return the source of the file with the change."""
        return source[: self.start] + self.text + source[self.end :]

    def diff(self, source: str) -> str:
        """Return the change as a unified diff of the file."""
        old, new = source.splitlines(), self.apply(source).splitlines()
        return "\n".join(difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}", n=3, lineterm=""))


def mutant(path: str, place: str, operator: str, source: str, change: tuple[int, int, str]) -> Mutant:
    """Return the mutant that replaces the characters from a start to an end by a text."""
    start, end, text = change
    first = source.rfind("\n", 0, start) + 1
    last = source.find("\n", end)
    last = len(source) if last < 0 else last
    before, after = source[first:last], source[first:start] + text + source[end:last]
    line = source.count("\n", 0, start) + 1
    return Mutant(path, place, operator, line, _normal(before), _normal(after), *change)


def _normal(text: str) -> str:
    return " ".join(text.split())
