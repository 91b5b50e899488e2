"""How broken variants are told of, and the tools to break the library with."""

# ruff: noqa: B010, SLF001 -- private parts are set by name

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from postroom.stores.redis import scripts
from postroom.stores.sql.wording import Wording

__all__ = [
    "ASYNCPG",
    "PLAIN",
    "REDIS",
    "STREAM",
    "VARIANTS",
    "Patched",
    "Variant",
    "applied",
    "apply",
    "rescript",
    "reword",
    "variant",
]

# What is patched is private, and typed as such; here nothing else is to be known of it.
Patched = Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to get it wrong."""

    breaks: str
    apply: Callable[[], None]
    #: Whose code it changes; on other stores it changes nothing.
    stores: Sequence[str]


VARIANTS: Final[dict[str, Variant]] = {}
#: In which ways the library is broken in this process, so that it can break others.
applied: Final[list[str]] = []


def apply(name: str) -> None:
    """Break the library in this process, in the way of that name."""
    VARIANTS[name].apply()
    applied.append(name)


#: Stores whose statements are the common ones, and those whose workers use asyncpg.
PLAIN: Final = ("mariadb", "sqlite")
ASYNCPG: Final = ("postgres",)
#: Those of a part that both stores in Redis have is shown on one of them.
REDIS: Final = ("redis",)
STREAM: Final = ("redis-stream",)
_TABLES: Final = ("postgres", "mariadb", "sqlite")


def variant(breaks: str, stores: Sequence[str] = _TABLES) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make the decorated function a variant of its own name, and say what it breaks."""

    def register(apply: Callable[[], None]) -> Callable[[], None]:
        VARIANTS[apply.__name__] = Variant(breaks, apply, stores)
        return apply

    return register


def reword(changes: Mapping[str, str], *, only: str = "") -> None:
    """Change the text of statements, of all or of those that have certain words, before names are filled in."""
    sound: Patched = Wording._formatted

    def formatted(self: Wording, text: str) -> str:
        if re.search(only, text):
            for old, new in changes.items():
                text = re.sub(old, new, text)
        worded: str = sound(self, text)
        return worded

    setattr(Wording, "_formatted", formatted)


def rescript(name: str, changes: Mapping[str, str]) -> None:
    """Change the text of a script of Redis, as it stands in its file; each change must have something to change."""
    sound = scripts.source

    def source(wanted: str) -> str:
        text = sound(wanted)
        for old, new in changes.items() if wanted == name else ():
            if old not in text:
                raise LookupError(f"{old!r} is not in {name}.lua any more")
            text = text.replace(old, new)
        return text

    setattr(scripts, "source", source)
