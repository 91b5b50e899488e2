"""Probing: takes parked messages out of the store again, one to test a destination, and all once it works."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from . import events
from .breakers import Breakers
from .patience import persist
from .publishing import Publishing
from .store import Store

__all__ = ["Prober"]

#: Seconds between two walks over the parked messages of the store.
WALK_EVERY = 5.0
PAGE = 1000
#: After how many seconds without an answer a recovery is given up; the next walk begins it anew.
STALLED = 10.0
#: How often a destination without parked messages is asked for: they may not have been recorded yet.
MAX_MISSES = 5
#: How many seconds to wait before the store is asked again.
PAUSE = 0.01


@dataclass(slots=True)
class _Recovery:
    size: int = 1
    asked_at: float = 0.0


class Prober:
    """Decides when parked messages become due; the next claim brings them."""

    def __init__(
        self, store: Store, breakers: Breakers, publishing: Publishing, wake: Callable[[], None], tell: events.Listener
    ) -> None:
        self._store = store
        self._breakers = breakers
        self._publishing = publishing
        self._wake = wake
        self._tell = tell
        self._is_newest_turn = False
        self._recoveries: dict[str, _Recovery] = {}
        #: How many messages of a destination that works again become due at once, at the most.
        self.most: int = 1000

    @property
    def is_busy(self) -> bool:
        """Whether parked messages are about to become due."""
        waiting = self._breakers.recovered or self._publishing.untried or self._breakers.is_searching
        return self._store.features.parks and bool(waiting)

    async def probe_forever(self) -> None:
        """Make parked messages due when their time has come."""
        while self._store.features.parks:
            self._breakers.changed.clear()
            if not (await self._probe() | await self._recover() | await self._try_untried()):
                await self._rest()

    async def find_forever(self) -> None:
        """Look for parked messages of dispatchers that have ended."""
        while self._store.features.parks:
            await self.find()
            await asyncio.sleep(WALK_EVERY * random.uniform(0.75, 1.0))

    async def find(self, until: asyncio.Event | None = None) -> None:
        """Take note of all destinations that have parked messages; end early once ``until`` is set."""
        after, names = "", [""] * PAGE
        while len(names) == PAGE:
            call = partial(self._store.parked, after=after, limit=PAGE)
            names = await persist("parked", call, self._tell, until=until) or []
            ours = filter(self._breakers.naming.is_ours, names)
            if self._publishing.releases_are_outages:
                self._breakers.find(name for name in ours if name not in self._publishing.untried)
            else:
                await self._unpark_all(ours)
            after = names[-1] if names else ""

    async def _unpark_all(self, names: Iterable[str]) -> None:
        """Make parked messages due for a reader, which has no destination that could be down."""
        for name in names:
            while await self._unpark(name, self.most) == self.most:
                pass

    async def _probe(self) -> bool:
        invited = self._breakers.next_probe()
        if invited is None:
            return False
        name, count = invited
        if not await self._unpark(name, min(count, self.most)):
            self._breakers.report_empty(name)
        return True

    async def _recover(self) -> bool:
        """Make the messages of destinations that work again due, ever more of them while they are answered."""
        has_worked = False
        for name in list(self._breakers.recovered):
            recovery, now = self._recoveries.setdefault(name, _Recovery()), time.monotonic()
            is_stalled = recovery.asked_at and now - recovery.asked_at > STALLED
            if self._breakers.is_down(name) or is_stalled:
                self._end(name)
            elif not recovery.asked_at or self._breakers.has_answered_since(name, recovery.asked_at):
                has_worked = True
                recovery.asked_at = now
                if await self._unpark(name, recovery.size) < recovery.size:
                    self._end(name)
                recovery.size = min(recovery.size * 2, self.most)
        return has_worked

    def _end(self, name: str) -> None:
        self._breakers.recovered.pop(name, None)
        self._recoveries.pop(name, None)

    async def _try_untried(self) -> bool:
        """Make messages due that were parked because too many other destinations had not answered yet."""
        untried = self._publishing.untried
        if not untried or not self._publishing.slots.has_room:
            return False
        # By turns the newest and the oldest: a new destination does not wait for all that hang, nor they for ever.
        self._is_newest_turn = not self._is_newest_turn
        name, misses = untried.popitem(last=self._is_newest_turn)
        if self._publishing.is_hanging(name):
            untried[name] = misses
            untried.move_to_end(name, last=not self._is_newest_turn)
            return False
        if not await self._unpark(name, self.most) and misses < MAX_MISSES:
            untried[name] = misses + 1
            untried.move_to_end(name, last=False)
            return len(untried) > 1
        return True

    async def _unpark(self, name: str, limit: int) -> int:
        count = await persist("unpark", partial(self._store.unpark, name, limit), self._tell) or 0
        if count:
            self._wake()
        return count

    async def _rest(self) -> None:
        """Wait until something has changed, or the next probe is due."""
        is_waiting = self._breakers.recovered or self._publishing.untried
        planned = self._breakers.until_next()
        seconds = min(1.0 if planned is None else max(planned, 0.001), 1.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, PAUSE) if is_waiting else seconds):
                await self._breakers.changed.wait()
