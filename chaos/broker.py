"""The broker: keeps what the receiver has taken for each group of consumers, and hands it out until it is acknowledged.

Everything that it must not forget stands in the history of its process, one write for each event, from which a new life
of it begins. It hands out again what nobody settled in time, what was held by a consumer whose connection broke, and
some messages for no reason, while somebody else still works on them.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .history import Event, History

__all__ = ["DUPLICATED", "VISIBILITY", "Broker"]

#: For how many seconds a message belongs to the consumer that it was handed to.
VISIBILITY: Final = 2.0
#: How many of a thousand hand-outs are made twice.
DUPLICATED: Final = 40
_TICK: Final = 0.05
#: Each life of the broker numbers its hand-outs from here on, so that no number is used twice.
_LIVES: Final = 10_000_000


@dataclass(slots=True, eq=False)
class _Entry:
    place: int
    message: Event
    #: Those of its key, this one at the head while it may be handed out; None without a key.
    lane: deque[_Entry] | None = None
    attempts: int = 0
    is_done: bool = False
    is_offered: bool = False


@dataclass(slots=True, eq=False)
class _Session:
    """A consumer that is connected."""

    writer: asyncio.StreamWriter
    asked: int = 0
    #: Which hand-outs it has, and until when.
    held: dict[int, float] = field(default_factory=dict[int, float])

    def say(self, **line: object) -> None:
        self.writer.write(json.dumps(line).encode() + b"\n")


class _Group:
    """What waits for one group of consumers."""

    def __init__(self, name: str, broker: Broker) -> None:
        self.name = name
        self.sessions: dict[_Session, None] = {}
        self.waiting = 0
        self.done = 0
        self._broker = broker
        self._entries: dict[int, _Entry] = {}
        self._lanes: dict[tuple[str, str], deque[_Entry]] = {}
        self._offered: list[tuple[float, int, _Entry]] = []
        self._handed: dict[int, _Entry] = {}

    def put(self, place: int, message: Event) -> None:
        """Take a message that was confirmed."""
        entry = self._entries[place] = _Entry(place, message)
        self.waiting += 1
        if message["key"] is not None:
            entry.lane = self._lanes.setdefault((message["topic"], message["key"]), deque())
            entry.lane.append(entry)
        self._offer(entry)

    def _offer(self, entry: _Entry, delay: float = 0.0) -> None:
        if entry.is_done or entry.is_offered:
            return
        if entry.lane is None or entry.lane[0] is entry:
            entry.is_offered = True
            heapq.heappush(self._offered, (time.monotonic() + delay, entry.place, entry))

    def remember(self, event: Event) -> None:
        """Repeat what an earlier life has done."""
        if event["op"] == "hand":
            entry = self._handed[event["handle"]] = self._entries[event["place"]]
            entry.attempts = event["attempt"]
        else:
            self._settle(self._handed[event["handle"]], event["word"])

    def pump(self) -> None:
        """Hand out what may be to those who ask for it."""
        now = time.monotonic()
        asking = [session for session in self.sessions if session.asked]
        while asking and self._offered and self._offered[0][0] <= now:
            _, _, entry = heapq.heappop(self._offered)
            entry.is_offered = False
            if not entry.is_done:
                session = self._broker.rng.choice(asking)
                self._hand(session, entry)
                asking = [session for session in asking if session.asked]

    def _hand(self, session: _Session, entry: _Entry) -> None:
        handle = self._broker.next_handle()
        entry.attempts += 1
        self._handed[handle] = entry
        told = {"group": self.name, "id": entry.message["id"], "handle": handle, "attempt": entry.attempts}
        self._broker.history.write("hand", "ok", place=entry.place, **told)
        session.asked -= 1
        session.held[handle] = time.monotonic() + VISIBILITY
        session.say(message=entry.message, handle=handle, attempt=entry.attempts)
        if self._broker.rng.randrange(1000) < DUPLICATED:
            self._offer(entry)

    def settle(self, session: _Session, handle: int, word: str, delay: float) -> None:
        """Note what a consumer says; to acknowledge counts also late, anything else only in time."""
        is_held = session.held.pop(handle, None) is not None
        entry = self._handed.get(handle)
        if entry is None or entry.is_done:
            return
        if is_held or word == "delivered":
            self._broker.history.write(
                "settled", "ok", group=self.name, id=entry.message["id"], handle=handle, word=word
            )
            self._settle(entry, word, delay)

    def _settle(self, entry: _Entry, word: str, delay: float = 0.0) -> None:
        if entry.is_done:
            return
        if word in {"delivered", "dead"}:
            entry.is_done = True
            self.waiting -= 1
            self.done += 1
            self._next_of(entry)
            return
        if word == "release":
            entry.attempts -= 1
        self._offer(entry, delay)

    def _next_of(self, entry: _Entry) -> None:
        if entry.lane is None:
            return
        while entry.lane and entry.lane[0].is_done:
            entry.lane.popleft()
        if entry.lane:
            self._offer(entry.lane[0])
        else:
            self._lanes.pop((entry.message["topic"], entry.message["key"]), None)

    def expire(self) -> None:
        """Offer what was held for too long."""
        now = time.monotonic()
        for session in self.sessions:
            for handle in [handle for handle, until in session.held.items() if until < now]:
                del session.held[handle]
                self._offer(self._handed[handle])

    def leave(self, session: _Session) -> None:
        """Take back what somebody held whose connection is gone."""
        self.sessions.pop(session, None)
        for handle in session.held:
            self._offer(self._handed[handle], self._broker.rng.uniform(0.0, 0.5))


class Broker:
    """Serves the consumers of all groups."""

    def __init__(self, groups: Iterable[str], topics: Iterable[str], *, life: int, seed: int, history: History) -> None:
        """Set up.

        Args:
            groups: Each of them gets every message.
            topics: Whose messages are kept; others are only confirmed.
            life: Which life of the process this is.
            seed: Decides which messages are handed out twice.
            history: Where everything is written down before it is done.
        """
        self.history = history
        self.rng = random.Random(f"{seed} broker {life}")
        self._topics = frozenset(topics)
        self._groups = {name: _Group(name, self) for name in groups}
        self._places = 0
        self._handles = life * _LIVES

    def next_handle(self) -> int:
        """Return a number for a hand-out."""
        self._handles += 1
        return self._handles

    def remember(self, events: Iterable[Event]) -> None:
        """Begin where earlier lives have ended."""
        for event in events:
            if event["op"] == "deliver":
                self.put(event)
            elif event["op"] in {"hand", "settled"}:
                self._groups[event["group"]].remember(event)

    def put(self, message: Event) -> None:
        """Keep a message for every group; it stands in the history already."""
        if message["topic"] in self._topics:
            self._places += 1
            for group in self._groups.values():
                group.put(self._places, message)

    @property
    def counts(self) -> tuple[int, int]:
        """How many messages wait for a group or are handed out, and how many are done."""
        groups: Sequence[_Group] = list(self._groups.values())
        return sum(group.waiting for group in groups), sum(group.done for group in groups)

    async def tick(self) -> None:
        """Hand out what comes due, for ever."""
        while True:
            await asyncio.sleep(_TICK)
            for group in self._groups.values():
                group.expire()
                group.pump()

    async def serve(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one consumer until its connection ends."""
        group, session = self._groups[name], _Session(writer)
        group.sessions[session] = None
        try:
            while line := await reader.readline():
                self._hear(group, session, json.loads(line))
                group.pump()
                await writer.drain()
        finally:
            group.leave(session)

    @staticmethod
    def _hear(group: _Group, session: _Session, said: dict[str, Any]) -> None:
        if "ask" in said:
            session.asked += 1
        else:
            group.settle(session, said["settle"], said["word"], said["delay"])
            session.say(settled=said["settle"])
