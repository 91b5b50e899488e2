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
        self._has_timer = False

    def watch(self, work: Within, loop: asyncio.AbstractEventLoop) -> None:
        """Have a timer for a piece of work that may be the oldest."""
        self.watched[work] = None
        if self.loop is not loop:
            self.loop, self._has_timer = loop, False  # the timer ended with its loop
        if not self._has_timer:
            self._has_timer = True
            loop.call_at(work.due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what is over time, and come back for the oldest of the others."""
        now = loop.time()
        for work in list(self.watched):
            if work.due > now:
                loop.call_at(work.due, self._look, loop)
                return
            del self.watched[work]
            work.expire()
        self._has_timer = False


class Within:
    """A block of code that has the time of a limit; made anew each time, in the task that runs it."""

    __slots__ = ("_before", "_is_expired", "_limit", "_task", "due")

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._is_expired = False
        #: When its time is over, by the clock of its loop.
        self.due: float = 0.0

    def __enter__(self) -> None:
        """Begin to count the time."""
        limit = self._limit
        if limit.seconds is None:
            return
        task = asyncio.current_task(limit.loop) or asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit needs a task that it can cancel")
        self._task: asyncio.Task[object] = task
        self._before = task.cancelling()
        loop = task.get_loop()
        self.due = loop.time() + limit.seconds
        limit.watch(self, loop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say that the time was over, if that is why the block ended."""
        if not self._is_expired:
            self._limit.watched.pop(self, None)
        # Somebody else may have cancelled the task too, and then it is cancelled and not late.
        elif self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """End the block by cancelling its task."""
        self._is_expired = True
        self._task.cancel()
