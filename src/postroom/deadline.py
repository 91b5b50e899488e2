"""A time limit for many pieces of work at once, watched by one timer."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import TracebackType

__all__ = ["Limit", "Within"]


class Limit:
    """Cancels work that takes too long, and makes a ``TimeoutError`` of it, as ``asyncio.timeout`` does.

    All its work has the same time, so what began first is over first: one timer for the oldest is enough, and a piece
    of work that ends in time costs no timer at all.

    Example:
        >>> import asyncio
        >>> from datetime import timedelta
        >>> from postroom.deadline import Limit, Within
        >>> limit = Limit(timedelta(milliseconds=1))
        >>> async def main() -> None:
        ...     try:
        ...         with Within(limit):
        ...             await asyncio.sleep(60)
        ...     except TimeoutError:
        ...         print("too long")
        >>> asyncio.run(main())
        too long
    """

    def __init__(self, duration: timedelta | None) -> None:
        """Set up a limit; None for no limit."""
        self.seconds: float | None = None if duration is None else duration.total_seconds()
        #: What is at work, in the order in which it is due.
        self.watched: dict[Within, None] = {}
        #: Where it was used last: to be told of the current loop costs more than everything else here.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.has_timer: bool = False

    def watch(self, work: Within, loop: asyncio.AbstractEventLoop) -> None:
        """Have a timer for a piece of work that may be the oldest."""
        if self.loop is not loop:
            # The timer ended with its loop, and so did everything that it watched.
            self.loop, self.has_timer = loop, False
            self.watched.clear()
        self.watched[work] = None
        if not self.has_timer:
            self.has_timer = True
            loop.call_at(work.due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what is over time, and come back for the oldest of the others."""
        if loop is not self.loop:
            return
        now = loop.time()
        for work in list(self.watched):
            if work.due > now:
                loop.call_at(work.due, self._look, loop)
                return
            del self.watched[work]
            work.expire()
        self.has_timer = False


class Within:
    """A piece of work that has the time of a limit, from when it is made until `end`; made in the task that does it.

    It is a context manager too; where every microsecond counts, `move` and `end` are called instead.
    """

    __slots__ = ("_before", "_limit", "_task", "due", "is_expired")

    def __init__(self, limit: Limit) -> None:
        """Begin to count the time."""
        #: Whether its time was over before it ended.
        self.is_expired: bool = False
        #: When its time is over, by the clock of its loop.
        self.due: float = 0.0
        task = asyncio.current_task(limit.loop) or asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit needs a task that it can cancel")
        self._task: asyncio.Task[object] = task
        self._before = task.cancelling()
        self._begin(limit)

    def _begin(self, limit: Limit) -> None:
        self._limit = limit
        if limit.seconds is None:
            return
        loop = self._task.get_loop()
        self.due = loop.time() + limit.seconds
        if limit.has_timer and limit.loop is loop:
            limit.watched[self] = None
        else:
            limit.watch(self, loop)

    def move(self, limit: Limit) -> None:
        """End this piece of work in time, and begin the next, which has the time of another limit."""
        if self.is_expired:  # it did not care
            self._task.uncancel()
            self.is_expired = False
        else:
            self._limit.watched.pop(self, None)
        self._begin(limit)

    def end(self, error: BaseException | None = None) -> BaseException | None:
        """End; return with what, which is a ``TimeoutError`` if it was cancelled because its time was over."""
        if not self.is_expired:
            self._limit.watched.pop(self, None)
        # Somebody else may have cancelled the task too, and then it is cancelled and not late.
        elif self._task.uncancel() <= self._before and isinstance(error, asyncio.CancelledError):
            return TimeoutError()
        return error

    def __enter__(self) -> None:
        """Begin, which it has already."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say that the time was over, if that is why the block ended."""
        ended_with = self.end(error)
        if ended_with is not None and ended_with is not error:
            raise ended_with from error

    def expire(self) -> None:
        """End the work by cancelling its task."""
        self.is_expired = True
        self._task.cancel()
