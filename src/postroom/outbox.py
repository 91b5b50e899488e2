"""The outbox: adds messages inside the caller's own transaction."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Protocol, TypeAlias, TypedDict, Unpack, cast, overload
from uuid import UUID

from .codec import Codec, JSONCodec, type_name
from .errors import (
    EncodeError,
    InvalidDueTimeError,
    InvalidMessageError,
    InvalidNameError,
    UnknownConnectionError,
)
from .message import DEFAULT_NAMESPACE, Limits, Message, is_namespace, validate

__all__ = ["Added", "Addition", "AsyncConnection", "Options", "Outbox", "SyncConnection", "Writer"]

#: How a library's connections are written through, by the package that their class comes from.
_WRITERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("asyncpg", "psycopg", "sqlite3", "aiosqlite", "asyncmy", "pymysql", "sqlalchemy", "django"),
        "postroom.stores.sql.writer",
    ),
    "postroom": "postroom.stores.memory",
}
_ACCEPTED: Final = (
    "asyncpg, psycopg (sync or async), sqlite3, aiosqlite, asyncmy, PyMySQL, SQLAlchemy Session, AsyncSession, "
    "Connection or AsyncConnection, Django's connection"
)
_POOLS: Final = ("Pool", "Engine", "sessionmaker", "async_sessionmaker", "ConnectionPool", "AsyncConnectionPool")


@dataclass(frozen=True, slots=True)
class Added:
    """What became of a message that was added."""

    #: The id under which the message is stored; None for a duplicate whose row this transaction cannot see.
    id: UUID | None
    #: False if a message with its id or dedupe key was there already.
    added: bool


@dataclass(frozen=True, slots=True)
class Addition:
    """A message on its way into the outbox, and when it is due."""

    message: Message
    due_at: datetime | None = None
    delay: timedelta = timedelta(0)
    #: Whether the caller made the message, so that its id may be there already.
    given: bool = False


class _Commits(Protocol):
    def commit(self) -> None: ...


class _AwaitsCommit(Protocol):
    def commit(self) -> Awaitable[None]: ...


class _TellsTransaction(Protocol):
    def is_in_transaction(self) -> bool: ...


#: A connection or session whose calls return at once.
SyncConnection: TypeAlias = _Commits
#: A connection or session whose calls are awaited.
AsyncConnection: TypeAlias = _AwaitsCommit | _TellsTransaction


class Options(TypedDict, total=False):
    """What may be said of the messages of one `Outbox.add`."""

    topic: str
    key: str | None
    type: str
    tenant_id: UUID | None
    dedupe_key: str | None
    headers: Mapping[str, str]
    content_type: str
    delay: timedelta
    due_at: datetime
    outside_transaction: bool


class Writer(Protocol):
    """Writes messages through one library's connections."""

    def write(
        self, connection: Any, additions: Sequence[Addition], outbox: Outbox, *, outside_transaction: bool  # noqa: ANN401
    ) -> list[Added] | Awaitable[list[Added]]:
        """Write in the caller's transaction; never commit it."""
        ...


class Outbox:
    """Adds messages to the outbox table, through whatever holds the caller's transaction.

    Example:
        >>> import sqlite3
        >>> from postroom import Outbox
        >>> from postroom.stores import SQLiteStore
        >>> outbox = Outbox(namespace="shop")
        >>> connection = sqlite3.connect(":memory:")
        >>> SQLiteStore.create_tables(connection)
        >>> with connection:
        ...     outbox.add(connection, {"order_id": 42}, topic="orders", key="42").added
        True
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        table: str = "postroom_outbox",
        schema: str | None = None,
        codec: Codec | None = None,
        limits: Limits | None = None,
        strict_order: bool = False,
        opaque_dedupe_keys: bool = False,
        wake: Callable[[], object] | None = None,
    ) -> None:
        """Set up an outbox; no connection is made.

        Args:
            namespace: Whose messages these are; a dispatcher delivers one namespace.
            table: The name of the outbox table.
            schema: The database schema that the table is in.
            codec: Turns events into bytes; JSON by default.
            limits: How large messages may be.
            strict_order: Let one transaction at a time add to a key, so that its order is commit order.
            opaque_dedupe_keys: Do not ask that a dedupe key begins with its tenant.
            wake: Called after a commit that is known of, to deliver at once: ``dispatcher.wake`` or ``store.notify``.
        """
        if not is_namespace(namespace):
            raise InvalidNameError("namespace", namespace, "1 to 100 printable characters")
        self.namespace = namespace
        self.table = table
        self.schema = schema
        self.codec: Codec = codec or JSONCodec()
        self.limits = limits or Limits()
        self.strict_order = strict_order
        self.opaque_dedupe_keys = opaque_dedupe_keys
        self.wake = wake

    @overload
    def add(
        self, connection: AsyncConnection, event: list[Any] | tuple[Any, ...], /, **options: Unpack[Options]
    ) -> Awaitable[list[Added]]: ...
    @overload
    def add(self, connection: AsyncConnection, event: object, /, **options: Unpack[Options]) -> Awaitable[Added]: ...
    @overload
    def add(
        self, connection: SyncConnection, event: list[Any] | tuple[Any, ...], /, **options: Unpack[Options]
    ) -> list[Added]: ...
    @overload
    def add(self, connection: SyncConnection, event: object, /, **options: Unpack[Options]) -> Added: ...
    def add(self, connection: object, event: object, /, **options: Unpack[Options]) -> object:
        """Write one message, or a list of them, in the transaction that is open on ``connection``.

        A `Message` is written as it is, under this outbox's namespace. Any other event is encoded, and needs
        ``topic=``; its ``type`` is its class name in dots, or the topic for a dict. With an async connection the
        answer is to be awaited. Nothing is written unless everything can be.

        Raises:
            MessageError: A message is not valid; the subclass says what.
            NotInTransactionError: No transaction is open, and ``outside_transaction=True`` was not passed.
            UnknownConnectionError: Nothing is known of this kind of connection.
        """
        many = isinstance(event, list | tuple)
        events = cast("Sequence[object]", event) if many else (event,)
        additions = [self.prepare(item, **options) for item in events]
        if many and options.get("dedupe_key") is not None and len(additions) > 1:
            raise InvalidMessageError("one dedupe_key cannot stand for several events; pass Message objects")
        writer = _writer(connection)
        outside = options.get("outside_transaction", False)
        written = writer.write(connection, additions, self, outside_transaction=outside)
        if many:
            return written
        return _first(written) if isinstance(written, Awaitable) else written[0]

    def transaction(self, pool: Any) -> AbstractAsyncContextManager[Any]:  # noqa: ANN401 -- whatever the pool hands out
        """Open a transaction on a pool or engine, and deliver at once after its commit.

        Yields a connection for your statements and for `add`. Takes an asyncpg ``Pool``, a psycopg
        ``AsyncConnectionPool``, or SQLAlchemy's ``AsyncEngine`` or ``async_sessionmaker``.

        Raises:
            CommitUnknownError: The connection broke during COMMIT.
        """
        module = importlib.import_module("postroom.stores.sql.transaction")
        return cast("AbstractAsyncContextManager[Any]", module.transaction(pool, self.wake))

    def prepare(self, event: object, /, **options: Unpack[Options]) -> Addition:
        """Return what `add` would write, checked in every way that needs no database."""
        message = self._message(event, options)
        validate(message, self.limits, opaque_dedupe_keys=self.opaque_dedupe_keys)
        due_at, delay = options.get("due_at"), options.get("delay", timedelta(0))
        if due_at is not None and due_at.tzinfo is None:
            raise InvalidDueTimeError(due_at, "a moment needs a time zone; use datetime.now(UTC) or .astimezone()")
        if due_at is not None and delay:
            raise InvalidDueTimeError(due_at, "pass either due_at or delay, not both")
        if delay < timedelta(0):
            raise InvalidDueTimeError(due_at, f"delay={delay} is in the past")
        return Addition(message, due_at, delay, given=isinstance(event, Message))

    def _message(self, event: object, options: Options) -> Message:
        if isinstance(event, Message):
            if extra := options.keys() - {"delay", "due_at", "outside_transaction"}:
                raise InvalidMessageError(f"a Message already says its {', '.join(sorted(extra))}; leave them out of add()")
            return replace(event, namespace=self.namespace, type=event.type or event.topic)
        topic = options.get("topic")
        if topic is None:
            raise InvalidMessageError("add() needs topic= for an event that is not a Message")
        raw = isinstance(event, bytes | bytearray | memoryview)
        payload = bytes(event) if raw else self._encode(event)
        return Message(
            topic=topic,
            payload=payload,
            type=options.get("type") or (topic if raw or isinstance(event, Mapping) else type_name(event)),
            key=options.get("key"),
            namespace=self.namespace,
            content_type=options.get("content_type", "application/octet-stream" if raw else self.codec.content_type),
            headers=dict(options.get("headers", {})),
            tenant_id=options.get("tenant_id"),
            dedupe_key=options.get("dedupe_key"),
        )

    def _encode(self, event: object) -> bytes:
        if event is None or isinstance(event, str | int | float):
            raise EncodeError(event, "a bare value is no event")
        return self.codec.encode(event)


def _writer(connection: object) -> Writer:
    for kind in type(connection).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _WRITERS and kind.__name__ not in _POOLS:
            module = importlib.import_module(_WRITERS[package])
            writer: Writer | None = module.writer_for(connection)
            if writer is not None:
                return writer
    is_pool = type(connection).__name__ in _POOLS
    hint = ", which hands out connections but is none: acquire one and begin a transaction" if is_pool else ""
    raise UnknownConnectionError(connection, _ACCEPTED, hint)


async def _first(written: Awaitable[list[Added]]) -> Added:
    return (await written)[0]
