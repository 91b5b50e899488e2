"""The clock of a message: what limits its handler, its waiting for the store, and its COMMIT, each by itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from enum import Enum, auto
from types import TracebackType
from typing import Final

from .errors import CommitUnknownError, StoreTimeoutError

__all__ = ["UNTIMED", "Limit", "Phase", "Untimed", "Within", "clock", "is_waiting", "late", "off_the_clock"]

#: How many seconds a message may wait for its store beyond the timeout of a handler, while no other one moves on.
STALLED: Final = 30.0
#: How many seconds that is where handlers have no timeout.
STALLED_WITHOUT_TIMEOUT: Final = 600.0
#: How many seconds a COMMIT may take before its outcome is given up as unknown.
COMMITTING: Final = 60.0


class Phase(Enum):
    """What a piece of work does while its time is counted."""

    #: Its handler and middlewares run.
    RUNNING = auto()
    #: It waits for a connection, a thread or a lock that other transactions hold.
    WAITING = auto()
    #: Its transaction is being committed.
    COMMITTING = auto()
    #: Its transaction is being rolled back.
    UNDOING = auto()


class Limit:
    """Cancels work that takes too long, and makes a ``TimeoutError`` of it, as ``asyncio.timeout`` does.

    One timer watches all its work, so that a piece of work that ends in time costs no timer at all.

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
        self.duration = duration
        self.seconds: float = math.inf if duration is None else duration.total_seconds()
        self.stalled: float = self.seconds + STALLED if duration is not None else STALLED_WITHOUT_TIMEOUT
        #: What is at work.
        self.watched: dict[Within, None] = {}
        #: Where it was used last: to ask for the current loop costs more than everything else here.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.has_timer: bool = False
        #: When a piece of work last stopped waiting, by the clock of the loop.
        self.moved: float = -math.inf

    def watch(self, work: Within, loop: asyncio.AbstractEventLoop) -> None:
        """Have a timer for a piece of work that may be the only one."""
        if self.loop is not loop:
            # The timer ended with its loop, and so did everything that it watched.
            self.loop, self.has_timer = loop, False
            self.watched.clear()
        self.watched[work] = None
        if not self.has_timer:
            self.has_timer = True
            self._look_at(work.due, loop)

    def _look_at(self, due: float, loop: asyncio.AbstractEventLoop) -> None:
        # Never later than a due time that may be set from now on: work moves from phase to phase without a timer.
        loop.call_at(min(due, loop.time() + min(self.seconds, COMMITTING)), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what is over time, and come back for the others."""
        if loop is not self.loop:
            return
        now = loop.time()
        earliest = math.inf
        for work in list(self.watched):
            due = work.due
            if work.phase is Phase.WAITING:
                due = max(due, self.moved + self.stalled)  # it moves up in a queue
            if due <= now:
                del self.watched[work]
                work.expire()
            else:
                earliest = min(earliest, due)
        self.has_timer = bool(self.watched)
        if self.has_timer:
            self._look_at(earliest, loop)


class Untimed:
    """Work that nothing limits: of a message that is handled outside of a consumer, or inside another handler."""

    __slots__ = ()

    def wait(self) -> None:
        """Wait for others from now on, for as long as their queue moves."""

    def run(self) -> None:
        """Begin to run, with the whole time of a handler; may be called from any thread."""

    def commit(self) -> None:
        """Commit from now on: what is stored must not be reported as late."""

    def undo(self) -> None:
        """Roll back from now on, for a time of its own that does not grow."""

    def excuse(self, timeout: asyncio.Timeout | None) -> asyncio.Timeout | None:
        """Switch off another time limit of the message once it commits; return the one before, to be put back."""
        return None


UNTIMED: Final = Untimed()
#: What limits the message that is being handled.
clock: ContextVar[Untimed] = ContextVar("postroom_clock", default=UNTIMED)


class Within(Untimed):
    """A piece of work that has the time of a limit, from when it is made until `end`; made in the task that does it.

    It is a context manager too; where every microsecond counts, `move` and `end` are called instead.
    """

    __slots__ = ("_before", "_excused", "_excused_until", "_limit", "_loop", "_task", "due", "is_expired", "phase")

    def __init__(self, limit: Limit) -> None:
        """Begin to count the time."""
        #: Whether its time was over before it ended.
        self.is_expired: bool = False
        #: When its time is over, by the clock of its loop.
        self.due: float = math.inf
        #: What it does; what it did when its time was over, once it was.
        self.phase: Phase = Phase.RUNNING
        self._excused: asyncio.Timeout | None = None
        #: When the excused time limit was to end, while it is switched off.
        self._excused_until: float | None = None
        task = asyncio.current_task(limit.loop) or asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit needs a task that it can cancel")
        self._task: asyncio.Task[object] = task
        self._loop = task.get_loop()
        self._before = task.cancelling()
        self._begin(limit)

    def _begin(self, limit: Limit) -> None:
        self._limit = limit
        self.due = self._loop.time() + limit.seconds
        if limit.has_timer and limit.loop is self._loop:
            limit.watched[self] = None
        else:
            limit.watch(self, self._loop)

    def wait(self) -> None:
        """Wait for others from now on, for as long as their queue moves."""
        self._enter(Phase.WAITING, self._limit.stalled)
        if self._excused is not None and self._excused_until is not None and not self._excused.expired():
            self._excused.reschedule(self._excused_until)  # nothing was committed, and the handler runs again
            self._excused_until = None

    def run(self) -> None:
        """Begin to run, with the whole time of a handler; may be called from any thread."""
        if not self.is_expired:
            # As `_enter` does, with one look at the clock: twice for every message.
            self._limit.moved = now = self._loop.time()
            self.due = now + self._limit.seconds
            self.phase = Phase.RUNNING

    def commit(self) -> None:
        """Commit from now on: what is stored must not be reported as late."""
        self._enter(Phase.COMMITTING, COMMITTING)
        if self._excused is not None and not self._excused.expired():
            self._excused_until = self._excused.when()
            self._excused.reschedule(None)

    def _enter(self, phase: Phase, seconds: float) -> None:
        if not self.is_expired:
            # In this order: a timer that looks in between finds too much time, never too little.
            self.due = self._loop.time() + seconds
            self.phase = phase

    def undo(self) -> None:
        """Roll back from now on, for a time of its own that does not grow: a lost connection may never answer."""
        self._enter(Phase.UNDOING, COMMITTING)

    def excuse(self, timeout: asyncio.Timeout | None) -> asyncio.Timeout | None:
        """Switch off another time limit of the message once it commits; return the one before, to be put back."""
        before, self._excused = self._excused, timeout
        return before

    def move(self, limit: Limit) -> None:
        """End this piece of work in time, and begin the next, which has the time of another limit."""
        if self.is_expired:  # it did not care
            self._task.uncancel()
            self.is_expired = False
        else:
            self._limit.watched.pop(self, None)
        self.phase = Phase.RUNNING
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


@contextmanager
def off_the_clock() -> Generator[None]:
    """Wait for the store without spending the time of the message's handler."""
    work = clock.get()
    work.wait()
    try:
        yield
    finally:
        work.run()


def is_waiting() -> bool:
    """Tell whether a message waits here for its transaction, which its consumer limits."""
    work = clock.get()
    return isinstance(work, Within) and work.phase is Phase.WAITING


def late(phase: Phase, limit: Limit) -> Exception:
    """Return what a message failed with whose time was over: only a handler that took too long is to blame for it."""
    error: StoreTimeoutError | CommitUnknownError
    match phase:
        case Phase.RUNNING:
            return TimeoutError(f"the handler did not end within {limit.seconds:g} s")
        case Phase.WAITING:
            error = StoreTimeoutError(
                f"the message waited {limit.stalled:g} s for its transaction while no other message of this consumer "
                "moved on; check the store and its pool, and that no handler blocks them for ever"
            )
        case Phase.COMMITTING:
            error = CommitUnknownError()
        case Phase.UNDOING:
            error = StoreTimeoutError(
                f"ROLLBACK was not answered within {COMMITTING:g} s; check the network and the store"
            )
    error.is_outage = True
    return error
