"""The broker in memory: topics, groups and redelivery within one process, for tests, trials and the monolith."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Final, Self, TypeAlias

from ..checks import check_count
from ..delivery import Delivery
from ..errors import BrokerUnavailableError, ConfigurationError, StoreUnavailableError
from ..message import Message, claimed
from ..retry import Backoff
from ..store import Dead, Delivered, Outcome, Release, Retry

__all__ = ["MemoryBroker", "Subscription"]

_Lane: TypeAlias = tuple[str, str]

#: How long a message waits that was nacked without a delay.
_BACKOFF: Final = Backoff()


class MemoryBroker:
    """Confirms messages at once, hands them to every group that subscribed to their topic, and can be switched off.

    Nothing of it survives the process. It remembers the latest ``keep`` messages for tests to look at.

    Example:
        >>> import asyncio
        >>> from postroom import Message
        >>> from postroom.brokers import MemoryBroker
        >>> broker = MemoryBroker()
        >>> asyncio.run(broker.publish_batch([Message(topic="orders", payload=b"{}")]))
        [Delivered()]
        >>> [message.topic for message in broker.received]
        ['orders']
    """

    def __init__(self, *, keep: int = 100_000, capacity: int = 100_000) -> None:
        """Set up a broker without topics; each comes about with its first message or subscriber.

        Args:
            keep: How many messages are remembered.
            capacity: How many messages may wait for a group; more are refused, and wait with whoever publishes them.
        """
        check_count("keep", keep)
        check_count("capacity", capacity)
        self._received: deque[Message] = deque(maxlen=keep)
        self._capacity = capacity
        self._down: set[str | None] = set()
        self._groups: dict[str, _Group] = {}
        self._readers: dict[str, list[_Group]] = {}
        #: How many messages were ever confirmed, also those that are no longer remembered.
        self.confirmed: int = 0

    @property
    def received(self) -> list[Message]:
        """The latest confirmed messages, in the order in which they were confirmed."""
        return list(self._received)

    def down(self, topic: str | None = None) -> None:
        """Refuse all messages, or those of one topic, until it is up again."""
        self._down.add(topic)

    def up(self, topic: str | None = None) -> None:
        """Take messages again; without a topic, those of every topic."""
        if topic is None:
            self._down.clear()
        self._down.discard(topic)

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        """Confirm a batch, except what goes to a topic that is down or to a group that has no room."""
        if None in self._down:
            raise BrokerUnavailableError("the broker in memory is switched off; call up()")
        return [self._take(message) for message in messages]

    def _take(self, message: Message) -> Outcome:
        groups = self._readers.get(message.topic, ())
        if message.topic in self._down or any(group.count >= self._capacity for group in groups):
            return Release()
        # What belongs to the process that sent it is none of the receiver's, as if there were a network between.
        message = replace(message, local={}) if message.local else message
        self._received.append(message)
        self.confirmed += 1
        for group in groups:
            group.put(message)
        return Delivered()

    def subscribe(self, *topics: str, group: str) -> Subscription:
        """Return a subscriber; from now on, every message of the topics goes to one subscriber of the group.

        Messages of one key are handed out one at a time, in order. One that is nacked comes again after its delay, by
        default the usual backoff, and holds back the later ones of its key until then.
        """
        if not topics:
            raise ConfigurationError("subscribe() needs the topics to read")
        member = self._groups.setdefault(group, _Group(self._received.maxlen))
        for topic in topics:
            readers = self._readers.setdefault(topic, [])
            if member not in readers:
                readers.append(member)
        return Subscription(member)

    def backlog(self, group: str) -> int:
        """Return how many messages a group has not settled, those that are handed out among them."""
        return self._groups[group].count if group in self._groups else 0

    def dead(self, group: str) -> list[tuple[Message, str]]:
        """Return the latest messages that a group has rejected, and why; as many as are remembered of all."""
        return list(self._groups[group].dead) if group in self._groups else []


@dataclass(slots=True, eq=False)
class _Entry:
    #: Counts up with every message of the group; what comes again takes its old place, unless it waited for nothing.
    place: int
    message: Message
    #: Where those of its key stand, this one at the head while it is handed out; None without a key.
    lane: deque[_Entry] | None = None
    attempts: int = 0


class _Group:
    """The messages that wait for a group, and its readers that wait for messages."""

    def __init__(self, keep: int | None) -> None:
        self.dead: deque[tuple[Message, str]] = deque(maxlen=keep)
        #: How many messages wait or are handed out.
        self.count: int = 0
        self._places = 0
        self._lanes: dict[_Lane, deque[_Entry]] = {}
        self._ready: list[tuple[int, _Entry]] = []  # a heap, by place
        self._delayed: list[tuple[float, int, _Entry]] = []  # a heap, by time
        self._readers: dict[asyncio.Future[None], None] = {}  # in the order in which they came
        self._timer: asyncio.TimerHandle | None = None

    def put(self, message: Message) -> None:
        """Take a message that was published."""
        self._places += 1
        self.count += 1
        entry = _Entry(self._places, message)
        if message.key is not None:
            name = (message.topic, message.key)
            lane = entry.lane = self._lanes.setdefault(name, deque())
            lane.append(entry)
            if len(lane) > 1:
                return
        self._offer(entry)

    def _offer(self, entry: _Entry) -> None:
        heapq.heappush(self._ready, (entry.place, entry))
        self.wake()

    def wake(self) -> None:
        """Have one reader look for a message, if there is one."""
        while self._ready and self._readers:
            reader = next(iter(self._readers))
            del self._readers[reader]
            if not reader.done():
                reader.set_result(None)
                return

    def take(self) -> _Entry | None:
        """Hand out the first message that may be, if there is one."""
        if self._delayed:
            self._ripen()
        if not self._ready:
            return None
        _, entry = heapq.heappop(self._ready)
        entry.attempts += 1
        return entry

    async def wait(self, note: Callable[[asyncio.Future[None]], None]) -> None:
        """Wait until there may be a message; ``note`` is told what ends the waiting."""
        reader = asyncio.get_running_loop().create_future()
        self._readers[reader] = None
        note(reader)
        self._set_timer()
        try:
            await reader
        except asyncio.CancelledError:
            if not reader.cancelled():
                self.wake()  # it was woken for a message, which is for the next one now
            raise
        finally:
            self._readers.pop(reader, None)

    def settle(self, entry: _Entry, outcome: Outcome) -> None:
        """Note what became of a message that was handed out."""
        match outcome:
            case Delivered():
                self._remove(entry)
            case Dead(error):
                self.dead.append((entry.message, error))
                self._remove(entry)
            case Retry(_, delay):
                if delay == timedelta(0):
                    # Behind all that wait, so that one that always fails does not keep the others waiting.
                    self._places += 1
                    entry.place = self._places
                self._return(entry, _BACKOFF(entry.attempts) if delay is None else delay)
            case Release(delay):
                entry.attempts -= 1
                self._return(entry, delay)

    def _remove(self, entry: _Entry) -> None:
        self.count -= 1
        if entry.lane is not None:
            entry.lane.popleft()
            if entry.lane:
                self._offer(entry.lane[0])
            else:
                del self._lanes[entry.message.topic, entry.message.key or ""]

    def _return(self, entry: _Entry, delay: timedelta) -> None:
        if not delay:
            self._offer(entry)
            return
        due = asyncio.get_running_loop().time() + delay.total_seconds()
        heapq.heappush(self._delayed, (due, entry.place, entry))
        if self._readers and self._delayed[0][2] is entry:
            self._set_timer()

    def _ripen(self) -> None:
        """Offer what has waited long enough."""
        now = asyncio.get_running_loop().time()
        while self._delayed and self._delayed[0][0] <= now:
            self._offer(heapq.heappop(self._delayed)[2])

    def _set_timer(self) -> None:
        """Have the readers that wait told of what comes due; those that are busy find out when they ask."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._delayed:
            self._timer = asyncio.get_running_loop().call_at(self._delayed[0][0], self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._ripen()
        if self._readers:
            self._set_timer()


class Subscription(AsyncIterator[Delivery]):
    """One reader of a group; when it is left, what it holds goes back to the group."""

    #: How long after its first delivery a message may come again: nobody knows how long it is nacked.
    redelivery_horizon: timedelta | None = None

    def __init__(self, group: _Group) -> None:
        self._group = group
        self._held: dict[int, _Entry] = {}
        self._handed_out = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_left = False

    async def __aenter__(self) -> Self:
        """Begin to read."""
        self._is_left = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back what is held."""
        self._is_left = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        for number in list(self._held):
            self._end(number, Release())

    async def __anext__(self) -> Delivery:
        """Wait for the next message; ends when the subscription is left."""
        while not self._is_left:
            entry = self._group.take()
            if entry is not None:
                return self._hand_out(entry)
            await self._group.wait(self._note)
        self._group.wake()  # who was woken for a message and does not take it wakes another
        raise StopAsyncIteration

    def _note(self, waiting: asyncio.Future[None]) -> None:
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)

    def _hand_out(self, entry: _Entry) -> Delivery:
        self._handed_out = number = self._handed_out + 1
        self._held[number] = entry

        async def settle(outcome: Outcome) -> None:
            if number not in self._held:
                raise StoreUnavailableError(
                    "the subscription was left before this was recorded; the message will come again"
                )
            self._end(number, outcome)

        message = entry.message
        return Delivery(claimed(message, attempt=entry.attempts, token=message.token), settle)

    def _end(self, number: int, outcome: Outcome) -> None:
        self._group.settle(self._held.pop(number), outcome)
