"""Taps: an outbox, a store and a publisher with failpoints around what they do.

They stand around the ports, so that nothing in postroom knows of them; a test builds its parts with them or without.
"""

# ruff: noqa: D102 -- a tap does what its port says

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, Unpack

from ..broker import Publisher, Send
from ..message import Message
from ..outbox import Added, AsyncConnection, Options, Outbox
from ..store import Claim, ClaimTerms, Features, Outcome, Release, Settlement, Stats, Store
from ..stores.sql.driver import Driver
from ..stores.sql.statement import Result, Script, Statement
from ..stores.sql.store import SQLStore
from .failpoints import Failpoints

__all__ = ["TappedOutbox", "TappedPublisher", "TappedStore", "tapped_send"]

T = TypeVar("T")

#: Which call of a store a driver is working for.
_CALL: Final[ContextVar[str | None]] = ContextVar("postroom_failpoints_call", default=None)


class TappedOutbox:
    """An outbox for connections that are awaited, with points around its transactions and additions."""

    def __init__(self, outbox: Outbox, points: Failpoints) -> None:
        self._outbox = outbox
        self._points = points

    async def add(self, connection: AsyncConnection, event: object, /, **options: Unpack[Options]) -> Added:
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

    async def publish(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        await self._points.hit("publish.before")
        answers = await self._publisher.publish(messages)
        await self._points.hit("publish.sent")
        await self._points.hit("publish.confirmed")
        return answers


def tapped_send(send: Send, points: Failpoints) -> Send:
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
            # It makes its driver itself; this one place is where a test may get between the two.
            store._driver = _TappedDriver(store._driver, points)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    async def open(self) -> bool:
        return await self._store.open()

    async def close(self) -> None:
        await self._store.close()

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        async with self._around("claim"):
            return await self._store.claim(limit, terms)

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


class _TappedDriver:
    """A driver with points around the statements of every script."""

    def __init__(self, driver: Driver, points: Failpoints) -> None:
        self._driver = driver
        self._points = points

    async def run(self, script: Script[T], *, atomic: bool = True, timeout: timedelta) -> T:  # noqa: ASYNC109
        call = _CALL.get()
        if call is not None:
            script = self._tapped(script, call)
        return await self._driver.run(script, atomic=atomic, timeout=timeout)

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
        await self._driver.listen(channel, wake, timeout=timeout)

    async def close(self) -> None:
        await self._driver.close()
