"""Threads for libraries that are not async: each is lent to one transaction at a time."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ClassVar, Final

from .block import Foreign, Link

__all__ = ["Gate", "OnThread", "Plain", "Threads"]

#: How many transactions on threads may be open at once, for each pool.
SIZE: Final = 32


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
    """A bounded number of threads, started when they are needed and used again."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._gate = Gate(size)
        self._idle: list[ThreadPoolExecutor] = []
        self._pid = os.getpid()

    async def take(self) -> Lane:
        """Wait for a thread that nobody uses."""
        if self._pid != os.getpid():
            # Threads do not outlive a fork.
            self._idle, self._gate, self._pid = [], Gate(self._size), os.getpid()
        gate = self._gate
        await gate.acquire()
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = ThreadPoolExecutor(1, thread_name_prefix="postroom-transaction")
        return Lane(thread, gate, self._idle)


class Lane:
    """One thread, for as long as a transaction has it."""

    def __init__(self, thread: ThreadPoolExecutor, gate: Gate, idle: list[ThreadPoolExecutor]) -> None:
        self._thread = thread
        self._gate = gate
        self._idle = idle

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 -- whatever it returns
        """Run a plain function on the thread, with the context of the caller; one that has begun goes to its end."""
        context = copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(context.run, function, *arguments))

    def give_back(self) -> None:
        """Let the next transaction have the thread."""
        self._idle.append(self._thread)
        self._gate.release()


class Plain(ABC):
    """A link whose calls return at once: see `Link`. All of them are made on one thread."""

    is_telling: bool = False
    connection: Foreign = None

    @abstractmethod
    def begin(self) -> None:
        """Take a connection and begin a transaction."""

    @abstractmethod
    def commit(self) -> None:
        """Commit, and make sure that it was."""

    @abstractmethod
    def roll_back(self) -> None:
        """Roll back everything."""

    @abstractmethod
    def release(self, *, is_sound: bool) -> None:
        """Give the connection back, or close it for good."""

    def abort(self) -> None:  # noqa: B027 -- not every library can
        """Break the connection at once, from another thread."""

    @abstractmethod
    def mark(self) -> Foreign:
        """Make a savepoint."""

    @abstractmethod
    def keep(self, mark: Foreign) -> None:
        """Forget a savepoint and keep what came after it."""

    @abstractmethod
    def undo(self, mark: Foreign) -> None:
        """Undo what came after a savepoint."""


class OnThread(Link):
    """A plain link, each of whose calls is made on a thread that this transaction has for itself."""

    is_telling: bool
    call: Callable[..., Awaitable[Any]]
    connection: Foreign = None

    is_async: ClassVar[bool] = False

    def __init__(self, plain: Plain, threads: Threads) -> None:
        self._plain = plain
        self._threads = threads
        self._lane: Lane | None = None
        self.is_telling = plain.is_telling

    async def begin(self) -> None:
        self._lane = await self._threads.take()
        self.call = self._lane.call
        await self.call(self._plain.begin)
        self.connection = self._plain.connection

    async def commit(self) -> None:
        await self.call(self._plain.commit)

    async def roll_back(self) -> None:
        await self.call(self._plain.roll_back)

    async def release(self, *, is_sound: bool) -> None:
        if self._lane is None:
            return
        try:
            # Behind whatever the thread is still busy with: a thread cannot be cancelled.
            await self._lane.call(self._released, is_sound)
        finally:
            self._lane.give_back()

    def _released(self, is_sound: bool) -> None:  # noqa: FBT001 -- passed on by a thread
        self._plain.release(is_sound=is_sound)

    def abort(self) -> None:
        self._plain.abort()

    async def mark(self) -> Foreign:
        return await self.call(self._plain.mark)

    async def keep(self, mark: Foreign) -> None:
        await self.call(self._plain.keep, mark)

    async def undo(self, mark: Foreign) -> None:
        await self.call(self._plain.undo, mark)

    def is_sound_after(self, error: BaseException) -> bool:
        """Tell so always: a statement on a thread is never cut off, and this waits behind it."""
        return True
