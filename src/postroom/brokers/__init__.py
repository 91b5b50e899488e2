"""Where messages go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..broker import Publisher
from ..errors import UnknownURLError
from .file import FileBroker
from .lines import LinesBroker
from .memory import MemoryBroker

__all__ = ["FileBroker", "LinesBroker", "MemoryBroker", "open_url"]

if TYPE_CHECKING:
    _proof: list[type[Publisher]] = [FileBroker, LinesBroker, MemoryBroker]

ACCEPTED = "stdout:, file:path/of/the/file, memory:"


def open_url(url: str) -> FileBroker | LinesBroker | MemoryBroker:
    """Return the broker that a URL names; nothing is opened before the first message.

    Example:
        >>> from postroom.brokers import open_url
        >>> open_url("file:messages.jsonl")
        FileBroker('messages.jsonl')
    """
    scheme, colon, rest = url.partition(":")
    if rest.startswith("///"):
        rest = rest.removeprefix("//")
    match scheme:
        case "stdout" if colon and not rest:
            return LinesBroker.stdout()
        case "memory" if colon and not rest:
            return MemoryBroker()
        case "file" if rest and not rest.startswith("//"):
            return FileBroker(rest)
        case _:
            # Of what cannot be read, any part may be a password, and without a colon all of it.
            raise UnknownURLError(f"{scheme}:…" if colon else "…", ACCEPTED)
