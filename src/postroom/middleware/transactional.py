"""The whole stack that makes the effect of a message happen once, as one middleware."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Protocol

from .. import events
from ..checks import check_count, check_duration, check_function, check_methods, check_text
from ..dead_letters import DeadLetters, StoredDeadLetters
from ..inbox import By, Inbox, Mode
from ..message import Message
from ..outbox import Outbox
from ..store import as_store
from ..transaction import Transactions
from .chain import Next
from .dead_letters import DeadLetterMiddleware, no_fault_of_the_message
from .inbox import InboxMiddleware, purge_forever
from .layers import INBOX, OUTBOX, TRANSACTION
from .outbox import OutboxMiddleware
from .transaction import TransactionMiddleware

__all__ = ["Transactional", "TransactionalStore", "transactional"]


class TransactionalStore(Protocol):
    """A store whose outbox and inbox are written in the transactions of handlers."""

    async def open(self) -> bool:
        """Connect, and check the tables; tell whether the store was closed before."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...

    def transactions(self) -> Transactions:
        """Return what opens transactions on connections of the store."""
        ...

    def outbox(self, *, wake: Callable[[], object] | None = None) -> Outbox:
        """Return what adds messages to this store."""
        ...

    def inbox(
        self,
        consumer: str,
        *,
        mode: Mode,
        by: By,
        retention: timedelta = ...,
        redelivery_horizon: timedelta | None,
    ) -> Inbox:
        """Return the inbox of a consumer in this store; how long it remembers messages by default, the store says."""
        ...


class Transactional:
    """The whole stack in one: dead letters, transaction, inbox, outbox, in the order in which they keep their promises.

    Made by `transactional`.
    """

    layer: ClassVar[int] = TRANSACTION
    holds: ClassVar[tuple[int, ...]] = (TRANSACTION, INBOX, OUTBOX)

    def __init__(
        self,
        store: TransactionalStore,
        transaction: TransactionMiddleware,
        inbox: InboxMiddleware,
        outbox: OutboxMiddleware,
        dead_letters: DeadLetterMiddleware | None,
        *,
        cleanup_interval: timedelta,
    ) -> None:
        self._store = store
        self._has_asked = self._has_opened = False
        self._transaction = transaction
        self._inbox = inbox
        self._outbox = outbox
        self._dead_letters = dead_letters
        self._cleanup_interval = cleanup_interval

    def check_horizon(self, horizon: timedelta | None) -> None:
        """Refuse a broker that may hand out a message again after the inbox has forgotten it."""
        self._inbox.check_horizon(horizon)

    def limit_to(self, timeout: timedelta | None) -> None:
        """Let the server end transactions of handlers that have ``timeout`` and whose process hangs, if it can."""
        self._transaction.limit_to(timeout)

    async def serve(self, tell: events.Listener) -> None:
        """Delete inbox rows past their retention, until cancelled; a consumer does this while it runs.

        A store that was opened for a message is closed then.
        """
        try:
            await purge_forever(self._inbox.inbox, self._transaction.transactions, tell, every=self._cleanup_interval)
        finally:
            if self._has_opened:
                self._has_asked = self._has_opened = False
                await self._store.close()

    def __call__(self, message: Message, call_next: Next) -> Coroutine[Any, Any, Sequence[Message]]:
        """Handle a message so that its effect happens once."""
        # Nothing here awaits for the one inside: each coroutine more is resumed with every answer of the database.
        return self._outermost(message, call_next) if self._has_asked else self._first(message, call_next)

    async def _first(self, message: Message, call_next: Next) -> Sequence[Message]:
        # Without its tables nothing can be handled, and a store that is not open hints at nothing.
        with no_fault_of_the_message():
            self._has_opened = await self._store.open() or self._has_opened
        self._has_asked = True
        return await self._outermost(message, call_next)

    def _outermost(self, message: Message, call_next: Next) -> Coroutine[Any, Any, Sequence[Message]]:
        inside = partial(self._in_transaction, call_next)
        return inside(message) if self._dead_letters is None else self._dead_letters(message, inside)

    def _in_transaction(self, call_next: Next, message: Message) -> Coroutine[Any, Any, Sequence[Message]]:
        return self._transaction(message, partial(self._in_inbox, call_next))

    def _in_inbox(self, call_next: Next, message: Message) -> Coroutine[Any, Any, Sequence[Message]]:
        return self._inbox(message, partial(self._in_outbox, call_next))

    def _in_outbox(self, call_next: Next, message: Message) -> Coroutine[Any, Any, Sequence[Message]]:
        return self._outbox(message, call_next)


def as_transactional(store: TransactionalStore | str) -> TransactionalStore:
    """Return a store whose outbox and inbox can be written in transactions, made of its URL if that was given."""
    needs = ("transactions", "inbox", "outbox", "open")
    found: TransactionalStore = as_store(store, needs=needs, kind="a store with an inbox")
    return found


def transactional(  # noqa: PLR0913 -- one keyword for each choice a user has
    store: TransactionalStore | str,
    *,
    consumer: str,
    pool: object | None = None,
    topic: str | None = None,
    mode: Mode = "pessimistic",
    by: By = "id",
    retention: timedelta | None = None,
    redelivery_horizon: timedelta | None = None,
    max_attempts: int | None = 10,
    dead_letters: DeadLetters | None = None,
    wake: Callable[[], object] | None = None,
    cleanup_interval: timedelta = timedelta(minutes=1),
    listener: events.Listener | None = None,
) -> Transactional:
    """Return the middleware that makes the effect of each message happen once.

    It begins a transaction, asks the inbox, runs the handler, adds what it returns to the outbox and commits. Then the
    message is acknowledged. A message that was handled before is acknowledged and nothing else.

    Args:
        store: Where outbox and inbox are: a store, or its URL.
        consumer: Who handles the messages; each consumer needs a name of its own.
        pool: Where transactions are opened, if not on connections of the store: see `TransactionMiddleware`.
        topic: Where all outputs go; by default each says it itself.
        mode: Whether a message is marked before its handler runs, or after it: see `Inbox`.
        by: By what a message is known again, its id or its dedupe key: see `Inbox`.
        retention: How long a message is remembered; by default 7 days in SQL databases, and one day in Redis.
        redelivery_horizon: For how long after its first delivery a message may come again.
        max_attempts: After how many deliveries a message that failed becomes a dead letter; None for never.
        dead_letters: Where dead letters go, if not to the table beside the inbox.
        wake: Called after a commit, to deliver outputs at once: ``dispatcher.wake``; by default the store's hint.
        cleanup_interval: How often the inbox is cleaned.
        listener: Called with duplicates and dead letters, as the listener of the consumer is.

    Raises:
        ConfigurationError: Messages would be forgotten while they may still come again.
    """
    check_text("topic", topic, optional=True)
    check_count("max_attempts", max_attempts, optional=True)
    check_methods("dead_letters", dead_letters, ("bury",), "a place for dead letters or None", optional=True)
    check_function("wake", wake, "no argument", optional=True)
    check_function("listener", listener, "an event", optional=True)
    check_duration("cleanup_interval", cleanup_interval)
    store = as_transactional(store)
    inbox = (
        store.inbox(consumer, mode=mode, by=by, redelivery_horizon=redelivery_horizon)
        if retention is None
        else store.inbox(consumer, mode=mode, by=by, retention=retention, redelivery_horizon=redelivery_horizon)
    )
    transaction = TransactionMiddleware(store if pool is None else pool)
    if mode == "pessimistic":
        transaction.open_for(inbox)
    letters = dead_letters or StoredDeadLetters(inbox, transaction.transactions)
    return Transactional(
        store,
        transaction,
        InboxMiddleware(inbox, listener=listener),
        OutboxMiddleware(store.outbox(wake=wake), topic=topic),
        None
        if max_attempts is None
        else DeadLetterMiddleware(
            letters,
            max_attempts=max_attempts,
            was_handled=partial(inbox.was_handled, transaction.transactions),
            listener=listener,
        ),
        cleanup_interval=cleanup_interval,
    )
