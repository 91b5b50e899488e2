"""The rows of the store in memory, and which of them is due next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import TypeAlias, overload
from uuid import UUID

from ..message import Message
from .memory_queue import Entry, SortedQueue

__all__ = ["MemoryRow", "MemoryTable"]

#: What has to go out one after the other: the messages of a key, or a single one without.
Line: TypeAlias = tuple[object, ...]


@dataclass(slots=True, eq=False)
class MemoryRow:
    """A stored message and what became of it so far."""

    message: Message
    due: datetime
    changed: datetime
    status: str = "pending"
    worker: UUID | None = None
    locked_until: datetime | None = None
    error: str | None = None
    #: The destination that the message is parked for.
    destination: str | None = None
    #: Its place in the order of arrival.
    number: int = 0

    def become(self, status: str, now: datetime) -> None:
        """Change the status, which also ends a lease."""
        self.status, self.changed, self.worker, self.locked_until = status, now, None, None

    def is_expired(self, now: datetime) -> bool:
        """Tell whether a lease ran out."""
        return self.locked_until is not None and self.locked_until < now

    @property
    def line(self) -> Line:
        """The line that the row stands in."""
        message = self.message
        # The number of an id is hashed in half of the time.
        return (message.namespace, message.id.int if message.key is None else message.topic, message.key)


class MemoryTable(Sequence[MemoryRow]):
    """Rows in order of arrival, with an index of the lines that are due, so that a claim does not read every row."""

    def __init__(self) -> None:
        self._rows: dict[UUID, MemoryRow] = {}
        self._dedupe: dict[tuple[str, str, str], UUID] = {}
        self._lines: dict[Line, dict[UUID, MemoryRow]] = {}
        #: For each namespace and status, when the first row of a line can be claimed, its number, and the line.
        self._due: dict[tuple[str, str], SortedQueue] = {}
        self._entries: dict[Line, tuple[tuple[str, str], Entry]] = {}
        #: Rows by the destination that they are parked for, those parked first in front.
        self.parked: dict[tuple[str, str], dict[UUID, MemoryRow]] = {}
        self._count = 0

    @overload
    def __getitem__(self, index: int) -> MemoryRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[MemoryRow]: ...
    def __getitem__(self, index: int | slice) -> MemoryRow | list[MemoryRow]:
        """Return the rows at a place in the order of arrival."""
        return list(self._rows.values())[index]

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._rows)

    def __iter__(self) -> Iterator[MemoryRow]:
        """Iterate in order of arrival."""
        return iter(self._rows.values())

    def find(self, identity: UUID) -> MemoryRow | None:
        """Return the row of a message."""
        return self._rows.get(identity)

    def same(self, message: Message) -> UUID | None:
        """Return the message that has the same id or the same dedupe key."""
        if message.id in self._rows:
            return message.id
        return None if message.dedupe_key is None else self._dedupe.get(_dedupe(message, message.dedupe_key))

    def append(self, row: MemoryRow) -> None:
        """Store a row behind all others."""
        self._count += 1
        row.number = self._count
        self._rows[row.message.id] = row
        if row.message.dedupe_key is not None:
            self._dedupe[_dedupe(row.message, row.message.dedupe_key)] = row.message.id
        self._lines.setdefault(row.line, {})[row.message.id] = row
        self._index(row.line)

    def remove(self, row: MemoryRow) -> None:
        """Delete a row."""
        row.status = "delivered"
        self.update(row)
        del self._rows[row.message.id]
        if row.message.dedupe_key is not None:
            del self._dedupe[_dedupe(row.message, row.message.dedupe_key)]

    def clear(self) -> None:
        """Delete all rows."""
        for row in list(self):
            self.remove(row)

    def update(self, row: MemoryRow) -> None:
        """Take note of a row that has changed."""
        line = row.line
        if row.status == "delivered" and line in self._lines:
            self._lines[line].pop(row.message.id, None)
            if not self._lines[line]:
                del self._lines[line]
        self._index(line)

    def park(self, row: MemoryRow, destination: str | None) -> None:
        """Have a row wait for a destination, or for none."""
        if row.destination is not None:
            waiting = self.parked[row.message.namespace, row.destination]
            del waiting[row.message.id]
            if not waiting:
                del self.parked[row.message.namespace, row.destination]
        row.destination = destination
        if destination is not None:
            self.parked.setdefault((row.message.namespace, destination), {})[row.message.id] = row

    def until(self, row: MemoryRow) -> list[MemoryRow]:
        """Return the rows of a line up to one of them."""
        line = self._lines[row.line].values()
        return [*takewhile(lambda other: other is not row, line), row]

    def lines(self, namespace: str) -> list[list[MemoryRow]]:
        """Return the rows of each line that are not delivered."""
        return [list(line.values()) for place, line in self._lines.items() if place[0] == namespace]

    def due(
        self, namespace: str, status: str, now: datetime, *, newest_first: bool = False
    ) -> Iterator[Iterable[MemoryRow]]:
        """Return the lines whose first row that is not dead has a status and is due, those due first in front."""
        queue = self._due.get((namespace, status), SortedQueue())
        for _, _, line in queue.due(now, newest_first=newest_first):
            yield self._lines[line].values()

    def _index(self, line: Line) -> None:
        if line in self._entries:
            place, entry = self._entries.pop(line)
            self._due[place].remove(entry)
        for row in self._lines.get(line, {}).values():
            if row.status != "dead":
                place, entry = (row.message.namespace, row.status), (row.locked_until or row.due, row.number, line)
                self._due.setdefault(place, SortedQueue()).add(entry)
                self._entries[line] = place, entry
                return


def _dedupe(message: Message, key: str) -> tuple[str, str, str]:
    return message.namespace, message.topic, key
