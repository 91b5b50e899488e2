"""`transactional`: effect, mark and outputs of a message are stored together, and then it is acknowledged."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import UUID

import pytest

from postroom import Consumer, Message, Outbox, Router
from postroom.brokers import MemoryBroker
from postroom.dead_letters import DeadLetters
from postroom.delivery import Delivery
from postroom.errors import (
    AlreadyHandledError,
    CommitUnknownError,
    ConfigurationError,
    InvalidMessageError,
    MiddlewareOrderError,
    NoTransactionError,
    RejectError,
    SchemaMissingError,
    StoreUnavailableError,
)
from postroom.events import DeadLettered, DuplicateSkipped, Event
from postroom.inbox import Inbox, Mode
from postroom.middleware import (
    DeadLetterMiddleware,
    InboxMiddleware,
    OutboxMiddleware,
    TransactionMiddleware,
    transactional,
)
from postroom.middleware.chain import Middleware, chained
from postroom.store import Delivered, Outcome, Release, Retry
from postroom.stores import MySQLStore, PostgresStore, SQLiteStore, SQLStore
from postroom.stores.sql.drivers import asyncpg as asyncpg_driver
from postroom.testing.faults import FaultProxy
from postroom.testing.waiting import until
from postroom.transaction import Transaction, current_transaction, in_transaction, transactions_of

from .test_transactions import LITE, MY, PG, TABLE, _run, _run_async, asking, through


@dataclass
class Shop:
    """A store, and a way to look at its database from outside."""

    family: str
    dsn: str
    store: SQLStore
    ask: Callable[[str], Any]

    async def look(self, sql: str) -> list[Any]:
        return [row[0] for row in await asyncio.to_thread(self.ask, sql)]

    async def effects(self) -> list[int]:
        return await self.look("SELECT id FROM business ORDER BY id")

    async def outputs(self) -> list[str]:
        return await self.look("SELECT type FROM postroom_outbox ORDER BY seq")

    async def marks(self) -> int:
        return int((await self.look("SELECT count(*) FROM postroom_inbox"))[0])

    async def dead(self) -> int:
        return int((await self.look("SELECT count(*) FROM postroom_inbox_dead"))[0])

    async def write(self, number: int) -> None:
        """Write through the transaction of a handler, as an adapter does."""
        transaction = current_transaction()
        run = _run if self.family == LITE else _run_async
        await transaction.do(run, f"INSERT INTO business (id) VALUES ({number})")


def store_on(family: str, dsn: str) -> SQLStore:
    timeout = timedelta(seconds=10)
    if family == PG:
        return PostgresStore(dsn, timeout=timeout)
    return MySQLStore(dsn, timeout=timeout) if family == MY else SQLiteStore(dsn, timeout=timeout)


@asynccontextmanager
async def shop_on(family: str, request: pytest.FixtureRequest) -> AsyncGenerator[Shop]:
    dsn = str(request.getfixturevalue({PG: "postgres_dsn", MY: "mariadb_dsn", LITE: "sqlite_path"}[family]))
    store = store_on(family, dsn)
    await store.apply_schema()
    ask = asking(family, dsn)
    await asyncio.to_thread(ask, TABLE[family])
    yield Shop(family, dsn, store, ask)
    await store.close()


@pytest.fixture(params=[PG, MY, LITE])
async def shop(request: pytest.FixtureRequest) -> AsyncGenerator[Shop]:
    """A shop on each database in turn."""
    async with shop_on(request.param, request) as opened:
        yield opened


def message(**parts: Any) -> Message:  # noqa: ANN401
    return Message(topic="orders", type="order.placed", payload=b"{}", attempt=1, **parts)


class Hand:
    """A delivery whose settlement is seen, and what was stored by then."""

    def __init__(self, shop: Shop, content: Message) -> None:
        self.shop = shop
        self.outcomes: list[Outcome] = []
        self.effects: list[int] = []
        self.dead = 0
        self.is_in_transaction: bool | None = None
        self.delivery = Delivery(content, self._settle)

    async def _settle(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.effects = await self.shop.effects()
        self.dead = await self.shop.dead()
        self.is_in_transaction = in_transaction() is not None


Work = Callable[[Message], Any]


def consumer_of(work: Work, *middlewares: Middleware, listener: Callable[[Event], None] | None = None) -> Consumer:
    router = Router()

    async def handle(received: Message) -> Sequence[Message] | None:
        outputs: Sequence[Message] | None = await work(received)
        return outputs

    router.on("order.placed")(handle)
    options: dict[str, Any] = {} if listener is None else {"listener": listener}
    return Consumer(MemoryBroker().subscribe("orders", group="stock"), router, *middlewares, **options)


async def deliver(shop: Shop, consumer: Consumer, content: Message) -> Hand:
    hand = Hand(shop, content)
    await consumer.handle(hand.delivery)
    return hand


# -- once ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G7", "G8", "F-16", "F-17", "F-19", "S1-01", "S1-06", "S1-14", "S1-23", "S1-28")
@pytest.mark.parametrize("mode", ["pessimistic", "optimistic"])
async def test_effect_mark_and_outputs_are_stored_together_and_then_it_is_acknowledged(shop: Shop, mode: Mode) -> None:
    """With a broker, from end to end."""
    broker, router = MemoryBroker(), Router()
    seen: list[bool] = []

    @router.on("order.placed")
    async def reserve(received: Message) -> list[Message]:
        await shop.write(1)
        # Nobody else sees anything of it yet; SQLite lets nobody look who would wait for it.
        seen.append(await shop.effects() == [] and await shop.outputs() == [] and await shop.marks() == 0)
        return [Message(topic="stock", type=f"n{n}", payload=b"{}") for n in (3, 1, 2)]

    stack = transactional(shop.store, consumer="stock", mode=mode)
    consumer = Consumer(broker.subscribe("orders", group="stock"), router, stack)
    running = asyncio.create_task(consumer.run())
    await broker.publish_batch([message()])

    async def is_done() -> bool:
        return await shop.marks() == 1

    await until(is_done, "the commit")
    await consumer.stop()
    await running

    assert seen == [True]
    assert await shop.effects() == [1]
    assert await shop.outputs() == ["n3", "n1", "n2"]
    assert broker.confirmed == 1  # the outputs are the dispatcher's, not the consumer's


@pytest.mark.requirement("G8", "F-16", "F-17")
async def test_a_message_is_acknowledged_after_its_commit_and_outside_of_it(shop: Shop) -> None:
    """Whoever acknowledges finds the effect stored and no transaction open."""
    consumer = consumer_of(lambda _: shop.write(1), transactional(shop.store, consumer="stock"))

    hand = await deliver(shop, consumer, message())

    assert hand.outcomes == [Delivered()]
    assert hand.effects == [1]
    assert hand.is_in_transaction is False


@pytest.mark.requirement("G7", "S1-15")
@pytest.mark.parametrize("mode", ["pessimistic", "optimistic"])
async def test_a_message_that_comes_again_is_acknowledged_and_nothing_else(shop: Shop, mode: Mode) -> None:
    """Without an error and without outputs."""
    told: list[Event] = []
    runs = 0

    async def work(_: Message) -> list[Message]:
        nonlocal runs
        runs += 1
        await shop.write(runs)
        return [Message(topic="stock", type="reserved", payload=b"{}")]

    consumer = consumer_of(work, transactional(shop.store, consumer="stock", mode=mode, listener=told.append))
    content = message()

    first, second = await deliver(shop, consumer, content), await deliver(shop, consumer, content)

    assert first.outcomes == second.outcomes == [Delivered()]
    assert (runs, await shop.effects(), await shop.outputs()) == (1, [1], ["reserved"])
    assert told == [DuplicateSkipped("stock", content.id, "order.placed", content.topic, content.key)]


@pytest.mark.requirement("S1-16")
async def test_another_consumer_handles_the_same_message(shop: Shop) -> None:
    """Each by its own name."""
    numbers = iter((1, 2))
    content = message()

    for name in ("stock", "mail"):
        await deliver(
            shop, consumer_of(lambda _: shop.write(next(numbers)), transactional(shop.store, consumer=name)), content
        )

    assert await shop.effects() == [1, 2]
    assert await shop.marks() == 2


@pytest.mark.requirement("G7", "S1-21")
@pytest.mark.parametrize("mode", ["pessimistic", "optimistic"])
async def test_two_deliveries_at_once_have_one_effect(shop: Shop, mode: Mode) -> None:
    """Pessimistic, one handler runs; optimistic, what the second did is undone."""
    runs = 0

    async def work(_: Message) -> list[Message]:
        nonlocal runs
        runs += 1
        await shop.write(runs)
        await asyncio.sleep(0.05)
        return [Message(topic="stock", type="reserved", payload=b"{}")]

    consumer = consumer_of(work, transactional(shop.store, consumer="stock", mode=mode))
    content = message()

    hands = await asyncio.gather(*(deliver(shop, consumer, content) for _ in range(3)))

    assert [hand.outcomes for hand in hands] == [[Delivered()]] * 3
    assert len(await shop.effects()) == 1
    assert await shop.outputs() == ["reserved"]
    assert await shop.marks() == 1
    if mode == "pessimistic":
        assert runs == 1


# -- nothing at all --------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-14", "S1-27")
@pytest.mark.parametrize("mode", ["pessimistic", "optimistic"])
@pytest.mark.parametrize("error", [LookupError, TimeoutError])
async def test_a_handler_that_fails_leaves_nothing_behind(shop: Shop, mode: Mode, error: type[Exception]) -> None:
    """And its message is handled when it comes again."""
    failures = [error]

    async def work(_: Message) -> None:
        await shop.write(1)
        if failures:
            raise failures.pop()

    consumer = consumer_of(work, transactional(shop.store, consumer="stock", mode=mode))
    content = message()

    first = await deliver(shop, consumer, content)
    assert isinstance(first.outcomes[0], Retry)
    assert (await shop.effects(), await shop.outputs(), await shop.marks()) == ([], [], 0)

    second = await deliver(shop, consumer, content)
    assert second.outcomes == [Delivered()]
    assert await shop.effects() == [1]


@pytest.mark.requirement("S1-27")
async def test_an_output_that_cannot_be_stored_undoes_everything(shop: Shop) -> None:
    """Effect and mark as well."""

    async def work(_: Message) -> list[Message]:
        await shop.write(1)
        return [Message(topic="", payload=b"{}", type="x")]

    hand = await deliver(shop, consumer_of(work, transactional(shop.store, consumer="stock")), message())

    assert isinstance(hand.outcomes[0], Retry)
    assert (await shop.effects(), await shop.outputs(), await shop.marks()) == ([], [], 0)


@pytest.mark.requirement("F-20")
async def test_a_cancelled_handler_leaves_nothing_behind(shop: Shop) -> None:
    """The message is not acknowledged."""
    is_running = asyncio.Event()

    async def work(_: Message) -> None:
        await shop.write(1)
        is_running.set()
        await asyncio.Event().wait()

    consumer = consumer_of(work, transactional(shop.store, consumer="stock"))
    hand = Hand(shop, message())
    task = asyncio.create_task(consumer.handle(hand.delivery))
    await is_running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert Delivered() not in hand.outcomes
    assert (await shop.effects(), await shop.marks()) == ([], 0)


@pytest.mark.requirement("G1", "G8", "G12")
async def test_an_error_that_a_handler_swallows_is_not_acknowledged(request: pytest.FixtureRequest) -> None:
    """PostgreSQL has given up the transaction, and answers COMMIT with ROLLBACK."""
    async with shop_on(PG, request) as shop:

        async def work(_: Message) -> None:
            await shop.write(1)
            with suppress(Exception):
                await current_transaction().connection.execute("SELECT * FROM no_such_table")

        consumer = consumer_of(work, transactional(shop.store, consumer="stock"))
        hands = [await deliver(shop, consumer, message()) for _ in range(2)]

        assert all(isinstance(hand.outcomes[0], Retry) for hand in hands)
        assert (await shop.effects(), await shop.marks()) == ([], 0)


# -- what a stack is made of -----------------------------------------------------------------------------------


async def outputs_of(_: Message) -> list[Message]:
    return [Message(topic="stock", type="reserved", payload=b"{}")]


@pytest.mark.requirement("S1-02")
async def test_each_part_of_the_stack_works_with_fewer_others(shop: Shop) -> None:
    """A transaction alone, with an inbox, with an outbox, with both."""
    store, content = shop.store, message()
    await store.open()
    transaction = TransactionMiddleware(store)
    inbox, outbox = InboxMiddleware(store.inbox("stock")), OutboxMiddleware(store.outbox())

    async def work(number: int, _: Message) -> list[Message]:
        await shop.write(number)
        return [Message(topic="stock", type=f"of {number}", payload=b"{}")] if number > 2 else []

    stacks: list[tuple[Middleware, ...]] = [
        (transaction,),
        (transaction, inbox),
        (transaction, outbox),
        (transaction, InboxMiddleware(store.inbox("mail")), outbox),
    ]
    for number, stack in enumerate(stacks, 1):
        consumer = consumer_of(lambda received, number=number: work(number, received), *stack)  # type: ignore[misc]
        hand = await deliver(shop, consumer, content)
        assert hand.outcomes == [Delivered()], number

    assert await shop.effects() == [1, 2, 3, 4]
    assert await shop.outputs() == ["of 3", "of 4"]
    assert await shop.marks() == 2


@pytest.mark.requirement("S1-22", "S1-24", "S1-25")
async def test_outputs_go_no_further_than_the_outbox(shop: Shop) -> None:
    """All to one topic, if it is given; without outputs nothing is written."""
    stack = transactional(shop.store, consumer="stock", topic="elsewhere")

    async def nothing(_: Message) -> list[Message]:
        return []

    first = await stack(message(), outputs_of)
    second = await stack(message(), nothing)

    assert (list(first), list(second)) == ([], [])
    assert await shop.look("SELECT topic FROM postroom_outbox") == ["elsewhere"]


@pytest.mark.requirement("S1-17", "S1-26")
async def test_without_a_transaction_the_first_message_is_an_error(shop: Shop) -> None:
    """The error names what is missing; before anything was handled."""
    runs: list[Message] = []

    async def handle(received: Message) -> list[Message]:
        runs.append(received)
        return []

    for middleware in (InboxMiddleware(shop.store.inbox("stock")), OutboxMiddleware(Outbox())):
        with pytest.raises(NoTransactionError, match="TransactionMiddleware"):
            await middleware(message(), handle)
        with pytest.raises(MiddlewareOrderError, match="TransactionMiddleware"):
            await consumer_of(handle, middleware).run()

    assert runs == []


@pytest.mark.requirement("S1-18")
async def test_a_message_without_an_id_is_an_error(shop: Shop) -> None:
    """It could never be known again."""
    stack = transactional(shop.store, consumer="stock")
    nameless = replace(message(), id=None)  # type: ignore[arg-type]

    with pytest.raises(InvalidMessageError, match="no id"):
        await stack(nameless, outputs_of)

    assert (await shop.outputs(), await shop.marks()) == ([], 0)


@pytest.mark.requirement("S1-04", "S1-19")
async def test_a_store_without_tables_is_an_error_on_the_first_message(sqlite_path: Any) -> None:  # noqa: ANN401
    """Nothing is created on the way."""
    store = SQLiteStore(sqlite_path)

    with pytest.raises(SchemaMissingError):
        await transactional(store, consumer="stock")(message(), outputs_of)

    await store.close()


# -- a mark that travels with BEGIN -------------------------------------------------------------------------------

QUOTES = "o'hara \\'; DROP TABLE postroom_inbox; -- %s {} ü"


@pytest.mark.requirement("G7", "S1-28")
@pytest.mark.parametrize("name", ["stock", QUOTES])
async def test_asyncpg_marks_a_message_along_with_begin(name: str, request: pytest.FixtureRequest) -> None:
    """One round trip less, whatever the consumer is called."""
    queries: list[str] = []
    numbers = count(1)

    def hear(record: Any) -> None:  # noqa: ANN401
        queries.append(record.query)

    async with shop_on(PG, request) as shop:

        async def work(_: Message) -> None:
            await shop.write(next(numbers))
            current_transaction().connection.add_query_logger(hear)

        consumer = consumer_of(work, transactional(shop.store, consumer=name))
        for content in (message(), first := message(), first):
            await deliver(shop, consumer, content)

        kinds = [" ".join(query.split()) for query in queries]
        assert [kind.partition(" (")[0] for kind in kinds if "postroom_inbox" in kind] == [
            """BEGIN; SET LOCAL synchronous_commit TO 'on';INSERT INTO "postroom_inbox\""""
        ] * 2
        assert not [kind for kind in kinds if kind == "BEGIN;"]
        assert await shop.look("SELECT consumer FROM postroom_inbox") == [name] * 2
        assert await shop.effects() == [1, 2]


@pytest.mark.requirement("G7")
async def test_a_version_of_asyncpg_that_takes_nothing_along_is_marked_by_the_inbox(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not known of the inside of asyncpg costs a round trip, and no promise."""
    monkeypatch.setattr(asyncpg_driver, "_listen", lambda *_: None)
    async with shop_on(PG, request) as shop:
        consumer = consumer_of(lambda _: shop.write(1), transactional(shop.store, consumer="stock"))
        content = message()
        hands = [await deliver(shop, consumer, content) for _ in range(2)]

        assert [hand.outcomes for hand in hands] == [[Delivered()]] * 2
        assert (await shop.marks(), await shop.effects()) == (1, [1])


@pytest.mark.requirement("G13")
async def test_a_mark_that_is_refused_with_begin_says_why_and_spares_the_other_connections(
    request: pytest.FixtureRequest,
) -> None:
    """A missing table is told as ever, and nobody else's connection is closed for it."""
    async with shop_on(PG, request) as shop:
        stack, opener = transactional(shop.store, consumer="stock"), shop.store.transactions()
        async with opener.begin() as one, opener.begin() as other:
            connections = {id(one.connection), id(other.connection)}
        await stack(message(), outputs_of)
        await asyncio.to_thread(shop.ask, "ALTER TABLE postroom_inbox RENAME TO away")

        with pytest.raises(SchemaMissingError, match="postroom_inbox"):
            await stack(message(), outputs_of)

        async with opener.begin() as left:
            assert id(left.connection) in connections


# -- COMMIT without an answer ----------------------------------------------------------------------------------


@pytest.mark.requirement("G7", "G12")
@pytest.mark.parametrize("family", [PG, MY])
@pytest.mark.parametrize("mode", ["pessimistic", "optimistic"])
async def test_a_commit_without_an_answer_is_resolved_by_the_inbox(
    family: str, mode: Mode, request: pytest.FixtureRequest
) -> None:
    """It is not acknowledged and not undone; when it comes again, it is known."""
    async with shop_on(family, request) as shop:
        url = urlsplit(shop.dsn)
        async with FaultProxy(str(url.hostname), url.port or 0) as proxy:
            store = store_on(family, through(shop.dsn, proxy) + ("?sslmode=disable" if family == PG else ""))
            stack = transactional(store, consumer="stock", mode=mode)
            caught: list[CommitUnknownError] = []

            async def keeping(received: Message, call_next: Any) -> Sequence[Message]:  # noqa: ANN401
                try:
                    answer: Sequence[Message] = await call_next(received)
                except CommitUnknownError as error:
                    caught.append(error)
                    raise
                return answer

            async def work(_: Message) -> None:
                await shop.write(1)
                proxy.drop_reply(b"COMMIT")

            consumer, content = consumer_of(work, keeping, stack), message()
            first = await deliver(shop, consumer, content)
            proxy.heal()
            assert isinstance(first.outcomes[0], Release)
            assert await caught[0].resolve() is True
            second = await deliver(shop, consumer, content)
            await store.close()

        assert second.outcomes == [Delivered()]
        assert (await shop.effects(), await shop.marks(), await shop.dead()) == ([1], 1, 0)


@pytest.mark.requirement("G12")
@pytest.mark.parametrize("family", [PG, MY])
async def test_a_commit_that_never_arrived_is_resolved_as_not_stored(
    family: str, request: pytest.FixtureRequest
) -> None:
    """The same error, the other answer."""
    async with shop_on(family, request) as shop:
        stack = transactional(shop.store, consumer="stock")
        content = message()
        await stack(message(), outputs_of)
        error = CommitUnknownError()
        inbox = shop.store.inbox("stock")
        error.witness = lambda: inbox.was_handled(shop.store.transactions(), content)

        assert await error.resolve() is False


# -- dead letters ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("G2", "G9")
@pytest.mark.parametrize("error", [LookupError, RejectError])
async def test_a_dead_letter_is_stored_before_its_message_is_acknowledged(shop: Shop, error: type[Exception]) -> None:
    """A rejected one at once, another one after its budget; nothing else of it stays."""
    told: list[Event] = []

    async def work(_: Message) -> None:
        await shop.write(1)
        raise error("bad")

    stack = transactional(shop.store, consumer="stock", max_attempts=3, listener=told.append)
    attempt = 1 if error is RejectError else 3
    hand = await deliver(shop, consumer_of(work, stack), replace(message(), attempt=attempt))

    assert hand.outcomes == [Delivered()]
    assert hand.dead == 1
    assert (await shop.effects(), await shop.marks()) == ([], 0)
    assert [type(event) for event in told] == [DeadLettered]


@pytest.mark.requirement("G9")
async def test_a_failure_within_its_budget_is_no_dead_letter(shop: Shop) -> None:
    """It comes again."""

    async def work(_: Message) -> None:
        raise LookupError

    stack = transactional(shop.store, consumer="stock", max_attempts=3)
    hand = await deliver(shop, consumer_of(work, stack), replace(message(), attempt=2))

    assert isinstance(hand.outcomes[0], Retry)
    assert hand.dead == 0


@pytest.mark.requirement("G13")
async def test_an_outage_makes_no_dead_letter(request: pytest.FixtureRequest) -> None:
    """However often the message has come, it is not its fault; on a pool of the caller's as well."""
    import asyncpg  # noqa: PLC0415

    nowhere = asyncpg.create_pool("postgresql://nobody@127.0.0.1:1/shop", min_size=0)
    async with shop_on(PG, request) as shop, nowhere as pool:
        letters = DeadLetterMiddleware(_Never(), max_attempts=3)
        consumer = consumer_of(lambda _: shop.write(1), letters, TransactionMiddleware(pool))
        hand = await deliver(shop, consumer, replace(message(), attempt=3))

        assert isinstance(hand.outcomes[0], Release)
        with pytest.raises(StoreUnavailableError):
            async with transactions_of(pool).begin():
                pass


@pytest.mark.requirement("G9", "G13")
async def test_a_message_that_breaks_its_own_connection_is_put_aside_in_the_end(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost connection is an outage a few times, and then it is the message that is suspected."""
    monkeypatch.setattr(sys.modules[TransactionMiddleware.__module__], "PARDONED", 5)
    async with shop_on(PG, request) as shop:

        async def work(_: Message) -> None:
            connection = current_transaction().connection
            with suppress(Exception):
                await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            await connection.execute("SELECT 1")

        consumer = consumer_of(work, transactional(shop.store, consumer="stock", max_attempts=2))
        content = message()
        outcomes = [(await deliver(shop, consumer, content)).outcomes[0] for _ in range(6)]
        last = await deliver(shop, consumer, replace(content, attempt=2))

        assert [type(outcome) for outcome in outcomes] == [Release] * 5 + [Retry]
        assert last.outcomes == [Delivered()]
        assert (await shop.marks(), await shop.dead()) == (0, 1)


@pytest.mark.requirement("G13", "S1-21")
async def test_a_wait_for_the_inbox_that_takes_too_long_is_no_fault_of_the_message(
    request: pytest.FixtureRequest,
) -> None:
    """While somebody else handles it, a second delivery goes back and is no dead letter."""
    async with shop_on(PG, request) as shop:
        store = PostgresStore(shop.dsn, timeout=timedelta(milliseconds=300))
        content = replace(message(), attempt=3)
        consumer = consumer_of(outputs_of, transactional(store, consumer="stock", max_attempts=3))
        inbox = shop.store.inbox("stock")
        async with shop.store.transactions().begin() as holder:
            await inbox.admit(holder, content)
            hand = await deliver(shop, consumer, content)
        await store.close()

        assert isinstance(hand.outcomes[0], Release)
        assert (await shop.marks(), await shop.dead()) == (1, 0)


@pytest.mark.requirement("G13")
@pytest.mark.parametrize("away", [CommitUnknownError(), StoreUnavailableError("away")], ids=["unknown", "away"])
async def test_a_letter_that_cannot_be_stored_costs_no_delivery(shop: Shop, away: Exception) -> None:
    """Whether a COMMIT or the database is lost while a message is put aside, it goes back as it was."""

    class Away:
        async def bury(self, _message: Message, _error: str) -> None:
            raise away

    async def work(_: Message) -> None:
        raise RejectError("never")

    stack = transactional(shop.store, consumer="stock", dead_letters=Away())
    hand = await deliver(shop, consumer_of(work, stack), message())

    assert [type(outcome) for outcome in hand.outcomes] == [Release]


@pytest.mark.requirement("G13")
async def test_to_ask_in_vain_whether_a_message_was_handled_costs_no_delivery(shop: Shop) -> None:
    """It came too often, and the database that knows why is away."""

    async def ask(_: Message) -> bool:
        raise StoreUnavailableError("away")

    async def bury(_message: Message, _error: str) -> None:
        raise AssertionError

    letters = cast("DeadLetters", SimpleNamespace(bury=bury))
    stack = DeadLetterMiddleware(letters, max_attempts=3, was_handled=ask)
    hand = await deliver(shop, consumer_of(outputs_of, stack), replace(message(), attempt=4))

    assert [type(outcome) for outcome in hand.outcomes] == [Release]


@pytest.mark.requirement("G8")
async def test_a_message_that_was_handled_and_comes_too_often_is_no_dead_letter(shop: Shop) -> None:
    """Its acknowledgement may have been lost each time."""
    content = message()
    consumer = consumer_of(lambda _: shop.write(1), transactional(shop.store, consumer="stock", max_attempts=3))
    await deliver(shop, consumer, content)
    hand = await deliver(shop, consumer, replace(content, attempt=4))

    assert hand.outcomes == [Delivered()]
    assert (await shop.effects(), await shop.marks(), await shop.dead()) == ([1], 1, 0)


@pytest.mark.requirement("G7", "G8")
async def test_that_somebody_else_handled_a_message_says_nothing_of_another_transaction(shop: Shop) -> None:
    """An error of that kind from anywhere else is a failure like any other."""

    async def work(received: Message) -> None:
        await shop.write(1)
        raise AlreadyHandledError(received.id, None)

    hand = await deliver(shop, consumer_of(work, transactional(shop.store, consumer="stock")), message())

    assert isinstance(hand.outcomes[0], Retry)
    assert (await shop.effects(), await shop.marks()) == ([], 0)


@pytest.mark.requirement("G7")
async def test_a_joined_message_that_somebody_else_handled_meanwhile_does_not_undo_the_others_effect(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole transaction begins again, and then the joined message is known."""
    inner, outer = message(), message()
    inside: list[Middleware] = [
        TransactionMiddleware(shop.store),
        InboxMiddleware(shop.store.inbox("inner", mode="optimistic")),
    ]
    handle_inner = chained(inside, outputs_of)
    await TransactionMiddleware(shop.store)(inner, chained(inside[1:], outputs_of))
    blind = [True]
    has = Inbox.has

    async def has_not_yet(self: Inbox, transaction: Transaction, received: Message) -> bool:
        return False if blind and blind.pop() else await has(self, transaction, received)

    async def work(_: Message) -> None:
        await shop.write(1)
        await handle_inner(inner)

    monkeypatch.setattr(Inbox, "has", has_not_yet)
    hand = await deliver(shop, consumer_of(work, transactional(shop.store, consumer="outer")), outer)

    assert hand.outcomes == [Delivered()]
    assert (await shop.effects(), await shop.marks()) == ([1], 2)


@pytest.mark.requirement("G12")
async def test_an_unknown_commit_of_another_pool_is_not_resolved_by_this_inbox(shop: Shop) -> None:
    """Only the transaction that was being committed knows what would tell."""
    unknown = CommitUnknownError()

    async def work(_: Message) -> None:
        raise unknown

    await deliver(shop, consumer_of(work, transactional(shop.store, consumer="stock")), message())

    with pytest.raises(ConfigurationError):
        await unknown.resolve()


@pytest.mark.requirement("G13")
async def test_the_purge_goes_on_after_an_unknown_commit(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """To purge again is harmless, and no reason to end a consumer."""
    calls = 0
    purged = asyncio.Event()

    async def purge(self: Inbox, transactions: object, *, limit: int = 1) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise CommitUnknownError
        purged.set()
        return 0

    monkeypatch.setattr(Inbox, "purge", purge)
    stack = transactional(shop.store, consumer="stock", cleanup_interval=timedelta(milliseconds=1))
    serving = asyncio.create_task(stack.serve(lambda _: None))
    await asyncio.wait({serving, waiting := asyncio.create_task(purged.wait())}, return_when=asyncio.FIRST_COMPLETED)
    was_serving = not serving.done()
    for task in (serving, waiting):
        task.cancel()
    await asyncio.wait({serving, waiting})

    assert was_serving


@pytest.mark.requirement("G2")
async def test_letters_without_an_id_are_all_kept(shop: Shop) -> None:
    """What a broker gave no id cannot be told apart, and none may stand for the others."""
    stack = transactional(shop.store, consumer="stock", max_attempts=1)
    for _ in range(2):
        await deliver(shop, consumer_of(outputs_of, stack), replace(message(), id=cast("UUID", None)))

    assert await shop.dead() == 2


@pytest.mark.requirement("G8")
async def test_acknowledging_by_hand_inside_a_transaction_is_refused(shop: Shop) -> None:
    """It would come before the commit."""
    subscriber = MemoryBroker().subscribe("orders", group="stock")
    stack = transactional(shop.store, consumer="stock")

    with pytest.raises(MiddlewareOrderError, match="acking='on_success'"):
        await Consumer(subscriber, Router(), stack, acking="manual").run()


class _Never:
    async def bury(self, message: Message, error: str) -> None:
        raise AssertionError(f"{message.id} was buried: {error}")
