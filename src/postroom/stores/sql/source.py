"""Where the connections of transactions come from, and on which threads their steps are taken."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from ...deadline import Limit
from .driver import Begun, Driver, Foreign, Steps, finish, finish_async

__all__ = ["BEGINNING", "Gate", "Lane", "Source", "Threads", "Turns"]

T = TypeVar("T")

#: How long a transaction may take to begin on a connection of the application's pool. One that is half open never
#: answers, and while other messages move on, it passes for one that waits in a queue.
BEGINNING: Final = timedelta(seconds=20)
#: How many transactions on threads may be open at once, for each pool.
THREADS: Final = 32


class Lane:
    """Takes the steps of one transaction on the event loop, where a cancellation reaches them."""

    #: Whether what was begun goes to its end, also when its caller is cancelled.
    goes_on: bool = False

    async def run(self, steps: Steps[T]) -> T:
        """Take steps to their end."""
        return await finish_async(steps)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 -- whatever it returns
        """Run a plain function on a thread that may use the connection."""
        return await asyncio.to_thread(function, *arguments)

    def give_back(self) -> None:
        """Let the next transaction have the lane."""


class Source:
    """Connections of an application's pool, and the lanes for their transactions.

    Args:
        driver: How the library of the pool is used.
        pool: The pool.
        lanes: Where the steps of transactions are taken; by default on the event loop, or on threads if the library is
            not async.
        is_limited: Whether a transaction may take no longer than `BEGINNING` to begin.
        is_shared: Whether its connection is used by others too, so that only what was begun here may be rolled back or
            broken.
    """

    #: Statements that set each transaction.
    settings: str = ""

    def __init__(
        self,
        driver: Driver,
        pool: Foreign,
        *,
        lanes: Threads | Turns | None = None,
        is_limited: bool = False,
        is_shared: bool = False,
    ) -> None:
        self.driver = driver
        self.is_shared = is_shared
        self.limit: Limit | None = Limit(BEGINNING) if is_limited else None
        self._pool = pool
        self._lanes = lanes if lanes is not None or driver.is_async else Threads(THREADS)

    async def lane(self) -> Lane:
        """Wait for a lane that no other transaction uses."""
        return _ON_THE_LOOP if self._lanes is None else await self._lanes.take()

    def acquire(self) -> Steps[Foreign]:
        """Take a connection that no other transaction uses."""
        return self.driver.acquire(self._pool)

    def release(self, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        """Give a connection back; one that is not sound is never used again."""
        return self.driver.release(self._pool, connection, begun, is_sound=is_sound)

    def on_loss(self) -> None:
        """Take note that a connection was lost, and that others may have been lost with it; most pools find out."""

    def limit_to(self, timeout: timedelta | None) -> None:
        """Take note of how long the handlers of a consumer have; the longest of several consumers counts."""


_ON_THE_LOOP: Final = Lane()


class Gate:
    """Lets a number of tasks in at a time, in order, whatever event loops they run on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        #: The event loops of those inside; one that was closed has left nobody behind who could come out.
        self._inside: list[asyncio.AbstractEventLoop] = []
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def acquire(self) -> None:
        """Wait until there is room."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if len(self._inside) >= self._size:
                self._inside = [other for other in self._inside if not other.is_closed()]
            if len(self._inside) < self._size and not self._waiting:
                self._inside.append(loop)
                return
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, turn))
            self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                is_inside = (loop, turn) not in self._waiting
                if not is_inside:
                    self._waiting.remove((loop, turn))
            if is_inside:
                self.release()
            raise

    def release(self) -> None:
        """Let the next one in; to be called on the event loop that was let in."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop in self._inside:
                self._inside.remove(loop)
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._inside) < self._size:
            loop, turn = self._waiting.popleft()
            try:
                loop.call_soon_threadsafe(_let, turn)
            except RuntimeError:  # the loop was closed
                continue
            self._inside.append(loop)


def _let(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class Threads:
    """A bounded number of threads for a library that is not async; each is lent to one transaction at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._gate = Gate(size)
        self._idle: list[ThreadPoolExecutor] = []
        self._pid = os.getpid()

    async def take(self) -> Lane:
        """Wait for a thread that no other transaction uses."""
        if self._pid != os.getpid():
            # Threads do not outlive a fork.
            self._idle, self._gate, self._pid = [], Gate(self._size), os.getpid()
        gate = self._gate
        await gate.acquire()
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = ThreadPoolExecutor(1, "postroom-transaction")
        return _Thread(thread, gate, self._idle)


class _Thread(Lane):
    """Takes all the steps of a call on one thread, which a cancellation does not reach."""

    goes_on = True

    def __init__(self, thread: ThreadPoolExecutor, gate: Gate, idle: list[ThreadPoolExecutor]) -> None:
        self._thread = thread
        self._gate = gate
        self._idle = idle

    async def run(self, steps: Steps[T]) -> T:
        answer: T = await self.call(finish, steps)
        return answer

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 -- whatever it returns
        """Run a plain function on the thread, with the context of the caller; one that has begun goes to its end."""
        work = partial(copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def give_back(self) -> None:
        self._idle.append(self._thread)
        self._gate.release()


class Turns:
    """One connection that is awaited, on which one transaction follows another."""

    def __init__(self) -> None:
        self._gate = Gate(1)

    async def take(self) -> Lane:
        """Wait for the end of the transaction before."""
        await self._gate.acquire()
        return _Turn(self._gate)


class _Turn(Lane):
    """Takes steps in order; the connection's own thread goes on with each in any case."""

    goes_on = True

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._last: asyncio.Task[Any] | None = None

    async def run(self, steps: Steps[T]) -> T:
        self._last = task = asyncio.create_task(self._after(self._last, steps))
        return await asyncio.shield(task)

    async def _after(self, last: asyncio.Task[Any] | None, steps: Steps[T]) -> T:
        if last is not None:
            await asyncio.wait({last})
        return await finish_async(steps)

    def give_back(self) -> None:
        self._gate.release()
