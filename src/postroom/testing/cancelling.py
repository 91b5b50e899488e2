"""Cancelling at every await: an operation is run again and again, and cut at its 1st, 2nd, ... suspension."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar

__all__ = ["Cut", "Moment", "cuts"]

T = TypeVar("T")
#: When a cut comes: once the operation has begun to wait, or together with what it waits for, which is then lost on it.
Moment: TypeAlias = Literal["waiting", "answered"]
_Inner: TypeAlias = Coroutine[Any, Any, T] | Generator[Any, None, T]
_PATIENCE = timedelta(seconds=30)


def cuts(
    *,
    moment: Moment = "waiting",
    error: type[Exception] | None = None,
    fault: Callable[[], object] | None = None,
    limit: int = 5000,
) -> Iterator[Cut]:
    """Yield a cut for each suspension of the operation that the body of the loop runs, until one run goes through.

    The operation is cancelled as in life, so that shields, timeouts and task groups do what they do. Tasks that it
    starts are part of it: it is cancelled at their suspensions as well. With ``error``, that is raised instead; with
    ``fault``, that is called instead, such as the ``cut`` of a `FaultProxy`, once the operation has begun to wait.

    Example:
        >>> import asyncio
        >>> from postroom.testing.cancelling import cuts
        >>> async def handle(done: list[str]) -> None:
        ...     await asyncio.sleep(0)
        ...     done.append("charged")
        ...     await asyncio.sleep(0)
        ...     done.append("shipped")
        >>> async def main() -> None:
        ...     for cut in cuts():
        ...         done: list[str] = []
        ...         await cut.run(handle(done))
        ...         print(cut.happened, done)
        >>> asyncio.run(main())
        True []
        True ['charged']
        False ['charged', 'shipped']
    """
    for at in range(1, limit + 1):
        cut = Cut(at, moment, error, fault)
        yield cut
        if cut.suspensions < at:
            return
    raise AssertionError(f"the operation was still going on at its suspension {limit}")


class Cut:
    """One run of an operation, to be cut at one of its suspensions."""

    def __init__(
        self,
        at: int,
        moment: Moment = "waiting",
        error: type[Exception] | None = None,
        fault: Callable[[], object] | None = None,
    ) -> None:
        self.at: int = at
        #: Whether the operation came so far and was cut, where that was, and how often it was suspended in all.
        self.happened: bool = False
        self.where: str = "not reached"
        self.suspensions: int = 0
        self._moment = moment
        self._error = error
        self._fault = fault
        self._tasks: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        """Say where it was."""
        return f"<cut at suspension {self.at}, {self.where}>"

    @property
    def unfinished(self) -> int:
        """How many of the tasks that the operation started are still running."""
        return sum(not task.done() for task in self._tasks)

    async def run(self, operation: Coroutine[Any, Any, T], *, patience: timedelta = _PATIENCE) -> T | None:
        """Return what the operation returns, or None if it was cancelled; whatever else it raises is raised.

        Fails if the operation does not end in time, or goes on as if nobody had cancelled it.
        """
        loop = asyncio.get_running_loop()
        usual = loop.get_task_factory()
        loop.set_task_factory(self._start)
        try:
            task: asyncio.Task[T] = loop.create_task(operation)
            await asyncio.wait({task}, timeout=patience.total_seconds())
        finally:
            loop.set_task_factory(usual)
        if not task.done():
            task.cancel()
            raise AssertionError(f"{self}: the operation did not end within {patience}")
        if task.cancelled() and self.happened:
            return None
        result = task.result()
        if self.happened and self._error is None and self._fault is None:
            raise AssertionError(f"{self}: the operation swallowed its cancellation")
        return result

    def _start(self, loop: asyncio.AbstractEventLoop, inner: _Inner[T], **rest: Any) -> asyncio.Task[T]:  # noqa: ANN401
        task: asyncio.Task[T] = asyncio.Task(_Counted[T](inner, self), loop=loop, **rest)
        self._tasks.append(task)
        return task

    def suspended(self, operation: _Counted[Any], future: asyncio.Future[Any] | None) -> Any:  # noqa: ANN401
        """Count a suspension, and cut if it is the one; called by what drives the operation."""
        self.suspensions += 1
        if self.suspensions != self.at:
            return future
        self.where = _innermost(operation.inner)
        if self._error is not None:
            self.happened = True
            return operation.throw(self._error(f"raised at suspension {self.at}"))
        if self._fault is not None:
            self.happened = True
            self._tasks[0].get_loop().call_soon(self._fault)
        elif self._moment == "waiting" or future is None:
            self._tasks[0].get_loop().call_soon(self._cancel)
        else:
            future.add_done_callback(self._cancel)  # before the task's own, so that the answer does not reach it
        return future

    def _cancel(self, *_: object) -> None:
        self.happened = self._tasks[0].cancel()


class _Counted(Coroutine[Any, Any, T]):
    """A coroutine, driven by a task, whose suspensions are counted."""

    def __init__(self, inner: _Inner[T], cut: Cut) -> None:
        self.inner = inner
        self._cut = cut

    def send(self, value: Any) -> Any:  # noqa: ANN401
        return self._cut.suspended(self, self.inner.send(value))

    def throw(self, *error: Any) -> Any:  # noqa: ANN401
        return self._cut.suspended(self, self.inner.throw(*error))

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError  # only tasks drive it


def _innermost(operation: Any) -> str:  # noqa: ANN401
    """Return where a suspended coroutine stands: the last frame that Python knows of."""
    place = ""
    while operation is not None:
        frame = getattr(operation, "cr_frame", None) or getattr(operation, "gi_frame", None)
        if frame is not None:
            place = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname} line {frame.f_lineno}"
        operation = getattr(operation, "cr_await", None) or getattr(operation, "gi_yieldfrom", None)
    return place
