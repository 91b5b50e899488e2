"""The dispatcher: claims messages, publishes them, settles what became of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple, cast
from uuid import UUID, uuid4

from . import events
from .broker import OUTAGES, Each, Publisher, Send, describe, is_cancelled
from .custody import Custody
from .destinations import Destinations
from .errors import (
    ConfigurationError,
    PublishUnknownError,
    StoreContentionError,
    StoreTimeoutError,
    StoreUnavailableError,
    ungrouped,
)
from .message import Message
from .patience import UPKEEP, call_in, persist
from .retry import Backoff, Delay, guarded
from .store import Claim, ClaimTerms, Dead, OnDead, Outcome, Release, Retry, Settlement, Store
from .upkeep import purge_forever, repair_forever, sweep_forever
from .verdict import Verdict, judge

__all__ = ["Dispatcher"]

SECOND = timedelta(seconds=1)
#: Where waiting for work begins before it grows to the poll interval.
SHORTEST_IDLE = 0.01
#: How many seconds a stop waits for the store to take the last settlements.
FAREWELL = 10.0
UNREACHABLE = "the publisher could not reach it"
#: What may go away by itself while a store is opened; wrong credentials and a missing schema do not.
PASSING = (StoreUnavailableError, StoreTimeoutError, StoreContentionError)


class _Answer(NamedTuple):
    """What a claim brought, and whether nothing was held when it began."""

    claims: Sequence[Claim]
    began_idle: bool


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

    def __init__(  # noqa: PLR0913, PLR0915 -- one keyword for each choice a user has
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
        self.worker: UUID = worker or uuid4()
        self._store = store
        self._publisher = self._wrapped(publisher, concurrency, publish_timeout)
        self._batch = batch
        self._batches_in_flight = batches_in_flight
        self._poll_interval = poll_interval.total_seconds()
        self._publish_timeout = publish_timeout.total_seconds()
        self._backoff = guarded(backoff or Backoff())
        self._grace = shutdown_grace.total_seconds()
        self._sweep_interval = sweep_interval
        self._cleanup_interval = cleanup_interval
        self._terms = ClaimTerms(
            worker=self.worker, lease=lease, max_attempts=max_attempts, on_dead=on_dead, tenant_id=tenant_id
        )
        self._tell = events.guarded(listener)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._custody = Custody(store, lease, self._tell, chunk=4 * batch)
        self._destinations = Destinations(guarded(outage_backoff or Backoff(max=30 * SECOND)), self._tell)
        #: Whether a message that is given back says that its destination is down; a reader may do so at any time.
        self.releases_are_outages: bool = True
        self._alone: asyncio.Task[None] | None = None
        self._claiming: list[asyncio.Task[_Answer]] = []
        self._answered = asyncio.Event()
        self._batches: set[asyncio.Task[None]] = set()
        self._idle = SHORTEST_IDLE
        self._ramp = self._batch

    def _wrapped(self, publisher: Publisher | Send, concurrency: int, timeout: timedelta) -> Publisher:
        if hasattr(publisher, "publish"):
            return cast("Publisher", publisher)
        send: Send = publisher  # pyright: ignore[reportAssignmentType] -- hasattr does not narrow it there

        async def send_if_held(message: Message) -> object:
            if not self._custody.is_safe(message):
                return Retry("the lease ran out before the message was sent", timedelta(0))
            return await send(message)

        return Each(send_if_held, concurrency=concurrency, timeout=timeout)

    # -- life --------------------------------------------------------------------------------------------------

    async def run(self, *, until_idle: bool = False) -> None:
        """Deliver until `stop` is called or the task is cancelled; raises only what no retry can mend.

        With ``until_idle`` it also ends when nothing is due and nothing is under way.
        """
        if self._loop is not None:
            raise ConfigurationError("a dispatcher runs once; make a new one to run again")
        self._loop = asyncio.get_running_loop()
        released, opened = 0, None
        try:
            # None if it was stopped before the store could be reached.
            opened = await persist("open", self._store.open, self._tell, only=PASSING, until=self._stopping)
            if opened is None:
                return
            async with asyncio.TaskGroup() as group:
                self._tell(events.Started(self.worker, self._store.namespace))
                services = [
                    group.create_task(service)
                    for service in (
                        self._custody.settle_forever(),
                        self._custody.renew_forever(),
                        sweep_forever(self._store, self._terms, self._tell, every=self._sweep_interval),
                        purge_forever(self._store, self._tell, every=self._cleanup_interval),
                        repair_forever(self._store, self._tell),
                        persist(
                            "listen", partial(self._store.listen, self.wake), self._tell, only=UPKEEP, deadline=None
                        ),
                    )
                ]
                try:
                    await self._claim_until_stopped(until_idle=until_idle)
                    await self._wait_for_batches(self._grace)
                finally:
                    released = await self._let_go()
                    for service in services:
                        service.cancel()
        except BaseExceptionGroup as group:
            raise ungrouped(group) from None
        finally:
            await self._end(released, opened=opened)

    async def _listen(self) -> None:
        await self._store.listen(self.wake)

    async def _end(self, released: int, *, opened: bool | None) -> None:
        try:
            if opened:
                await self._store.close()
        finally:  # cancelled or not: a task may wait in stop()
            if opened is not None:
                self._tell(events.Stopped(self.worker, released))
            self._stopped.set()

    def wake(self) -> None:
        """Look for work at once; may be called from any thread, and costs next to nothing."""
        # While it is set, no claim has begun since; the next one will see everything.
        if self._loop is not None and not self._woken.is_set():
            call_in(self._loop, self._look_again)

    def _look_again(self) -> None:
        self._woken.set()
        if self._claiming and not self._stopping.is_set():
            self._begin_claims(2)  # the one under way may have looked already

    def stop_soon(self) -> None:
        """Begin to stop: claim no more, finish what is under way; a second call gives up what is under way."""
        if self._stopping.is_set():
            self._cancel_batches()
        self._stopping.set()
        self._woken.set()
        self._custody.progress.set()

    async def stop(self) -> None:
        """Stop and wait until everything is settled or released; to call it again changes nothing."""
        if not self._stopping.is_set():
            self.stop_soon()
        if self._loop is not None:
            await self._stopped.wait()

    def on_settled(self, listener: Callable[[Sequence[Settlement]], None]) -> None:
        """Have settlements told that are in the store, for those who wait for one of them."""
        self._custody.recorded = listener

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
        await self._wait_for_batches(FAREWELL)  # a publisher may ignore that it is cancelled
        released = self._custody.release_undecided()
        with suppress(TimeoutError):
            # If the store is away for longer, the leases will run out by themselves.
            async with asyncio.timeout(FAREWELL):
                await self._custody.wait_until_settled()
        return released

    # -- claim -------------------------------------------------------------------------------------------------

    async def _claim_until_stopped(self, *, until_idle: bool) -> None:
        is_busy = False
        try:
            while not self._stopping.is_set():
                await self._room()
                self._begin_claims(2 if is_busy else 1)
                answer = await self._next_claim()
                is_busy = len(answer.claims) == self._batch
                if answer.claims:
                    await self._start(answer.claims)
                    self._idle = SHORTEST_IDLE
                elif self._claiming:
                    continue
                elif until_idle and answer.began_idle and not self._custody and not self._woken.is_set():
                    return
                else:
                    await self._rest()
        finally:
            # The store may have claimed already: what it took must be known, to be given back.
            self._stopping.set()
            await asyncio.gather(*self._claiming, return_exceptions=True)

    def _begin_claims(self, wanted: int) -> None:
        """Have a claim under way, and a second one while there is much to do, so that the store need not wait."""
        while len(self._claiming) < wanted and not (self._claiming and self._is_crowded(ahead=len(self._claiming))):
            self._woken.clear()  # whatever it told of, this claim will see
            claiming = asyncio.create_task(self._claim())
            claiming.add_done_callback(lambda _: self._answered.set())
            self._claiming.append(claiming)

    async def _next_claim(self) -> _Answer:
        """Wait for the first claim that is answered, be it one that was begun meanwhile."""
        while not (answered := [claiming for claiming in self._claiming if claiming.done()]):
            self._answered.clear()
            await self._answered.wait()
        self._claiming.remove(answered[0])
        return answered[0].result()

    async def _claim(self) -> _Answer:
        """Claim a batch into custody."""
        began_idle, granted = not self._custody, time.monotonic()
        call = partial(self._store.claim, self._ramp, self._terms_now())
        claims = await persist("claim", call, self._tell, until=self._stopping) or []
        if claims:
            self._custody.hold(claims, granted + self._terms.lease.total_seconds())
            self._tell(events.Claimed(len(claims)))
        return _Answer(claims, began_idle)

    async def _room(self) -> None:
        """Wait until another batch may be under way."""
        while not self._stopping.is_set() and self._is_crowded():
            self._custody.progress.clear()
            await self._custody.progress.wait()

    def _is_crowded(self, ahead: int = 0) -> bool:
        """Tell whether there is no room for another batch, with so many more claimed that are not under way yet."""
        if self._alone is not None and not self._alone.done():
            return True
        # A publisher of single messages has a limit of its own; small batches must not use it up.
        batches = 0 if isinstance(self._publisher, Each) else len(self._batches) + ahead
        held = len(self._custody) + ahead * self._batch
        return batches >= self._batches_in_flight or held >= self._batch * self._batches_in_flight

    def _terms_now(self) -> ClaimTerms:
        """Return the terms of the next claim, which leaves topics alone that are down."""
        down = self._destinations.down()
        return replace(self._terms, skip_topics=down) if down else self._terms

    async def _start(self, claims: Sequence[Claim]) -> None:
        if claims[0].suspect:
            await self._make_way(claims)
        if self._stopping.is_set():
            return  # too late to begin; it is given back with the rest
        task = asyncio.create_task(self._dispatch(claims))
        self._alone = task if claims[0].suspect else None
        self._batches.add(task)
        task.add_done_callback(self._finished)

    async def _make_way(self, suspects: Sequence[Claim]) -> None:
        """Have nothing else at stake: what is under way ends, and what was claimed at the same time is given back."""
        while self._claiming:
            others = (await self._next_claim()).claims
            self._custody.settle([Settlement(claim, Release()) for claim in others])
        with suppress(TimeoutError):
            async with asyncio.timeout(self._publish_timeout):
                while len(self._custody) > len(suspects) and not self._stopping.is_set():
                    self._custody.progress.clear()
                    await self._custody.progress.wait()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        self._custody.progress.set()

    async def _rest(self) -> None:
        """Wait for a hint, or for a time that grows while there is nothing to do."""
        try:
            async with asyncio.timeout(self._idle * random.uniform(0.75, 1.0)):
                await self._woken.wait()
            self._idle = SHORTEST_IDLE
        except TimeoutError:
            self._idle = min(self._idle * 2, self._poll_interval)

    # -- publish -----------------------------------------------------------------------------------------------

    async def _dispatch(self, claims: Sequence[Claim]) -> None:
        """Publish a batch and hand over what became of it."""
        sound = self._without_broken(claims)
        if time.monotonic() > self._custody.expires(claims[0]) - self._publish_timeout:
            self._custody.settle([Settlement(claim, Release()) for claim in sound])
            return
        tried, waiting = self._destinations.admit(sound)
        self._custody.settle([Settlement(claim, Release()) for claim in waiting])
        try:
            if tried:
                await self._publish(tried)
        except (Exception, asyncio.CancelledError) as error:
            # A batch must not end without an outcome, whatever went wrong; cancelled by a stop it is given back there.
            if self._stopping.is_set() and isinstance(error, asyncio.CancelledError):
                raise
            left = self._custody.without_outcome(tried)
            failed = self._judge(left, [Retry(describe(error))] * len(left))
            self._custody.settle(list(map(Settlement, left, failed.outcomes)))
        finally:
            self._destinations.end_probes(tried)

    def _without_broken(self, claims: Sequence[Claim]) -> list[Claim]:
        """Make claims dead that cannot be read, and give back the rest of their keys, which they may hold back now."""
        broken = [(claim, claim.broken) for claim in claims if claim.broken is not None]
        if not broken:
            return list(claims)
        keys = {(claim.message.topic, claim.message.key) for claim, _ in broken if claim.message.key is not None}
        others = [claim for claim in claims if claim.broken is None]
        held_back = [claim for claim in others if (claim.message.topic, claim.message.key) in keys]
        self._custody.settle([Settlement(claim, Dead(why)) for claim, why in broken])
        self._custody.settle([Settlement(claim, Release()) for claim in held_back])
        return [claim for claim in others if claim not in held_back]

    async def _publish(self, claims: Sequence[Claim]) -> None:
        """Publish claims and settle them: those with an answer of their own at once, the others with the batch."""
        early: set[int] = set()

        def heard(index: int, outcome: Outcome) -> None:
            if isinstance(outcome, Release) and self.releases_are_outages:
                return  # an outage is judged by the whole batch
            early.add(index)
            if not isinstance(outcome, Release):
                outcome = self._judge([claims[index]], [outcome]).outcomes[0]
            self._custody.settle([Settlement(claims[index], outcome)])

        answers, error = await self._answers([claim.message for claim in claims], heard)
        verdict = self._judge(claims, answers)
        was_down = set(self._destinations.down()) & verdict.alive
        outcomes = verdict.outcomes
        if self.releases_are_outages:
            outcomes = self._destinations.hear(claims, verdict, error)
        if was_down:
            # Beginning again with one message keeps a destination that comes back from being overrun.
            self._ramp = 1
        elif verdict.alive:
            self._ramp = min(self._ramp * 2, self._batch)
        settlements = list(map(Settlement, claims, outcomes))
        self._custody.settle([s for index, s in enumerate(settlements) if index not in early] if early else settlements)

    def _judge(self, claims: Sequence[Claim], answers: Sequence[Outcome | None]) -> Verdict:
        messages = [claim.message for claim in claims]
        return judge(messages, answers, backoff=self._backoff, max_attempts=self._terms.max_attempts)

    async def _answers(
        self, messages: Sequence[Message], heard: Callable[[int, Outcome], None]
    ) -> tuple[Sequence[Outcome | None], str]:
        """Return what the publisher says of each message, and why if it could say nothing."""
        if isinstance(self._publisher, Each):
            # It watches the time of each message; the batch as a whole may take longer.
            return await self._publisher.publish(messages, heard), UNREACHABLE
        deadline = asyncio.timeout(self._publish_timeout)
        try:
            async with deadline:
                answers = list(await self._publisher.publish(messages))
        except asyncio.CancelledError:
            if is_cancelled() and not deadline.expired():
                raise
            return [None] * len(messages), "it took too long, or something that the publisher waited for was cancelled"
        except Exception as error:  # noqa: BLE001 -- whatever a publisher raises is a failed delivery
            unknown = deadline.expired() or isinstance(error, PublishUnknownError)
            failed: Outcome = Release() if isinstance(error, OUTAGES) else Retry(describe(error))
            return [None if unknown else failed] * len(messages), describe(error)
        if len(answers) != len(messages):
            wrong = f"the publisher gave {len(answers)} outcomes for {len(messages)} messages"
            return [Retry(wrong)] * len(messages), ""
        return answers, UNREACHABLE
