"""The keys of a stream, all in one slot of a cluster."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from .keys import Keys

__all__ = ["StreamKeys", "stream_keys"]

#: In the order in which the scripts know them, after the stream itself.
_NAMES: Final = (
    *("dead", "delayed", "later", "waiting", "topics", "notes", "graves"),
    *("leases", "scans", "done", "receipts", "counters"),
)


class StreamKeys:
    """What the keys of a namespace are called: ``<table>:{<namespace>}:stream``, and those beside it."""

    def __init__(self, table: str, namespace: str) -> None:
        self.stream: str = f"{Keys(table, namespace).prefix}:stream"
        self.all: list[str] = [self.stream, *(f"{self.stream}:{name}" for name in _NAMES)]
        self.counters: str = self.all[-1]


@lru_cache(maxsize=256)
def stream_keys(table: str, namespace: str) -> StreamKeys:
    """Return the keys of a namespace; raise `InvalidNameError` for names that there cannot be."""
    return StreamKeys(table, namespace)
