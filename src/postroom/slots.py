"""Slots for destinations that have not answered yet, so that those that hang leave room for those that work."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

__all__ = ["STUCK", "UnprovenSlots"]

#: How many calls one destination that has not answered yet has under way: enough to tell that it is down.
FOR_ONE = 3
#: After how many seconds in which none of them has ended calls count as stuck.
STUCK = 0.5


@dataclass(slots=True, eq=False)
class _Lane:
    """The messages of one destination."""

    members: int = 0
    used: int = 0
    #: When the last of its calls began.
    moved_at: float = 0.0
    waiting: deque[asyncio.Future[bool]] = field(default_factory=deque[asyncio.Future[bool]])

    @property
    def is_stuck(self) -> bool:
        """Whether it has all the slots that it may have, and none of its calls ends."""
        return self.used >= FOR_ONE and time.monotonic() - self.moved_at > STUCK

    def next(self) -> asyncio.Future[bool] | None:
        """Return the message that waits longest, if one waits and may have a slot."""
        while self.waiting and self.waiting[0].done():
            self.waiting.popleft()
        return self.waiting.popleft() if self.waiting and self.used < FOR_ONE else None


class UnprovenSlots:
    """Shares a number of slots among the destinations that have not answered yet.

    Calls that fail at once free their slots at once, so that thousands of destinations are tried in a moment. Calls
    that hang keep theirs: then no more messages are let in, and those of further destinations are parked.
    """

    def __init__(self, slots: int, members: int) -> None:
        """Set up ``slots`` calls at the same time, with at most ``members`` messages that have or wait for one."""
        self._slots = max(slots, 1)
        self._max_members = members
        self._lanes: dict[str, _Lane] = {}
        #: A lane for each message that waits.
        self._queue: deque[_Lane] = deque()
        self._is_newest_turn = False
        self._used = 0
        self._members = 0
        self._moved_at = 0.0

    def __bool__(self) -> bool:
        """Tell whether any message has or waits for a slot."""
        return bool(self._lanes)

    @property
    def has_room(self) -> bool:
        """Whether another destination may come in now."""
        return self._members < self._max_members and not self._are_stuck()

    def _are_stuck(self) -> bool:
        return self._used >= self._slots and time.monotonic() - self._moved_at > STUCK

    def is_stuck(self, destination: str) -> bool:
        """Tell whether the calls of a destination hang, so that more of them would tell nothing."""
        lane = self._lanes.get(destination)
        return lane is not None and lane.is_stuck

    def join(self, destination: str) -> bool:
        """Let another message of a destination wait for a slot; return False if there is no room for it.

        A destination that is alone takes no room from others: the backlog of one topic is not parked at the start.
        """
        is_alone = len(self._lanes) == 1 and destination in self._lanes
        is_full = self._members >= self._max_members and not is_alone
        if is_full or self._are_stuck() or self.is_stuck(destination):
            return False
        self._lanes.setdefault(destination, _Lane()).members += 1
        self._members += 1
        return True

    def leave(self, destination: str) -> None:
        """Count one message less."""
        lane = self._lanes[destination]
        lane.members -= 1
        self._members -= 1
        if not lane.members:
            del self._lanes[destination]

    async def acquire(self, destination: str) -> bool:
        """Wait for a slot, or until the destination needs none any more; return whether a slot was taken."""
        lane = self._lanes[destination]
        if lane.used < FOR_ONE and self._used < self._slots and not lane.waiting:
            self._take(lane)
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        self._queue.append(lane)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.release(destination)
            raise

    def _take(self, lane: _Lane) -> None:
        lane.used += 1
        self._used += 1
        self._moved_at = lane.moved_at = time.monotonic()

    def release(self, destination: str) -> None:
        """Give a slot back, to the next message that waits for one."""
        lane = self._lanes[destination]
        lane.used -= 1
        self._used -= 1
        for _ in range(len(self._queue)):
            if self._used >= self._slots:
                return
            # By turns the newest and the oldest: a new destination does not wait for all that hang, nor they for ever.
            self._is_newest_turn = not self._is_newest_turn
            lane = self._queue.pop() if self._is_newest_turn else self._queue.popleft()
            turn = lane.next()
            if turn is not None:
                self._take(lane)
                turn.set_result(True)
            elif lane.waiting:
                self._queue.appendleft(lane)  # it has as many slots as one destination may have

    def dissolve(self, destination: str) -> None:
        """Let go all that wait: their destination has answered, or is known to be down."""
        lane = self._lanes.get(destination)
        while lane is not None and lane.waiting:
            turn = lane.waiting.popleft()
            if not turn.done():
                turn.set_result(False)
