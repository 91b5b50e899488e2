"""The dispatcher: claims messages, publishes them, settles what became of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, get_args
from uuid import UUID, uuid4

from . import events
from .breakers import Breakers
from .broker import Each, describe, is_asked_for
from .checks import check_choice, check_count, check_duration, check_function, check_type
from .claiming import Claimed, Claiming
from .custody import Custody
from .destination import NamesDestinations, Naming
from .errors import ConfigurationError, StoreContentionError, StoreTimeoutError, StoreUnavailableError, ungrouped
from .message import Message
from .patience import UPKEEP, call_in, persist
from .probing import Prober
from .publisher import AnyPublisher, as_publisher
from .publishing import Policy, Publishing
from .retry import Backoff, Delay, guarded
from .store import Claim, ClaimTerms, Dead, OnDead, Release, Settlement, Store, as_store
from .upkeep import look_elsewhere, purge_forever, repair_forever, sweep_forever

__all__ = ["Dispatcher"]

SECOND = timedelta(seconds=1)
#: Where waiting for work begins before it grows to the poll interval.
SHORTEST_IDLE = 0.01
#: After how many claims that found nothing, since the start, other namespaces are looked at.
EMPTY_POLLS = 15
#: How many seconds a stop waits for the store to take the last settlements.
FAREWELL = 10.0
#: How many bytes of payload one claim brings by default.
BATCH_BYTES = 4 * 1024 * 1024
#: How long a destination that is down is left alone by default.
OUTAGE_BACKOFF = Backoff(max=30 * SECOND)
#: What may go away by itself while a store is opened; wrong credentials and a missing schema do not.
PASSING = (StoreUnavailableError, StoreTimeoutError, StoreContentionError)


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
        store: Store | str,
        publisher: AnyPublisher,
        *,
        batch: int = 500,
        batch_bytes: int = BATCH_BYTES,
        batches_in_flight: int = 4,
        concurrency: int = 100,
        poll_interval: timedelta = SECOND / 2,
        lease: timedelta = 30 * SECOND,
        publish_timeout: timedelta = 10 * SECOND,
        max_attempts: int = 10,
        backoff: Delay | None = None,
        outage_backoff: Delay | None = None,
        destination: Callable[[Message], str] | None = None,
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
            store: Where the messages are: a store, or its URL.
            publisher: A function, or an object with ``publish(message)``, that delivers one message, async or plain;
                or a `Publisher` with ``publish_batch(messages)``. Plain ones run on threads, which nothing can stop:
                one that may hang should have a timeout of its own.
            batch: How many messages are claimed at once.
            batch_bytes: How many bytes of payload are claimed at once; a single message may be larger.
            batches_in_flight: How many batches are being published or settled at the same time.
            concurrency: How many calls of a publisher of single messages run at the same time; calls to a
                destination that has stopped answering do not count while messages for others wait.
            poll_interval: How long to wait at the most before looking for work; at most a third of the lease.
            lease: How long a claim holds; renewed while the publish runs.
            publish_timeout: How long one publish may take; shorter than the lease.
            max_attempts: After how many deliveries a failing message is dead.
            backoff: How long a failed message waits, by its number of attempts.
            outage_backoff: How long a destination that is down is left alone, by the number of failed probes.
            destination: Names where a message is taken, so that an outage there delays no others; by default the
                publisher's own method ``destination``, or the topic.
            on_dead: Whether a dead message holds back the later ones of its key.
            tenant_id: Deliver messages of this tenant only.
            shutdown_grace: How long a stop waits for publishes that are under way.
            sweep_interval: How often messages without an attempt left are made dead.
            cleanup_interval: How often delivered messages past their retention are deleted.
            worker: Who holds the claims; a new id by default.
            listener: Called with every event; by default they are logged.
        """
        check_count("batch", batch)
        check_count("batch_bytes", batch_bytes)
        check_count("batches_in_flight", batches_in_flight)
        check_count("concurrency", concurrency)
        check_count("max_attempts", max_attempts)
        check_duration("poll_interval", poll_interval)
        check_duration("lease", lease)
        check_duration("publish_timeout", publish_timeout)
        check_duration("shutdown_grace", shutdown_grace, zero=True)
        check_duration("sweep_interval", sweep_interval)
        check_duration("cleanup_interval", cleanup_interval)
        check_function("backoff", backoff, "the number of attempts", optional=True)
        check_function("outage_backoff", outage_backoff, "the number of failed probes", optional=True)
        check_function("destination", destination, "a message", optional=True)
        check_function("listener", listener, "an event")
        check_choice("on_dead", on_dead, get_args(OnDead))
        check_type("tenant_id", tenant_id, UUID, optional=True)
        check_type("worker", worker, UUID, optional=True)
        if poll_interval > lease / 3:
            raise ConfigurationError(f"poll_interval={poll_interval} must be at most a third of lease={lease}")
        if publish_timeout >= lease:
            raise ConfigurationError(f"publish_timeout={publish_timeout} must be shorter than lease={lease}")
        self.worker: UUID = worker or uuid4()
        self._store: Store = as_store(store)
        self._publisher = as_publisher(publisher, concurrency=concurrency, timeout=publish_timeout)
        self._batch = batch
        self._batch_bytes = batch_bytes
        self._batches_in_flight = batches_in_flight
        self._poll_interval = poll_interval.total_seconds()
        self._publish_timeout = publish_timeout.total_seconds()
        self._grace = shutdown_grace.total_seconds()
        self._sweep_interval = sweep_interval
        self._cleanup_interval = cleanup_interval
        self._terms = ClaimTerms(
            worker=self.worker,
            lease=lease,
            max_attempts=max_attempts,
            on_dead=on_dead,
            tenant_id=tenant_id,
            max_bytes=batch_bytes,
        )
        self._tell = events.guarded(listener)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._custody = Custody(self._store, lease, self._tell, chunk=4 * batch)
        if destination is None and isinstance(publisher, NamesDestinations) and callable(publisher.destination):
            destination = publisher.destination  # and not an attribute that happens to be called so
        cooldown = guarded(outage_backoff or OUTAGE_BACKOFF, self._tell)
        self._breakers = Breakers(Naming(destination, tenant_id, self._tell), cooldown, self._tell)
        policy = Policy(
            backoff=guarded(backoff or Backoff(), self._tell),
            max_attempts=max_attempts,
            timeout=self._publish_timeout,
            batch=batch,
            parks=self._store.features.parks,
        )
        self._publishing = Publishing(self._publisher, self._custody, self._breakers, policy, self._stopping)
        self._publishing.on_interruption = self.stop_soon
        self._publishing.on_failure = self._report_failure
        self._prober = Prober(self._store, self._breakers, self._publishing, self.wake, self._tell)
        self._prober.most = batch * batches_in_flight
        self._alone: asyncio.Task[None] | None = None
        self._claiming = Claiming(self._store, self._terms, self._custody, self._tell, batch, self._stopping)
        self._batches: set[asyncio.Task[None]] = set()
        self._idle = SHORTEST_IDLE
        #: How many claims in a row have found nothing since the start; None once that no longer matters.
        self._empty_polls: int | None = 0
        self._released = 0

    # -- life --------------------------------------------------------------------------------------------------

    async def run(self, *, until_idle: bool = False) -> None:
        """Deliver until `stop` is called or the task is cancelled; raises only what no retry can mend.

        With ``until_idle`` it also ends when nothing is due and nothing is under way.
        """
        if self._loop is not None:
            raise ConfigurationError("a dispatcher runs once; make a new one to run again")
        self._loop = asyncio.get_running_loop()
        try:
            await self._open_and_deliver(until_idle=until_idle)
        except BaseException as error:
            if not is_asked_for(error):
                self._tell(events.DispatcherFailed(self.worker, describe(error), error))
            raise
        finally:
            if isinstance(self._publisher, Each):
                self._publisher.close()
            self._stopped.set()

    async def _open_and_deliver(self, *, until_idle: bool) -> None:
        opened = await persist("open", self._store.open, self._tell, only=PASSING, until=self._stopping)
        if opened is None:
            return  # stopped before the store was there
        self._tell(events.Started(self.worker, self._store.namespace))
        try:
            await self._deliver(until_idle=until_idle)
        finally:
            try:
                if opened:
                    await self._store.close()
            finally:  # cancelled or not
                self._tell(events.Stopped(self.worker, self._released))
        if self._publishing.interruption is not None:
            raise self._publishing.interruption

    async def _deliver(self, *, until_idle: bool) -> None:
        try:
            await self._claim_and_publish(until_idle=until_idle)
        except BaseExceptionGroup as group:
            raise ungrouped(group) from None

    async def _claim_and_publish(self, *, until_idle: bool) -> None:
        async with asyncio.TaskGroup() as group:
            services = [group.create_task(service) for service in self._services()]
            try:
                if until_idle and self._store.features.parks:
                    await self._prober.find(self._stopping)  # what waits for a destination is tried once, too
                await self._claim_until_stopped(until_idle=until_idle)
                await self._wait_for_batches(self._grace)
            finally:
                self._released = await self._let_go()
                for service in services:
                    service.cancel()

    def _services(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (
            self._custody.settle_forever(),
            self._custody.renew_forever(),
            sweep_forever(self._store, self._terms, self._tell, every=self._sweep_interval),
            purge_forever(self._store, self._tell, every=self._cleanup_interval),
            repair_forever(self._store, self._tell),
            self._prober.probe_forever(),
            self._prober.find_forever(),
            persist("listen", lambda: self._store.listen(self.wake), self._tell, only=UPKEEP, deadline=None),
        )

    def wake(self) -> None:
        """Look for work at once; may be called from any thread, and costs next to nothing."""
        # While it is set, no claim has begun since; the next one will see everything.
        if self._loop is not None and not self._woken.is_set():
            call_in(self._loop, self._look_again)

    def _look_again(self) -> None:
        self._woken.set()
        if self._claiming and not self._stopping.is_set():
            self._begin_claims(1 + self._claiming.complete)  # the one under way may have looked already

    def stop_soon(self) -> None:
        """Begin to stop: claim no more, finish what is under way; a second call gives up what is under way.

        It may be called from any thread, such as by a plain publisher.
        """
        if self._loop is None:
            self._begin_to_stop()
        else:
            call_in(self._loop, self._begin_to_stop)

    def _begin_to_stop(self) -> None:
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

    def take_releases_as_requeues(self) -> None:
        """Take a release by the publisher as a wish to get the message again, and not as an outage."""
        self._publishing.releases_are_outages = False

    async def _wait_for_batches(self, grace: float) -> None:
        if under_way := self._batches | self._publishing.alone:
            await asyncio.wait(under_way, timeout=grace)

    def _cancel_batches(self) -> None:
        for task in self._batches | self._publishing.alone:
            task.cancel()

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
                self._begin_claims(self._wanted_claims(is_busy=is_busy))
                claimed = await self._claiming.next()
                is_busy = self._claiming.is_full(claimed)
                if claimed.claims:
                    self._empty_polls = None
                    await self._start(claimed)
                    self._idle = SHORTEST_IDLE
                    if self._claiming.is_clogged and not self._claiming:
                        await self._rest()  # to park a backlog must not take the store from those who add
                elif self._claiming:
                    continue
                elif until_idle and claimed.began_idle and self._is_idle():
                    await self._look_elsewhere(patience=0)
                    return
                else:
                    await self._rest()
                    await self._look_elsewhere(patience=EMPTY_POLLS)
        finally:
            # The store may have claimed already: what it took must be known, to be given back.
            self._stopping.set()
            await self._claiming.end()

    async def _look_elsewhere(self, *, patience: int) -> None:
        """Look once for messages of other namespaces, if so many claims have found nothing since the start."""
        if self._empty_polls is None:
            return
        self._empty_polls += 1
        if self._empty_polls > patience:
            self._empty_polls = None
            if self._store.features.sees_namespaces:
                await look_elsewhere(self._store, self._tell)

    def _is_idle(self) -> bool:
        return not (self._custody or self._woken.is_set() or self._prober.is_busy)

    def _wanted_claims(self, *, is_busy: bool) -> int:
        """Return one, or two while there is much to do, so that the store need not wait.

        Behind a backlog that has to wait, what was added last matters more.
        """
        if self._claiming.is_clogged:
            return self._claiming.complete if self._woken.is_set() else 1
        return 2 if is_busy else 1

    def _begin_claims(self, wanted: int) -> None:
        """Have so many claims under way, unless it is crowded with those."""
        if self._claiming.begin(wanted, self._is_crowded, is_hinted=self._woken.is_set()):
            self._woken.clear()  # whatever it was set for, that claim will see

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
        size = self._custody.size + ahead * self._batch_bytes
        most = self._batches_in_flight
        return batches >= most or held >= self._batch * most or size >= self._batch_bytes * most

    async def _start(self, claimed: Claimed) -> None:
        claims = claimed.claims
        if claims[0].suspect:
            await self._make_way(claims)
        if self._stopping.is_set():
            return  # too late to begin; it is given back with the rest
        task = asyncio.create_task(self._dispatch(claimed))
        self._alone = task if claims[0].suspect else None
        self._batches.add(task)
        task.add_done_callback(self._finished)

    async def _make_way(self, suspects: Sequence[Claim]) -> None:
        """Have nothing else at stake: what is under way ends, and what was claimed at the same time is given back."""
        while self._claiming:
            others = (await self._claiming.next()).claims
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

    async def _dispatch(self, claimed: Claimed) -> None:
        """Publish a batch and hand over what became of it."""
        claims = claimed.claims
        sound = self._without_broken(claims)
        if time.monotonic() > self._custody.expires(claims[0]) - self._publish_timeout:
            self._custody.settle([Settlement(claim, Release()) for claim in sound])
            return
        runs = self._publishing.admit(sound)
        self._claiming.report(claimed, sent=sum(len(run.claims) for run in runs))
        if runs:
            await self._publishing.publish(runs)

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

    def _report_failure(self, message: Message, error: BaseException | str, count: int) -> None:
        if self._publishing.releases_are_outages:  # otherwise it is a reader, which knows what it nacked
            said, exception = (error, None) if isinstance(error, str) else (describe(error), error)
            at = (message.id, message.topic, message.key, message.attempt)
            self._tell(events.PublishFailed(*at, said, exception, count, self._terms.max_attempts))
