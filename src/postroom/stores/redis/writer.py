"""Adding messages through the clients and pipelines of redis-py; it is not imported here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, TypeVar
from uuid import UUID

from ...decisions import Question
from ...duplicates import log_duplicates
from ...errors import ConfigurationError
from ...inbox import Inbox
from ...message import Message
from ...outbox import Addition, AddResult, Answer, Outbox
from ...writer import Writer
from .decisions import ask, ask_async, asking
from .keys import Keys, dedupe_field, lane
from .pipelines import refuse_if_it_repeats, refuse_unless_it_queues
from .record import packed
from .scripts import script
from .stream_outbox import StreamOutbox

__all__ = ["AT_ONCE", "AsyncRedisWriter", "RedisWriter", "arguments_of", "hoped", "script_calls", "writer_for"]

T = TypeVar("T")

# Clients of the library have no type that could be named without importing it.
Foreign = Any

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_NO_INBOX: Final = "the inbox of SQL stores is a table; use the one of postroom.stores.redis"
#: A script holds up everybody else's commands, so none stores more than this.
AT_ONCE: Final = 500


def script_calls(additions: Sequence[Addition], outbox: Outbox) -> list[tuple[Sequence[str], list[Any]]]:
    """Return the keys and arguments of each call of the script that stores messages."""
    return [arguments_of(additions[first : first + AT_ONCE], outbox) for first in range(0, len(additions), AT_ONCE)]


def _commands(additions: Sequence[Addition], outbox: Outbox) -> list[list[Any]]:
    """Return the commands that store messages.

    EVAL is called by its name: pipelines of clusters have a method ``eval`` that takes nothing.
    """
    text = script("enqueue").text
    return [["EVAL", text, len(keys), *keys, *words] for keys, words in script_calls(additions, outbox)]


def arguments_of(additions: Sequence[Addition], outbox: Outbox) -> tuple[Sequence[str], list[Any]]:
    """Return the keys and the words that the script takes which stores messages."""
    keys = _keys(outbox.table, outbox.namespace)
    words: list[Any] = [keys.channel]
    for addition in additions:
        words += _words(addition)
    return keys.all, words


def _words(addition: Addition) -> tuple[Any, ...]:
    message, due_at = addition.message, addition.due_at
    time = addition.delay if due_at is None else due_at - _EPOCH
    tenant = b"" if message.tenant_id is None else message.tenant_id.bytes
    is_delay, topic = int(due_at is None), message.topic.encode()
    body, lead = packed(message), lane(message)
    return message.id.bytes, body, is_delay, time // _MICROSECOND, topic, lead, tenant, dedupe_field(message)


@lru_cache(maxsize=256)
def _keys(table: str, namespace: str) -> Keys:
    return Keys(table, namespace)


def _added(additions: Sequence[Addition], replies: Sequence[bytes | str]) -> list[AddResult]:
    texts = [answer if isinstance(answer, str) else answer.decode() for answer in replies]
    added = [
        AddResult(addition.message.id, is_new=True) if text == "1" else AddResult(UUID(text), is_new=False)
        for addition, text in zip(additions, texts, strict=True)
    ]
    log_duplicates(additions, added)
    return added


def _is_queueing(connection: Foreign) -> bool:
    """Tell whether a connection is a pipeline, which answers later.

    Raises:
        CommandRefusedError: It is one that would not, because it watches keys.
        ConfigurationError: It, or the client that it is of, repeats commands by itself.
    """
    refuse_if_it_repeats(connection)
    refuse_unless_it_queues(connection, "add()")
    names = {base.__name__ for base in type(connection).__mro__}
    return not names.isdisjoint({"Pipeline", "ClusterPipeline"})


class _NoInbox:
    """Refuses what only tables can do."""

    def admit(self, connection: Foreign, inbox: Inbox, message: Message) -> bool:
        raise ConfigurationError(_NO_INBOX)

    def has(self, connection: Foreign, inbox: Inbox, message: Message) -> bool:
        raise ConfigurationError(_NO_INBOX)

    def purge_inbox(self, connection: Foreign, inbox: Inbox, limit: int) -> int:
        raise ConfigurationError(_NO_INBOX)

    def bury(self, connection: Foreign, inbox: Inbox, message: Message, error: str) -> None:
        raise ConfigurationError(_NO_INBOX)


class RedisWriter(_NoInbox):
    """A client or pipeline whose calls return at once."""

    def write(
        self,
        connection: Foreign,
        additions: Sequence[Addition],
        outbox: Outbox,
        answer: Answer[T],
        *,
        outside_transaction: bool,
    ) -> T:
        """Store messages with one script; in a pipeline, when it is executed."""
        if isinstance(outbox, StreamOutbox):
            return answer(self._append(connection, additions, outbox))
        replies: list[bytes | str] = []
        is_queueing = _is_queueing(connection)
        for command in _commands(additions, outbox):
            reply = connection.execute_command(*command)
            replies += [] if is_queueing else reply
        if is_queueing:
            return answer(hoped(additions))
        _wake(outbox, additions)
        return answer(_added(additions, replies))

    def ask(self, connection: Foreign, outbox: Outbox, question: Question) -> object:
        """Answer a question about tickets with one script."""
        return ask(connection, outbox, asking(question, outbox, _words))

    @staticmethod
    def _append(connection: Foreign, additions: Sequence[Addition], outbox: StreamOutbox) -> list[AddResult]:
        """Append messages to a stream, all or none of them."""
        commands = outbox.commands(additions)
        queue = connection if _is_queueing(connection) else connection.pipeline(transaction=True)
        for command in commands:
            queue.execute_command(*command)
        if queue is not connection:
            queue.execute()
            _wake(outbox, additions)
        return hoped(additions)


class AsyncRedisWriter(_NoInbox):
    """A client or pipeline whose calls are awaited."""

    async def write(
        self,
        connection: Foreign,
        additions: Sequence[Addition],
        outbox: Outbox,
        answer: Answer[T],
        *,
        outside_transaction: bool,
    ) -> T:
        """Store messages with one script; in a pipeline, when it is executed."""
        if isinstance(outbox, StreamOutbox):
            return answer(await self._append(connection, additions, outbox))
        replies: list[bytes | str] = []
        is_queueing = _is_queueing(connection)
        await _find(connection)
        for command in _commands(additions, outbox):
            reply = connection.execute_command(*command)
            if not is_queueing:
                replies += await reply
            elif asyncio.iscoroutine(reply):
                await reply
        if is_queueing:
            return answer(hoped(additions))
        _wake(outbox, additions)
        return answer(_added(additions, replies))

    async def ask(self, connection: Foreign, outbox: Outbox, question: Question) -> object:
        """Answer a question about tickets with one script."""
        return await ask_async(connection, outbox, asking(question, outbox, _words))

    @staticmethod
    async def _append(connection: Foreign, additions: Sequence[Addition], outbox: StreamOutbox) -> list[AddResult]:
        """Append messages to a stream, all or none of them."""
        commands = outbox.commands(additions)
        is_queueing = _is_queueing(connection)
        await _find(connection)
        # One command needs no transaction; in a cluster, only without one is it noticed at once that a server is gone.
        is_alone = is_queueing or len(commands) == 1
        queue = connection if is_alone else connection.pipeline(transaction=True)
        for command in commands:
            queued = queue.execute_command(*command)
            if asyncio.iscoroutine(queued):
                await queued
        if not is_alone:
            await queue.execute()
        if not is_queueing:
            _wake(outbox, additions)
        return hoped(additions)


async def _find(connection: Foreign) -> None:
    """Let a cluster's client find the servers, unless it is a pipeline: commands that do it disturb each other."""
    if hasattr(connection, "get_node_from_key"):
        await connection.initialize()


def hoped(additions: Sequence[Addition]) -> list[AddResult]:
    """Say of messages that a pipeline holds that they are new: what is there will be known when it is executed."""
    return [AddResult(addition.message.id, is_new=True) for addition in additions]


def _wake(outbox: Outbox, additions: Sequence[Addition]) -> None:
    if outbox.wake is not None and additions:
        outbox.wake()


def writer_for(connection: object) -> Writer | None:
    """Return what writes through a client or pipeline of redis-py, None for anything else."""
    if not hasattr(connection, "eval"):
        return None
    is_async = any(".asyncio" in base.__module__ for base in type(connection).__mro__)
    return AsyncRedisWriter() if is_async else RedisWriter()
