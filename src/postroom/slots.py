"""Slots for destinations that have not answered yet, so that those that hang leave room for those that work."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

__all__ = ["UnprovenSlots"]

#: How many calls one destination that has not answered yet has under way: enough to tell that it is down.
FOR_ONE = 3


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
        #: Set whenever a destination has left.
        self.freed: asyncio.Event = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether another destination may come in."""
        return len(self._lanes) < self._slots and self._members < self._max_members

    def join(self, destination: str) -> bool:
        """Have another message of a destination wait for a slot; False if there is no room for it."""
        if not (self.has_room or (destination in self._lanes and self._members < self._max_members)):
            return False
        self._lanes.setdefault(destination, _Lane()).members += 1
        self._members += 1
        return True

    def leave(self, destination: str) -> None:
        """Have one message less."""
        lane = self._lanes[destination]
        lane.members -= 1
        self._members -= 1
        if not lane.members:
            del self._lanes[destination]
        self.freed.set()

    async def acquire(self, destination: str) -> bool:
        """Wait for a slot, or until the destination needs none any more; tell whether a slot was taken."""
        lane = self._lanes[destination]
        if not lane.used or (lane.used < FOR_ONE and self._used < self._slots):
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
