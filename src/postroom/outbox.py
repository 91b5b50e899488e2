"""The outbox: adds messages inside the caller's own transaction."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from operator import itemgetter
from typing import (
    Any,
    Final,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_type_hints,
    overload,
)
from uuid import UUID

from .checks import check_flag, check_function, check_methods, check_text, check_type
from .codec import Codec, JSONCodec, encoded, is_many
from .errors import InvalidDueTimeError, InvalidMessageError, InvalidNameError
from .message import DEFAULT_NAMESPACE, Limits, Message, drafted, is_namespace, uuid7s, validate
from .writer import writer_of

__all__ = [
    "AddResult",
    "Addition",
    "Answer",
    "AsyncConnection",
    "MessageSettings",
    "Options",
    "Outbox",
    "OutboxSettings",
    "SyncConnection",
    "check_moment",
    "check_settings",
]

T = TypeVar("T")

#: What Python calls an `add` that was never awaited, in its warning.
_NAME: Final = "Outbox.add"
_NO_DELAY: Final = timedelta(0)
#: Moments that every database can store.
_MAX_DELAY: Final = timedelta(days=36525)
_FIRST_YEAR: Final = 1970
_LAST_YEAR: Final = 9998


@dataclass(frozen=True, slots=True)
class AddResult:
    """The id of a message that was added, and whether this call stored it.

    A result is true in a condition if the message is new. ``if outbox.add(...):`` asks whether something was added,
    and an object that is true for a duplicate too would have the caller do twice what it does for a new message.
    Reading a duplicate as a failure instead is loud, and loses nothing; ``is_new`` says which of the two is meant.

    Example:
        >>> from uuid import UUID
        >>> from postroom import AddResult
        >>> bool(AddResult(UUID(int=1), is_new=True)), bool(AddResult(UUID(int=1), is_new=False))
        (True, False)
    """

    #: The id under which the message is stored; None for a duplicate whose row this transaction cannot see.
    id: UUID | None
    #: False if a message with its id or dedupe key was there already.
    is_new: bool

    def __bool__(self) -> bool:
        """Return whether the message is new."""
        return self.is_new


#: What `Outbox.add` returns of the results: the only one, or all of them.
Answer: TypeAlias = Callable[[list[AddResult]], T]
_FIRST: Final[Answer[AddResult]] = itemgetter(0)


class Addition(NamedTuple):
    """A message on its way into the outbox, and when it is due."""

    message: Message
    due_at: datetime | None = None
    delay: timedelta = timedelta(0)
    #: Whether the caller made the message, so that its id may be there already.
    given: bool = False


class _Commits(Protocol):
    def commit(self) -> None: ...


class _Forwards(Protocol):
    def __getattr__(self, name: str, /) -> Any: ...  # noqa: ANN401 -- Django's proxy says no more


class _AwaitsCommit(Protocol):
    def commit(self) -> Awaitable[None]: ...


class _TellsTransaction(Protocol):
    def is_in_transaction(self) -> bool: ...


class _Evaluates(Protocol):
    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any: ...  # noqa: ANN401 -- as redis-py says it


class _AwaitsClose(Protocol):
    def aclose(self) -> Awaitable[None]: ...


class _NamedTuple(Protocol):
    """One event, although type checkers see a tuple."""

    def _asdict(self) -> dict[str, Any]: ...


#: A connection, session, client or pipeline whose calls return at once.
SyncConnection: TypeAlias = _Commits | _Forwards | _Evaluates
#: A connection, session, client or pipeline whose calls are awaited.
AsyncConnection: TypeAlias = _AwaitsCommit | _TellsTransaction | _AwaitsClose


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


class MessageSettings(TypedDict, total=False):
    """Settings of an `Outbox` that a store of any kind passes on to it."""

    codec: Codec | None
    limits: Limits | None
    opaque_dedupe_keys: bool


class OutboxSettings(MessageSettings, total=False):
    """Settings of an `Outbox` that a store which keeps the order of keys passes on to it."""

    strict_order: bool


def check_settings(store: str, given: Iterable[str], settings: type) -> None:
    """Raise `TypeError` for a keyword that neither a store nor its outbox takes, as Python does for any call."""
    for name in given:
        if name not in get_type_hints(settings):
            raise TypeError(f"{store}() got an unexpected keyword argument {name!r}")


_OPTIONS: Final = frozenset(Options.__annotations__)
_OF_EVERY_MESSAGE: Final = frozenset({"delay", "due_at", "outside_transaction"})


class Outbox:
    """Adds messages to the outbox table, through whatever holds the caller's transaction.

    Get it from the store, as ``store.outbox()``: it has the store's namespace, table and settings, so that a dispatcher
    of the store delivers what it adds. A process that has no store makes one of its own with the same arguments.

    Example:
        >>> import sqlite3
        >>> from postroom.stores import SQLiteStore
        >>> outbox = SQLiteStore("shop.sqlite3", namespace="shop").outbox()
        >>> connection = sqlite3.connect(":memory:")
        >>> SQLiteStore.create_tables(connection)
        >>> with connection:
        ...     outbox.add(connection, {"order_id": 42}, topic="orders", key="42").is_new
        True
        >>> connection.close()
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
        check_text("table", table)
        check_text("schema", schema, optional=True)
        check_methods("codec", codec, ("encode", "decode"), "a Codec or None", optional=True)
        check_type("limits", limits, Limits, optional=True)
        check_flag("strict_order", strict_order)
        check_flag("opaque_dedupe_keys", opaque_dedupe_keys)
        check_function("wake", wake, "no argument", optional=True)
        self.namespace = namespace
        self.table = table
        self.schema = schema
        self.codec: Codec = codec or JSONCodec()
        self.limits: Limits = limits or Limits()
        self.strict_order = strict_order
        self.opaque_dedupe_keys = opaque_dedupe_keys
        self.wake = wake

    # A list is an object too, and a named tuple a tuple: the first overload that fits is meant, which mypy takes for an
    # accident. Async ones return a coroutine, because type checkers report a coroutine that is not awaited by default.
    @overload
    def add(
        self, connection: AsyncConnection, event: _NamedTuple, /, **options: Unpack[Options]
    ) -> Coroutine[Any, Any, AddResult]: ...
    @overload
    def add(  # type: ignore[overload-overlap]
        self, connection: AsyncConnection, event: list[Any] | tuple[Any, ...], /, **options: Unpack[Options]
    ) -> Coroutine[Any, Any, list[AddResult]]: ...
    @overload
    def add(
        self, connection: AsyncConnection, event: object, /, **options: Unpack[Options]
    ) -> Coroutine[Any, Any, AddResult]: ...
    @overload
    def add(self, connection: SyncConnection, event: _NamedTuple, /, **options: Unpack[Options]) -> AddResult: ...
    @overload
    def add(  # type: ignore[overload-overlap]
        self, connection: SyncConnection, event: list[Any] | tuple[Any, ...], /, **options: Unpack[Options]
    ) -> list[AddResult]: ...
    @overload
    def add(self, connection: SyncConnection, event: object, /, **options: Unpack[Options]) -> AddResult: ...
    def add(self, connection: object, event: object, /, **options: Unpack[Options]) -> object:
        """Write one message, or a list of them, in the transaction that is open on ``connection``.

        A `Message` is written as it is, under this outbox's namespace. Any other event is encoded, and needs
        ``topic=``; its ``type`` is its class name in dots, or the topic for a dict. A ``list`` or a plain ``tuple``
        holds many events and returns a list; a named tuple is one event. With an async connection ``add`` returns a
        coroutine: messages are checked by the call, and written when it is awaited. Errors of the database are raised
        by the library of the connection, unchanged.

        Raises:
            MessageError: A message is not valid; the subclass says what.
            NotInTransactionError: No transaction is open, and ``outside_transaction=True`` was not passed.
            TransactionAbortedError: The transaction has failed before.
            UnknownConnectionError: Nothing is known of this kind of connection.
            InvalidNameError: The table or its schema cannot be called so.
            SchemaMissingError: The table is not there.
        """
        events: Sequence[object] = event if is_many(event) else (event,)
        additions = self._additions(events, options)
        if len(additions) > 1 and options.get("dedupe_key") is not None:
            raise InvalidMessageError("one dedupe_key cannot stand for several events; pass Message objects")
        outside = options.get("outside_transaction", False)
        answer = _every if events is event else _FIRST
        written: object = writer_of(connection).write(connection, additions, self, answer, outside_transaction=outside)
        if inspect.iscoroutine(written):
            written.__qualname__ = _NAME
        return written

    def transaction(self, pool: Any) -> AbstractAsyncContextManager[Any]:  # noqa: ANN401 -- whatever the pool hands out
        """Open a transaction on a pool or engine, and deliver at once after its commit.

        Yields a connection, or a session, for your statements and for `add`. Takes an asyncpg ``Pool``, or
        SQLAlchemy's ``AsyncEngine`` or ``async_sessionmaker``.

        Raises:
            CommitUnknownError: The connection broke during COMMIT.
            TransactionAbortedError: A statement failed, its error was caught, and so nothing can be committed.
            UnknownConnectionError: Nothing is known of this kind of pool.
        """
        return _opener()(pool, self.wake)

    def prepare(self, event: object, /, **options: Unpack[Options]) -> Addition:
        """Return what `add` would write, checked in every way that needs no database."""
        return self._additions((event,), options)[0]

    def _additions(self, events: Sequence[object], options: Options) -> list[Addition]:
        due_at, delay = _due(options)
        headers = options.get("headers")
        if isinstance(headers, Mapping):
            options["headers"] = dict(headers)  # the caller may change its own before an async add is awaited
        additions: list[Addition] = []
        checked: set[tuple[str, str]] = set()
        identities = iter(uuid7s(sum(not isinstance(event, Message) for event in events)))
        for event in events:
            if isinstance(event, Message):
                message, given = self._given(event, options), True
            else:
                message, given = self._made(event, next(identities), options), False
            # What comes from the options is the same for all events, and checked with the first of them.
            differing = (message.type, message.content_type)
            if given or differing not in checked or len(message.payload) > self.limits.payload:
                validate(message, self.limits, opaque_dedupe_keys=self.opaque_dedupe_keys)
                checked.add(differing)
            additions.append(Addition(message, due_at, delay, given))
        return additions

    def _given(self, message: Message, options: Options) -> Message:
        if extra := options.keys() - _OF_EVERY_MESSAGE:
            raise InvalidMessageError(f"a Message already says its {_listed(extra)}; leave them out of add()")
        if message.type and message.namespace == self.namespace and not message.local:
            return message
        return replace(message, namespace=self.namespace, type=message.type or message.topic, local={})

    def _made(self, event: object, identity: UUID, options: Options) -> Message:
        topic = options.get("topic")
        if topic is None:
            raise InvalidMessageError("add() needs topic= for an event that is not a Message")
        payload, kind, content_type = encoded(self.codec, event, topic)
        return drafted(
            id=identity,
            topic=topic,
            payload=payload,
            type=options.get("type") or kind,
            key=options.get("key"),
            namespace=self.namespace,
            content_type=options.get("content_type") or content_type,
            headers=options.get("headers") or {},
            tenant_id=options.get("tenant_id"),
            dedupe_key=options.get("dedupe_key"),
        )


def _due(options: Options) -> tuple[datetime | None, timedelta]:
    """Return when the messages of one call are due; refuse options that there are none of."""
    if not options.keys() <= _OPTIONS:
        raise InvalidMessageError(f"add() takes no {_listed(options.keys() - _OPTIONS)}; it takes {_listed(_OPTIONS)}")
    due_at, delay = options.get("due_at"), options.get("delay") or _NO_DELAY
    if due_at is not None or delay is not _NO_DELAY:
        _validate_due(due_at, delay)
    return due_at, delay


def _validate_due(due_at: object, delay: object) -> None:
    if not isinstance(due_at, datetime | None) or not isinstance(delay, timedelta):
        raise InvalidDueTimeError("due_at is a datetime and delay a timedelta; convert them first")
    if delay < _NO_DELAY:
        raise InvalidDueTimeError(f"delay={delay} is in the past; leave it out to deliver at once")
    if delay > _MAX_DELAY:
        raise InvalidDueTimeError(f"delay={delay} is over a century; pass a shorter one")
    if due_at is None:
        return
    if delay:
        raise InvalidDueTimeError("pass either due_at or delay, not both")
    check_moment("due_at", due_at)


def check_moment(name: str, moment: datetime) -> None:
    """Refuse what is no moment that every database can store."""
    if moment.utcoffset() is None:
        raise InvalidDueTimeError(f"{name}={moment} has no time zone; use datetime.now(UTC) or .astimezone()")
    if not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise InvalidDueTimeError(f"{name}={moment} is out of range; use the years {_FIRST_YEAR} to {_LAST_YEAR}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


@lru_cache(maxsize=1)
def _opener() -> Callable[[Any, Callable[[], object] | None], AbstractAsyncContextManager[Any]]:
    module = importlib.import_module("postroom.stores.sql.transactions")
    return cast("Callable[[Any, Callable[[], object] | None], AbstractAsyncContextManager[Any]]", module.transaction)


def _every(results: list[AddResult]) -> list[AddResult]:
    return results
