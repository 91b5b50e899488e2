"""The dispatcher: claims messages, publishes them, settles what became of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast
from uuid import UUID, uuid4

from . import events
from .broker import Each, Publisher, Send, describe
from .errors import BrokerUnavailableError, ConfigurationError, StoreError, StoreUnavailableError
from .message import Message
from .retry import Backoff, Breaker, Delay
from .store import Claim, ClaimTerms, Dead, Delivered, OnDead, Outcome, Release, Retry, Settlement, Store
from .verdict import delayed, judge

__all__ = ["Dispatcher"]

T = TypeVar("T")

SECOND = timedelta(seconds=1)
#: Where waiting for work begins before it grows to the poll interval.
SHORTEST_IDLE = 0.01
#: How many topics can be down at once before the one that went down first is tried anew.
MAX_BREAKERS = 1000


@dataclass(slots=True)
class _Held:
    """A claim in flight."""

    claim: Claim
    expires: float
    is_lost: bool = False


class Dispatcher:
    """Delivers the messages of one store to one publisher until it is stopped.

    Example:
        >>> import asyncio
        >>> from postroom import Dispatcher, Message, Outbox
        >>> from postroom.stores import MemoryStore
        >>> async def main():
        ...     store = MemoryStore()
        ...     with store.transaction() as transaction:
        ...         Outbox().add(transaction, {"order_id": 42}, topic="orders")
        ...     async def send(message: Message) -> None:
        ...         print(message.topic, message.payload)
        ...         dispatcher.stop_soon()
        ...     dispatcher = Dispatcher(store, send)
        ...     await dispatcher.run()
        >>> asyncio.run(main())
        orders b'{"order_id":42}'
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        store: Store,
        publisher: Publisher | Send,
        *,
        batch: int = 500,
        batches_in_flight: int = 4,
        concurrency: int = 100,
        poll_interval: timedelta = SECOND / 2,
        lease: timedelta = 30 * SECOND,
        publish_timeout: timedelta = 10 * SECOND,
        max_attempts: int = 10,
        backoff: Delay | None = None,
        outage_backoff: Delay | None = None,
        on_dead: OnDead = "block",
        tenant_id: UUID | None = None,
        shutdown_grace: timedelta = 30 * SECOND,
        sweep_interval: timedelta = 5 * SECOND,
        cleanup_interval: timedelta = 60 * SECOND,
        worker: UUID | None = None,
        listener: events.Listener = events.log_event,
    ) -> None:
        """Set up a dispatcher; nothing runs before `run`.

        Args:
            store: Where the messages are.
            publisher: A `Publisher`, or a function that delivers one message.
            batch: How many messages are claimed at once.
            batches_in_flight: How many batches are being published or settled at the same time.
            concurrency: How many calls of a function that delivers one message run at the same time.
            poll_interval: How long to wait at the most before looking for work; at most a third of the lease.
            lease: How long a claim holds; renewed while the publish runs.
            publish_timeout: How long one publish may take; shorter than the lease.
            max_attempts: After how many deliveries a failing message is dead.
            backoff: How long a failed message waits, by its number of attempts.
            outage_backoff: How long a destination that is down is left alone, by the number of failed probes.
            on_dead: Whether a dead message holds back the later ones of its key.
            tenant_id: Deliver messages of this tenant only.
            shutdown_grace: How long a stop waits for publishes that are under way.
            sweep_interval: How often messages without an attempt left are made dead.
            cleanup_interval: How often delivered messages past their retention are deleted.
            worker: Who holds the claims; a new id by default.
            listener: Is told every event; by default they are logged.
        """
        durations = (poll_interval, lease, publish_timeout, sweep_interval, cleanup_interval)
        if min(batch, batches_in_flight, max_attempts) < 1 or min(durations) <= timedelta(0):
            raise ConfigurationError("batch, batches_in_flight, max_attempts and all durations must be positive")
        if poll_interval * 3 > lease:
            raise ConfigurationError(f"poll_interval={poll_interval} must be at most a third of lease={lease}")
        if publish_timeout >= lease:
            raise ConfigurationError(f"publish_timeout={publish_timeout} must be shorter than lease={lease}")
        if on_dead not in {"block", "skip"}:
            raise ConfigurationError(f"on_dead={on_dead!r} must be 'block' or 'skip'")
        self.worker = worker or uuid4()
        self._store = store
        self._publisher = self._wrapped(publisher, concurrency, publish_timeout)
        self._batch = batch
        self._batches_in_flight = batches_in_flight
        self._poll_interval = poll_interval.total_seconds()
        self._publish_timeout = publish_timeout.total_seconds()
        self._backoff: Delay = backoff or Backoff()
        self._outage_backoff: Delay = outage_backoff or Backoff(max=30 * SECOND)
        self._grace = shutdown_grace.total_seconds()
        self._sweep_interval = sweep_interval.total_seconds()
        self._cleanup_interval = cleanup_interval.total_seconds()
        self._terms = ClaimTerms(
            worker=self.worker, lease=lease, max_attempts=max_attempts, on_dead=on_dead, tenant_id=tenant_id
        )
        self._tell = listener
        self._reset()

    def _reset(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: asyncio.TaskGroup | None = None
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._progress = asyncio.Event()
        self._settling = asyncio.Event()
        self._held: dict[UUID, _Held] = {}
        self._batches: set[asyncio.Task[None]] = set()
        self._unsettled: list[Settlement] = []
        self._idle = SHORTEST_IDLE
        self._ramp = self._batch
        self._broker = Breaker(self._outage_backoff)
        self._topics: OrderedDict[str, Breaker] = OrderedDict()

    def _wrapped(self, publisher: Publisher | Send, concurrency: int, timeout: timedelta) -> Publisher:
        if hasattr(publisher, "publish"):
            return cast("Publisher", publisher)
        send = cast("Send", publisher)

        async def send_if_held(message: Message) -> None:
            held = self._held.get(message.id)
            if held is not None and held.is_lost:
                raise BrokerUnavailableError("the lease was lost before the message was sent")
            await send(message)

        return Each(send_if_held, concurrency=concurrency, timeout=timeout)

    # -- life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Deliver until `stop` is called or the task is cancelled; raises only what no retry can mend."""
        if self._group is not None:
            raise ConfigurationError("this dispatcher is running already; make another for more")
        self._loop = asyncio.get_running_loop()
        released = 0
        try:
            async with asyncio.TaskGroup() as self._group:
                await self._repeat("open", self._store.open, only=StoreUnavailableError)
                self._tell(events.Started(self.worker, self._store.namespace))
                services = [
                    self._group.create_task(service)
                    for service in (self._settle_forever(), self._renew_forever(), self._upkeep_forever(), self._listen_forever())
                ]
                try:
                    await self._claim_until_stopped()
                    await self._wait_for_batches(self._grace)
                finally:
                    released = await self._let_go()
                    for service in services:
                        service.cancel()
        finally:
            self._tell(events.Stopped(self.worker, released))
            self._stopped.set()

    def wake(self) -> None:
        """Look for work at once; may be called from any thread, and costs next to nothing."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)

    def stop_soon(self) -> None:
        """Begin to stop: claim no more, finish what is under way; a second call gives up what is under way."""
        if self._stopping.is_set():
            self._grace = 0.0
            self._cancel_batches()
        self._stopping.set()
        self._woken.set()
        self._progress.set()

    async def stop(self) -> None:
        """Stop and wait until everything is settled or released; to call it again changes nothing."""
        if not self._stopping.is_set():
            self.stop_soon()
        if self._group is not None:
            await self._stopped.wait()

    async def _wait_for_batches(self, grace: float) -> None:
        if self._batches:
            await asyncio.wait(self._batches, timeout=grace)

    def _cancel_batches(self) -> None:
        for batch in self._batches:
            batch.cancel()

    async def _let_go(self) -> int:
        """Give back what is still held, so that others need not wait for the leases to run out."""
        self._stopping.set()
        self._cancel_batches()
        if self._batches:
            await asyncio.wait(self._batches)
        settled = {settlement.claim.message.id for settlement in self._unsettled}
        left = [held.claim for held in self._held.values() if held.claim.message.id not in settled and not held.is_lost]
        settlements = [*self._unsettled, *(Settlement(claim, Release()) for claim in left)]
        if settlements:
            with suppress(StoreError, TimeoutError):
                # Once is enough: if the store is away the leases will run out.
                async with asyncio.timeout(self._terms.lease.total_seconds()):
                    await self._store.settle(settlements)
        return len(left)

    # -- claim -------------------------------------------------------------------------------------------------

    async def _claim_until_stopped(self) -> None:
        while not self._stopping.is_set():
            limit = await self._permission()
            if limit == 0:
                continue
            self._woken.clear()
            granted = time.monotonic()
            claims = await self._repeat("claim", lambda: self._store.claim(limit, self._terms), unless_stopping=True)
            if not claims:
                self._broker.end_probe()
                await self._rest()
                continue
            self._tell(events.Claimed(len(claims)))
            await self._start(claims, granted)
            if len(claims) < limit:
                self._idle = SHORTEST_IDLE
                await self._rest()

    async def _permission(self) -> int:
        """Wait until there is room; return how many messages may be claimed, 0 to ask again."""
        wait = self._broker.wait(time.monotonic())
        if wait > 0:
            await self._pause(wait)
            return 0
        room = 1 if not self._broker.is_closed else self._batches_in_flight
        if len(self._held) >= self._batch * self._batches_in_flight or len(self._batches) >= room:
            self._progress.clear()
            await self._progress.wait()
            return 0
        if self._broker.is_closed:
            return self._ramp
        return 1 if self._broker.start_probe(time.monotonic()) else 0

    async def _start(self, claims: Sequence[Claim], granted: float) -> None:
        alone = claims[0].suspect
        if alone:
            await self._wait_for_batches(self._publish_timeout)
        expires = granted + self._terms.lease.total_seconds()
        for claim in claims:
            self._held[claim.message.id] = _Held(claim, expires)
        assert self._group is not None
        task = self._group.create_task(self._dispatch(claims, expires))
        self._batches.add(task)
        task.add_done_callback(self._finished)
        if alone:
            await asyncio.wait({task})

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        self._progress.set()

    async def _rest(self) -> None:
        """Wait for a hint, or for a time that grows while there is nothing to do."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._idle * random.uniform(0.75, 1.0)):
                await self._woken.wait()
                self._idle = SHORTEST_IDLE
                return
        self._idle = min(self._idle * 2, self._poll_interval)

    # -- publish -----------------------------------------------------------------------------------------------

    async def _dispatch(self, claims: Sequence[Claim], expires: float) -> None:
        """Publish a batch and hand over what became of it."""
        sound = [claim for claim in claims if claim.broken is None]
        self._settle_later([Settlement(claim, Dead(claim.broken)) for claim in claims if claim.broken is not None])
        if time.monotonic() > expires - self._publish_timeout:
            self._settle_later([Settlement(claim, Release()) for claim in sound])
            return
        tried, waiting = self._admitted(sound)
        self._settle_later([Settlement(claim, Release(wait)) for claim, wait in waiting])
        if tried:
            outcomes = await self._publish([claim.message for claim in tried])
            self._settle_later([Settlement(claim, outcome) for claim, outcome in zip(tried, outcomes, strict=True)])

    def _admitted(self, claims: Sequence[Claim]) -> tuple[list[Claim], list[tuple[Claim, timedelta]]]:
        """Part the claims whose topic may be tried from those whose topic is down."""
        if not self._topics:
            return list(claims), []
        now, tried, waiting = time.monotonic(), list[Claim](), list[tuple[Claim, timedelta]]()
        for claim in claims:
            breaker = self._topics.get(claim.message.topic)
            if breaker is None or breaker.start_probe(now):
                tried.append(claim)
            else:
                waiting.append((claim, timedelta(seconds=breaker.wait(now) or self._poll_interval)))
        return tried, waiting

    async def _publish(self, messages: Sequence[Message]) -> Sequence[Outcome]:
        answers, error = await self._answers(messages)
        verdict = judge(messages, answers, backoff=self._backoff, max_attempts=self._terms.max_attempts)
        now = time.monotonic()
        for topic in verdict.alive:
            self._topic_answers(topic)
        waits = {topic: self._topic_is_down(topic, now, error) for topic in verdict.down}
        if verdict.alive:
            self._ramp = min(self._ramp * 2, self._batch)
            if self._broker.succeed():
                self._tell(events.BreakerClosed(None))
        elif verdict.down:
            # Beginning again with one message keeps a destination that comes back from being overrun.
            self._ramp = 1
            if self._broker.fail(now):
                self._tell(events.BreakerOpened(None, error))
        return delayed(verdict, messages, waits)

    async def _answers(self, messages: Sequence[Message]) -> tuple[Sequence[Outcome | None], str]:
        # A publisher of single messages watches the time of each; the batch as a whole may take longer.
        limit = None if isinstance(self._publisher, Each) else self._publish_timeout
        deadline = asyncio.timeout(limit)
        try:
            async with deadline:
                answers = await self._publisher.publish(messages)
        except BrokerUnavailableError as error:
            return [Release()] * len(messages), describe(error)
        except Exception as error:  # noqa: BLE001 -- whatever a publisher raises is a failed delivery
            if deadline.expired():
                return [None] * len(messages), "no answer in time"
            return [Retry(describe(error))] * len(messages), ""
        if len(answers) != len(messages):
            wrong = f"the publisher gave {len(answers)} outcomes for {len(messages)} messages"
            return [Retry(wrong)] * len(messages), ""
        return answers, "the publisher could not reach it"

    def _topic_answers(self, topic: str) -> None:
        if self._topics.pop(topic, None) is not None:
            self._tell(events.BreakerClosed(topic))

    def _topic_is_down(self, topic: str, now: float, error: str) -> float:
        breaker = self._topics.get(topic)
        if breaker is None:
            if len(self._topics) >= MAX_BREAKERS:
                self._topics.popitem(last=False)
            breaker = self._topics[topic] = Breaker(self._outage_backoff)
        if breaker.fail(now):
            self._tell(events.BreakerOpened(topic, error))
        return breaker.wait(now)

    # -- settle ------------------------------------------------------------------------------------------------

    def _settle_later(self, settlements: Sequence[Settlement]) -> None:
        if settlements:
            self._unsettled += settlements
            self._settling.set()

    async def _settle_forever(self) -> None:
        while True:
            await self._settling.wait()
            self._settling.clear()
            while self._unsettled:
                settlements = self._unsettled[: 4 * self._batch]
                known_lost = {s.claim.message.id for s in settlements if self._is_lost(s)}
                # A lost lease is never followed by a nack; a confirmed delivery is always worth recording.
                worth = [s for s in settlements if s.claim.message.id not in known_lost or isinstance(s.outcome, Delivered)]
                lost = await self._repeat("settle", lambda worth=worth: self._store.settle(worth))
                del self._unsettled[: len(settlements)]
                self._record(settlements, {claim.message.id for claim in lost or ()} | known_lost, known_lost)

    def _is_lost(self, settlement: Settlement) -> bool:
        held = self._held.get(settlement.claim.message.id)
        return held is not None and held.is_lost

    def _record(self, settlements: Sequence[Settlement], lost: set[UUID], known: set[UUID]) -> None:
        counts = {Delivered: 0, Release: 0}
        for settlement in settlements:
            message, outcome = settlement.claim.message, settlement.outcome
            self._held.pop(message.id, None)
            if message.id in lost:
                if message.id not in known:
                    self._tell(events.LeaseLost(message.id, message.topic, message.token))
                continue
            match outcome:
                case Delivered() | Release():
                    counts[type(outcome)] += 1
                case Retry(error, delay):
                    self._tell(events.Retried(message.id, message.topic, message.attempt, delay or timedelta(0), error))
                case Dead(error):
                    self._tell(events.Died(message.id, message.topic, message.attempt, error))
        if counts[Delivered]:
            self._tell(events.MessagesDelivered(counts[Delivered]))
        if counts[Release]:
            self._tell(events.MessagesReleased(counts[Release]))
        self.on_settled(settlements)
        self._progress.set()

    def on_settled(self, settlements: Sequence[Settlement]) -> None:
        """Take note that settlements are in the store; for subclasses."""

    # -- upkeep ------------------------------------------------------------------------------------------------

    async def _renew_forever(self) -> None:
        lease = self._terms.lease.total_seconds()
        while True:
            planned = time.monotonic() + lease / 3
            await asyncio.sleep(lease / 3)
            late = time.monotonic() - planned
            if late > lease / 3:
                self._tell(events.LoopStalled(timedelta(seconds=late)))
            await self._renew(lease)

    async def _renew(self, lease: float) -> None:
        now = time.monotonic()
        aging = [held for held in self._held.values() if not held.is_lost and held.expires - now < lease * 0.7]
        if not aging:
            return
        claims = [held.claim for held in aging]
        lost = await self._repeat("extend", lambda: self._store.extend(claims, self._terms.lease))
        gone = {claim.message.id for claim in lost or ()}
        for held in aging:
            message = held.claim.message
            if message.id not in gone:
                held.expires = now + lease
            elif message.id in self._held:
                held.is_lost = True
                self._tell(events.LeaseLost(message.id, message.topic, message.token))

    async def _upkeep_forever(self) -> None:
        cleanup = time.monotonic() + self._cleanup_interval * random.random()
        while True:
            await asyncio.sleep(self._sweep_interval * random.uniform(0.75, 1.0))
            dead = await self._repeat("sweep", lambda: self._store.sweep(self._terms))
            if dead:
                self._tell(events.Swept(dead))
            if time.monotonic() >= cleanup:
                await self._clean_up()
                cleanup = time.monotonic() + self._cleanup_interval * random.uniform(0.75, 1.0)

    async def _clean_up(self) -> None:
        total, chunk = 0, 1000
        while True:
            purge = self._store.purge
            count = await self._repeat("purge", lambda: purge(older_than=self._store.keep_delivered, limit=chunk))
            total += count or 0
            if not count or count < chunk:
                break
            await asyncio.sleep(0.01)  # leaves the database to the claims between two chunks
        if total:
            self._tell(events.Purged(total))

    async def _listen_forever(self) -> None:
        await self._repeat("listen", lambda: self._store.listen(self.wake), deadline=None)

    async def _repeat(
        self,
        operation: str,
        call: Callable[[], Awaitable[T]],
        *,
        only: type[StoreError] = StoreError,
        unless_stopping: bool = False,
        deadline: float | None = 60.0,
    ) -> T | None:
        """Make a call to the store until it succeeds; never give up because the store is away."""
        failures = 0
        backoff = Backoff(base=SECOND / 10, max=5 * SECOND)
        while not (unless_stopping and self._stopping.is_set()):
            try:
                async with asyncio.timeout(deadline):
                    result = await call()
            except (only, TimeoutError) as error:
                failures += 1
                self._tell(events.StoreFailed(operation, describe(error)))
                await self._pause(backoff(failures).total_seconds(), stoppable=unless_stopping)
            else:
                if failures:
                    self._tell(events.StoreRecovered(operation))
                return result
        return None

    async def _pause(self, seconds: float, *, stoppable: bool = True) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (self._stopping if stoppable else asyncio.Event()).wait()

