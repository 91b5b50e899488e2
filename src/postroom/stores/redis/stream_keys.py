"""The keys of a stream, all in one slot of a cluster."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from ...errors import InvalidNameError
from ...message import is_namespace
from .keys import Keys

__all__ = ["StreamKeys", "stream_keys"]

#: In the order in which the scripts know them, after the stream itself.
_NAMES: Final = (
    *("dead", "delayed", "later", "waiting", "topics", "notes", "graves"),
    *("leases", "scans", "done", "receipts", "counters"),
)


#: A name without braces, or with one hash tag: what is between its braces decides on the slot.
_STREAM: Final = re.compile(r"[^{}]+|[^{}]*\{[^{}]+\}[^{}]*")


class StreamKeys:
    """What the keys of a namespace are called: ``<table>:{<namespace>}:stream``, and those beside it.

    A stream that has a name of its own has them beside it: ``{outbox:events}:dead`` is in the slot of
    ``outbox:events``, and ``{shop}:events:dead`` in that of ``{shop}:events``.
    """

    def __init__(self, table: str, namespace: str, stream: str | None = None) -> None:
        by_namespace = f"{Keys(table, namespace).prefix}:stream"
        if stream is not None and (not is_namespace(stream) or _STREAM.fullmatch(stream) is None):
            raise InvalidNameError("stream", stream, "1 to 100 printable characters with at most one pair of braces")
        self.stream: str = by_namespace if stream is None else stream
        prefix = self.stream if "{" in self.stream else f"{{{self.stream}}}"
        self.all: list[str] = [self.stream, *(f"{prefix}:{name}" for name in _NAMES)]
        self.counters: str = self.all[-1]


@lru_cache(maxsize=256)
def stream_keys(table: str, namespace: str, stream: str | None = None) -> StreamKeys:
    """Return the keys of a namespace; raise `InvalidNameError` for names that there cannot be."""
    return StreamKeys(table, namespace, stream)
