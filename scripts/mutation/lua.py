"""Changes of the Lua scripts that run inside Redis, line by line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from .mutant import Mutant, mutant

__all__ = ["lua_mutants_of"]

_CALL: Final = re.compile(r"^\s*(?:(?:redis\.p?call|later|write|offer|withdraw|promote|bury|forget)\(.*\))$")
_CONDITION: Final = re.compile(r"\b(?:if|elseif|while) (.+?) (?:then|do)\b")
_WORDS: Final = (
    ("comparison", re.compile(r" == "), " ~= "),
    ("comparison", re.compile(r" ~= "), " == "),
    ("comparison", re.compile(r" <= "), " < "),
    ("comparison", re.compile(r" >= "), " > "),
    ("comparison", re.compile(r" < "), " <= "),
    ("comparison", re.compile(r" > "), " >= "),
    ("connective", re.compile(r" and "), " or "),
    ("connective", re.compile(r" or "), " and "),
    ("constant", re.compile(r" \+ 1\b"), " + 2"),
    ("constant", re.compile(r" - 1\b"), " - 2"),
)
_FUNCTION: Final = re.compile(r"^(?:local )?function ([\w.]+)")


def lua_mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a script, in the order of its lines."""
    start, place = 0, ""
    for line in source.splitlines(keepends=True):
        code = line.partition("--")[0].rstrip()
        if named := _FUNCTION.match(code):
            place = named[1]
        elif code and not line.startswith((" ", "end")):
            place = ""
        for operator, first, last, text in _changes(code):
            yield mutant(path, place, operator, source, (start + first, start + last, text))
        start += len(line)


def _changes(code: str) -> Iterator[tuple[str, int, int, str]]:
    if _CALL.match(code) and code.count("(") == code.count(")"):
        yield "statement", len(code) - len(code.lstrip()), len(code), ""
    for found in _CONDITION.finditer(code):
        if " == " not in found[1] and " ~= " not in found[1]:
            yield "condition", found.start(1), found.end(1), f"not ({found[1]})"
    for operator, pattern, text in _WORDS:
        for found in pattern.finditer(code):
            yield operator, found.start(), found.end(), text
