"""The scripts that change a namespace, each in a file of its own beside this one."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

__all__ = ["Script", "composed", "function", "script", "source"]


class Script(NamedTuple):
    """The text of a script, and the digest by which a server that has seen it knows it."""

    text: str
    digest: str


@lru_cache(maxsize=32)
def script(name: str) -> Script:
    """Return a script by the name of its file."""
    return composed(source(name))


def composed(text: str) -> Script:
    """Return a script with what all of them have in common before it."""
    whole = f"{source('common')}\n{text}"
    return Script(whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest())


def function(name: str) -> str:
    """Return a script as a function of that name, for other scripts to call with what it takes as ARGV."""
    return f"local function {name}(ARGV)\n{source(name)}\nend"


@lru_cache(maxsize=32)
def source(name: str) -> str:
    """Return what a file holds."""
    return (files(__name__.rpartition(".")[0]) / "lua" / f"{name}.lua").read_text(encoding="utf-8")
