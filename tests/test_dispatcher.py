"""The dispatcher: claim, publish, settle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from postroom import (
    Backoff,
    Claim,
    ClaimTerms,
    Dead,
    Delivered,
    Dispatcher,
    Message,
    Outbox,
    Outcome,
    Publisher,
    Release,
    Retry,
    Settlement,
)
from postroom import events as ev
from postroom.broker import Send
from postroom.brokers import MemoryBroker
from postroom.dispatcher import EMPTY_POLLS
from postroom.errors import BrokerUnavailableError, ConfigurationError, RejectError, StoreUnavailableError
from postroom.stores import MemoryStore, PostgresStore
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
QUICK = Backoff(base=MS, max=10 * MS)


class Bench:
    """A memory store, an outbox that writes to it, and everything a dispatcher told."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.outbox = Outbox()
        self.events: list[ev.Event] = []

    def add(self, count: int = 1, *, topic: str = "t", key: str | None = None) -> list[UUID]:
        with self.store.transaction() as transaction:
            added = self.outbox.add(transaction, [{"n": n} for n in range(count)], topic=topic, key=key)
        return [one.id for one in added if one.id is not None]

    def dispatcher(self, publisher: Publisher | Send, **options: object) -> Dispatcher:
        settings: dict[str, object] = {
            "backoff": QUICK,
            "outage_backoff": QUICK,
            "poll_interval": 20 * MS,
            "listener": self.events.append,
        }
        return Dispatcher(self.store, publisher, **{**settings, **options})  # type: ignore[arg-type]

    @asynccontextmanager
    async def running(self, publisher: Publisher | Send, **options: object) -> AsyncIterator[Dispatcher]:
        dispatcher = self.dispatcher(publisher, **options)
        task = asyncio.create_task(dispatcher.run())
        try:
            yield dispatcher
        finally:
            await dispatcher.stop()
            await task

    def statuses(self) -> list[str]:
        return [row.status for row in self.store.rows]

    def told(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until_status(self, *statuses: str) -> None:
        await until(lambda: self.statuses() == list(statuses), f"rows becoming {statuses}")


async def accept(message: Message) -> None:
    """Take every message."""


class Answers:
    """A publisher of batches that answers what a function says of each message."""

    def __init__(self, answer: Callable[[Message], Outcome | None]) -> None:
        self.answer = answer
        self.batches: list[list[UUID]] = []

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        self.batches.append([message.id for message in messages])
        return [self.answer(message) for message in messages]


@pytest.mark.requirement("S2-36", "S2-37", "S4-11", "S4-16")
async def test_a_function_that_returns_has_delivered() -> None:
    """To return is success; the row is delivered and not eligible again."""
    bench, seen = Bench(), list[Message]()

    async def send(message: Message) -> None:
        seen.append(message)

    added = bench.add(3)
    async with bench.running(send):
        await bench.until_status("delivered", "delivered", "delivered")

    assert [message.id for message in seen] == added
    assert [message.payload for message in seen] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']
    assert await bench.store.claim(10, ClaimTerms(worker=uuid4())) == []


@pytest.mark.requirement("S2-36")
async def test_payload_is_handed_on_as_it_is() -> None:
    """The dispatcher never interprets a payload."""
    bench, seen = Bench(), list[bytes]()
    raw = bytes(range(256))
    with bench.store.transaction() as transaction:
        bench.outbox.add(transaction, raw, topic="t")

    async def send(message: Message) -> None:
        seen.append(message.payload)

    async with bench.running(send):
        await bench.until_status("delivered")

    assert seen == [raw]


@pytest.mark.requirement("S2-38", "S2-51", "S4-15")
async def test_a_failing_message_is_retried_until_it_succeeds() -> None:
    """An exception puts it back with an error and a wait that grows."""
    bench, attempts = Bench(), list[int]()

    async def send(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt < 4:
            raise ValueError("not yet")

    bench.add()
    async with bench.running(send, backoff=Backoff(base=MS, max=SECOND, jitter="none")):
        await bench.until_status("delivered")

    retried = [event for event in bench.events if isinstance(event, ev.Retried)]
    assert attempts == [1, 2, 3, 4]
    assert [event.delay for event in retried] == [1 * MS, 2 * MS, 4 * MS]
    assert {event.error for event in retried} == {"ValueError: not yet"}


@pytest.mark.requirement("G9", "S2-30", "S2-44", "S4-14")
async def test_a_message_is_delivered_at_most_max_attempts_times_and_then_dead() -> None:
    """Max_attempts = 3 means three deliveries, then dead with its error."""
    bench, attempts = Bench(), list[int]()

    async def send(message: Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("never")

    bench.add()
    async with bench.running(send, max_attempts=3):
        await bench.until_status("dead")

    assert attempts == [1, 2, 3]
    assert bench.store.rows[0].error == "ValueError: never"
    assert [type(event) for event in bench.told(ev.Died)] == [ev.Died]


@pytest.mark.requirement("S2-04")
async def test_a_rejected_message_is_dead_at_once() -> None:
    """What can never be delivered is surfaced at the first attempt, with its reason."""
    bench = Bench()

    async def send(message: Message) -> None:
        raise RejectError("too large for the broker")

    bench.add()
    async with bench.running(send):
        await bench.until_status("dead")

    assert bench.store.rows[0].message.attempt == 1
    assert bench.store.rows[0].error == "RejectError: too large for the broker"


@pytest.mark.requirement("S2-37", "S2-38")
async def test_a_partial_batch_settles_what_was_confirmed() -> None:
    """Every message of a batch has an outcome of its own."""
    bench = Bench()
    good, bad, worse = bench.add(3)

    answers: dict[UUID, Outcome] = {good: Delivered(), bad: Retry("later", 3600 * SECOND), worse: Dead("never")}

    async with bench.running(Answers(lambda message: answers[message.id])):
        await bench.until_status("delivered", "pending", "dead")

    assert [row.error for row in bench.store.rows] == [None, "later", "never"]


async def test_a_wrong_number_of_outcomes_fails_the_batch() -> None:
    """A publisher that breaks its contract loses nothing."""

    class Short:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            return []

    bench = Bench()
    bench.add(2)
    async with bench.running(Short(), max_attempts=2):
        await bench.until_status("dead", "dead")

    assert bench.store.rows[0].error == "the publisher gave 0 outcomes for 2 messages"


@pytest.mark.requirement("G13", "S4-20")
async def test_an_outage_spends_no_attempts_and_makes_no_dead_letters() -> None:
    """While the broker is down messages wait; they are delivered when it is back."""
    bench = Bench()
    is_down, calls = True, 0

    class Broker:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            nonlocal calls
            calls += 1
            if is_down:
                raise BrokerUnavailableError("connection refused")
            return [Delivered()] * len(messages)

    bench.add(50)
    async with bench.running(Broker(), max_attempts=1):
        await until(lambda: calls > 20, "twenty probes of a broker that is down")
        assert {row.message.attempt for row in bench.store.rows} <= {0, 1}
        is_down = False
        await bench.until_status(*["delivered"] * 50)

    assert [type(e) for e in bench.events if isinstance(e, ev.BreakerOpened | ev.BreakerClosed)] == [
        ev.BreakerOpened,
        ev.BreakerClosed,
    ]
    assert {row.message.attempt for row in bench.store.rows} == {1}


@pytest.mark.requirement("G13")
async def test_during_an_outage_one_message_at_a_time_tests_the_destination() -> None:
    """A breaker lets a single probe through, and recovery begins small, not with a stampede."""
    bench, sizes = Bench(), list[int]()
    is_down = True

    class Broker:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            sizes.append(len(messages))
            if is_down:
                raise BrokerUnavailableError("connection refused")
            return [Delivered()] * len(messages)

    bench.add(100)
    async with bench.running(Broker(), batch=10, batches_in_flight=1):
        await until(lambda: len(sizes) > 5, "five probes")
        assert sizes[0] == 10
        assert set(sizes[1:]) == {1}
        probes = len(sizes)
        is_down = False
        await bench.until_status(*["delivered"] * 100)

    assert sizes[probes : probes + 5] in ([1, 1, 2, 4, 8], [1, 2, 4, 8, 10])


@pytest.mark.requirement("G13")
async def test_one_topic_that_is_down_does_not_hold_up_the_others() -> None:
    """The breaker is per destination."""
    bench = Bench()
    bench.add(20, topic="down")

    def answer(message: Message) -> Outcome:
        return Release() if message.topic == "down" else Delivered()

    async with bench.running(Answers(answer), batch=10, outage_backoff=Backoff(base=60 * SECOND, max=60 * SECOND)):
        await until(lambda: bool(bench.told(ev.BreakerOpened)), "the breaker opening")
        bench.add(30, topic="up")
        await bench.until_status(*["pending"] * 20, *["delivered"] * 30)

    assert {row.message.attempt for row in bench.store.rows[:20]} == {0}


@pytest.mark.requirement("G13")
async def test_a_topic_that_is_down_is_left_out_of_claims() -> None:
    """A backlog that waits for its destination costs no writes."""
    store = Counting()
    bench = Bench(store)
    bench.add(20, topic="down")

    async with bench.running(
        Answers(lambda _: Release()), poll_interval=MS, outage_backoff=Backoff(base=60 * SECOND, max=60 * SECOND)
    ):
        await until(lambda: bool(bench.told(ev.BreakerOpened)), "the breaker opening")
        seen = store.claims
        await until(lambda: store.claims > seen + 20, "twenty more claims")

    assert {row.message.token for row in store.rows} == {1}


@pytest.mark.requirement("G9", "G13")
async def test_a_message_that_hangs_alone_is_an_outage_and_beside_others_a_failure() -> None:
    """Silence is judged by what else was heard; nothing waits for ever on one publish."""
    bench, hanging = Bench(), set[UUID]()

    async def send(message: Message) -> None:
        if message.id in hanging:
            await asyncio.Event().wait()

    hanging.update(bench.add(1, topic="quiet"))
    hanging.update(bench.add(1, topic="busy"))
    bench.add(1, topic="busy")
    async with bench.running(
        send,
        publish_timeout=50 * MS,
        backoff=Backoff(base=60 * SECOND),
        outage_backoff=Backoff(base=60 * SECOND, max=60 * SECOND),
    ):
        await bench.until_status("pending", "pending", "delivered")

    quiet, busy, _ = bench.store.rows
    assert (quiet.message.attempt, quiet.error) == (0, None)
    assert busy.message.attempt == 1
    assert busy.error is not None
    assert busy.error.startswith("PublishUnknownError")


@pytest.mark.requirement("G11")
async def test_a_publisher_that_never_answers_is_cut_off() -> None:
    """Every call to a broker has a deadline of our own."""

    class Silent:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            await asyncio.Event().wait()
            return []

    bench = Bench()
    bench.add(2)
    async with bench.running(Silent(), publish_timeout=20 * MS):
        await until(lambda: bool(bench.told(ev.BreakerOpened)), "the breaker opening")

    assert {row.message.attempt for row in bench.store.rows} == {0}


@pytest.mark.requirement("G11")
async def test_a_publisher_that_is_cut_off_after_a_task_group_failed_did_not_answer() -> None:
    """The group leaves a request to cancel behind in Python 3.11, and no attempt is spent for that."""

    class Silent:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.fail())
            await asyncio.Event().wait()
            return []

        async def fail(self) -> None:
            raise ValueError

    bench = Bench()
    bench.add(2)
    async with bench.running(Silent(), publish_timeout=20 * MS):
        await until(lambda: bool(bench.told(ev.BreakerOpened) or bench.told(ev.Retried)), "an answer being made up")

    assert {row.message.attempt for row in bench.store.rows} == {0}


@pytest.mark.requirement("S2-34", "S4-12")
async def test_stopping_finishes_what_is_under_way() -> None:
    """Stop claims no more, waits for publishes, and settles them; to stop twice is fine."""
    bench = Bench()
    started, finish = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        await finish.wait()

    bench.add()
    dispatcher = bench.dispatcher(send)
    running = asyncio.create_task(dispatcher.run())
    await started.wait()
    stopping = asyncio.create_task(dispatcher.stop())
    bench.add()
    _, waiting = await asyncio.wait({stopping}, timeout=0.1)
    assert waiting == {stopping}
    finish.set()
    await stopping
    await dispatcher.stop()
    await running

    assert bench.statuses() == ["delivered", "pending"]
    assert bench.store.rows[1].message.attempt == 0


@pytest.mark.requirement("S4-12")
async def test_what_is_not_finished_in_time_is_released_with_its_attempt_given_back() -> None:
    """After the grace period claims are released, not left to expire."""
    bench, started = Bench(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        await asyncio.Event().wait()

    bench.add(3)
    dispatcher = bench.dispatcher(send, shutdown_grace=10 * MS)
    running = asyncio.create_task(dispatcher.run())
    await started.wait()
    await dispatcher.stop()
    await running

    assert bench.statuses() == ["pending"] * 3
    assert [row.message.attempt for row in bench.store.rows] == [0, 0, 0]
    assert bench.told(ev.Stopped) == [ev.Stopped(dispatcher.worker, 3)]


@pytest.mark.requirement("S4-12")
async def test_asking_to_stop_twice_does_not_wait_for_the_grace_period() -> None:
    """A second signal gives up what is under way."""
    bench, started = Bench(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        await asyncio.Event().wait()

    bench.add()
    dispatcher = bench.dispatcher(send, shutdown_grace=3600 * SECOND)
    running = asyncio.create_task(dispatcher.run())
    await started.wait()
    dispatcher.stop_soon()
    dispatcher.stop_soon()
    await asyncio.wait_for(running, 10)

    assert bench.statuses() == ["pending"]


@pytest.mark.requirement("S2-34")
async def test_cancelling_a_dispatcher_releases_its_claims() -> None:
    """Cancellation passes through, and nothing stays leased behind it."""
    bench, started = Bench(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        await asyncio.Event().wait()

    bench.add(2)
    running = asyncio.create_task(bench.dispatcher(send).run())
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert bench.statuses() == ["pending", "pending"]
    assert [row.message.attempt for row in bench.store.rows] == [0, 0]


@pytest.mark.requirement("S2-29")
async def test_a_lease_is_renewed_while_the_publish_runs() -> None:
    """A publish that takes longer than the lease keeps its claim."""
    bench = Bench()
    started, finish = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        await finish.wait()

    bench.add()
    async with bench.running(send, lease=6 * SECOND, publish_timeout=5900 * MS):
        await started.wait()
        first = bench.store.rows[0].locked_until
        assert first is not None
        await until(lambda: (bench.store.rows[0].locked_until or first) > first, "the lease being renewed")
        # A claim after the publish was cut off would prolong it as well, with another token.
        assert bench.store.rows[0].message.token == 1
        assert await bench.store.claim(10, ClaimTerms(worker=uuid4())) == []
        finish.set()
        await bench.until_status("delivered")

    assert bench.told(ev.LeaseLost) == []


class Clocked(Bench):
    """A bench whose store's clock can be moved."""

    def __init__(self) -> None:
        self.ahead = timedelta(0)
        super().__init__(MemoryStore(clock=lambda: datetime.now(UTC) + self.ahead))


@pytest.mark.requirement("S2-39", "S2-40")
async def test_a_lost_lease_is_reported_and_never_followed_by_a_nack() -> None:
    """What another worker holds is not touched, whatever became of our publish."""
    bench = Clocked()
    started, finish = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        await finish.wait()
        raise ValueError("failed, but it is not ours any more")

    bench.add()
    async with bench.running(send):
        await started.wait()
        bench.ahead = timedelta(hours=1)
        [other] = await bench.store.claim(1, ClaimTerms(worker=uuid4(), lease=timedelta(hours=2)))
        finish.set()
        await until(lambda: bool(bench.told(ev.LeaseLost)), "the loss being told")

    [row] = bench.store.rows
    assert (row.status, row.error, row.message.token) == ("processing", None, other.message.token)
    assert bench.told(ev.Retried) == []


class Recording(MemoryStore):
    """A store that keeps what it was asked to settle."""

    settlements: list[Settlement]

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        self.settlements = [*getattr(self, "settlements", []), *settlements]
        return await super().settle(settlements)


@pytest.mark.requirement("S2-39")
async def test_a_loss_that_the_renewal_noticed_is_not_settled_at_all() -> None:
    """Once a lease is known to be lost, no failure of ours is reported for it."""
    ahead = timedelta(0)
    store = Recording(clock=lambda: datetime.now(UTC) + ahead)
    bench = Bench(store)
    started, finish = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        await finish.wait()
        raise ValueError("failed, but it is not ours any more")

    bench.add()
    async with bench.running(
        send, lease=3 * SECOND, publish_timeout=2 * SECOND, batches_in_flight=1, batch=1, concurrency=1
    ):
        await started.wait()
        ahead = timedelta(hours=1)
        await store.claim(1, ClaimTerms(worker=uuid4(), lease=timedelta(hours=2)))
        await until(lambda: len(bench.told(ev.LeaseLost)) == 1, "the renewal noticing the loss")
        finish.set()

    assert getattr(store, "settlements", []) == []
    assert len(bench.told(ev.LeaseLost)) == 1


@pytest.mark.requirement("G9")
async def test_a_suspect_is_published_while_nothing_else_is_under_way() -> None:
    """A message that may kill its worker puts no other message at risk."""
    bench = Clocked()
    under_way, company = set[UUID](), dict[UUID, int]()

    at_stake = dict[UUID, int]()

    async def send(message: Message) -> None:
        company[message.id] = len(under_way)
        at_stake[message.id] = bench.statuses().count("processing")
        under_way.add(message.id)
        await asyncio.sleep(0.02)
        under_way.remove(message.id)

    [suspect] = bench.add()
    for _ in range(3):
        [claim] = await bench.store.claim(1, ClaimTerms(worker=uuid4()))
        bench.ahead += timedelta(minutes=1)
    assert claim.message.attempt == 3
    bench.add(50)
    async with bench.running(send, batch=5):
        await bench.until_status(*["delivered"] * 51)

    assert company[suspect] == 0
    assert max(company.values()) > 0
    assert at_stake[suspect] == 1, "others were claimed at the same time, and would have lost an attempt"


@pytest.mark.requirement("G4")
async def test_a_late_confirmation_is_recorded_if_nobody_else_claimed() -> None:
    """The token decides, not the clock: a slow worker's delivery still counts."""
    bench = Clocked()
    started, finish = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        await finish.wait()

    bench.add()
    async with bench.running(send, batches_in_flight=1, concurrency=1, batch=1) as dispatcher:
        await started.wait()
        bench.ahead = timedelta(hours=1)
        dispatcher.stop_soon()
        finish.set()

    assert bench.statuses() == ["delivered"]
    assert bench.told(ev.LeaseLost) == []


class Slow(MemoryStore):
    """A store whose claims take long to arrive."""

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        claims = await super().claim(limit, terms)
        if claims:
            await asyncio.sleep(0.15)
        return claims


@pytest.mark.requirement("S2-29")
async def test_work_is_not_begun_when_the_lease_is_nearly_over() -> None:
    """With less than the publish timeout left, a claim is released, not published."""
    bench, calls = Bench(Slow()), list[UUID]()

    async def send(message: Message) -> None:
        calls.append(message.id)

    bench.add()
    async with bench.running(send, lease=2 * SECOND, publish_timeout=1900 * MS):
        await until(lambda: bool(bench.told(ev.MessagesReleased)), "the release")

    assert calls == []
    assert bench.store.rows[0].message.attempt == 0


@pytest.mark.requirement("G11")
async def test_a_blocked_event_loop_is_noticed() -> None:
    """A handler that blocks the loop starves the renewal, so it is told."""
    bench = Bench()

    async def send(message: Message) -> None:
        time.sleep(0.4)  # noqa: ASYNC251 -- the mistake that this is about

    bench.add()
    async with bench.running(send, lease=300 * MS, publish_timeout=200 * MS):
        await until(lambda: bool(bench.told(ev.LoopStalled)), "the stall being told")


class Flaky(MemoryStore):
    """A store that is away for a while."""

    is_away = False

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        self._check()
        return await super().claim(limit, terms)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        self._check()
        return await super().settle(settlements)

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailableError("connection refused")


@pytest.mark.requirement("S1-34", "S4-13")
async def test_a_store_that_goes_away_stops_nothing_for_good() -> None:
    """Store errors are told and the loop goes on; a confirmed delivery is recorded later."""
    store = Flaky()
    bench, delivered = Bench(store), list[UUID]()

    async def send(message: Message) -> None:
        delivered.append(message.id)
        store.is_away = len(delivered) == 1

    bench.add()
    async with bench.running(send):
        await until(lambda: len(bench.told(ev.StoreFailed)) > 2, "failures being told")
        store.is_away = False
        await bench.until_status("delivered")
        bench.add()
        await bench.until_status("delivered", "delivered")

    assert len(delivered) == 2
    assert bench.told(ev.StoreRecovered)


class Unreachable(MemoryStore):
    """A store that cannot be opened."""

    async def open(self) -> bool:
        raise StoreUnavailableError("connection refused")


async def test_a_dispatcher_that_never_reached_its_store_did_not_start() -> None:
    """Neither the start nor the stop of something that did not run is reported."""
    bench = Bench(Unreachable())
    dispatcher = bench.dispatcher(accept)
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: bool(bench.told(ev.StoreFailed)), "the failure being reported")
    await dispatcher.stop()
    await running

    assert bench.told(ev.Started) == []
    assert bench.told(ev.Stopped) == []


@pytest.mark.requirement("S4-23")
async def test_a_wake_up_delivers_long_before_the_next_poll() -> None:
    """Latency does not depend on the poll interval when somebody hints."""
    bench = Bench()
    async with bench.running(accept, poll_interval=600 * SECOND, lease=3600 * SECOND) as dispatcher:
        await until(lambda: dispatcher._idle >= 1, "the dispatcher resting for long")  # noqa: SLF001
        bench.add()
        dispatcher.wake()
        await bench.until_status("delivered")


class Counting(MemoryStore):
    """A store that counts its claims."""

    claims = 0

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        self.claims += 1
        return await super().claim(limit, terms)


@pytest.mark.requirement("S1-29", "S2-35")
async def test_an_idle_dispatcher_asks_ever_more_rarely() -> None:
    """Polling backs off to the poll interval while there is nothing to do."""
    store = Counting()
    bench = Bench(store)
    async with bench.running(accept, poll_interval=10 * SECOND, lease=60 * SECOND) as dispatcher:
        await until(lambda: dispatcher._idle >= 1, "the rests growing")  # noqa: SLF001

    assert store.claims < 12


@pytest.mark.requirement("S1-29")
async def test_a_full_batch_is_followed_by_the_next_at_once() -> None:
    """A backlog is drained in batches without waiting in between."""
    bench, rests = Bench(), 0

    class Observed(Dispatcher):
        async def _rest(self) -> None:
            nonlocal rests
            rests += 1
            await super()._rest()

    bench.add(200)
    await Observed(bench.store, accept, batch=10, listener=bench.events.append).run(until_idle=True)

    assert bench.statuses() == ["delivered"] * 200
    assert len(bench.told(ev.Claimed)) == 20
    assert rests < 10


@pytest.mark.requirement("G6")
async def test_messages_of_a_key_follow_each_other_and_keys_run_side_by_side() -> None:
    """One of a key at a time, in order; different keys at the same time."""
    bench = Bench()
    under_way, most, order = dict[str, int](), 0, dict[str, list[UUID]]()

    async def send(message: Message) -> None:
        nonlocal most
        key = message.key or ""
        under_way[key] = under_way.get(key, 0) + 1
        most = max(most, sum(under_way.values()))
        assert under_way[key] == 1
        await asyncio.sleep(0)
        order.setdefault(key, []).append(message.id)
        under_way[key] -= 1

    wanted = {key: bench.add(20, key=key) for key in "abcde"}
    async with bench.running(send):
        await bench.until_status(*["delivered"] * 100)

    assert order == wanted
    assert most > 1


@pytest.mark.requirement("G6")
async def test_a_failing_head_holds_back_its_own_key_only() -> None:
    """The followers wait for their head, the other keys do not."""
    bench, seen = Bench(), list[tuple[str | None, int]]()
    failures = 3

    async def send(message: Message) -> None:
        nonlocal failures
        if message.key == "bad" and message.payload == b'{"n":0}' and failures:
            failures -= 1
            raise ValueError("not yet")
        seen.append((message.key, int(message.payload[5:-1])))

    bench.add(3, key="bad")
    bench.add(3, key="good")
    async with bench.running(send):
        await bench.until_status(*["delivered"] * 6)

    assert [n for key, n in seen if key == "bad"] == [0, 1, 2]
    assert [n for key, n in seen if key == "good"] == [0, 1, 2]
    assert seen[-1] == ("bad", 2)


@pytest.mark.requirement("G6")
@pytest.mark.parametrize(("policy", "followers"), [("block", "pending"), ("skip", "delivered")])
async def test_a_dead_head_blocks_or_is_skipped_as_asked(policy: str, followers: str) -> None:
    """On_dead="block" keeps the key waiting, visibly; "skip" lets it go on."""
    bench = Bench()
    first, *_ = bench.add(3, key="k")
    bench.add(1)

    async def send(message: Message) -> None:
        if message.id == first:
            raise RejectError("never")

    async with bench.running(send, on_dead=policy):
        await bench.until_status("dead", followers, followers, "delivered")


@pytest.mark.requirement("S1-39", "S1-40", "S4-09", "S4-10")
async def test_old_deliveries_are_purged_and_nothing_else() -> None:
    """Cleanup runs on its own timer and only takes delivered rows past retention."""
    store = MemoryStore(keep_delivered=1 * MS)
    bench = Bench(store)
    bench.add(2)
    with store.transaction() as transaction:
        bench.outbox.add(transaction, {}, topic="later", delay=timedelta(days=1))
    async with bench.running(accept, sweep_interval=5 * MS, cleanup_interval=5 * MS):
        await until(lambda: bench.statuses() == ["pending"], "delivered rows being purged")
        await until(lambda: bool(bench.told(ev.Purged)), "the purge being told")


@pytest.mark.requirement("G9", "S2-28")
async def test_messages_without_an_attempt_left_are_swept() -> None:
    """A crash on the last attempt ends in dead, not in limbo."""
    bench = Clocked()
    bench.add()
    await bench.store.claim(1, ClaimTerms(worker=uuid4(), max_attempts=1))
    bench.ahead = timedelta(hours=1)
    async with bench.running(accept, max_attempts=1, sweep_interval=5 * MS):
        await bench.until_status("dead")
        await until(lambda: bool(bench.told(ev.Swept)), "the sweep being told")


@pytest.mark.requirement("S2-35", "S2-43")
@pytest.mark.parametrize(
    "options",
    [
        {"poll_interval": 11 * SECOND, "lease": 30 * SECOND},
        {"publish_timeout": 30 * SECOND, "lease": 30 * SECOND},
        {"batch": 0},
        {"batches_in_flight": 0},
        {"max_attempts": 0},
        {"lease": timedelta(0)},
        {"on_dead": "ignore"},
        {"concurrency": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    """Poll_interval must be well below the lease; everything is checked at construction."""
    with pytest.raises(ConfigurationError):
        Dispatcher(MemoryStore(), accept, **options)  # type: ignore[arg-type]


async def test_a_dispatcher_runs_once() -> None:
    """A second run of the same object would share its claims."""
    bench = Bench()
    dispatcher = bench.dispatcher(accept)
    await dispatcher.run(until_idle=True)

    with pytest.raises(ConfigurationError, match="runs once"):
        await dispatcher.run()


async def test_a_run_until_idle_ends_when_nothing_is_left() -> None:
    """A drain ends by itself, with everything settled."""
    bench = Bench()
    bench.add(25)

    await bench.dispatcher(accept, batch=10).run(until_idle=True)

    assert bench.statuses() == ["delivered"] * 25


@pytest.mark.requirement("G11")
async def test_no_event_or_log_holds_a_payload(caplog: pytest.LogCaptureFixture) -> None:
    """Payloads and header values stay out of everything that is told."""
    store, secret = MemoryStore(), "s3cr3t-canary"
    caplog.set_level(logging.DEBUG, logger="postroom")
    told: list[ev.Event] = []
    with store.transaction() as transaction:
        Outbox().add(transaction, {"card": secret}, topic="t", headers={"authorization": secret})

    def listener(event: ev.Event) -> None:
        told.append(event)
        ev.log_event(event)

    async def send(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("no")
        raise RejectError("never")

    dispatcher = Dispatcher(store, send, backoff=QUICK, listener=listener)
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: store.rows[0].status == "dead", "the message being dead")
    await dispatcher.stop()
    await running

    assert {type(event) for event in told} >= {ev.Started, ev.Claimed, ev.Retried, ev.Died, ev.Stopped}
    assert secret not in repr(told)
    assert secret not in repr([record.__dict__ for record in caplog.records])


class Batches:
    """A publisher of batches that does what a function does with each message."""

    def __init__(self, send: Callable[[Message], Awaitable[None]]) -> None:
        self._send = send

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        for message in messages:
            await self._send(message)
        return [Delivered()] * len(messages)


@pytest.mark.requirement("G2")
@pytest.mark.parametrize("in_batches", [True, False])
async def test_a_publisher_whose_own_wait_is_cancelled_strands_nothing(in_batches: bool) -> None:  # noqa: FBT001
    """A client library may cancel what a publisher awaits; that is no cancellation of the dispatcher."""
    bench, failures = Bench(), 3

    async def send(message: Message) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            lost.cancel()
            await lost

    bench.add(5)
    async with bench.running(Batches(send) if in_batches else send):
        await bench.until_status(*["delivered"] * 5)


@pytest.mark.requirement("G2")
@pytest.mark.parametrize("in_batches", [True, False])
async def test_a_publisher_that_cancels_its_own_task_strands_nothing(in_batches: bool) -> None:  # noqa: FBT001
    """What nobody else would ever settle counts as failed, and is tried again."""
    bench, failures = Bench(), 2

    async def send(message: Message) -> None:
        nonlocal failures
        task = asyncio.current_task()
        if failures and task is not None:
            failures -= 1
            task.cancel()
        await asyncio.sleep(0)

    bench.add(5)
    async with bench.running(Batches(send) if in_batches else send):
        await bench.until_status(*["delivered"] * 5)


@pytest.mark.requirement("G11")
async def test_a_lost_claim_whose_publisher_ends_badly_takes_up_no_room() -> None:
    """With room for one message, the next one is delivered all the same."""
    ahead = timedelta(0)
    store = Recording(clock=lambda: datetime.now(UTC) + ahead)
    bench = Bench(store)
    started, finish = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        task = asyncio.current_task()
        if not started.is_set() and task is not None:
            started.set()
            await finish.wait()
            task.cancel()
        await asyncio.sleep(0)

    bench.add()
    options = {"lease": 600 * MS, "publish_timeout": 500 * MS, "batches_in_flight": 1, "batch": 1}
    async with bench.running(Batches(send), **options):
        await started.wait()
        ahead = timedelta(hours=1)
        await store.claim(1, ClaimTerms(worker=uuid4(), lease=timedelta(hours=2)))
        await until(lambda: len(bench.told(ev.LeaseLost)) == 1, "the renewal noticing the loss")
        finish.set()
        bench.add()
        await until(lambda: "delivered" in bench.statuses(), "the next message being delivered")


class Withholding(MemoryStore):
    """A store whose answers to claims are held back after it has looked."""

    def __init__(self) -> None:
        super().__init__()
        self.answering = asyncio.Event()
        self.answering.set()
        self.looked = 0

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        claims = await super().claim(limit, terms)
        self.looked += 1
        await self.answering.wait()
        return claims


async def test_a_wake_up_while_two_claims_are_under_way_leads_to_a_third() -> None:
    """Both have looked already when the message comes, so only another one can find it before the next poll."""
    store = Withholding()
    bench = Bench(store)
    lazy = timedelta(seconds=30)
    async with bench.running(Batches(lambda _: asyncio.sleep(0)), poll_interval=lazy, lease=4 * lazy) as dispatcher:
        await until(lambda: store.looked > 0, "the first claim")
        dispatcher._idle = lazy.total_seconds()  # noqa: SLF001 -- as after half a minute without work
        store.answering.clear()
        dispatcher.wake()
        await until(lambda: len(dispatcher._claiming) == 1 and not store.answering.is_set(), "a claim under way")  # noqa: SLF001
        seen = store.looked
        dispatcher.wake()
        await until(lambda: store.looked > seen or len(dispatcher._claiming) == 2, "the second claim")  # noqa: SLF001
        bench.add()
        dispatcher.wake()
        store.answering.set()
        await bench.until_status("delivered")


@pytest.mark.requirement("G9")
@pytest.mark.parametrize(
    "answer",
    [True, "yes", Retry("later", timedelta.max), Retry(ValueError("no"), timedelta(0)), Retry("no", 5)],  # type: ignore[arg-type]
    ids=["bool", "text", "for ever", "exception", "number"],
)
async def test_an_answer_that_no_store_could_record_is_a_failure_of_its_message_alone(answer: object) -> None:
    """What an untyped publisher says cannot stop the settling of others."""
    bench = Bench()
    bad, *_ = bench.add(5)
    async with bench.running(Answers(lambda m: answer if m.id == bad else Delivered())):  # type: ignore[arg-type, return-value]
        await until(lambda: bench.statuses()[1:] == ["delivered"] * 4, "the others being delivered")
        await until(lambda: bool(bench.told(ev.Retried)), "the failure being told")


@pytest.mark.requirement("G2", "G9", "G13")
async def test_a_message_that_cannot_be_sent_does_not_stand_for_its_topic() -> None:
    """The next test of a topic that seems down is another message."""
    bench = Bench()
    [hanging] = bench.add(1, topic="t")

    async def send(message: Message) -> None:
        if message.id == hanging:
            raise BrokerUnavailableError("one endpoint is down")

    async with bench.running(send):
        await until(lambda: bool(bench.told(ev.BreakerOpened)), "the topic looking down")
        bench.add(50, topic="t")
        await until(lambda: bench.statuses()[1:] == ["delivered"] * 50, "the others being delivered")

    assert bench.store.rows[0].message.attempt == 0


@pytest.mark.requirement("G11")
async def test_concurrency_is_that_of_the_dispatcher_and_not_of_a_batch() -> None:
    """Batches under way side by side do not multiply the calls."""
    bench, under_way, most = Bench(), 0, 0

    async def send(message: Message) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1

    bench.add(60)
    async with bench.running(send, batch=10, concurrency=3):
        await bench.until_status(*["delivered"] * 60)

    assert most == 3


@pytest.mark.requirement("G2")
async def test_listeners_and_backoffs_that_fail_do_not_stop_delivery(caplog: pytest.LogCaptureFixture) -> None:
    """What users plug in is not trusted with the life of the dispatcher."""
    bench = Bench()

    def broken(_: object) -> timedelta:
        raise ZeroDivisionError

    async def send(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("not yet")

    bench.add()
    async with bench.running(send, listener=broken):
        await bench.until_status("delivered")
    bench.add()
    async with bench.running(send, listener=ev.log_event, backoff=broken):
        await bench.until_status("delivered", "delivered")

    assert "a listener failed" in caplog.text
    assert "the backoff function failed" in caplog.text


class Deaf(MemoryStore):
    """A store that cannot be asked for what is parked."""

    asked = 0

    async def parked(self, *, after: str = "", limit: int = 100) -> list[str]:
        self.asked += 1
        raise StoreUnavailableError("the server is down")


async def test_a_run_that_waits_for_the_store_before_its_first_claim_can_be_stopped() -> None:
    """A run until all is idle asks for parked messages first; while the store is down nothing else would end it."""
    store = Deaf()
    bench = Bench(store)
    dispatcher = bench.dispatcher(MemoryBroker())
    running = asyncio.create_task(dispatcher.run(until_idle=True))
    # Once by the service that looks for them now and then, which is cancelled in any case, and once by the run.
    await until(lambda: store.asked >= 2, "both asking for parked messages")

    async with asyncio.timeout(30):
        await dispatcher.stop()
        await running

    assert {event.operation for event in bench.told(ev.StoreFailed) if isinstance(event, ev.StoreFailed)} == {"parked"}


@pytest.mark.requirement("S2-34")
async def test_cancelling_during_a_claim_gives_back_what_it_took() -> None:
    """A claim that the store has made is known, whenever the cancellation comes."""
    bench = Bench(Slow())
    bench.add(3)
    running = asyncio.create_task(bench.dispatcher(accept).run())
    await until(lambda: "processing" in bench.statuses(), "the claim being made")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert bench.statuses() == ["pending"] * 3
    assert {row.message.attempt for row in bench.store.rows} == {0}


@pytest.mark.requirement("S4-12")
async def test_a_stop_does_not_wait_for_a_publisher_that_ignores_its_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopping is bounded, whatever a publisher does."""
    monkeypatch.setattr("postroom.dispatcher.FAREWELL", 0.05)
    bench, started, end = Bench(), asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    bench.add()
    dispatcher = bench.dispatcher(send, shutdown_grace=10 * MS, publish_timeout=9 * SECOND)
    running = asyncio.create_task(dispatcher.run())
    await started.wait()
    await asyncio.wait_for(dispatcher.stop(), 10)
    end.set()
    await running

    assert bench.statuses() == ["pending"]


async def test_a_dispatcher_that_never_reached_its_store_neither_starts_nor_stops_in_the_log() -> None:
    """An operator who reads "dispatcher started" believes that the store was reached."""
    told: list[ev.Event] = []
    store = PostgresStore("postgresql://app@127.0.0.1:9/shop")  # the discard port, where nothing listens
    dispatcher = Dispatcher(store, MemoryBroker(), listener=told.append)

    running = asyncio.create_task(dispatcher.run())
    await until(lambda: bool(told), "the store cannot be reached", within=timedelta(seconds=60))
    await dispatcher.stop()
    await running

    assert {type(event) for event in told} == {ev.StoreFailed}


def hours(asked: list[int]) -> Callable[[int], timedelta]:
    """Return a backoff of an hour for each attempt, which notes what it was asked."""

    def wait(attempts: int) -> timedelta:
        asked.append(attempts)
        return attempts * HOUR

    return wait


@pytest.mark.requirement("S2-42")
async def test_a_failed_message_waits_as_the_backoff_of_its_dispatcher_says() -> None:
    """The user's function decides, by the number of attempts."""
    bench, asked = Bench(), list[int]()

    async def refuse(message: Message) -> None:
        raise ValueError("no")

    bench.add()
    async with bench.running(refuse, backoff=hours(asked)):
        await until(lambda: bool(bench.told(ev.Retried)), "the retry")

    row = bench.store.rows[0]
    assert asked == [1]
    assert row.due - row.changed == HOUR


@pytest.mark.requirement("G13")
async def test_a_destination_that_is_down_is_left_alone_as_the_backoff_for_outages_says() -> None:
    """The user's function decides, by the number of failed probes."""
    bench, asked = Bench(), list[int]()

    async def refuse(message: Message) -> None:
        raise BrokerUnavailableError("connection refused")

    bench.add()
    async with bench.running(refuse, outage_backoff=hours(asked)):
        await until(lambda: bool(bench.told(ev.BreakerOpened)), "the outage")

    assert asked == [1]


@pytest.mark.requirement("S2-29")
async def test_a_message_is_leased_for_as_long_as_its_dispatcher_says() -> None:
    """The lease is the user's choice, from the claim on."""
    bench = Bench()
    started, finish = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        started.set()
        await finish.wait()

    bench.add()
    async with bench.running(send, lease=HOUR):
        await started.wait()
        row = bench.store.rows[0]
        until_then, since = row.locked_until, row.changed
        finish.set()
        await bench.until_status("delivered")

    assert until_then == since + HOUR


class Asked(MemoryStore):
    """A store that counts how often it was asked for other namespaces."""

    asked = 0
    polls = 0

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        self.polls += 1
        return await super().claim(limit, terms)

    async def due_elsewhere(self) -> dict[str, int]:
        self.asked += 1
        return await super().due_elsewhere()


async def test_a_dispatcher_that_finds_nothing_reports_once_that_messages_are_due_in_another_namespace() -> None:
    """An outbox and a store of two namespaces would otherwise be silent for ever."""
    store = Asked()
    bench = Bench(store)
    bench.outbox = Outbox(namespace="shop")
    bench.add(12)
    async with bench.running(accept):
        await until(lambda: bool(bench.told(ev.DueElsewhere)), "the report")
        polls = store.polls
        await until(lambda: store.polls > polls + 2 * EMPTY_POLLS, "as many polls again")

    assert bench.told(ev.DueElsewhere) == [ev.DueElsewhere("default", ("12 in 'shop'",))]
    assert store.asked == 1


async def test_a_run_until_idle_that_found_nothing_reports_messages_of_another_namespace() -> None:
    """``postroom dispatch --once`` ends before there were many polls."""
    bench = Bench()
    bench.outbox = Outbox(namespace="shop")
    bench.add()

    await bench.dispatcher(accept).run(until_idle=True)

    assert bench.told(ev.DueElsewhere) == [ev.DueElsewhere("default", ("1 in 'shop'",))]


async def test_a_dispatcher_that_has_found_messages_does_not_look_at_other_namespaces() -> None:
    """It has the right one, and what waits elsewhere is for others."""
    store = Asked()
    bench = Bench(store)
    bench.add()
    with store.transaction() as transaction:
        Outbox(namespace="shop").add(transaction, {"n": 1}, topic="t")

    await bench.dispatcher(accept).run(until_idle=True)

    assert bench.statuses() == ["delivered", "pending"]
    assert (store.asked, bench.told(ev.DueElsewhere)) == (0, [])


class Mute(MemoryStore):
    """A store that cannot be asked for other namespaces."""

    async def due_elsewhere(self) -> dict[str, int]:
        raise StoreUnavailableError("the server is down")


async def test_a_failing_look_at_other_namespaces_disturbs_nothing() -> None:
    """It is a courtesy; claims report what is wrong with the store."""
    bench = Bench(Mute())

    await bench.dispatcher(accept).run(until_idle=True)

    assert bench.told(ev.StoreFailed) == []
