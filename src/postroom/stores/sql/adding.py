"""Adding messages inside the caller's transaction, as statements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar
from uuid import UUID

from ...duplicates import log_duplicates
from ...outbox import Addition, AddResult, Answer
from .statement import Script, Statement
from .wording import Wording, letters

__all__ = ["Adding", "add_all"]

T = TypeVar("T")

#: One statement stays within the limits of parameters and, escaped, of packets that servers come with.
_ROWS_AT_ONCE: Final = 500
_BYTES_AT_ONCE: Final = 4 * 1024 * 1024


class Adding(Wording):
    """The statements of the outbox's side."""

    def add(self, additions: Sequence[Addition], *, strict_order: bool) -> Script[list[AddResult]]:
        """Insert messages in the caller's transaction; tell of each whether it is new."""
        if strict_order:
            yield from self.lock_keys(additions)
        result = yield self._insert(additions)
        return (yield from self._outcome(additions, {self.to_uuid(row[0]) for row in result.rows}))

    def _outcome(self, additions: Sequence[Addition], added: set[UUID]) -> Script[list[AddResult]]:
        """Look up which messages stand in the way of those that were not added."""
        if len(added) == len(additions):
            return [AddResult(addition.message.id, is_new=True) for addition in additions]
        missed = [a.message for a in additions if a.message.id not in added and a.message.dedupe_key is not None]
        existing: dict[tuple[str, str], UUID] = {}
        if missed:
            found = yield self.query(
                self._existing,
                namespace=missed[0].namespace,
                topics=[message.topic for message in missed],
                keys=[message.dedupe_key for message in missed],
            )
            existing = {(row[1], row[2]): self.to_uuid(row[0]) for row in found.rows}
        return [self._added(addition, added, existing) for addition in additions]

    def _added(self, addition: Addition, added: set[UUID], existing: Mapping[tuple[str, str], UUID]) -> AddResult:
        message = addition.message
        if message.id in added:
            return AddResult(message.id, is_new=True)
        if message.dedupe_key is None:
            return AddResult(message.id, is_new=False)
        return AddResult(existing.get((message.topic, message.dedupe_key)), is_new=False)

    _existing: ClassVar[str] = (
        "SELECT id, topic, dedupe_key FROM {outbox} "
        "WHERE namespace = :namespace AND dedupe_key IN :keys AND topic IN :topics"
    )

    def _insert(self, additions: Sequence[Addition]) -> Statement:
        raise NotImplementedError

    def lock_keys(self, additions: Sequence[Addition]) -> Script[None]:
        """Take the lock of every key, so that messages of one key get their place in commit order."""
        raise NotImplementedError

    def _values(self, addition: Addition) -> dict[str, Any]:
        message = addition.message
        return {
            "id": self.uuid(message.id),
            "namespace": message.namespace,
            "topic": message.topic,
            "type": message.type,
            "key": message.key,
            "tenant_id": None if message.tenant_id is None else self.uuid(message.tenant_id),
            "dedupe_key": message.dedupe_key,
            "payload": message.payload,
            "content_type": message.content_type,
            "headers": json.dumps(dict(message.headers)) if message.headers else "{}",
            "due_at": None if addition.due_at is None else self.time(addition.due_at),
            "delay": self.duration(addition.delay),
        }

    def _rows_of_values(self, additions: Sequence[Addition], row: str) -> tuple[str, dict[str, Any]]:
        """Return ``(…), (…)`` and its parameters, for databases without arrays."""
        params: dict[str, Any] = {}
        rows: list[str] = []
        for number, addition in enumerate(additions):
            suffix = letters(number)
            params.update({f"{name}_{suffix}": value for name, value in self._values(addition).items()})
            rows.append(row.replace("#", suffix))
        return ",\n".join(rows), params


def add_all(additions: Sequence[Addition], dialect: Adding, *, answer: Answer[T], strict_order: bool) -> Script[T]:
    """Insert any number of messages in the caller's transaction; return what ``answer`` makes of the results."""
    if len(additions) == 1:
        added = yield from dialect.add(additions, strict_order=strict_order)
        log_duplicates(additions, added)
        return answer(added)
    if strict_order:
        # All at once: chunks that lock in turns could wait for the chunks of another add, and it for them.
        yield from dialect.lock_keys(additions)
    added = list[AddResult]()
    for chunk in _chunks(additions):
        added += yield from dialect.add(chunk, strict_order=False)
    if any(addition.given for addition in additions):
        _first_of_each(added)
    log_duplicates(additions, added)
    return answer(added)


def _chunks(additions: Sequence[Addition]) -> Iterator[Sequence[Addition]]:
    chunk: list[Addition] = []
    size = 0
    for addition in additions:
        size += len(addition.message.payload)
        if chunk and (len(chunk) == _ROWS_AT_ONCE or size > _BYTES_AT_ONCE):
            yield chunk
            chunk, size = [], len(addition.message.payload)
        chunk.append(addition)
    if chunk:
        yield chunk


def _first_of_each(added: list[AddResult]) -> None:
    """Say of a message that is listed twice that it was added once."""
    seen: set[UUID] = set()
    for place, item in enumerate(added):
        if item.is_new and item.id is not None:
            if item.id in seen:
                added[place] = AddResult(item.id, is_new=False)
            seen.add(item.id)
