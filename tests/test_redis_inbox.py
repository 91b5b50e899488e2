"""The inbox in Redis: a message takes effect once, whoever crashes, whatever is lost, and is acknowledged then."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import Context
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias, cast, get_args
from uuid import UUID, uuid4

import pytest
import redis

from postroom import Consumer, Message, Outbox, Router, events
from postroom.brokers import MemoryBroker
from postroom.dead_letters import StoredDeadLetters
from postroom.delivery import Delivery
from postroom.errors import (
    CommitRefusedError,
    CommitUnknownError,
    ConfigurationError,
    FencedError,
    InvalidMessageError,
    InvalidNameError,
    MessageBusyError,
    PartlyAppliedError,
    QuarantinedError,
    StoreContentionError,
    StoreError,
    StoreUnavailableError,
)
from postroom.inbox import Inbox, Mode
from postroom.middleware import InboxMiddleware, OutboxMiddleware, TransactionMiddleware, transactional
from postroom.middleware.chain import Middleware, check_order
from postroom.middleware.chain import connect as connect_middlewares
from postroom.store import Dead, Delivered, Outcome, Release, Retry
from postroom.stores import SQLiteStore
from postroom.stores.redis import RedisInbox, RedisStore, RedisTransactions, current_pipeline
from postroom.stores.redis.client import Client
from postroom.stores.redis.marks import Mark, Renewal
from postroom.stores.redis.record import packed
from postroom.stores.redis.scripts import alone
from postroom.testing.cancelling import Moment, cuts
from postroom.testing.clients import ValkeyClient
from postroom.testing.servers import ValkeyServer
from postroom.testing.waiting import until
from postroom.transaction import Opening, Transaction, in_transaction

from .test_redis_transaction import MODES, Shop, connect, shop_on, through_proxy

#: In which order the middlewares stand, the first outermost: the transaction, or the inbox as the design has it.
Order: TypeAlias = Literal["transaction_first", "inbox_first"]
ORDERS: Final[Sequence[Order]] = get_args(Order)

SHORT = timedelta(milliseconds=150)
NEVER = timedelta(0)
TENANT = UUID(int=7)


def message(**parts: Any) -> Message:  # noqa: ANN401
    return Message(topic="orders", type="order.placed", payload=b"{}", attempt=1, **parts)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> Order:
    chosen: Order = request.param
    return chosen


@pytest.fixture
async def shop(valkey_server: ValkeyClient, order: Order) -> AsyncGenerator[Shop]:
    """Keys that are this test's own, in a shop for each order of middlewares."""
    async with shop_on(valkey_server.dsn, order=order) as shop:
        yield shop


class Worker:
    """Handles messages step by step, and may stop for ever at each of them."""

    def __init__(self, transactions: RedisTransactions, inbox: Inbox, order: str) -> None:
        self._transactions = transactions
        self._inbox = inbox
        self._order = order
        self._open: list[AbstractAsyncContextManager[Transaction]] = []

    async def claim(self, claimed: Message) -> Transaction | None:
        """Begin to handle a message, if it was not handled before."""
        if self._order == "inbox_first":
            return await self._claim_first(claimed)
        block = self._transactions.begin()
        transaction = await block.__aenter__()
        try:
            is_new = await self._inbox.admit(transaction, claimed)
        except BaseException as error:
            with suppress(type(error)):
                await block.__aexit__(type(error), error, None)
            raise
        if not is_new:
            await block.__aexit__(None, None, None)
            return None
        self._open.append(block)
        return transaction

    async def _claim_first(self, claimed: Message) -> Transaction | None:
        claim = await self._transactions.claim(self._inbox, claimed)
        if claim is None:
            return None
        block = self._transactions.begin(Opening(self._inbox, claimed, claim))
        self._open.append(block)
        return await block.__aenter__()

    async def commit(self) -> None:
        """End the block of the first message well."""
        await self._open.pop(0).__aexit__(None, None, None)

    async def fail(self) -> None:
        """End it as a handler does that fails."""
        with suppress(ZeroDivisionError):
            await self._open.pop(0).__aexit__(ZeroDivisionError, ZeroDivisionError(), None)

    async def clean_up(self) -> None:
        for _ in list(self._open):
            with suppress(Exception):
                await self.fail()


@asynccontextmanager
async def workers(shop: Shop, inbox: Inbox, count: int = 2) -> AsyncGenerator[list[Worker]]:
    """Give workers, as if each were a process; what they leave open stays as a crash leaves it."""
    made = [Worker(shop.transactions, inbox, shop.order) for _ in range(count)]
    try:
        yield made
    finally:
        for worker in made:
            await worker.clean_up()


def inbox(**options: Any) -> RedisInbox:  # noqa: ANN401
    """Return an inbox whose leases nobody renews."""
    consumer: str = options.pop("consumer", f"consumer-{uuid4().hex}")
    return RedisInbox(consumer, **{"longest": NEVER, **options})


def patient(box: RedisInbox) -> RedisInbox:
    """Return the inbox of the same consumer with a lease that does not end during a test, however slow it is."""
    return inbox(lease=timedelta(minutes=10), consumer=box.consumer)


async def elsewhere(work: Awaitable[Any]) -> Any:  # noqa: ANN401
    """Do something as another process would, which knows nothing of a transaction here."""

    async def do() -> Any:  # noqa: ANN401
        return await work

    return await asyncio.create_task(do(), context=Context())


async def effect(shop: Shop, transaction: Transaction) -> None:
    await transaction.connection.incrby(shop.key("effect"), 1)
    await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="events")


async def effects(shop: Shop) -> tuple[int, int]:
    """Return how often the effect happened, and how many events there are."""
    return int(await shop.client.get(shop.key("effect")) or 0), (await shop.store().stats()).pending


async def mark(shop: Shop, marks: RedisInbox, of: Message) -> str:
    """Return the word that a mark begins with."""
    state = await shop.client.get(marks.key(shop.tag, of))
    return (state or b"").partition(b":")[0].decode()


def has_no_mark(shop: Shop, marks: RedisInbox, of: Message) -> Callable[[], Any]:
    async def is_gone() -> bool:
        return await mark(shop, marks, of) == ""

    return is_gone


# -- one message ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-15", "S0-34", "S0-40")
async def test_a_message_is_claimed_at_once_and_done_with_its_effect(shop: Shop) -> None:
    """The claim is seen by others while the handler runs, and its end together with the effect."""
    box, handled = inbox(retention=timedelta(hours=1)), message()

    async with workers(shop, box) as (worker, _):
        transaction = await worker.claim(handled)
        assert transaction is not None
        during = await mark(shop, box, handled)
        lease = await shop.client.pttl(box.key(shop.tag, handled))
        await effect(shop, transaction)
        nothing = await effects(shop)
        await worker.commit()

    kept = await shop.client.pttl(box.key(shop.tag, handled))
    assert (during, nothing) == ("p", (0, 0))
    assert 0 < lease <= 30_000
    assert (await mark(shop, box, handled), await effects(shop)) == ("done", (1, 1))
    assert 3_590_000 < kept <= 3_600_000


@pytest.mark.requirement("S0-11", "S0-35", "S0-39")
async def test_a_message_that_was_handled_is_a_duplicate_for_its_consumer_and_tenant_alone(shop: Shop) -> None:
    """Consumers and tenants know nothing of each other."""
    box, handled = inbox(), message()
    others = [(inbox(), handled), (box, replace(handled, tenant_id=TENANT)), (box, message())]

    async with workers(shop, box) as (worker, _):
        assert await worker.claim(handled) is not None
        await worker.commit()
        assert await worker.claim(handled) is None
    for other, seen in others:
        async with workers(shop, other) as (worker, _):
            assert await worker.claim(seen) is not None


@pytest.mark.requirement("S0-39")
async def test_names_with_odd_characters_do_not_meet(shop: Shop) -> None:
    """Braces, colons and newlines in names and keys change neither slot nor owner."""
    tangled = RedisInbox("a", key_func=lambda _: "b:c"), RedisInbox("a:b", key_func=lambda _: "c")

    keys = [box.key("t}{:", message()) for box in tangled]

    assert len(set(keys)) == 2
    assert {key[: key.index("}") + 1] for key in keys} == {"postroom_inbox:{t%7D%7B:}"}
    with pytest.raises(InvalidNameError):
        RedisInbox("a", table="{").key("t", message())


@pytest.mark.requirement("S0-21", "S0-22", "S0-37")
async def test_a_handler_that_fails_gives_its_claim_back(shop: Shop) -> None:
    """Only a commit leaves a mark, and the message may be handled again at once."""
    box, handled = inbox(), message()

    async with workers(shop, box) as (first, second):
        transaction = await first.claim(handled)
        assert transaction is not None
        await effect(shop, transaction)
        await first.fail()
        after = await mark(shop, box, handled)
        again = await second.claim(handled)

    assert (after, await effects(shop)) == ("", (0, 0))
    assert again is not None


@pytest.mark.requirement("S0-32")
@pytest.mark.parametrize(
    ("said", "hours"),
    [
        ({}, 24),
        ({"retention": timedelta(0)}, 24),
        ({"retention": timedelta(seconds=-1)}, 24),
        ({"retention": timedelta(hours=1)}, 1),
    ],
)
async def test_a_mark_is_kept_for_a_day_unless_another_retention_is_said(
    shop: Shop, said: dict[str, timedelta], hours: int
) -> None:
    """Zero and less mean the default; the server has it as the time to live."""
    box, handled = inbox(**said), message()

    async with workers(shop, box) as (worker, _):
        assert await worker.claim(handled) is not None
        await worker.commit()

    assert box.retention == timedelta(hours=hours)
    left = timedelta(milliseconds=await shop.client.pttl(box.key(shop.tag, handled)))
    assert timedelta(hours=hours) - timedelta(minutes=5) < left <= timedelta(hours=hours)


@pytest.mark.requirement("S0-32")
async def test_the_whole_stack_in_one_keeps_marks_for_a_day_in_redis(shop: Shop) -> None:
    """The store says how long; in SQL databases it is a week."""
    store, handled = shop.store(), message()
    box = store.inbox("stock")

    outcome = await Hand(nothing, transactional(store, consumer="stock", listener=lambda _: None)).deliver(handled)

    left = timedelta(milliseconds=await shop.client.pttl(box.key(shop.tag, handled)))
    assert (outcome, box.retention) == (Delivered(), timedelta(days=1))
    assert timedelta(hours=23) < left <= timedelta(days=1)
    assert SQLiteStore("never-opened.db").inbox("stock").retention == timedelta(days=7)


@pytest.mark.requirement("S0-18", "S0-38")
async def test_a_message_is_forgotten_after_its_retention_and_handled_again(shop: Shop) -> None:
    """The server forgets by itself, and no cleanup has anything to do."""
    box, handled = inbox(retention=SHORT), message()

    async with workers(shop, box) as (worker, _):
        assert await worker.claim(handled) is not None
        await worker.commit()
        await until(has_no_mark(shop, box, handled), "the end of the retention")

        assert await worker.claim(handled) is not None
    assert await box.purge(shop.transactions) == 0


@pytest.mark.requirement("S0-33", "S0-39")
async def test_a_message_may_be_known_by_something_else_than_its_id(shop: Shop) -> None:
    """An idempotency key in a header; one that has none is an error, not a duplicate of its like."""
    box = inbox(key_func=lambda seen: seen.headers.get("idempotency-key", ""))
    headers = {"idempotency-key": "42"}

    async with workers(shop, box) as (worker, _):
        assert await worker.claim(message(headers=headers)) is not None
        await worker.commit()
        assert await worker.claim(message(headers=headers)) is None
        with pytest.raises(InvalidMessageError):
            await worker.claim(message())


@pytest.mark.requirement("S0-33")
async def test_a_message_without_an_id_is_an_error(shop: Shop) -> None:
    """All of those would be duplicates of each other."""
    nameless = replace(message(), id=cast("UUID", None))

    with pytest.raises(InvalidMessageError, match="no id"):
        await handled_by(shop, RedisInbox("stock"), nothing).chain(nameless)


@pytest.mark.parametrize("wrong", [{"lease": timedelta(0)}, {"longest": timedelta(-1)}, {"mode": "setnx"}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        RedisInbox("stock", **wrong)


@pytest.mark.requirement("S0-32")
def test_an_inbox_that_forgets_too_early_is_refused() -> None:
    """What may come again after it was forgotten would take effect twice."""
    with pytest.raises(ConfigurationError, match="retention"):
        RedisInbox("stock", redelivery_horizon=timedelta(days=2))


async def test_the_inbox_of_the_kernel_works_as_well(shop: Shop) -> None:
    box, handled = Inbox(f"consumer-{uuid4().hex}"), message()

    async with workers(shop, box) as (worker, _):
        assert await worker.claim(handled) is not None
        with pytest.raises(MessageBusyError):
            await worker.claim(handled)
        await worker.commit()

        assert await worker.claim(handled) is None
    assert await box.was_handled(shop.transactions, handled) is True
    assert await box.was_handled(shop.transactions, message()) is False


async def test_to_ask_leaves_no_trace(shop: Shop) -> None:
    box, asked = inbox(), message()

    assert await box.was_handled(shop.transactions, asked) is False
    assert await mark(shop, box, asked) == ""


# -- two at a time ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-17", "S0-19")
async def test_a_message_that_somebody_handles_is_looked_at_again_soon_then_less_often(shop: Shop) -> None:
    """It is neither a duplicate nor handled twice; the error says when to look again.

    After as long as it was held so far: a handler that is quick is not waited for until the end of its lease.
    """
    lease = timedelta(minutes=10)
    box, handled = inbox(lease=lease), message()
    held = [timedelta(0), timedelta(minutes=1), timedelta(minutes=4), timedelta(minutes=9)]
    delays: list[timedelta] = []

    async with workers(shop, box) as (first, second):
        assert await first.claim(handled) is not None
        for since in held:
            left = (lease - since) // timedelta(milliseconds=1)
            await shop.client.pexpire(box.key(shop.tag, handled), left)
            with pytest.raises(MessageBusyError) as caught:
                await second.claim(handled)
            delays.append(caught.value.delay)

    minute = timedelta(minutes=1)
    assert timedelta(milliseconds=200) < delays[0] < minute
    assert minute <= delays[1] < 2 * minute
    assert 4 * minute <= delays[2] < 6 * minute
    assert delays[3] < 1.3 * minute, "the rest of the lease is less than it was held"


@pytest.mark.requirement("S0-19")
async def test_a_claim_without_an_end_is_looked_at_after_a_lease(shop: Shop) -> None:
    """Somebody has taken the time to live away."""
    box, handled = inbox(lease=timedelta(seconds=10)), message()

    async with workers(shop, box) as (first, second):
        assert await first.claim(handled) is not None
        await shop.client.persist(box.key(shop.tag, handled))
        with pytest.raises(MessageBusyError) as caught:
            await second.claim(handled)

    assert caught.value.delay >= timedelta(seconds=10)


@pytest.mark.requirement("S0-20")
@pytest.mark.parametrize("mode", MODES)
async def test_whoever_is_late_is_fenced_and_the_effect_happens_once(shop: Shop, mode: Any) -> None:  # noqa: ANN401
    """A pause past the lease; what the late one did is dropped, in both modes."""
    box, handled = inbox(lease=SHORT), message()
    shop.transactions = shop.also(shop.client, mode=mode)

    async with workers(shop, box, 1) as (late,), workers(shop, patient(box), 1) as (other,):
        slow = await late.claim(handled)
        assert slow is not None
        await effect(shop, slow)
        await until(has_no_mark(shop, box, handled), "the end of the lease")
        fast = await other.claim(handled)
        assert fast is not None
        with pytest.raises(FencedError):
            await late.commit()
        still = await mark(shop, box, handled)
        await effect(shop, fast)
        await other.commit()

    assert (still, await effects(shop)) == ("p", (1, 1))


@pytest.mark.requirement("S0-20")
async def test_whoever_is_late_by_a_moment_is_fenced_by_what_it_watches(shop: Shop) -> None:
    """With MULTI, the claim is looked at before; if it changes after that, nothing is applied."""
    box, handled = inbox(), message()
    shop.transactions = shop.also(shop.client, mode="multi")

    async with workers(shop, box) as (worker, _):
        transaction = await worker.claim(handled)
        assert transaction is not None
        await effect(shop, transaction)
        pipeline, key = transaction.connection.pipeline, box.key(shop.tag, handled)
        begin_multi = pipeline.multi

        def multi() -> None:
            with redis.Redis.from_url(shop.url) as other:
                other.set(key, "p:other")
            begin_multi()

        pipeline.multi = multi
        with pytest.raises(StoreContentionError, match="changed"):
            await worker.commit()

    assert await shop.client.get(key) == b"p:other"
    assert await effects(shop) == (0, 0)


@pytest.mark.requirement("S0-37")
async def test_whoever_is_late_and_fails_deletes_nobody_elses_claim(shop: Shop) -> None:
    """Compare and delete, by the token."""
    box, handled = inbox(lease=SHORT), message()

    async with workers(shop, box, 1) as (late,), workers(shop, patient(box), 1) as (other,):
        assert await late.claim(handled) is not None
        await until(has_no_mark(shop, box, handled), "the end of the lease")
        assert await other.claim(handled) is not None
        await late.fail()

        assert await mark(shop, box, handled) == "p"


@pytest.mark.requirement("S0-19")
async def test_a_lease_is_renewed_while_the_handler_runs_and_no_longer(shop: Shop) -> None:
    """A slow handler keeps its message, up to a limit."""
    box, handled = inbox(lease=20 * SHORT, longest=timedelta(minutes=1)), message()
    limited, stuck = inbox(lease=2 * SHORT, longest=30 * SHORT), message()

    async with workers(shop, box) as (worker, other), workers(shop, limited, 1) as (hanging,):
        transaction = await worker.claim(handled)
        assert transaction is not None
        assert await hanging.claim(stuck) is not None
        await until(has_no_mark(shop, limited, stuck), "the end of the longest lease")
        with pytest.raises(MessageBusyError):
            await other.claim(handled)
        await effect(shop, transaction)
        await worker.commit()

    assert (await mark(shop, box, handled), await effects(shop)) == ("done", (1, 1))


@pytest.mark.requirement("S0-19", "S0-20")
async def test_a_lease_is_renewed_by_the_one_who_has_it_alone(shop: Shop) -> None:
    """Whoever is late must not change how long somebody else's claim lasts."""
    box, handled = inbox(lease=timedelta(minutes=10)), message()
    key, renew = box.key(shop.tag, handled), alone("renew_mark").text

    async with workers(shop, box, 1) as (worker,):
        assert await worker.claim(handled) is not None
        token = (await shop.client.get(key)).partition(b":")[2]
        late = await shop.client.eval(renew, 1, key, "somebody", 1)
        left = await shop.client.pttl(key)
        own = await shop.client.eval(renew, 1, key, token, 10 * left)

        assert (late, own) == (0, 1)
        assert 1 < left < await shop.client.pttl(key)


@pytest.mark.requirement("S0-20")
async def test_optimistic_marks_come_last_and_undo_what_was_done_twice(shop: Shop) -> None:
    """The handler runs without a claim; the second of two applies nothing and is a duplicate."""
    box, twice = inbox(mode="optimistic"), message()
    calls = 0

    async def handle(received: Message) -> Sequence[Message]:
        nonlocal calls
        calls += 1
        await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
        if calls == 1:
            await elsewhere(hand.chain(received))
        return []

    hand = handled_by(shop, box, handle)
    await hand.chain(twice)
    await hand.chain(twice)

    assert (calls, await effects(shop)) == (2, (1, 0))
    assert sum(isinstance(event, events.DuplicateSkipped) for event in hand.heard) == 2


@pytest.mark.requirement("S0-15")
async def test_a_transaction_marks_one_message(shop: Shop) -> None:
    """Its commit finds one token; to mark the same again is to have it marked."""
    box, handled = inbox(), message()

    async with workers(shop, box) as (worker, _):
        transaction = await worker.claim(handled)
        assert transaction is not None
        assert await box.admit(transaction, handled) is False
        with pytest.raises(ConfigurationError, match="one message"):
            await box.admit(transaction, message())


# -- crashes and lost replies -----------------------------------------------------------------------------------

VICTIM = """
import asyncio, sys
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from postroom import Message
from postroom.middleware import InboxMiddleware, TransactionMiddleware
from postroom.middleware.chain import chained, check_order, connect
from postroom.stores.redis import RedisInbox, RedisTransactions, current_pipeline
from uuid import UUID
from datetime import timedelta

async def main(url, tag, consumer, identity, mode, order):
    client = redis.asyncio.Redis.from_url(url, retry=Retry(NoBackoff(), 0))
    transaction = TransactionMiddleware(RedisTransactions(client, tag=tag))
    inbox = InboxMiddleware(RedisInbox(consumer, lease=timedelta(seconds=5), mode=mode))
    stack = [inbox, transaction] if order == "inbox_first" else [transaction, inbox]

    async def handle(message):
        await current_pipeline(client).incrby("{%s}:effect" % tag, 1)
        print("claimed", flush=True)
        await asyncio.sleep(60)

    check_order(stack)
    connect(stack)
    await chained(stack, handle)(Message(topic="orders", payload=b"", id=UUID(identity)))

asyncio.run(main(*sys.argv[1:]))
"""


async def crash_with(shop: Shop, box: RedisInbox, handled: Message, mode: str) -> None:
    """Have a process claim a message, and kill it in its handler."""
    words = (shop.url, shop.tag, box.consumer, str(handled.id), mode, shop.order)
    victim = await asyncio.create_subprocess_exec(sys.executable, "-c", VICTIM, *words, stdout=asyncio.subprocess.PIPE)
    assert victim.stdout is not None
    assert await victim.stdout.readline() == b"claimed\n"
    victim.kill()
    await victim.wait()


@pytest.mark.requirement("S0-16", "S0-17", "S0-19")
async def test_a_process_that_is_killed_in_its_handler_delays_the_message_by_its_lease(shop: Shop) -> None:
    """A claim, no effect, no event, no ack; then it is busy, and then handled."""
    box, handled = inbox(lease=timedelta(seconds=5)), message()

    await crash_with(shop, box, handled, "pessimistic")

    async with workers(shop, box) as (worker, _):
        left = (await mark(shop, box, handled), await effects(shop))
        with pytest.raises(MessageBusyError) as caught:
            await worker.claim(handled)
        await until(has_no_mark(shop, box, handled), "the end of the lease")
        transaction = await worker.claim(handled)
        assert transaction is not None
        await effect(shop, transaction)
        await worker.commit()
    assert left == ("p", (0, 0))
    assert caught.value.delay <= timedelta(seconds=7)
    assert await effects(shop) == (1, 1)


@pytest.mark.requirement("S0-02", "S0-16", "S0-17")
async def test_the_literal_protocol_of_the_seed_loses_the_message_of_a_killed_process(shop: Shop) -> None:
    """SETNX says that it was handled, so it is acknowledged although it never was."""
    handled = message()
    box = inbox(mode="setnx_may_lose_messages")
    await crash_with(shop, box, handled, "setnx_may_lose_messages")

    hand = handled_by(shop, box, counting(shop))
    outcome = await hand.deliver(handled)

    assert (outcome, await effects(shop)) == (Delivered(), (0, 0))
    assert await shop.client.pttl(box.key(shop.tag, handled)) > 23 * 3_600_000


@pytest.mark.requirement("S0-02", "S0-21", "S0-35", "S0-37", "S0-38")
async def test_the_literal_protocol_marks_handles_once_and_deletes_on_errors(shop: Shop) -> None:
    """Without crashes it does what the seed says."""
    box, good, bad = inbox(mode="setnx_may_lose_messages"), message(), message()
    hand = handled_by(shop, box, counting(shop))

    outcomes = [await hand.deliver(good), await hand.deliver(good)]
    failed = await handled_by(shop, box, failing).deliver(bad)

    assert outcomes == [Delivered(), Delivered()]
    assert await effects(shop) == (1, 0)
    assert isinstance(failed, Retry)
    assert await shop.client.get(box.key(shop.tag, good)) == b"1"
    assert 23 * 3_600_000 < await shop.client.pttl(box.key(shop.tag, good)) <= 24 * 3_600_000
    assert await shop.client.exists(box.key(shop.tag, bad)) == 0
    assert await box.was_handled(shop.transactions, good) is True


@pytest.mark.requirement("S0-36")
async def test_a_claim_whose_reply_is_lost_delays_the_message_at_most(shop: Shop) -> None:
    """The claim may be nobody's; it is an error, and the message is handled later."""
    box, handled = inbox(lease=timedelta(seconds=1)), message()

    async with through_proxy(shop) as (proxy, client):
        shaky = handled_by(shop, box, counting(shop), shop.also(client))
        await shaky.deliver(message())
        proxy.drop_reply(str(handled.id).encode())
        first = await shaky.deliver(handled)
        assert proxy.dropped == 1
    hand = handled_by(shop, box, counting(shop))
    await until(has_no_mark(shop, box, handled), "the end of the lease")

    assert isinstance(first, Release)
    assert await hand.deliver(handled) == Delivered()
    assert await effects(shop) == (2, 0)


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("mode", MODES)
async def test_a_commit_whose_reply_is_lost_happens_once_and_is_acknowledged(shop: Shop, mode: Any) -> None:  # noqa: ANN401
    """Asked again with the same token, it answers that it is done."""
    box, handled = inbox(), message()

    async with through_proxy(shop) as (proxy, client):
        shaky = handled_by(shop, box, counting(shop), shop.also(client, mode=mode))
        await shaky.deliver(message())
        proxy.drop_reply(b"INCRBY")
        outcome = await shaky.deliver(handled)
        assert proxy.dropped == 1

    assert (outcome, await effects(shop)) == (Delivered(), (2, 0))
    assert await mark(shop, box, handled) == "done"


@pytest.mark.requirement("S0-30", "S0-60")
async def test_a_commit_that_cannot_be_asked_about_costs_no_attempt_and_no_second_effect(shop: Shop) -> None:
    """Unknown is nacked, and the redelivery finds out."""
    box, handled = inbox(lease=SHORT), message()

    async with through_proxy(shop) as (proxy, client):
        quick = shop.also(client, timeout=timedelta(seconds=1))

        async def handle(received: Message) -> Sequence[Message]:
            await current_pipeline(client).incrby(shop.key("effect"), 1)
            proxy.black_hole("replies")
            return []

        shaky = handled_by(shop, box, handle, quick)
        outcome = await shaky.deliver(handled)
        proxy.heal()
    hand = handled_by(shop, box, counting(shop))
    again = await hand.deliver(handled)

    assert isinstance(outcome, Release)
    assert isinstance(shaky.errors[0], CommitUnknownError)
    assert (again, await effects(shop)) == (Delivered(), (1, 0))


@pytest.mark.requirement("S0-22", "S0-60")
async def test_a_crash_between_commit_and_ack_is_a_duplicate_then(shop: Shop) -> None:
    """The effect is there, the redelivery is acknowledged and does nothing."""
    box, handled = inbox(), message()
    hand = handled_by(shop, box, counting(shop))

    await hand.chain(handled)  # the process ends here, and nobody acknowledges
    outcome = await hand.deliver(handled)

    assert (outcome, await effects(shop)) == (Delivered(), (1, 0))
    assert [type(event) for event in hand.heard] == [events.DuplicateSkipped]


@pytest.mark.requirement("S0-59")
async def test_a_server_that_crashes_has_effect_mark_and_event_together_or_none(
    private_valkey: ValkeyServer, order: Order
) -> None:
    """What the log of the server gives back is a prefix of whole commits."""
    async with shop_on(private_valkey.dsn, order=order) as shop:
        await shop.client.config_set("appendfsync", "always")
        box, done, open_ = inbox(lease=timedelta(seconds=5)), message(), message()
        async with workers(shop, box) as (worker, other):
            transaction = await worker.claim(done)
            assert transaction is not None
            await effect(shop, transaction)
            await worker.commit()
            assert await other.claim(open_) is not None
            private_valkey.kill9()
            private_valkey.start()
            await shop.client.connection_pool.disconnect()

            assert (await mark(shop, box, done), await effects(shop)) == ("done", (1, 1))
            assert await worker.claim(done) is None
            await until(has_no_mark(shop, box, open_), "the end of the lease")
            assert await worker.claim(open_) is not None


@pytest.mark.requirement("S0-36")
async def test_without_the_server_nothing_is_handled_and_nothing_acknowledged(
    private_valkey: ValkeyServer, order: Order
) -> None:
    """The mark fails closed, at no cost for the message."""
    async with shop_on(private_valkey.dsn, order=order) as shop:
        hand = handled_by(shop, inbox(), counting(shop))
        private_valkey.kill9()

        outcome = await hand.deliver(message())

        assert isinstance(outcome, Release)
        assert isinstance(hand.errors[0], StoreUnavailableError)
        assert hand.calls == 0


@pytest.mark.requirement("S0-36")
async def test_a_server_without_memory_or_scripts_is_no_fault_of_the_message(
    private_valkey: ValkeyServer, order: Order
) -> None:
    """OOM at the mark; then NOSCRIPT, which is none."""
    async with shop_on(private_valkey.dsn, order=order) as shop:
        box, handled = inbox(), message()
        hand = handled_by(shop, box, counting(shop))
        await shop.client.config_set("maxmemory", "1")
        refused = await hand.deliver(handled)
        await shop.client.config_set("maxmemory", "0")
        await shop.client.script_flush()

        assert isinstance(refused, Release)
        assert await hand.deliver(handled) == Delivered()
        assert await effects(shop) == (1, 0)


@pytest.mark.requirement("S0-36")
@pytest.mark.parametrize("kind", ["hash", "foreign"])
async def test_a_mark_that_is_something_else_is_an_error(shop: Shop, kind: str) -> None:
    """Whoever has written there, it is not taken for a duplicate."""
    box, handled = inbox(), message()
    key = box.key(shop.tag, handled)
    await (shop.client.hset(key, "a", "b") if kind == "hash" else shop.client.set(key, "what?"))
    hand = handled_by(shop, box, counting(shop))

    outcome = await hand.deliver(handled)

    assert isinstance(outcome, Release)
    assert isinstance(hand.errors[0], StoreError)
    assert (hand.calls, await shop.client.exists(key)) == (0, 1)


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize(("value", "why"), [(2**63 - 1, "overflow"), ("a text", "not an integer")])
async def test_what_was_applied_in_part_is_put_aside_and_never_acknowledged_as_done(
    shop: Shop,
    value: Any,  # noqa: ANN401
    why: str,
) -> None:
    """Nacked with an alert, then in quarantine, then a dead letter; it runs once."""
    box, handled = inbox(), message()
    await shop.client.set(shop.key("count"), value)

    async def handle(received: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
        await current_pipeline(shop.client).incrby(shop.key("count"), 1)
        return []

    hand = handled_by(shop, box, handle)
    first, second = await hand.deliver(handled), await hand.deliver(handled)

    assert isinstance(first, Retry)
    assert isinstance(second, Dead)
    assert [type(error) for error in hand.errors] == [PartlyAppliedError, QuarantinedError]
    assert why in second.error
    assert [type(event) for event in shop.heard] == [events.PartlyApplied]
    assert (hand.calls, await mark(shop, box, handled)) == (1, "partial")
    assert await shop.client.ttl(box.key(shop.tag, handled)) == -1
    with pytest.raises(QuarantinedError):
        async with shop.transactions.begin() as transaction:
            await box.has(transaction, handled)


@pytest.mark.requirement("S0-30")
async def test_a_value_that_does_not_fit_leaves_the_message_to_be_handled_again_if_nothing_was_applied(
    shop: Shop,
) -> None:
    """Nacked, and handled as soon as the value is put right."""
    box, handled = inbox(), message()
    await shop.client.set(shop.key("count"), "a text")

    async def handle(received: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key("count"), 1)
        await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
        return []

    hand = handled_by(shop, box, handle)
    first = await hand.deliver(handled)
    effect = await shop.client.get(shop.key("effect"))
    await shop.client.set(shop.key("count"), 5)
    second = await hand.deliver(handled)

    assert isinstance(first, Retry)
    assert (effect, second) == (None, Delivered())
    assert [type(error) for error in hand.errors] == [CommitRefusedError]
    assert await shop.client.mget(shop.key("count"), shop.key("effect")) == [b"6", b"1"]
    assert (hand.calls, await mark(shop, box, handled)) == (2, "done")


async def ended(shop: Shop, hand: Hand, handled: Message) -> tuple[int, int]:
    """Have a message delivered until it is acknowledged; return how often it took effect, and count all events."""

    async def is_acked() -> bool:
        return await hand.deliver(handled) == Delivered()

    await until(is_acked, "the acknowledgement")
    return int(await shop.client.get(shop.key(str(handled.id))) or 0), (await shop.store().stats()).pending


def writing(shop: Shop) -> Callable[[Message], Any]:
    """Return a handler whose effect tells for which message it was, and which leads to an event."""

    async def handle(received: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key(str(received.id)), 1)
        return [Message(topic="events", type="stock.reserved", payload=b"{}")]

    return handle


@pytest.mark.requirement("S0-16", "S0-21", "S0-22", "S0-30")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", ["waiting", "answered"])
async def test_a_handling_that_is_cancelled_anywhere_takes_effect_once_in_the_end(
    shop: Shop,
    mode: Any,  # noqa: ANN401
    moment: Moment,
) -> None:
    """At each of its awaits; the redelivery finds all of it or nothing, and is acked."""
    hand = handled_by(shop, inbox(lease=SHORT), writing(shop), shop.also(shop.client, mode=mode))
    count = 0

    for cut in cuts(moment=moment):
        count += 1
        handled = message()
        await cut.run(cast("Coroutine[Any, Any, Any]", hand.chain(handled)))

        assert await ended(shop, hand, handled) == (1, count), cut
    assert count > 2


@pytest.mark.requirement("S0-30", "S0-36")
@pytest.mark.parametrize("mode", MODES)
async def test_a_handling_that_loses_its_connections_anywhere_takes_effect_once_in_the_end(
    shop: Shop,
    mode: Any,  # noqa: ANN401
) -> None:
    """All connections are reset at each of its awaits, which says nothing of what the server did."""
    async with through_proxy(shop) as (proxy, client):
        box = inbox(lease=SHORT)
        shaky = handled_by(shop, box, writing(shop), shop.also(client, mode=mode))
        hand = handled_by(shop, box, writing(shop))
        count = 0
        for cut in cuts(fault=proxy.cut):
            count += 1
            handled = message()
            with suppress(StoreUnavailableError, CommitUnknownError):
                await cut.run(cast("Coroutine[Any, Any, Any]", shaky.chain(handled)))

            assert await ended(shop, hand, handled) == (1, count), cut
    assert count > 2


# -- the whole stack --------------------------------------------------------------------------------------------


async def nothing(received: Message) -> Sequence[Message]:
    return []


async def failing(received: Message) -> Sequence[Message]:
    raise ZeroDivisionError


def counting(shop: Shop) -> Callable[[Message], Any]:
    async def handle(received: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
        return []

    return handle


class Hand:
    """A consumer whose deliveries are made by hand, and what it said of them."""

    def __init__(self, work: Callable[[Message], Any], *middlewares: Middleware) -> None:
        self.calls = 0
        self.heard: list[events.Event] = []
        self.errors: list[Exception] = []
        self.trace: list[str] = []
        router = Router()
        self._work = work

        @router.on("order.placed")
        async def handle(received: Message) -> Sequence[Message]:
            self.calls += 1
            outputs: Sequence[Message] = await self._work(received)
            return outputs

        async def watch(received: Message, call_next: Callable[[Message], Any]) -> Sequence[Message]:
            try:
                outputs: Sequence[Message] = await call_next(received)
            except Exception as error:
                self.errors.append(error)
                raise
            return outputs

        subscriber = MemoryBroker().subscribe("orders", group="stock")
        check_order(middlewares)
        connect_middlewares(middlewares)  # as a consumer does when it starts
        self._consumer = Consumer(subscriber, router, watch, *middlewares, listener=lambda _: None)
        self.chain = self._consumer._chain  # noqa: SLF001 -- what handles without an ack
        router.start()

    async def deliver(self, handled: Message) -> Outcome:
        """Have a delivery of a message handled, and return what was said of it."""
        outcomes: list[Outcome] = []

        async def settle(outcome: Outcome) -> None:
            self.trace.append("ack" if isinstance(outcome, Delivered) else "nack")
            assert in_transaction() is None
            outcomes.append(outcome)

        await self._consumer.handle(Delivery(handled, settle))
        [outcome] = outcomes
        return outcome


def ordered(shop: Shop, transaction: TransactionMiddleware, inbox: InboxMiddleware) -> tuple[Middleware, Middleware]:
    """Return the outer and the inner of two middlewares."""
    is_inbox_first = shop.order == "inbox_first" and inbox.can_claim_first
    return (inbox, transaction) if is_inbox_first else (transaction, inbox)


def handled_by(
    shop: Shop, box: Inbox, work: Callable[[Message], Any], transactions: RedisTransactions | None = None
) -> Hand:
    heard: list[events.Event] = []
    outer, inner = ordered(
        shop, TransactionMiddleware(transactions or shop.transactions), InboxMiddleware(box, listener=heard.append)
    )
    hand = Hand(work, outer, inner, OutboxMiddleware(Outbox(namespace=shop.tag)))
    hand.heard = heard
    return hand


@pytest.mark.requirement("S0-17")
async def test_a_busy_message_is_released_for_a_moment_and_never_acknowledged(shop: Shop) -> None:
    """The broker is told when to bring it again, at the cost of no attempt."""
    box, handled = inbox(lease=timedelta(minutes=10)), message()
    hand = handled_by(shop, box, counting(shop))

    async with workers(shop, box) as (worker, _):
        assert await worker.claim(handled) is not None
        outcome = await hand.deliver(handled)

    assert isinstance(outcome, Release)
    assert timedelta(milliseconds=200) < outcome.delay < timedelta(minutes=1)
    assert hand.calls == 0


@pytest.mark.requirement("S0-21", "S0-37")
async def test_a_handler_that_fails_is_nacked_with_its_own_error(shop: Shop) -> None:
    """Discard, take the mark away, nack; the error is the handler's."""
    box, handled = inbox(), message()
    bad = handled_by(shop, box, failing)

    outcome = await bad.deliver(handled)

    assert isinstance(outcome, Retry)
    assert [type(error) for error in bad.errors] == [ZeroDivisionError]
    assert await mark(shop, box, handled) == ""
    assert await handled_by(shop, box, counting(shop)).deliver(handled) == Delivered()


@pytest.mark.requirement("S0-20")
async def test_whoever_was_fenced_starts_again_and_finds_the_message_done(shop: Shop) -> None:
    """The lease ended in the handler and another worker was faster; it is a duplicate then, and acknowledged."""
    box, handled = inbox(lease=SHORT), message()
    other = handled_by(shop, box, counting(shop))

    async def handle(received: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
        await until(has_no_mark(shop, box, handled), "the end of the lease")
        assert await elsewhere(other.deliver(handled)) == Delivered()
        return []

    late = handled_by(shop, box, handle)
    other_trace = await late.deliver(handled)

    assert (other_trace, late.calls, await effects(shop)) == (Delivered(), 1, (1, 0))
    assert [type(event) for event in late.heard] == [events.DuplicateSkipped]


@pytest.mark.requirement("S0-09", "S0-10", "S0-11", "S0-15", "S0-44", "S0-60")
async def test_the_whole_stack_in_one_takes_a_message_from_the_broker_to_the_outbox(shop: Shop) -> None:
    """Handled once, stored together, acknowledged last; then a duplicate."""
    store, broker, router, heard = (
        RedisStore(shop.client, namespace=shop.tag),
        MemoryBroker(),
        Router(),
        list[events.Event](),
    )
    stack = transactional(store, consumer="stock", listener=heard.append)
    placed = message()

    @router.on("order.placed")
    async def reserve(received: Message) -> list[Message]:
        await current_pipeline(shop.client).hincrby(shop.key("stock"), "apples", -1)
        return [Message(topic="events", type="stock.reserved", payload=b"{}")]

    consumer = Consumer(broker.subscribe("orders", group="stock"), router, stack, listener=heard.append)
    running = asyncio.create_task(consumer.run())
    for _ in range(2):
        await broker.publish_batch([placed])
        await until(lambda: broker.backlog("stock") == 0, "the acknowledgement")
    await consumer.stop()
    await running

    assert await shop.client.hget(shop.key("stock"), "apples") == b"-1"
    assert [found.type for found in await shop.published()] == ["stock.reserved"]
    assert sum(isinstance(event, events.DuplicateSkipped) for event in heard) == 1


@pytest.mark.requirement("S0-21")
async def test_a_message_that_fails_too_often_is_a_dead_letter_beside_the_inbox_once(shop: Shop) -> None:
    """Kept with its error, once for each consumer and message, and acknowledged then."""
    store, handled = RedisStore(shop.client, namespace=shop.tag), message(tenant_id=TENANT)
    stack = transactional(store, consumer="stock", max_attempts=1, listener=lambda _: None)
    box = store.inbox("stock", mode="pessimistic", retention=timedelta(days=1), redelivery_horizon=None)

    outcome = await Hand(failing, stack).deliver(handled)
    await StoredDeadLetters(box, shop.transactions).bury(handled, "again")
    letters = await shop.client.hgetall(box.dead_letters(shop.tag))

    assert outcome == Delivered()
    field = f"stock:{handled.id}:{TENANT}".encode()
    assert letters.keys() == {field, field + b":error", field + b":attempts"}
    assert (letters[field], letters[field + b":attempts"]) == (packed(handled), b"1")
    assert b"ZeroDivisionError" in letters[field + b":error"]


@pytest.mark.requirement("S0-30")
async def test_a_message_in_quarantine_is_a_dead_letter(shop: Shop) -> None:
    """It is put where somebody will find it, however few attempts it has had."""
    store, handled = RedisStore(shop.client, namespace=shop.tag), message()
    box = store.inbox("stock", mode="pessimistic", retention=timedelta(days=1), redelivery_horizon=None)
    await shop.client.set(box.key(shop.tag, handled), f"partial:{uuid4().hex} 1 of 2 applied: ERR")
    stack = transactional(store, consumer="stock", listener=lambda _: None)
    hand = Hand(nothing, stack)

    outcome = await hand.deliver(handled)

    assert (outcome, hand.calls) == (Delivered(), 0)
    assert await shop.client.hlen(box.dead_letters(shop.tag)) == 3


@pytest.mark.requirement("S0-31")
async def test_the_client_alone_is_enough_for_the_middlewares(valkey_server: ValkeyClient) -> None:
    """`TransactionMiddleware(client)`, with the tag that there is by default."""
    client = connect(valkey_server.dsn)
    box, handled, key = inbox(), message(), f"effect-{uuid4().hex}"

    async def handle(received: Message) -> Sequence[Message]:
        await current_pipeline(client).incrby(key, 1)
        return []

    hand = Hand(handle, TransactionMiddleware(client), InboxMiddleware(box, listener=lambda _: None))
    outcomes = [await hand.deliver(handled), await hand.deliver(handled)]

    assert outcomes == [Delivered(), Delivered()]
    assert (await client.get(key), hand.calls) == (b"1", 1)
    await client.aclose()


@pytest.mark.requirement("S2-41")
@pytest.mark.parametrize("mode", ["pessimistic", "optimistic"])
async def test_messages_with_the_same_dedupe_key_are_one_message(shop: Shop, mode: Mode) -> None:
    """And those of another tenant, or without a key, are others."""
    box = inbox(mode=mode, by="dedupe_key")
    first, again = (Message(topic="orders", payload=b"{}", dedupe_key="once") for _ in range(2))
    other = Message(topic="orders", payload=b"{}", dedupe_key="once", tenant_id=uuid4())
    plain, alike = (Message(topic="orders", payload=b"{}") for _ in range(2))

    admitted: list[bool] = []
    for message in (first, again, other, plain, alike):
        async with shop.transactions.begin() as transaction:
            is_known = await box.has(transaction, message)
            admitted.append(not is_known and await box.admit(transaction, message))

    assert admitted == [True, False, True, True, True]


async def test_a_renewal_that_was_stopped_before_it_began_renews_nothing(shop: Shop) -> None:
    """The lease of a message that was given up must run out."""
    mark, lease = Mark(shop.key("mark"), kept=timedelta(minutes=1), is_claimed=True), timedelta(milliseconds=30)
    await shop.client.set(mark.key, mark.expected, px=60_000)
    renewal = Renewal(
        Client(shop.client, timeout=timedelta(seconds=5)), mark, lease=lease, longest=timedelta(minutes=1)
    )

    await renewal.stop()
    await asyncio.sleep(2 * lease.total_seconds())  # what does not happen cannot be awaited

    assert await shop.client.pttl(mark.key) > 30_000
