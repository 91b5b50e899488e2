"""A sorted queue in memory whose operations stay quick when it holds hundreds of thousands of entries."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from datetime import datetime
from typing import Final, TypeAlias

__all__ = ["Entry", "SortedQueue"]

#: When something is due, a number that no other entry has, and what is due.
Entry: TypeAlias = tuple[datetime, int, tuple[object, ...]]

#: How many entries a chunk holds before it is split: to insert and delete moves only the entries of one chunk.
_CHUNK: Final = 1000


class SortedQueue:
    """Entries in the order of their times and numbers, in a list of short sorted lists."""

    def __init__(self) -> None:
        #: None of them is empty.
        self._chunks: list[list[Entry]] = []

    def add(self, entry: Entry) -> None:
        """Insert an entry where it belongs."""
        if not self._chunks:
            self._chunks.append([entry])
            return
        place = max(bisect_right(self._chunks, entry[:2], key=_first) - 1, 0)
        chunk = self._chunks[place]
        insort(chunk, entry)
        if len(chunk) > _CHUNK:
            self._chunks[place : place + 1] = [chunk[: _CHUNK // 2], chunk[_CHUNK // 2 :]]

    def remove(self, entry: Entry) -> None:
        """Delete an entry, which must be there."""
        place = bisect_right(self._chunks, entry[:2], key=_first) - 1
        chunk = self._chunks[place]
        del chunk[bisect_left(chunk, entry[:2], key=_rank)]
        if not chunk:
            del self._chunks[place]

    def due(self, now: datetime, *, newest_first: bool) -> Iterator[Entry]:
        """Return the entries up to a time, from the oldest on or from the newest on."""
        for chunk in reversed(self._chunks) if newest_first else self._chunks:
            places = range(bisect_right(chunk, now, key=_time))
            for place in reversed(places) if newest_first else places:
                yield chunk[place]
            if len(places) < len(chunk) and not newest_first:
                return


def _first(chunk: list[Entry]) -> tuple[datetime, int]:
    return chunk[0][:2]


def _rank(entry: Entry) -> tuple[datetime, int]:
    return entry[:2]


def _time(entry: Entry) -> datetime:
    return entry[0]
