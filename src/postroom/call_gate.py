"""How many calls of a publisher run at once, without those of a destination that hangs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from .slots import STUCK

__all__ = ["MAX_LINGERING", "CallGate"]

#: How many calls that hang may run beside those that are allowed to run at once.
MAX_HANGING = 1000
#: How many calls to one destination may run on after they were given up, before no more begin; fewer in a small gate.
MAX_LINGERING = 3
#: Seconds between two looks for calls that hang, while others wait.
LOOK_EVERY = 0.1


@dataclass(slots=True, eq=False)
class _Calls:
    """The calls of one destination that are under way."""

    #: When the first of them began, or the last of them was answered.
    since: float
    count: int = 0
    #: How many of them count against the limit of the gate.
    permits: int = 0
    #: How many of them were given up and run on, on threads that cannot be stopped.
    lingering: int = 0

    @property
    def are_hanging(self) -> bool:
        return time.monotonic() - self.since > STUCK


class CallGate:
    """Lets ``size`` calls run at once.

    While calls to one destination hang, those to others that wait take their places: a destination that hangs uses up
    the gate only for a moment, and never has more than ``size`` calls under way itself.
    """

    def __init__(self, size: int, *, hanging: int = MAX_HANGING) -> None:
        """Set up a gate; at most ``hanging`` calls run beside those that are allowed to run at once."""
        self._size = self._free = size
        self._most_hanging = hanging
        # Those that run on keep their places: once they have all of them, no other call could begin, and fail.
        self._most_lingering = min(MAX_LINGERING, size)
        self._hanging = 0
        self._calls: dict[str, _Calls] = {}
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        #: The loop whose timer looks for calls that hang; one that has ended looks no more.
        self._looking: asyncio.AbstractEventLoop | None = None

    def is_hogged_by(self, destination: str) -> bool:
        """Tell whether the gate is full, and a destination keeps others waiting with calls that hang."""
        calls = self._calls.get(destination)
        return calls is not None and not self._free and len(self._calls) > 1 and calls.are_hanging

    def is_clogged(self, destination: str) -> bool:
        """Tell whether so many calls to a destination were given up and run on that no more may begin."""
        calls = self._calls.get(destination)
        return calls is not None and calls.lingering >= self._most_lingering

    async def enter(self, destination: str) -> None:
        """Wait until another call may begin; end it with `leave`.

        A destination that is clogged is let in at once, to learn that.
        """
        if self.is_clogged(destination):
            self._begin_beside(destination)
            return
        # Calls that wait while a place is free wait for others of their own destination.
        if self._free and self._has_room(destination):
            self._free -= 1
            self._begin(destination)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((destination, turn))
        self._watch()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(destination, is_answered=False)
            raise

    def leave(self, destination: str, *, is_answered: bool) -> None:
        """End a call, and let the next one begin."""
        calls = self._calls[destination]
        calls.count -= 1
        if is_answered:
            calls.since = time.monotonic()
        if calls.permits > calls.count:
            calls.permits -= 1
            self._free += 1
        else:
            self._hanging -= 1
        if not calls.count:
            del self._calls[destination]
        self._hand_on()

    def linger(self, destination: str) -> None:
        """Keep the place of a call that is given up and runs on, beyond its `leave`; `end_lingering` frees it."""
        calls = self._calls[destination]
        calls.count += 1
        calls.lingering += 1
        self._hanging += 1  # `leave` takes this one back, and not the place
        if self.is_clogged(destination):
            self._let_in(destination)

    def end_lingering(self, destination: str) -> None:
        """Free the place of a call that has returned at last."""
        self._calls[destination].lingering -= 1
        self.leave(destination, is_answered=False)

    def _has_room(self, destination: str) -> bool:
        calls = self._calls.get(destination)
        return calls is None or calls.count < self._size

    def _begin(self, destination: str) -> None:
        calls = self._calls.get(destination)
        if calls is None:
            calls = self._calls[destination] = _Calls(time.monotonic())
        calls.count += 1
        calls.permits += 1

    def _begin_beside(self, destination: str) -> None:
        """Begin a call that takes no place."""
        self._calls[destination].count += 1
        self._hanging += 1

    def _let_in(self, destination: str) -> None:
        """Let all in that wait for a destination that is clogged."""
        still: deque[tuple[str, asyncio.Future[None]]] = deque()
        for waiting, turn in self._waiting:
            if waiting != destination:
                still.append((waiting, turn))
            elif not turn.done():
                self._begin_beside(destination)
                turn.set_result(None)
        self._waiting = still

    def _hand_on(self) -> None:
        """Give free places to those who wait longest and may have one."""
        passed: list[tuple[str, asyncio.Future[None]]] = []
        while self._free and self._waiting:
            destination, turn = self._waiting.popleft()
            if turn.done():
                continue
            if not self._has_room(destination):
                passed.append((destination, turn))
                continue
            self._free -= 1
            self._begin(destination)
            turn.set_result(None)
        self._waiting.extendleft(reversed(passed))

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        if self._looking is not loop:
            self._looking = loop
            loop.call_later(LOOK_EVERY, self._make_room)

    def _make_room(self) -> None:
        """Give the places of calls that hang to calls that wait for other destinations."""
        self._looking = None
        hanging = {name for name, calls in self._calls.items() if calls.are_hanging}
        places = [calls for name in hanging for calls in [self._calls[name]] * self._calls[name].permits]
        still: deque[tuple[str, asyncio.Future[None]]] = deque()
        for destination, turn in self._waiting:
            if turn.done():
                continue
            if destination in hanging or not places or self._hanging >= self._most_hanging:
                still.append((destination, turn))
                continue
            places.pop().permits -= 1
            self._hanging += 1
            self._begin(destination)
            turn.set_result(None)
        self._waiting = still
        if still:
            self._watch()
