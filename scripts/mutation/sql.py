"""Changes of SQL in string literals: a clause is emptied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

__all__ = ["sql_changes"]

#: Words that make a literal SQL; lower-case text such as an error message has none of them.
_SQL: Final = re.compile(
    r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|WHERE|ORDER BY|FOR UPDATE|CREATE (?:UNIQUE )?(?:TABLE|INDEX|VIEW)"
    r"|ON CONFLICT|ON DUPLICATE KEY|AND|SET|VALUES)\b"
)
_VALUE: Final = r"(?:'[^'\n]*'|\{\{?[\w.]+\}?\}|[:\w.]+)(?:::\w+)?(?:\(\))?"
_CLAUSES: Final = tuple(
    re.compile(clause)
    for clause in (
        r" SKIP LOCKED\b",
        r" ?\bFOR UPDATE SKIP LOCKED\b",
        r" ?\bFOR UPDATE\b(?! SKIP)",
        # Up to what may follow it.
        r" ?\bORDER BY [\w., {}]+?(?=\s+LIMIT|\s+FOR\b|\)|\"|\n)",
        r" ?\bON CONFLICT[^\n\")]*DO NOTHING",
        # One condition of several, in a line of its own or within a line.
        rf" ?\bAND \(?{_VALUE} (?:=|<>|<|>|<=|>=|IS|IS NOT|IN) (?:NOT )?{_VALUE}(?= AND|\)|\"|\n|\s+ORDER|\s+LIMIT)",
        # One assignment of several.
        rf"(?<=SET )\w+ = {_VALUE}(?: [+-] \d+)?, ?",
        rf", \w+ = {_VALUE}(?: [+-] \d+)?(?=,|\n|\")",
    )
)


def sql_changes(literal: str) -> Iterator[tuple[int, int, str]]:
    """Yield changes of the text of a string literal, as places in it and what stands there afterwards."""
    if not _SQL.search(literal):
        return
    for clause in _CLAUSES:
        for found in clause.finditer(literal):
            if _is_balanced(found.group()):
                yield found.start(), found.end(), ""


def _is_balanced(text: str) -> bool:
    return all(text.count(opening) == text.count(closing) for opening, closing in ("()", "{}", "[]"))
