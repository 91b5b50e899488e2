"""Plain functions: how to tell them from async ones, and the threads that they run on."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

__all__ = ["Ended", "ThreadCall", "Threads", "contained", "innermost", "is_async"]

T = TypeVar("T")


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a partial, or an object that can be called, stands for."""
    found: Any = function
    while isinstance(found, partial):
        found = found.func
    # An object may say itself that it is async, as those of unittest.mock do.
    is_function = inspect.isroutine(found) or inspect.iscoroutinefunction(found)
    called: Callable[..., Any] = found if is_function else found.__call__
    return called


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether to call a function is to make a coroutine."""
    return inspect.iscoroutinefunction(innermost(function))


class Ended(NamedTuple):
    """What a plain function raised to end more than itself."""

    error: BaseException


def contained(function: Callable[[], T], what: str) -> T | Ended:
    """Call a plain function on a thread, so that whatever it raises reaches the task that awaits the thread."""
    try:
        return function()
    except StopIteration as error:
        # No future takes it, so that the task would wait for ever.
        raise RuntimeError(f"{what} raised StopIteration") from error
    except Exception:
        raise
    except BaseException as error:  # noqa: BLE001 -- the task that awaits the thread raises it
        # A task around the thread would end the event loop with it, before the task of the message hears of it.
        return Ended(error)


class ThreadCall(Generic[T]):
    """A plain function that was handed to a thread."""

    def __init__(self, function: Callable[[], T], what: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._function = partial(copy_context().run, function)
        self._what = what
        self._answer: asyncio.Future[T | Ended] = self._loop.create_future()
        #: Whether the caller has stopped waiting, so that the function is not called if it has not been yet.
        self._is_abandoned = False

    async def result(self) -> T:
        """Wait for what the function returns; to be cancelled here leaves the thread alone."""
        try:
            returned = await asyncio.shield(self._answer)
        except asyncio.CancelledError:
            self._is_abandoned = True
            raise
        if isinstance(returned, Ended):
            raise returned.error
        return returned

    @property
    def is_running(self) -> bool:
        """Whether the thread has not returned yet."""
        return not self._answer.done()

    def on_return(self, callback: Callable[[], None]) -> None:
        """Have something called, on the event loop, once the thread has returned."""
        self._answer.add_done_callback(lambda _: callback())

    def perform(self) -> None:
        """Call the function; for the thread."""
        answer: T | Ended | None = None
        error: Exception | None = None
        if not self._is_abandoned:
            try:
                answer = contained(self._function, self._what)
            except Exception as raised:  # noqa: BLE001 -- handed to the caller
                error = raised
        with suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._finish, answer, error)

    def _finish(self, answer: Any, error: Exception | None) -> None:  # noqa: ANN401 -- what the function returned
        if error is None:
            self._answer.set_result(answer)
        else:
            self._answer.set_exception(error)
            self._answer.exception()  # the caller may have stopped waiting


_Queue: TypeAlias = "SimpleQueue[ThreadCall[Any] | None]"


class Threads:
    """At most ``size`` threads for plain functions, each started when there is a call for it.

    The end of the process does not wait for them: a call that hangs must not keep it alive.
    """

    def __init__(self, size: int, *, name: str) -> None:
        self._size = size
        self._name = name
        self._open()

    def _open(self) -> None:
        self._calls: _Queue = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def call(self, function: Callable[[], T], what: str) -> ThreadCall[T]:
        """Run a function on a thread, with the context of the caller; ``what`` names it in errors."""
        call = ThreadCall(function, what)
        if not self._idle.acquire(blocking=False) and self._started < self._size:
            self._start()  # before the call waits for it: it may be refused, and then no thread would make the call
        self._calls.put(call)
        return call

    def _start(self) -> None:
        """Start a thread; the system raises a ``RuntimeError`` if it has no more."""
        work = partial(_work, self._calls, self._idle)
        threading.Thread(target=work, name=f"{self._name}-{self._started + 1}", daemon=True).start()
        self._started += 1

    def __del__(self) -> None:
        """End the threads of a publisher that was not closed."""
        self.close()

    def close(self) -> None:
        """Let each thread end as soon as it has returned; a later call starts a new one."""
        for _ in range(self._started):
            self._calls.put(None)
        self._open()


def _work(calls: _Queue, idle: threading.Semaphore) -> None:
    while (call := calls.get()) is not None:
        call.perform()
        del call  # an idle thread keeps nothing alive
        idle.release()
