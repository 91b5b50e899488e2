"""A watch on the clock of a store: due times and leases are moments of it, and wait when it is put back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from . import events
from .errors import StoreError

__all__ = ["ClockWatch"]

SECOND: Final = timedelta(seconds=1)
#: How much slower than this process a clock may go while it is being corrected.
SLEW: Final = 0.001
#: How many seconds a store has to tell the time.
PATIENCE: Final = 10.0


class ClockWatch:
    """Compares the clock of a store with the monotonic clock of this process, from one look to the next.

    It notices a clock that was put back, and a failover to a server whose clock is behind. A clock that is corrected
    slowly is no jump, and neither is one that stands still, as clocks of tests do.

    Example:
        >>> from datetime import UTC, datetime, timedelta
        >>> from postroom.clock_watch import ClockWatch
        >>> watch, noon = ClockWatch(), datetime(2026, 7, 1, 12, tzinfo=UTC)
        >>> watch.jump(noon, asked=100.0, answered=100.1)
        >>> watch.jump(noon - timedelta(minutes=50), asked=700.1, answered=700.2)
        datetime.timedelta(seconds=3600)
    """

    def __init__(self) -> None:
        self._moment: datetime | None = None
        self._answered = 0.0

    def jump(self, moment: datetime, *, asked: float, answered: float) -> timedelta | None:
        """Return by how much the clock was put back since the last look at the least, None if it was not.

        Args:
            moment: What the store's clock says.
            asked: When it was asked, in seconds of a monotonic clock.
            answered: When the answer was there.
        """
        last, passed = self._moment, timedelta(seconds=asked - self._answered)
        self._moment, self._answered = moment, answered
        if last is None or moment == last:
            return None
        back = last + passed - moment
        return back if back > max(SECOND, passed * SLEW) else None

    async def look(self, store: object, tell: events.Listener) -> None:
        """Read the clock of a store that has one, and report if it was put back; an error is the next look's."""
        read: Callable[[], Awaitable[datetime]] | None = getattr(store, "clock", None)
        if read is None:
            return
        with suppress(StoreError, TimeoutError):
            asked = time.monotonic()
            async with asyncio.timeout(PATIENCE):
                moment = await read()
            back = self.jump(moment, asked=asked, answered=time.monotonic())
            if back is not None:
                tell(events.ClockJumpedBack(back))
