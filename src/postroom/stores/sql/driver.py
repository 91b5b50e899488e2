"""The port of database libraries, and what those with connections over a network have in common."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from ...deadline import Limit, is_waiting
from ...errors import PostroomError, StoreError, StoreTimeoutError, StoreUnavailableError
from ...text import without_rows
from .errors import ADVICE
from .statement import Result, Script, Statement, run_async
from .transactions.block import Link, SQLTransactions
from .transactions.network import Source
from .url import Place

__all__ = ["Driver", "NetworkDriver"]

T = TypeVar("T")
C = TypeVar("C")

#: How many seconds a broken connection has to let go of whoever waits on it.
FAREWELL = 1.0


class Driver(Protocol):
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
        """Return what opens transactions on connections of this driver's, always the same.

        They are other connections than those of `run`, so that handlers never hold up the store itself.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class NetworkDriver(ABC, Generic[C]):
    """A small pool of connections, none of which is used again after anything went wrong on it."""

    begin = "BEGIN"

    def __init__(self, place: Place, *, size: int) -> None:
        self._place = place
        self._size = size
        self._idle: list[C] = []
        self._gate = asyncio.Semaphore(size)
        # What is lent to handlers is kept apart: they may change the settings of a session, and hold it for long.
        self._returned: list[C] = []
        self._lending = asyncio.Semaphore(size)
        self._transactions: SQLTransactions | None = None
        #: How often the connections were closed; one from before must not be used after it.
        self._closings = 0
        self._pid = os.getpid()
        self._inherited: list[C] = []

    async def run(self, script: Script[T], *, atomic: bool = True, timeout: timedelta) -> T:  # noqa: ASYNC109
        """Run a script on a connection that nobody else uses."""
        self._notice_fork()
        deadline = asyncio.timeout(timeout.total_seconds())
        try:
            async with deadline, self._gate:
                return await self._run(script, atomic=atomic)
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
        connection = await self._take()
        work = asyncio.create_task(self._work(connection, script, atomic=atomic))
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
            self._discard(connection)
        return result

    async def _take(self) -> C:
        return self._idle.pop() if self._idle else await self._connected()

    async def _connected(self, connect: Callable[[], Coroutine[Any, Any, C]] | None = None) -> C:
        connecting = asyncio.create_task((connect or self.connect)())
        try:
            # From outside, since a library may finish in spite of a cancellation, and nobody would ever hear of that.
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

    def _decline(self, connecting: asyncio.Task[C]) -> None:
        """Close a connection that nobody waits for any more."""
        if not connecting.cancelled() and connecting.exception() is None:
            self._discard(connecting.result())

    async def _work(self, connection: C, script: Script[T], *, atomic: bool) -> T:
        if not atomic:
            return await run_async(script, lambda statement: self.execute(connection, statement))
        await self.execute(connection, Statement(self.begin, {}))
        try:
            result = await run_async(script, lambda statement: self.execute(connection, statement))
        except Exception:
            await self.execute(connection, Statement("ROLLBACK", {}))
            raise
        await self.execute(connection, Statement("COMMIT", {}))
        return result

    async def _throw_away(self, connection: C, work: asyncio.Task[Any]) -> None:
        if work.done():
            _forget(work)  # at once: the loop may be about to end, and then no callback comes any more
        work.add_done_callback(_forget)
        self.abort(connection)
        # A broken connection ends the work by itself; to cancel it as well makes some libraries ask the server first.
        await asyncio.wait({work}, timeout=FAREWELL)
        work.cancel()
        self.free(connection)

    def _translated(self, error: Exception) -> StoreError:
        kind = self.kind_of(error)
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
        """Return what opens transactions on connections of this driver's."""
        if self._transactions is None:
            self._transactions = _OwnTransactions(self, timeout)
        return self._transactions

    async def lend(self, timeout: timedelta) -> C:  # noqa: ASYNC109
        """Return a connection for a transaction; it is to be taken back."""
        self._notice_fork()
        if self._returned and not self._lending.locked():
            await self._lending.acquire()  # which does not wait, and so needs no deadline
            return self._returned.pop()
        deadline = asyncio.timeout(timeout.total_seconds())
        try:
            async with deadline:
                if is_waiting():
                    deadline.reschedule(None)  # for other handlers, however long they take: their consumer limits it
                await self._lending.acquire()
                deadline.reschedule(asyncio.get_running_loop().time() + timeout.total_seconds())
                try:
                    return self._returned.pop() if self._returned else await self._connected(self.connect_plain)
                except BaseException:
                    self._lending.release()
                    raise
        except TimeoutError:
            if not deadline.expired():
                raise
            raise StoreTimeoutError(f"{self._place} did not answer within {timeout.total_seconds():g} s") from None

    def take_back(self, connection: C, *, is_sound: bool, closings: int) -> None:
        """Keep a connection that was lent for the next transaction, or close it."""
        self._lending.release()
        if is_sound and closings == self._closings:
            self._returned.append(connection)
            return
        self._discard(connection)

    def forget_returned(self) -> None:
        """Close what waits for the next transaction: what broke a connection may have broken the others."""
        returned, self._returned = self._returned, []
        for connection in returned:
            self._discard(connection)

    @property
    def closings(self) -> int:
        """How often the connections were closed."""
        return self._closings

    async def listen(self, channel: str, wake: Callable[[], None], *, timeout: timedelta) -> None:  # noqa: ASYNC109
        """Return at once: most databases notify nobody."""

    async def _listener(self, timeout: timedelta) -> C:  # noqa: ASYNC109
        """Open a connection that is not of the pool, for it is never given back."""
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                return await self._connected()
        except TimeoutError:
            raise StoreTimeoutError(f"{self._place} did not answer within {timeout.total_seconds():g} s") from None

    async def close(self) -> None:
        """Close the idle connections; those in use are closed by their users."""
        self._notice_fork()
        idle, self._idle, self._returned = self._idle + self._returned, [], []
        self._closings += 1
        for connection in idle:
            self._discard(connection)

    def _discard(self, connection: C) -> None:
        self.abort(connection)
        self.free(connection)

    @abstractmethod
    async def connect(self) -> C:
        """Open a connection on which every statement commits by itself."""

    @abstractmethod
    async def connect_plain(self) -> C:
        """Open a connection for handlers, whose session has the defaults of its server and user."""

    def limit_handlers(self, timeout: timedelta | None) -> None:
        """Let the server end transactions of handlers that have ``timeout`` and took much longer, where it can."""

    @abstractmethod
    def link(self, source: Source) -> Link:
        """Return a link to a connection, which is as the library itself makes them."""

    @abstractmethod
    async def execute(self, connection: C, statement: Statement) -> Result:
        """Run one statement."""

    @abstractmethod
    def abort(self, connection: C) -> None:
        """Break a connection at once, failing whatever waits on it."""

    def free(self, connection: C) -> None:
        """Give back what is left of a broken connection, now that nobody waits on it."""

    @abstractmethod
    def kind_of(self, error: Exception) -> type[StoreError]:
        """Tell what an error of the library means."""


class _OwnTransactions(SQLTransactions):
    """Opens transactions on connections of a driver."""

    def __init__(self, driver: NetworkDriver[Any], timeout: timedelta) -> None:
        limit = Limit(timeout)
        super().__init__(lambda: driver.link(_Lent(driver, timeout, limit)))
        self._driver = driver

    def limit_to(self, timeout: timedelta | None) -> None:
        """Take note of how long the handlers of a consumer have; the longest of several consumers counts."""
        self._driver.limit_handlers(timeout)


class _Lent(Source):
    """Where the connections of one transaction come from."""

    def __init__(self, driver: NetworkDriver[Any], timeout: timedelta, limit: Limit | None) -> None:
        self._driver = driver
        self._timeout = timeout
        self.limit: Limit | None = limit
        self._closings = 0

    async def take(self) -> Any:  # noqa: ANN401 -- whatever the driver's are
        """Borrow a connection."""
        self._closings = self._driver.closings
        return await self._driver.lend(self._timeout)

    async def give_back(self, connection: Any, *, is_sound: bool) -> None:  # noqa: ANN401
        """Return it."""
        self._driver.take_back(connection, is_sound=is_sound, closings=self._closings)

    def hear_of_loss(self) -> None:
        """Let nobody have a connection that may be lost as well."""
        self._driver.forget_returned()


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
