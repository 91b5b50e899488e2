"""Taps: an outbox, a store, a publisher, and all that a consumer works with, with failpoints around what they do.

They stand around the ports, so that nothing in postroom knows of them; a test builds its parts with them or without.
"""

# ruff: noqa: D102, D105 -- a tap does what its port says

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from ..broker import Publisher, Send, Subscriber
from ..dead_letters import DeadLetters
from ..delivery import Delivery
from ..message import Message
from ..middleware import Next
from ..outbox import AddResult, AsyncConnection, Options, Outbox
from ..store import Claim, ClaimTerms, Delivered, Features, Outcome, Peeked, Release, Settlement, Stats, Store
from ..stores.sql.pool import Pool
from ..stores.sql.statement import Result, Script, Statement
from ..stores.sql.store import SQLStore
from ..stores.sql.transactions import SQLTransactions
from ..transaction import Opening, Transaction, Transactions, transactions_of
from .failpoints import Failpoints

__all__ = [
    "TappedDeadLetters",
    "TappedHandlers",
    "TappedOutbox",
    "TappedPool",
    "TappedPublisher",
    "TappedStore",
    "TappedSubscriber",
    "tapped_send",
]

T = TypeVar("T")

#: Which call of a store a driver is working for.
_CALL: Final[ContextVar[str | None]] = ContextVar("postroom_failpoints_call", default=None)


class TappedOutbox:
    """An outbox for connections that are awaited, with points around its transactions and additions."""

    def __init__(self, outbox: Outbox, points: Failpoints) -> None:
        self._outbox = outbox
        self._points = points

    async def add(self, connection: AsyncConnection, event: object, /, **options: Unpack[Options]) -> AddResult:
        await self._points.hit("add.before")
        added = await self._outbox.add(connection, event, **options)
        await self._points.hit("add.after")
        return added

    @asynccontextmanager
    async def transaction(self, pool: object) -> AsyncGenerator[Any]:
        await self._points.hit("tx.begin")
        async with self._outbox.transaction(pool) as connection:
            yield connection
            await self._points.hit("commit.before")
        await self._points.hit("commit.after")


class TappedPublisher:
    """A publisher with points around each batch."""

    def __init__(self, publisher: Publisher, points: Failpoints) -> None:
        self._publisher = publisher
        self._points = points

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        await self._points.hit("publish.before")
        answers = await self._publisher.publish_batch(messages)
        await self._points.hit("publish.sent")
        await self._points.hit("publish.confirmed")
        return answers


def tapped_send(send: Callable[[Message], Awaitable[object]], points: Failpoints) -> Send:
    """Return a function that delivers one message, with points around it."""

    async def deliver(message: Message) -> object:
        await points.hit("publish.before")
        answer = await send(message)
        await points.hit("publish.sent")
        await points.hit("publish.confirmed")
        return answer

    return deliver


class TappedStore:
    """A store with points around its calls and, if it is an SQL store, around each of their statements.

    To settle nothing but releases has a name of its own: it is how a dispatcher lets go when it stops.
    """

    def __init__(self, store: Store, points: Failpoints) -> None:
        self.namespace: str = store.namespace
        self.features: Features = store.features
        self.keep_delivered: timedelta = store.keep_delivered
        self._store = store
        self._points = points
        if isinstance(store, SQLStore):
            # It makes its pool itself; this one place is where a test may get between the two.
            store._pool = _TappedPool(store._pool, points)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    async def open(self) -> bool:
        return await self._store.open()

    async def close(self) -> None:
        await self._store.close()

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        async with self._around("claim"):
            return await self._store.claim(limit, terms)

    async def peek(self, limit: int, *, topic: str | None = None) -> list[Peeked]:
        return await self._store.peek(limit, topic=topic)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        is_release = all(isinstance(settlement.outcome, Release) for settlement in settlements)
        async with self._around("release" if is_release else "settle"):
            return await self._store.settle(settlements)

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        async with self._around("extend"):
            return await self._store.extend(claims, lease)

    async def sweep(self, terms: ClaimTerms) -> int:
        async with self._around("sweep"):
            return await self._store.sweep(terms)

    async def parked(self, *, after: str = "", limit: int = 100) -> list[str]:
        return await self._store.parked(after=after, limit=limit)

    async def unpark(self, destination: str, limit: int) -> int:
        return await self._store.unpark(destination, limit)

    async def due_elsewhere(self) -> dict[str, int]:
        return await self._store.due_elsewhere()

    async def purge(self, *, older_than: timedelta, limit: int = 1000) -> int:
        async with self._around("purge"):
            return await self._store.purge(older_than=older_than, limit=limit)

    async def stats(self) -> Stats:
        return await self._store.stats()

    async def listen(self, wake: Callable[[], None]) -> None:
        await self._store.listen(wake)

    @asynccontextmanager
    async def _around(self, call: str) -> AsyncGenerator[None]:
        await self._points.hit(f"{call}.before")
        before = _CALL.set(call)
        try:
            yield
        finally:
            _CALL.reset(before)
        await self._points.hit(f"{call}.after")


class _TappedPool:
    """The pool of a store with points around the statements of every script."""

    def __init__(self, pool: Pool, points: Failpoints) -> None:
        self._pool = pool
        self._points = points

    async def run(self, script: Script[T], *, atomic: bool = True, timeout: timedelta) -> T:  # noqa: ASYNC109
        call = _CALL.get()
        if call is not None:
            script = self._tapped(script, call)
        return await self._pool.run(script, atomic=atomic, timeout=timeout)

    def _tapped(self, script: Script[T], call: str) -> Script[T]:
        """Pass on what a script says and hears; SQLite runs this on a thread, so nothing here is awaited."""
        answer: Callable[[], Statement] = partial(next, script)
        while True:
            try:
                statement = answer()
            except StopIteration as end:
                self._points.hit_now(f"{call}.applied")
                return end.value  # type: ignore[no-any-return]
            self._points.hit_now(f"{call}.statement")
            try:
                result: Result = yield statement
            except BaseException as error:  # noqa: BLE001 -- raised again by the script
                answer = partial(script.throw, error)
            else:
                answer = partial(script.send, result)

    async def listen(self, channel: str, wake: Callable[[], None], *, timeout: timedelta) -> None:  # noqa: ASYNC109
        await self._pool.listen(channel, wake, timeout=timeout)

    def transactions(self, *, timeout: timedelta) -> SQLTransactions:
        return self._pool.transactions(timeout=timeout)

    async def close(self) -> None:
        await self._pool.close()


# -- what a consumer works with --------------------------------------------------------------------------------------


class TappedSubscriber:
    """A subscriber with points after each delivery and around what is said of it."""

    def __init__(self, subscriber: Subscriber, points: Failpoints) -> None:
        self.redelivery_horizon: timedelta | None = subscriber.redelivery_horizon
        self._subscriber = subscriber
        self._points = points

    async def __aenter__(self) -> Self:
        self._subscriber = await self._subscriber.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._subscriber.__aexit__(kind, error, trace)

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        async for delivery in self._subscriber:
            await self._points.hit("deliver.after")
            yield Delivery(delivery.message, partial(self._settle, delivery))

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        call = "ack" if isinstance(outcome, Delivered) else "nack"
        await self._points.hit(f"{call}.before")
        await delivery.settle(outcome)
        await self._points.hit(f"{call}.after")


class TappedPool:
    """A pool, an engine, a file or a store, with points around the transactions that are opened on it."""

    def __init__(self, pool: object, points: Failpoints) -> None:
        self._transactions = _TappedTransactions(transactions_of(pool), points)

    def transactions(self) -> Transactions:
        return self._transactions


class _TappedTransactions:
    def __init__(self, transactions: Transactions, points: Failpoints) -> None:
        self._transactions = transactions
        self._points = points

    @asynccontextmanager
    async def begin(self, opening: Opening | None = None) -> AsyncGenerator[Transaction]:
        await self._points.hit("tx.begin")
        async with self._transactions.begin(opening) as transaction:
            transaction.opened_by = self
            await self._points.hit("tx.begun")
            yield transaction
            await self._points.hit("commit.before")
        await self._points.hit("commit.after")

    def savepoint(self, transaction: Transaction) -> AbstractAsyncContextManager[None]:
        return self._transactions.savepoint(transaction)


class TappedHandlers:
    """A middleware with points around whatever is inside it; innermost, that is the handler."""

    def __init__(self, points: Failpoints) -> None:
        self._points = points

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        await self._points.hit("handle.before")
        outputs = await call_next(message)
        await self._points.hit("handle.after")
        return outputs


class TappedDeadLetters:
    """Dead letters with points around each."""

    def __init__(self, letters: DeadLetters, points: Failpoints) -> None:
        self._letters = letters
        self._points = points

    async def bury(self, message: Message, error: str) -> None:
        await self._points.hit("bury.before")
        await self._letters.bury(message, error)
        await self._points.hit("bury.after")
