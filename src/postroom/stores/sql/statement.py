"""Statements as values: SQL text with named parameters, and scripts of them that any driver can run."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar

__all__ = ["ParamStyle", "Result", "Row", "Script", "Statement"]

T = TypeVar("T")

ParamStyle: TypeAlias = Literal["numeric", "qmark", "format"]
Row: TypeAlias = Sequence[Any]

# A colon before a name, but not the second one of a PostgreSQL cast.
_PARAMETER = re.compile(r"(?<!:):([a-z_]+)")


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement answered."""

    rows: Sequence[Row]
    count: int


#: Yields statements and is sent their results; all of it is one transaction, or none is needed.
Script: TypeAlias = Generator["Statement", Result, T]


@dataclass(frozen=True, slots=True)
class Statement:
    """One SQL statement with ``:name`` parameters and their values.

    A list stands for one array with PostgreSQL's ``numeric`` style, and for ``(a, b, c)`` with the others.
    """

    text: str
    #: Not shown: payloads are among them, and a repr ends up in logs.
    params: Mapping[str, Any] = field(repr=False)
    #: Whether it answers with rows; otherwise only their count is asked for.
    returns: bool = False

    def bind(self, style: ParamStyle, *, arrays: bool) -> tuple[str, list[Any]]:
        """Return text and values as a driver of that style wants them."""
        sql, names = _render(self.text, style)
        if style == "numeric" or arrays:
            return sql, [self.params[name] for name in names]
        return self._expand(style, names)

    def spelled(self, spell: Callable[[Any], str]) -> str:
        """Return the text with its values in it, each as ``spell`` writes it."""
        return _template(self.text) % {name: spell(value) for name, value in self.params.items()}

    def _expand(self, style: ParamStyle, names: Sequence[str]) -> tuple[str, list[Any]]:
        mark = "?" if style == "qmark" else "%s"
        values: list[Any] = []
        sizes: dict[str, int] = {}
        for name in names:
            value = self.params[name]
            if isinstance(value, list):
                sizes[name] = len(value)  # pyright: ignore[reportUnknownArgumentType] -- a list of parameters
                values.extend(value)  # pyright: ignore[reportUnknownArgumentType] -- a list of parameters
            else:
                values.append(value)
        if not sizes:
            return _render(self.text, style)[0], values

        def marks(match: re.Match[str]) -> str:
            size = sizes.get(match[1])
            return mark if size is None else f"({', '.join([mark] * size)})"

        return _PARAMETER.sub(marks, self.text), values


@lru_cache(maxsize=128)
def _render(text: str, style: ParamStyle) -> tuple[str, tuple[str, ...]]:
    names: list[str] = _PARAMETER.findall(text)
    if style == "numeric":
        distinct = list(dict.fromkeys(names))
        return _PARAMETER.sub(lambda m: f"${distinct.index(m[1]) + 1}", text), tuple(distinct)
    mark = "?" if style == "qmark" else "%s"
    return _PARAMETER.sub(lambda _: mark, text), tuple(names)


@lru_cache(maxsize=16)
def _template(text: str) -> str:
    return _PARAMETER.sub(r"%(\1)s", text.replace("%", "%%"))
