"""The port of database libraries, and what those with connections over a network have in common."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from ...errors import PostroomError, StoreError, StoreTimeoutError, StoreUnavailableError
from .statement import Result, Script, Statement, run_async

__all__ = ["Driver", "NetworkDriver"]

T = TypeVar("T")
C = TypeVar("C")


class Driver(Protocol):
    """Runs scripts on connections of its own."""

    async def run(self, script: Script[T], *, atomic: bool = True, timeout: timedelta) -> T:
        """Run a script, as one transaction or, if not ``atomic``, statement by statement.

        Raises `StoreError` and its kin for whatever the library raises. A connection that was cancelled, timed out
        or failed is thrown away.
        """
        ...

    async def listen(self, channel: str, wake: Callable[[], None]) -> None:
        """Call ``wake`` at every notification until cancelled; return at once if the database has none."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class NetworkDriver(ABC, Generic[C]):
    """A small pool of connections, none of which is used again after anything went wrong on it."""

    def __init__(self, *, size: int, place: str, secret: str | None) -> None:
        self._size = size
        #: Where the database is, fit to be shown.
        self._place = place
        self._secret = secret
        self._idle: list[C] = []
        self._gate = asyncio.Semaphore(size)
        self._pid = os.getpid()

    async def run(self, script: Script[T], *, atomic: bool = True, timeout: timedelta) -> T:  # noqa: ASYNC109
        """Run a script on a connection that nobody else uses."""
        try:
            async with asyncio.timeout(timeout.total_seconds()) as deadline:
                async with self._gate:
                    return await self._run(script, atomic=atomic)
        except TimeoutError as error:
            if not deadline.expired():
                raise self._translated(error) from error
            raise StoreTimeoutError(f"{self._place} did not answer within {timeout.total_seconds():g} s") from None

    async def _run(self, script: Script[T], *, atomic: bool) -> T:
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
        self._idle.append(connection)
        return result

    async def _take(self) -> C:
        if self._pid != os.getpid():
            # A forked child must not talk on its parent's connections, nor close them.
            self._idle, self._pid = [], os.getpid()
        if self._idle:
            return self._idle.pop()
        try:
            return await self.connect()
        except Exception as error:
            raise self._translated(error) from self._cause(error)

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
        self.abort(connection)
        work.cancel()
        work.add_done_callback(_forget)
        await asyncio.wait({work}, timeout=1)

    def _translated(self, error: Exception) -> StoreError:
        kind = self.kind_of(error)
        return kind(f"{self._place}: {type(error).__name__}: {self._scrubbed(str(error))}")

    def _scrubbed(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text

    def _cause(self, error: Exception) -> Exception | None:
        return None if self._secret and self._secret in str(error) else error

    async def listen(self, channel: str, wake: Callable[[], None]) -> None:
        """Return at once: most databases notify nobody."""

    async def close(self) -> None:
        """Close the idle connections; those in use are closed by their users."""
        idle, self._idle = self._idle, []
        for connection in idle:
            self.abort(connection)

    begin = "BEGIN"

    @abstractmethod
    async def connect(self) -> C:
        """Open a connection on which every statement commits by itself."""

    @abstractmethod
    async def execute(self, connection: C, statement: Statement) -> Result:
        """Run one statement."""

    @abstractmethod
    def abort(self, connection: C) -> None:
        """Close a connection at once, failing whatever waits on it."""

    @abstractmethod
    def kind_of(self, error: Exception) -> type[StoreError]:
        """Tell what an error of the library means."""


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
