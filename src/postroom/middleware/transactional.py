"""Middleware that makes the effect of a message happen once: its transaction, its inbox, its outbox."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import ClassVar, Final, Literal, Protocol
from uuid import UUID

from .. import events
from ..broker import describe
from ..dead_letters import DeadLetters, StoredDeadLetters
from ..errors import (
    AlreadyHandledError,
    CommitUnknownError,
    ConfigurationError,
    InvalidMessageError,
    NoTransactionError,
    StoreContentionError,
    StoreError,
    StoreTimeoutError,
    TransactionError,
    is_hopeless,
    is_outage,
)
from ..inbox import CHUNK, Inbox, Mode
from ..message import Message
from ..outbox import Outbox
from ..patience import persist
from ..transaction import Opening, Transaction, Transactions, entered, in_transaction, transactions_of
from .chain import Next
from .layers import DEAD_LETTERS, INBOX, OUTBOX, TRANSACTION

__all__ = [
    "DeadLetterMiddleware",
    "InboxMiddleware",
    "OutboxMiddleware",
    "TransactionMiddleware",
    "Transactional",
    "TransactionalStore",
    "transactional",
]

NOTHING: Final[Sequence[Message]] = ()
#: How often in a row a message may lose its connection before it is suspected to be why, and of how many that is known.
PARDONED: Final = 20
REMEMBERED: Final = 1000


class TransactionMiddleware:
    """Handles each message in a transaction: committed when the handler ends well, rolled back whatever else happens.

    Adapters find it with `current_connection`. What other transactions stood in the way of is tried again from the
    start, a few times.
    """

    layer: ClassVar[int] = TRANSACTION

    def __init__(self, pool: object, *, nested: Literal["join", "savepoint"] = "join", retries: int = 3) -> None:
        """Set up.

        Args:
            pool: Where transactions are opened: an asyncpg or psycopg pool, SQLAlchemy's engine, ``sessionmaker`` or
                ``async_sessionmaker``, an asyncmy pool, the path of a SQLite file or a connection to it, Django's
                ``atomic``, or a store of postroom's.
            nested: What to do in a handler that is called from another handler's transaction on the same pool.
            retries: How often a transaction is tried again that others stood in the way of.

        Raises:
            UnknownConnectionError: Nothing is known of this kind of pool.
        """
        if nested not in {"join", "savepoint"} or retries < 0:
            raise ConfigurationError(
                f"nested={nested!r} must be 'join' or 'savepoint', and retries={retries} at least 0"
            )
        self.transactions: Transactions = transactions_of(pool)
        self._nested = nested
        self._retries = retries
        self._inbox: Inbox | None = None
        #: How often the connection was lost while a message was handled, for the latest of those that lost it.
        self._losses: dict[UUID, int] = {}

    def open_for(self, inbox: Inbox) -> None:
        """Let transactions mark their messages as they begin, if they can: one round trip less for each."""
        self._inbox = inbox

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message in a transaction.

        Raises:
            CommitUnknownError: The connection broke during COMMIT.
            TransactionAbortedError: A statement failed, its error was caught, and so nothing could be committed.
        """
        outer = in_transaction()
        if outer is not None and outer.opened_by is self.transactions:
            return await self._inside(outer, message, call_next)
        for attempt in range(self._retries):
            try:
                return await self._once(message, call_next)
            except StoreContentionError:
                await asyncio.sleep(random.uniform(0, 0.05) * 2**attempt)
        return await self._once(message, call_next)

    async def _once(self, message: Message, call_next: Next) -> Sequence[Message]:
        transaction: Transaction | None = None
        is_ending = False
        # A broker may have none, which the inbox tells.
        opening = Opening(self._inbox, message) if self._inbox is not None and isinstance(message.id, UUID) else None
        try:
            async with self.transactions.begin(opening) as transaction:
                with entered(transaction):
                    outputs = await call_next(message)
                is_ending = True
        except AlreadyHandledError as error:
            if error.transaction is not transaction:
                raise
            return NOTHING
        except (StoreError, CommitUnknownError) as error:
            if isinstance(error, CommitUnknownError) and is_ending and transaction is not None:
                error.witness = transaction.witness
            error.is_outage = self._is_outage(error, transaction, message)
            raise
        if self._losses:
            self._losses.pop(message.id, None)
        return outputs

    def _is_outage(
        self, error: StoreError | CommitUnknownError, transaction: Transaction | None, message: Message
    ) -> bool:
        """Tell whether an error says nothing about the message.

        What comes before its handler begins never does. A connection that is lost while it runs may be lost to an
        outage, or to the message itself, which then loses it every time.
        """
        if transaction is None or transaction.is_preparing:
            return True
        if isinstance(error, StoreContentionError | StoreTimeoutError):
            return False
        self._losses[message.id] = losses = self._losses.pop(message.id, 0) + 1
        if len(self._losses) > REMEMBERED:
            del self._losses[next(iter(self._losses))]
        return losses <= PARDONED

    async def _inside(self, outer: Transaction, message: Message, call_next: Next) -> Sequence[Message]:
        try:
            if self._nested == "join":
                return await call_next(message)
            async with self.transactions.savepoint(outer):
                return await call_next(message)
        except AlreadyHandledError as error:
            # To roll back all would undo what is not this message's; from the start again, it is known to be handled.
            raise StoreContentionError(str(error)) from error


class InboxMiddleware:
    """Skips messages that this consumer has handled; they are acknowledged, and counted by an event."""

    layer: ClassVar[int] = INBOX
    needs: ClassVar[int] = TRANSACTION

    def __init__(self, inbox: Inbox, *, listener: events.Listener = events.log_event) -> None:
        self.inbox = inbox
        self._tell = events.guarded(listener)

    def check_horizon(self, horizon: timedelta | None) -> None:
        """Refuse a broker that may hand out a message again after the inbox has forgotten it."""
        self.inbox.check_horizon(horizon)

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message unless it was handled before."""
        transaction = _transaction("the inbox")
        if not message.id:  # type: ignore[truthy-bool]  # a broker may have none
            raise InvalidMessageError("the message has no id, by which the inbox could know it again")
        transaction.witness = partial(self.inbox.was_handled, transaction.opened_by, message)
        is_optimistic = self.inbox.mode == "optimistic"
        transaction.is_preparing = True
        if is_optimistic:
            is_known = await self.inbox.has(transaction, message)
        else:
            is_admitted, transaction.is_admitted = transaction.is_admitted, None
            is_known = not (await self.inbox.admit(transaction, message) if is_admitted is None else is_admitted)
        transaction.is_preparing = False
        if is_known:
            self._skip(message)
            return NOTHING
        outputs = await call_next(message)
        if is_optimistic and not await self.inbox.admit(transaction, message):
            self._skip(message)
            raise AlreadyHandledError(message.id, transaction)
        return outputs

    def _skip(self, message: Message) -> None:
        self._tell(events.DuplicateSkipped(self.inbox.consumer, message.id, message.type))


class OutboxMiddleware:
    """Adds what a handler returns to the outbox, in its transaction, and hands nothing on."""

    layer: ClassVar[int] = OUTBOX
    needs: ClassVar[int] = TRANSACTION

    def __init__(self, outbox: Outbox, *, topic: str | None = None) -> None:
        """Set up.

        Args:
            outbox: Adds the messages.
            topic: Where all of them go; by default each says it itself.
        """
        self._outbox = outbox
        self._topic = topic

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message and keep what comes of it."""
        # Asked for before there is anything to write: a stack without one should not work for a while.
        transaction = _transaction("the outbox")
        outputs = await call_next(message)
        if outputs:
            if self._topic is not None:
                outputs = [replace(output, topic=self._topic) for output in outputs]
            await transaction.do(self._outbox.add, list(outputs))
            if self._outbox.wake is not None:
                transaction.after_commit(self._outbox.wake)
        return NOTHING


class DeadLetterMiddleware:
    """Puts a message aside that has failed too often, or that can never succeed, and has it acknowledged then.

    An error of the store is no fault of the message, and a transaction of which nobody knows whether it was committed
    is no failure: neither puts a message aside.
    """

    layer: ClassVar[int] = DEAD_LETTERS

    def __init__(
        self,
        letters: DeadLetters,
        *,
        max_attempts: int = 10,
        was_handled: Callable[[Message], Awaitable[bool]] | None = None,
        listener: events.Listener = events.log_event,
    ) -> None:
        """Set up.

        Args:
            letters: Where the messages go.
            max_attempts: After how many deliveries a message that failed is put aside.
            was_handled: Tells whether a message was handled, which may have been delivered so often for another reason.
            listener: Is told of each.
        """
        if max_attempts < 1:
            raise ConfigurationError(f"max_attempts={max_attempts} must be at least 1")
        self._letters = letters
        self._max_attempts = max_attempts
        self._was_handled = was_handled
        self._tell = events.guarded(listener)

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message, or put it aside."""
        if message.attempt > self._max_attempts:
            with _no_fault_of_the_message():
                was_handled = self._was_handled is not None and await self._was_handled(message)
            if was_handled:
                return NOTHING
            # Handled so often without an error, it must have killed whoever handled it.
            return await self._bury(
                message, f"delivered {message.attempt} times without an outcome: it may kill its worker"
            )
        try:
            return await call_next(message)
        except Exception as error:
            is_spent = message.attempt >= self._max_attempts and not is_outage(error)
            if not is_hopeless(error) and not is_spent:
                raise
            return await self._bury(message, describe(error))

    async def _bury(self, message: Message, error: str) -> Sequence[Message]:
        with _no_fault_of_the_message():
            await self._letters.bury(message, error)
        self._tell(events.DeadLettered(message.id, message.type, message.attempt, error))
        return NOTHING


@contextmanager
def _no_fault_of_the_message() -> Generator[None]:
    """Have an error of the store cost no delivery: it comes from nothing that the handler did."""
    try:
        yield
    except (StoreError, CommitUnknownError) as error:
        error.is_outage = True
        raise


async def purge_forever(inbox: Inbox, transactions: Transactions, tell: events.Listener, *, every: timedelta) -> None:
    """Delete inbox rows past their retention, in chunks that leave the database to the handlers in between."""
    while True:
        await asyncio.sleep(every.total_seconds() * random.uniform(0.75, 1.0))
        total, count = 0, CHUNK
        while count == CHUNK:
            purge = partial(inbox.purge, transactions)
            count = await persist("purge inbox", purge, tell, only=(StoreError, TransactionError)) or 0
            total += count
            await asyncio.sleep(0.01)
        if total:
            tell(events.InboxPurged(inbox.consumer, total))


def _transaction(who: str) -> Transaction:
    transaction = in_transaction()
    if transaction is None:
        raise NoTransactionError(who)
    return transaction


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

    def inbox(self, consumer: str, *, mode: Mode, retention: timedelta, redelivery_horizon: timedelta | None) -> Inbox:
        """Return the inbox of a consumer in this store."""
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

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message so that its effect happens once."""
        if not self._has_asked:
            # Without its tables nothing can be handled, and a store that is not open hints at nothing.
            with _no_fault_of_the_message():
                self._has_opened = await self._store.open() or self._has_opened
            self._has_asked = True
        inside = partial(self._in_transaction, call_next)
        return await (inside(message) if self._dead_letters is None else self._dead_letters(message, inside))

    async def _in_transaction(self, call_next: Next, message: Message) -> Sequence[Message]:
        return await self._transaction(message, partial(self._in_inbox, call_next))

    async def _in_inbox(self, call_next: Next, message: Message) -> Sequence[Message]:
        return await self._inbox(message, partial(self._in_outbox, call_next))

    async def _in_outbox(self, call_next: Next, message: Message) -> Sequence[Message]:
        return await self._outbox(message, call_next)


def transactional(  # noqa: PLR0913 -- one keyword for each choice a user has
    store: TransactionalStore,
    *,
    consumer: str,
    pool: object | None = None,
    topic: str | None = None,
    mode: Mode = "pessimistic",
    retention: timedelta = timedelta(days=7),
    redelivery_horizon: timedelta | None = None,
    max_attempts: int | None = 10,
    dead_letters: DeadLetters | None = None,
    wake: Callable[[], object] | None = None,
    cleanup_interval: timedelta = timedelta(minutes=1),
    listener: events.Listener = events.log_event,
) -> Transactional:
    """Return the middleware that makes the effect of each message happen once.

    It begins a transaction, asks the inbox, runs the handler, adds what it returns to the outbox and commits. Then the
    message is acknowledged. A message that was handled before is acknowledged and nothing else.

    Args:
        store: Where outbox and inbox are.
        consumer: Who handles the messages; each consumer needs a name of its own.
        pool: Where transactions are opened, if not on connections of the store: see `TransactionMiddleware`.
        topic: Where all outputs go; by default each says it itself.
        mode: Whether a message is marked before its handler runs, or after it: see `Inbox`.
        retention: How long a message is remembered.
        redelivery_horizon: For how long after its first delivery a message may come again.
        max_attempts: After how many deliveries a message that failed becomes a dead letter; None for never.
        dead_letters: Where dead letters go, if not to the table beside the inbox.
        wake: Called after a commit, to deliver outputs at once: ``dispatcher.wake``; by default the store's hint.
        cleanup_interval: How often the inbox is cleaned.
        listener: Is told of duplicates and dead letters.

    Raises:
        ConfigurationError: Messages would be forgotten while they may still come again.
    """
    inbox = store.inbox(consumer, mode=mode, retention=retention, redelivery_horizon=redelivery_horizon)
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
