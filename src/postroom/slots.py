"""Slots for destinations that have not answered yet, so that those that hang leave room for those that work."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

__all__ = ["UnprovenSlots"]

#: How many calls one destination that has not answered yet has under way: enough to tell that it is down.
FOR_ONE = 3
#: Seconds between two destinations that are tried for the first time, while such attempts fail.
PACE = 0.1
#: How many seconds room is kept for a destination whose messages were made due.
KEPT_FOR = 5.0


@dataclass(slots=True)
class _Lane:
    members: int = 0
    used: int = 0
    waiting: deque[asyncio.Future[bool]] = field(default_factory=deque[asyncio.Future[bool]])


class UnprovenSlots:
    """Shares a number of slots among the destinations that have not answered yet."""

    def __init__(self, slots: int, members: int) -> None:
        """Set up ``slots`` calls at the same time, with at most about ``members`` messages that wait for one."""
        self._slots = max(slots, 1)
        self._max_members = members
        self._lanes: dict[str, _Lane] = {}
        self._used = 0
        self._members = 0
        self._pace = 0.0
        self._next = 0.0
        #: Destinations that have been invited, and until when room is kept for them.
        self._invited: dict[str, float] = {}

    @property
    def has_room(self) -> bool:
        """Whether another destination may come in now."""
        now = time.monotonic()
        for name in [name for name, until in self._invited.items() if until < now]:
            del self._invited[name]
        return self._has_slot() and self._members < self._max_members and now >= self._next

    def _has_slot(self) -> bool:
        """Tell whether a slot is neither used nor kept for a destination that has none yet."""
        kept = sum(not lane.used for lane in self._lanes.values()) + len(self._invited)
        return self._used + kept < self._slots

    def invite(self, destination: str) -> None:
        """Keep room for a destination whose messages are about to come."""
        now = time.monotonic()
        self._next = now + self._pace
        self._invited[destination] = now + KEPT_FOR

    def join(self, destination: str) -> bool:
        """Have another message of a destination wait for a slot; False if there is no room for it."""
        if destination not in self._lanes and self._invited.pop(destination, None) is None:
            if not self.has_room:
                return False
            self._next = time.monotonic() + self._pace
        elif self._members >= self._max_members:
            return False
        self._lanes.setdefault(destination, _Lane()).members += 1
        self._members += 1
        return True

    def report(self, *, answered: bool) -> None:
        """Take note of how a first attempt ended: while they fail, the next ones follow more slowly."""
        self._pace = 0.0 if answered else PACE

    def leave(self, destination: str) -> None:
        """Have one message less."""
        lane = self._lanes[destination]
        lane.members -= 1
        self._members -= 1
        if not lane.members:
            del self._lanes[destination]

    async def acquire(self, destination: str) -> bool:
        """Wait for a slot, or until the destination needs none any more; tell whether a slot was taken."""
        lane = self._lanes[destination]
        if not lane.used or (lane.used < FOR_ONE and self._has_slot()):
            lane.used += 1
            self._used += 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.release(destination)
            raise

    def release(self, destination: str) -> None:
        """Give a slot back, to the next message of the same destination."""
        lane = self._lanes[destination]
        while lane.waiting:
            turn = lane.waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        lane.used -= 1
        self._used -= 1

    def dissolve(self, destination: str) -> None:
        """Let go all that wait: their destination has answered, or is known to be down."""
        lane = self._lanes.get(destination)
        while lane is not None and lane.waiting:
            turn = lane.waiting.popleft()
            if not turn.done():
                turn.set_result(False)
