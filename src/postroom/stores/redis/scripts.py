"""The scripts that change a namespace, each in a file of its own beside this one."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

__all__ = ["Script", "alone", "around", "calling", "composed", "function", "script", "source"]


class Script(NamedTuple):
    """The text of a script, and the digest by which a server that has seen it knows it."""

    text: str
    digest: str


@lru_cache(maxsize=32)
def script(name: str) -> Script:
    """Return a script by the name of its file."""
    return composed(source(name), common="stream_common" if name.startswith("stream_") else "common")


def composed(text: str, *, common: str = "common") -> Script:
    """Return a script with what all of its kind have in common before it."""
    return _digested(f"{source(common)}\n{text}")


@lru_cache(maxsize=32)
def alone(name: str) -> Script:
    """Return a script that knows nothing of a store, by the name of its file."""
    return _digested(source(name))


@lru_cache(maxsize=32)
def calling(name: str, *called: str) -> Script:
    """Return a script that calls others as functions, each with keys and arguments of its own.

    One more of them is ``check``, which returns an error if a key of a store is not as it should be.
    """
    return _digested(_functions(*called) + source(name))


@lru_cache(maxsize=256)
def around(text: str) -> Script:
    """Return a script of the user's own, which may call ``add_messages``."""
    own = f"local function own(KEYS, ARGV, add_messages)\n{text}\nend\n"
    return _digested(_functions("enqueue") + own + source("around"))


def _functions(*called: str) -> str:
    texts = {"check": source("common"), **{other: script(other).text for other in called}}
    # What a function is given is called as what a script is given, and hides it.
    return "".join(f"local function {other}(KEYS, ARGV)\n{text}\nend\n" for other, text in texts.items())


def _digested(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def function(name: str) -> str:
    """Return a script as a function of that name, for other scripts to call with what it takes as ARGV."""
    return f"local function {name}(ARGV)\n{source(name)}\nend"


@lru_cache(maxsize=32)
def source(name: str) -> str:
    """Return what a file says, without comments and margins, since pipelines send it all; lines keep their numbers."""
    text = (files(__name__.rpartition(".")[0]) / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.split("\n")]
    return "\n".join("" if line.startswith("--") else line for line in lines)
