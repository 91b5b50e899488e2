"""Connections of a store's own: a small pool over a network, none of which is used again after anything went wrong."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from ...deadline import Limit, is_waiting
from ...errors import PostroomError, StoreError, StoreTimeoutError, StoreUnavailableError
from ...text import without_rows
from .driver import Begun, Driver, Foreign, Steps, atomically, finish_async
from .drivers import classify
from .errors import ADVICE
from .source import Source
from .statement import Script
from .transactions import SQLTransactions, forget
from .url import Place

__all__ = ["Connector", "NetworkPool", "Pool"]

T = TypeVar("T")

#: How many seconds a broken connection has to let go of whoever waits on it.
FAREWELL = 1.0


class Pool(Protocol):
    """Runs scripts on connections of its own."""

    async def run(self, script: Script[T], *, atomic: bool = True, timeout: timedelta) -> T:  # noqa: ASYNC109
        """Run a script, as one transaction or, if not ``atomic``, statement by statement.

        Raises `StoreError` and its kin for whatever the library raises. A connection that was cancelled, timed out
        or failed is thrown away.
        """
        ...

    async def listen(self, channel: str, wake: Callable[[], None], *, timeout: timedelta) -> None:  # noqa: ASYNC109
        """Call ``wake`` at every notification until cancelled; return at once if the database has none.

        Raises `StoreError` when the connection breaks, or does not come about within ``timeout``.
        """
        ...

    def transactions(self, *, timeout: timedelta) -> SQLTransactions:
        """Return what opens transactions on connections of this pool, always the same.

        They are other connections than those of `run`, so that handlers never hold up the store itself.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class Connector(ABC):
    """How a library opens connections of a store's own, and what its errors mean on them."""

    driver: Driver
    #: What begins a transaction of the store's own calls.
    begin: str = "BEGIN"
    #: What sets a transaction of a handler, after BEGIN.
    handler_settings: str = ""

    @abstractmethod
    async def connect(self) -> Foreign:
        """Open a connection on which every statement commits by itself."""

    @abstractmethod
    async def connect_plain(self) -> Foreign:
        """Open a connection for handlers, whose session has the defaults of its server and user."""

    #: What its library raises without a code when a connection is lost, which nothing else has closed.
    lost: tuple[type[Exception], ...] = (OSError,)

    def kind_of(self, error: Exception) -> type[StoreError]:
        """Tell what an error means on a connection that only the store uses."""
        fault = classify(error)
        if fault is not None and fault.of_code is not None:
            return fault.of_code
        return StoreUnavailableError if isinstance(error, self.lost) else StoreError

    def run(self, connection: Foreign, script: Script[T], *, atomic: bool) -> Steps[T]:
        """Run a script, as one transaction or, if not ``atomic``, statement by statement."""
        if not atomic:
            return (yield from self.driver.run(connection, script))
        return (yield from atomically(self.driver, connection, script, self.begin))

    def discard(self, connection: Foreign) -> None:
        """Close a connection at once, whatever it is busy with."""
        self.driver.abort(connection, Begun())
        self.driver.free(connection)

    def limit_handlers(self, timeout: timedelta | None) -> None:  # noqa: B027 -- not every server can
        """Let the server end transactions of handlers that have ``timeout`` and took much longer."""

    async def listen(self, connection: Foreign, channel: str, wake: Callable[[], None]) -> None:
        """Call ``wake`` at every notification until the connection is closed; databases that can, override this."""
        raise NotImplementedError

    @property
    def can_listen(self) -> bool:
        """Whether the database notifies."""
        return type(self).listen is not Connector.listen


class NetworkPool:
    """A small pool of connections, none of which is used again after anything went wrong on it."""

    def __init__(self, place: Place, connector: Connector, *, size: int) -> None:
        self._place = place
        self._connector = connector
        self._size = size
        self._idle: list[Foreign] = []
        self._gate = asyncio.Semaphore(size)
        # What is lent to handlers is kept apart: they may change the settings of a session, and hold it for long.
        self._returned: list[Foreign] = []
        self._lending = asyncio.Semaphore(size)
        self._transactions: SQLTransactions | None = None
        #: The connections that handlers have, by their `id`, and how often the pool had been closed when they got them.
        self._lent: dict[int, int] = {}
        #: How often the connections were closed; one from before must not be used after it.
        self._closings = 0
        self._pid = os.getpid()
        self._inherited: list[Foreign] = []

    async def run(self, script: Script[T], *, atomic: bool = True, timeout: timedelta) -> T:  # noqa: ASYNC109
        """Run a script on a connection that no other call uses."""
        self._notice_fork()
        async with self._within(timeout), self._gate:
            return await self._run(script, atomic=atomic)

    @asynccontextmanager
    async def _within(self, timeout: timedelta) -> AsyncGenerator[asyncio.Timeout]:  # noqa: ASYNC109
        deadline = asyncio.timeout(timeout.total_seconds())
        try:
            async with deadline:
                yield deadline
        except TimeoutError:
            if not deadline.expired():
                raise
            raise StoreTimeoutError(f"{self._place} did not answer within {timeout.total_seconds():g} s") from None

    def _notice_fork(self) -> None:
        """Let a forked child begin anew: its parent's connections are not its own to use or to close."""
        if self._pid != os.getpid():
            # Kept, because to collect them would close what the parent uses.
            self._inherited += self._idle + self._returned
            self._idle, self._returned, self._pid = [], [], os.getpid()
            self._gate, self._lending = asyncio.Semaphore(self._size), asyncio.Semaphore(self._size)

    async def _run(self, script: Script[T], *, atomic: bool) -> T:
        closings = self._closings
        connection = self._idle.pop() if self._idle else await self._connected()
        work = asyncio.create_task(finish_async(self._connector.run(connection, script, atomic=atomic)))
        try:
            # Waiting from outside keeps a library's own slow handling of cancellation out of our deadline.
            await asyncio.wait({work})
            result = work.result()
        except asyncio.CancelledError:
            await self._throw_away(connection, work)
            raise
        except BaseException as error:
            await self._throw_away(connection, work)
            if isinstance(error, PostroomError) or not isinstance(error, Exception):
                raise
            translated = self._translated(error)
            if isinstance(translated, StoreUnavailableError):
                await self.close()  # what broke this connection broke the idle ones too
            raise translated from self._cause(error)
        if closings == self._closings:
            self._idle.append(connection)
        else:
            self._connector.discard(connection)
        return result

    async def _connected(self, *, plain: bool = False) -> Foreign:
        connect = self._connector.connect_plain if plain else self._connector.connect
        connecting: asyncio.Task[Foreign] = asyncio.create_task(connect())
        try:
            # From outside, since a library may finish in spite of a cancellation; its connection must be closed.
            await asyncio.wait({connecting})
        except asyncio.CancelledError:
            if connecting.done():
                self._decline(connecting)  # at once: the loop may be about to end, and then no callback comes any more
            else:
                connecting.add_done_callback(self._decline)
            connecting.cancel()
            await asyncio.wait({connecting}, timeout=FAREWELL)
            raise
        try:
            return connecting.result()
        except PostroomError:
            raise
        except Exception as error:  # noqa: BLE001 -- translated, whatever it is
            translated = self._translated(error)
        # Not chained: what a library keeps with an error of its login may be the password.
        raise translated

    def _decline(self, connecting: asyncio.Task[Foreign]) -> None:
        """Close a connection whose caller was cancelled."""
        if not connecting.cancelled() and connecting.exception() is None:
            self._connector.discard(connecting.result())

    async def _throw_away(self, connection: Foreign, work: asyncio.Task[Any]) -> None:
        if work.done():
            forget(work)  # at once: the loop may be about to end, and then no callback comes any more
        work.add_done_callback(forget)
        self._connector.driver.abort(connection, Begun())
        # A broken connection ends the work by itself; to cancel it as well makes some libraries ask the server first.
        await asyncio.wait({work}, timeout=FAREWELL)
        work.cancel()
        self._connector.driver.free(connection)

    def _translated(self, error: Exception) -> StoreError:
        kind = self._connector.kind_of(error)
        words = " ".join(self._scrubbed(str(error)).split())
        said = f"{self._place}: {type(error).__name__}: {words}"
        return kind(f"{said}; {ADVICE[kind]}" if kind in ADVICE else said)

    def _scrubbed(self, text: str) -> str:
        text = without_rows(text)
        for secret in self._place.secrets:
            text = text.replace(secret, "***")
        return text

    def _cause(self, error: Exception) -> Exception | None:
        """Return what may be chained to an error of ours: nothing that holds the password or a row."""
        return error if self._scrubbed(str(error)) == str(error) else None

    def transactions(self, *, timeout: timedelta) -> SQLTransactions:
        """Return what opens transactions on connections of this pool."""
        if self._transactions is None:
            self._transactions = SQLTransactions(LentConnections(self, self._connector, timeout))
        return self._transactions

    async def lend(self, timeout: timedelta) -> Foreign:  # noqa: ASYNC109
        """Return a connection for a transaction; it is to be taken back."""
        self._notice_fork()
        closings = self._closings
        if self._returned and not self._lending.locked():
            await self._lending.acquire()  # which does not wait, and so needs no deadline
            connection = self._returned.pop()
        else:
            connection = await self._lend_later(timeout)
        self._lent[id(connection)] = closings
        return connection

    async def _lend_later(self, timeout: timedelta) -> Foreign:  # noqa: ASYNC109
        async with self._within(timeout) as deadline:
            if is_waiting():
                deadline.reschedule(None)  # for other handlers, however long they take: their consumer limits it
            await self._lending.acquire()
            deadline.reschedule(asyncio.get_running_loop().time() + timeout.total_seconds())
            try:
                return self._returned.pop() if self._returned else await self._connected(plain=True)
            except BaseException:
                self._lending.release()
                raise

    def take_back(self, connection: Foreign, *, is_sound: bool) -> None:
        """Keep a connection that was lent for the next transaction, or close it."""
        self._lending.release()
        if self._lent.pop(id(connection)) == self._closings and is_sound:
            self._returned.append(connection)
        else:
            self._connector.discard(connection)

    def forget_returned(self) -> None:
        """Close what waits for the next transaction: what broke a connection may have broken the others."""
        returned, self._returned = self._returned, []
        for connection in returned:
            self._connector.discard(connection)

    async def listen(self, channel: str, wake: Callable[[], None], *, timeout: timedelta) -> None:  # noqa: ASYNC109
        """Listen on a connection of its own until it breaks or the task is cancelled."""
        if not self._connector.can_listen:
            return
        async with self._within(timeout):
            connection = await self._connected()
        try:
            await self._connector.listen(connection, channel, wake)
        except Exception as error:  # noqa: BLE001 -- translated, whatever it is
            raise self._translated(error) from self._cause(error)
        finally:
            self._connector.discard(connection)
        raise StoreUnavailableError(f"{self._place}: the listening connection was closed")

    async def close(self) -> None:
        """Close the idle connections; those in use are closed by their users."""
        self._notice_fork()
        idle, self._idle, self._returned = self._idle + self._returned, [], []
        self._closings += 1
        for connection in idle:
            self._connector.discard(connection)


class LentConnections(Source):
    """Connections that a pool lends to handlers."""

    def __init__(self, pool: NetworkPool, connector: Connector, timeout: timedelta) -> None:
        super().__init__(connector.driver, pool)
        self.limit: Limit | None = Limit(timeout)
        self._connector = connector
        self._lender = pool
        self._timeout = timeout

    @property
    def settings(self) -> str:  # type: ignore[override]  # it changes with the consumers
        """What sets each transaction of a handler."""
        return self._connector.handler_settings

    def acquire(self) -> Steps[Foreign]:
        return (yield self._lender.lend(self._timeout))

    def release(self, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        self._lender.take_back(connection, is_sound=is_sound)
        yield from ()

    def on_loss(self) -> None:
        self._lender.forget_returned()

    def limit_to(self, timeout: timedelta | None) -> None:
        self._connector.limit_handlers(timeout)
