"""Marking messages as handled, and keeping those that never will be, as statements."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID

from ...broker import MAX_ERROR
from ...message import Message
from .statement import Script
from .wording import Wording

__all__ = ["NO_TENANT", "Receiving"]

#: Stands for no tenant, since a part of a primary key cannot be NULL.
NO_TENANT = UUID(int=0)


class Receiving(Wording):
    """The statements of the inbox's side."""

    def admit(self, consumer: str, message: Message) -> Script[bool]:
        """Mark a message in the caller's transaction; tell whether it was not marked before."""
        marked = yield self.sql(self._admit, **self._mark(consumer, message))
        return marked.count == 1

    # Waits for another transaction that has written the same row; if that is rolled back, this one writes it.
    _admit: ClassVar[str] = """
        INSERT INTO {inbox} (consumer, tenant_id, message_id, created_at)
        VALUES (:consumer, :tenant_id, :message_id, {now})
        ON CONFLICT DO NOTHING
        """

    def has(self, consumer: str, message: Message) -> Script[bool]:
        """Tell whether a message is marked, without waiting."""
        found = yield self.query(self._has, **self._mark(consumer, message))
        return bool(found.rows)

    _has: ClassVar[str] = """
        SELECT 1 FROM {inbox}
        WHERE consumer = :consumer AND tenant_id = :tenant_id AND message_id = :message_id
        """

    def purge_inbox(self, consumer: str, older_than: timedelta, limit: int) -> Script[int]:
        """Delete a consumer's oldest marks past their retention; return how many."""
        deleted = yield self.sql(self._purge_inbox, consumer=consumer, duration=self.duration(older_than), limit=limit)
        return deleted.count

    _purge_inbox: ClassVar[str]

    def bury_letter(self, consumer: str, message: Message, error: str) -> Script[None]:
        """Keep a message that its consumer gave up, unless it is kept already."""
        yield self.sql(
            self._bury_letter,
            **self._mark(consumer, message),
            topic=_storable(message.topic),
            type=_storable(message.type),
            key=None if message.key is None else _storable(message.key),
            namespace=_storable(message.namespace),
            payload=message.payload,
            content_type=_storable(message.content_type),
            headers=json.dumps({_storable(name): _storable(value) for name, value in message.headers.items()}),
            attempts=message.attempt,
            error=_storable(error[:MAX_ERROR]),
        )

    _bury_letter: ClassVar[str] = """
        INSERT INTO {inbox_dead} (consumer, tenant_id, message_id, topic, type, {key}, namespace, payload,
                                  content_type, headers, attempts, error, died_at)
        VALUES (:consumer, :tenant_id, :message_id, :topic, :type, :key, :namespace, :payload,
                :content_type, {json_headers}, :attempts, :error, {now})
        {unless_there}
        """

    def _mark(self, consumer: str, message: Message) -> dict[str, Any]:
        return {
            "consumer": consumer,
            "tenant_id": self.uuid(message.tenant_id or NO_TENANT),
            "message_id": self.uuid(message.id),
        }


def _storable(text: str) -> str:
    """Return a text that every database takes: a letter is dead because something is wrong with it."""
    return text.replace("\x00", " ").encode(errors="replace").decode()
