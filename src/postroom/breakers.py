"""Breakers: which destinations are down, which part of one, and which message may probe it."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

from . import events
from .destination import Naming, readable
from .message import Message
from .retry import Breaker, Delay

__all__ = ["FREE", "Admission", "Breakers"]

T = TypeVar("T")

#: How many breakers are kept in memory; the store remembers the parked messages of one that is forgotten.
MAX_BREAKERS = 100_000
#: How many parts of a destination fail, with no answer of it in between, before the whole counts as down.
EVIDENCE = 3
#: How many parts of a destination that failed are probed at once when it works again.
MAX_FAILED = 100
#: Seconds between two probes; claims may bring a few of them together, and there must be at most 20 in any second.
PROBE_SPACING = 1 / 15
#: How many probes may follow each other without a pause while they are answered, at the most.
MAX_CREDIT = 100
#: After how many seconds another message is invited if the one before did not come.
INVITE_AGAIN = 1.0
#: After how many invitations that no parked message followed a breaker is forgotten.
MAX_EMPTY = 3


class Admission(NamedTuple):
    """Whether a message may be sent, and if not, which breaker it waits for."""

    waits_for: str | None = None
    is_probe: bool = False


FREE = Admission()


@dataclass(slots=True)
class _Entry:
    breaker: Breaker
    #: The destination whose part this is; None for a destination.
    parent: str | None
    #: When its next probe is planned; other entries of the schedule are out of date.
    planned: float = 0.0
    #: A parked message was made due to probe it.
    is_invited: bool = False
    #: How many times in a row none of those that were made due has probed it.
    ignored: int = 0
    empty: int = 0


class Breakers:
    """A breaker for each destination that is down, and for each part of one that fails while the rest works.

    A message that fails opens the breaker of its part. Only when `EVIDENCE` parts of a destination have failed, with
    no answer of it in between, does the destination count as down; any answer closes its breaker.
    """

    def __init__(self, naming: Naming, cooldown: Delay, tell: events.Listener) -> None:
        self.naming = naming
        self._cooldown = cooldown
        self._tell = tell
        self._open: OrderedDict[str, _Entry] = OrderedDict()
        #: The parts of each destination that failed since it answered last.
        self._failed: OrderedDict[str, set[str]] = OrderedDict()
        #: When each destination answered last, in seconds of the monotonic clock.
        self._answered: OrderedDict[str, float] = OrderedDict()
        self._schedule: list[tuple[float, str]] = []
        self._next_probe = 0.0
        #: How many probes need not wait: an answered one pays for two more, so that many parts recover quickly.
        self._credit = 0
        #: Breakers of parked messages that were found in the store, and have not been probed yet.
        self._found: set[str] = set()
        #: Destinations that work again and may have parked messages.
        self.recovered: dict[str, None] = {}
        #: Set when there is something new to probe or to recover.
        self.changed: asyncio.Event = asyncio.Event()

    def __bool__(self) -> bool:
        """Tell whether any breaker is open."""
        return bool(self._open)

    @property
    def is_searching(self) -> bool:
        """Whether parked messages were found of which nothing is known yet."""
        return bool(self._found)

    def is_proven(self, destination: str) -> bool:
        """Tell whether a destination has answered."""
        return destination in self._answered

    def has_answered_since(self, destination: str, moment: float) -> bool:
        """Tell whether a destination has answered since a moment of the monotonic clock."""
        return self._answered.get(destination, -1.0) >= moment

    def is_down(self, name: str) -> bool:
        """Tell whether a breaker is open."""
        return name in self._open

    def wait(self, name: str) -> timedelta:
        """Return how long a destination or a part must still be left alone."""
        entry = self._open.get(name)
        return timedelta(0) if entry is None else entry.breaker.wait(time.monotonic())

    # -- messages ----------------------------------------------------------------------------------------------

    def admit(self, message: Message) -> Admission:
        """Tell whether a message may be sent, or probe what is down; end a probe with `end_probe`."""
        now, entries = time.monotonic(), self._of(message)
        for name, entry in entries:
            if not (entry.is_invited or entry.breaker.may_probe(now)):
                return Admission(name)
        costly = [name for name, entry in entries if entry.breaker.failures and not entry.is_invited]
        if costly and not self._take_token(now):
            return Admission(costly[0])
        for _, entry in entries:
            entry.is_invited, entry.ignored = False, 0
            entry.breaker.start_probe(now)
        return Admission(is_probe=True) if entries else FREE

    def blocks(self, message: Message) -> str | None:
        """Return the breaker that has opened since a message was admitted."""
        return next((name for name, _ in self._of(message)), None)

    def end_probe(self, message: Message) -> None:
        """Let what a message has probed be probed again."""
        for _, entry in self._of(message):
            entry.breaker.end_probe()

    def answer(self, messages: Sequence[Message]) -> None:
        """Take note that the destinations of messages have answered."""
        now = time.monotonic()
        for destination in set(self.naming.destinations(messages)):
            self._answered[destination] = now
            self._answered.move_to_end(destination)
            failed = self._failed.pop(destination, ())
            if self._close(destination):
                self.recover(destination)
                self._hurry(failed, now)
        _bound(self._answered)
        if self._open:
            for message in messages:
                if self._close(self.naming.part(message)):
                    self._credit = min(self._credit + 2, MAX_CREDIT)

    def fail(self, messages: Sequence[Message], error: str) -> list[str]:
        """Take note of messages whose destination is down; return the breaker that each of them has to wait for."""
        names = [(destination := self.naming.destination(m), self.naming.part(m, destination)) for m in messages]
        for destination, part in names:
            failed = self._failed.setdefault(destination, set())
            if len(failed) < MAX_FAILED:
                failed.add(part)
        down = {destination for destination, _ in names if self._is_condemned(destination)}
        waits = [destination if destination in down else part for destination, part in names]
        for name, (destination, _) in dict(zip(waits, names, strict=True)).items():
            self._trip(name, None if name == destination else destination, error)
        _bound(self._failed)
        return waits

    def _hurry(self, parts: Iterable[str], now: float) -> None:
        """Have parts probed soon whose destination works again."""
        for part in parts:
            if part in self._open:
                self._open[part].breaker.end_cooldown()
                self._plan(part, now)

    def _of(self, message: Message) -> list[tuple[str, _Entry]]:
        if not self._open:
            return []
        destination = self.naming.destination(message)
        names = (self.naming.part(message, destination), destination)
        return [(name, self._open[name]) for name in names if name in self._open]

    def _is_condemned(self, destination: str) -> bool:
        return destination in self._open or len(self._failed[destination]) >= EVIDENCE

    def _trip(self, name: str, parent: str | None, error: str) -> None:
        now, entry = time.monotonic(), self._entry(name, parent)
        self._credit = 0
        self._found.discard(name)
        if entry.breaker.fail(now):
            self._tell(events.BreakerOpened(readable(name), error))
        self._plan(name, now + entry.breaker.wait(now).total_seconds())

    def _entry(self, name: str, parent: str | None) -> _Entry:
        if name not in self._open:
            self._open[name] = _Entry(Breaker(self._cooldown), parent)
            _bound(self._open)
        return self._open[name]

    def _close(self, name: str) -> bool:
        entry = self._open.pop(name, None)
        self._found.discard(name)
        if entry is not None and entry.breaker.failures:
            self._tell(events.BreakerClosed(readable(name)))
        return entry is not None

    # -- probes ------------------------------------------------------------------------------------------------

    def find(self, names: Iterable[str]) -> None:
        """Take note of parked messages in the store, which another dispatcher may have left behind."""
        now = time.monotonic()
        for name in names:
            if name in self._answered and name not in self._open:
                self.recover(name)
            elif name not in self._open and len(self._open) < MAX_BREAKERS:  # a later walk brings the others
                self._entry(name, None)
                self._found.add(name)
                self._plan(name, now)

    def recover(self, destination: str) -> None:
        """Have the parked messages of a destination made due that works."""
        self.recovered[destination] = None
        self.changed.set()

    def next_probe(self) -> tuple[str, int] | None:
        """Return a breaker for which parked messages are to be made due now, and how many; one is the probe.

        More than one, and ever more, if nothing probed a breaker that was only found in the store: its messages may
        go elsewhere by now, since the names of destinations have changed.
        """
        now = time.monotonic()
        while self._schedule and self._schedule[0][0] <= now:
            planned, name = heapq.heappop(self._schedule)
            entry = self._open.get(name)
            if entry is None or entry.planned != planned:
                continue
            if entry.parent in self._open or not (entry.is_invited or entry.breaker.may_probe(now)):
                self._plan(name, now + INVITE_AGAIN)
            elif entry.is_invited or self._take_token(now):
                entry.ignored += entry.is_invited and name in self._found
                entry.is_invited = True
                self._plan(name, now + INVITE_AGAIN)
                return name, 2**entry.ignored
            else:
                heapq.heappush(self._schedule, (planned, name))
                return None
        return None

    def until_next(self) -> float | None:
        """Return for how many seconds there is nothing to probe; None if nothing is planned."""
        if not self._schedule:
            return None
        planned = self._schedule[0][0]
        return (planned if self._credit else max(planned, self._next_probe)) - time.monotonic()

    def report_empty(self, name: str) -> None:
        """Take note that no message is parked for a breaker; after a while it is forgotten."""
        entry = self._open.get(name)
        if entry is not None:
            entry.empty += 1
            if entry.empty >= MAX_EMPTY:
                self._close(name)

    def _take_token(self, now: float) -> bool:
        if self._credit:
            self._credit -= 1
            return True
        if now < self._next_probe:
            return False
        self._next_probe = now + PROBE_SPACING
        return True

    def _plan(self, name: str, moment: float) -> None:
        entry = self._open.get(name)
        if entry is not None:
            entry.planned = moment
            heapq.heappush(self._schedule, (moment, name))
            self.changed.set()


def _bound(kept: OrderedDict[str, T]) -> None:
    while len(kept) > MAX_BREAKERS:
        kept.popitem(last=False)
