"""The idempotency check lets good handlers pass, and catches each kind of bad one."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import pytest

from postroom import (
    Delivery,
    Message,
    Outbox,
    Release,
    Router,
    current_connection,
    current_delivery,
    current_transaction,
    transactional,
)
from postroom.broker import describe
from postroom.errors import ConfigurationError, MiddlewareOrderError, RejectError
from postroom.handler import Handler
from postroom.middleware import (
    CorrelationMiddleware,
    InboxMiddleware,
    OutboxMiddleware,
    RetryMiddleware,
    TransactionMiddleware,
)
from postroom.middleware.chain import Middleware, Next
from postroom.stores import PostgresStore, SQLiteStore
from postroom.testing.differences import differences, known
from postroom.testing.idempotency import check_idempotency

TABLES = "CREATE TABLE stock (item TEXT PRIMARY KEY, reserved INTEGER); CREATE TABLE log (message_id TEXT, item TEXT)"
RESERVE = "INSERT INTO stock VALUES (?, ?) ON CONFLICT (item) DO UPDATE SET reserved = reserved + excluded.reserved"


@dataclass
class OrderPlaced:
    """What the handlers take."""

    item: str
    quantity: int = 1


@dataclass
class StockReserved:
    """What they tell."""

    item: str


def order(item: str, quantity: int = 1) -> Message:
    payload = b'{"item":"%s","quantity":%d}' % (item.encode(), quantity)
    return Message(topic="orders", type="order.placed", key=item, payload=payload)


ORDERS = [order("chair", 2), order("table"), order("chair")]


@dataclass
class Shop:
    """A database with stock, and handlers that reserve it."""

    path: Path
    #: What a handler keeps outside of the database.
    counted: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def __post_init__(self) -> None:
        self.store = SQLiteStore(self.path)
        with closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(TABLES)
            SQLiteStore.create_tables(connection)
        with closing(sqlite3.connect(self.elsewhere)) as connection:
            connection.executescript(TABLES)

    @property
    def elsewhere(self) -> Path:
        return self.path.with_name("elsewhere.sqlite3")

    def state(self) -> dict[str, object]:
        stock = {"counted": self.counted, "stock": self.rows(self.path), "elsewhere": self.rows(self.elsewhere)}
        return {**stock, "log": self.rows(self.path, "log")}

    def rows(self, path: Path, table: str = "stock") -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(path)) as connection:
            return connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()

    def reset(self) -> None:
        self.counted = 0
        for path in (self.path, self.elsewhere):
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("DELETE FROM stock")
                connection.execute("DELETE FROM log")

    async def check(
        self,
        handler: Handler | Router,
        *messages: Message,
        middlewares: list[Middleware] | None = None,
        any_order: bool = True,
    ) -> None:
        await check_idempotency(
            handler,
            messages or ORDERS,
            store=self.store,
            state=self.state,
            reset=self.reset,
            middlewares=middlewares,
            any_order=any_order,
        )

    async def reserve(self, order: OrderPlaced) -> StockReserved:
        """Do it well: in the transaction that is there."""
        await current_transaction().do(_reserve, order)
        return StockReserved(order.item)


def _reserve(connection: sqlite3.Connection, order: OrderPlaced) -> None:
    connection.execute(RESERVE, (order.item, order.quantity))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop.sqlite3")


async def failure(shop: Shop, handler: Handler | Router, *messages: Message) -> str:
    """Return what the check says of a bad handler."""
    with pytest.raises(AssertionError) as caught:
        await shop.check(handler, *messages)
    return str(caught.value)


# -- good ones -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G7", "G8", "S1-01", "S1-21")
async def test_a_handler_that_works_in_its_transaction_passes(shop: Shop) -> None:
    """Twice, at once, crashed, refused and cancelled at every await, it ends alike."""
    await shop.check(shop.reserve)

    assert shop.rows(shop.path) == [("chair", 3), ("table", 1)]


@pytest.mark.requirement("S1-02")
async def test_a_router_with_middlewares_of_the_user_passes(shop: Shop) -> None:
    """The stack may be put together by hand, and outputs may name the message that led to them."""
    router = Router(topic="stock")
    router.add(OrderPlaced, shop.reserve)
    stack: list[Middleware] = [
        RetryMiddleware(2),
        TransactionMiddleware(shop.store),
        InboxMiddleware(shop.store.inbox("stock")),
        OutboxMiddleware(shop.store.outbox()),
        CorrelationMiddleware(),
    ]

    await shop.check(router, middlewares=stack)


@pytest.mark.requirement("S1-21")
async def test_an_optimistic_inbox_passes(shop: Shop) -> None:
    """Who marks last undoes what was done twice."""
    stack: list[Middleware] = [transactional(shop.store, consumer="stock", mode="optimistic")]

    await shop.check(shop.reserve, ORDERS[0], middlewares=stack)


async def test_a_handler_that_calls_another_in_a_savepoint_passes(shop: Shop) -> None:
    nested = TransactionMiddleware(shop.store, nested="savepoint")

    async def reserve(message: Message) -> None:
        async def inner(message: Message) -> list[Message]:
            await shop.reserve(OrderPlaced("chair"))
            return []

        await nested(message, inner)

    await shop.check(reserve, ORDERS[0])


async def test_a_plain_function_passes(shop: Shop) -> None:
    """A handler that runs on a thread cannot be cancelled, and is waited for."""

    def reserve(order: OrderPlaced) -> StockReserved:
        _reserve(current_transaction().connection, order)
        return StockReserved(order.item)

    await shop.check(reserve, ORDERS[0])


async def test_a_handler_that_keeps_the_id_of_its_message_passes(shop: Shop) -> None:
    """Messages have new ids in each scenario, which must not look like a difference."""

    async def note(message: Message) -> Message:
        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO log VALUES (?, ?)", (str(message.id), message.id.hex))

        await current_transaction().do(write)
        return Message(topic="log", payload=message.id.bytes, headers={"noted": str(message.id)})

    await shop.check(note, ORDERS[0])


async def test_outputs_with_a_dedupe_key_are_not_taken_for_those_of_the_scenario_before(shop: Shop) -> None:
    async def reserve(order: OrderPlaced) -> Message:
        await shop.reserve(order)
        return Message(topic="stock", payload=b"{}", dedupe_key=order.item)

    await shop.check(reserve, order("chair"))


async def test_order_between_keys_may_matter_if_that_is_said(shop: Shop) -> None:
    async def last(order: OrderPlaced) -> None:
        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM stock")
            _reserve(connection, order)

        await current_transaction().do(write)

    await shop.check(last, order("chair"), order("table"), any_order=False)
    said = await failure(shop, last, order("chair"), order("table"))

    assert said.splitlines()[1:] == [
        "- delivered in another order, each key in its own:",
        "    state['stock'][0][0]: expected 'table', found 'chair'",
    ]


@pytest.mark.requirement("G7", "S1-21")
async def test_a_handler_on_a_pool_of_its_own_passes(postgres_dsn: str) -> None:
    """On PostgreSQL two deliveries do run at once, and a cancelled one takes its connection with it."""
    store = PostgresStore(postgres_dsn)
    await store.apply_schema()
    async with asyncpg.create_pool(postgres_dsn, min_size=1, max_size=3) as pool:
        await pool.execute("CREATE TABLE stock (item text PRIMARY KEY, reserved int)")

        async def reserve(order: OrderPlaced) -> StockReserved:
            reserve = RESERVE.replace("?, ?", "$1, $2").replace("= reserved", "= stock.reserved")
            await current_connection(pool).execute(reserve, order.item, order.quantity)
            return StockReserved(order.item)

        async def state() -> object:
            return await pool.fetch("SELECT * FROM stock ORDER BY item")

        async def reset() -> None:
            await pool.execute("DELETE FROM stock")

        stack = [transactional(store, consumer="stock", pool=pool)]
        await check_idempotency(reserve, ORDERS, store=store, state=state, reset=reset, middlewares=stack)

        assert [tuple(row) for row in await pool.fetch("SELECT * FROM stock ORDER BY item")] == [
            ("chair", 3),
            ("table", 1),
        ]
    await store.close()


# -- bad ones --------------------------------------------------------------------------------------------------


async def test_what_is_counted_outside_of_the_transaction_is_caught(shop: Shop) -> None:
    async def count(order: OrderPlaced) -> None:
        shop.counted += 1
        await shop.reserve(order)

    said = await failure(shop, count, ORDERS[0])

    assert said.startswith("the handler is not idempotent\n- crashed after the handler and before the commit")
    assert "left something behind, of 'order.placed' with key 'chair':" in said
    assert "state['counted']: expected 0, found 1" in said
    assert "delivered twice in a row" not in said  # the inbox does see to that


async def test_a_second_connection_that_commits_by_itself_is_caught(shop: Shop) -> None:
    """G1 does not include what is written through a second connection; this finds it."""

    async def elsewhere(order: OrderPlaced) -> StockReserved:
        with closing(sqlite3.connect(shop.elsewhere)) as connection, connection:
            _reserve(connection, order)
        return StockReserved(order.item)

    said = await failure(shop, elsewhere, *ORDERS, order("lamp"))

    assert "- crashed after the handler and before the commit, then delivered again:" in said
    assert "state['elsewhere']: expected [], found [['chair', 2]]" in said
    assert "- cancelled at await 3 while it waited, " in said
    assert "- cancelled at await 3 as the answer came, " in said
    assert "- and 1 more of this kind" in said


async def test_a_write_past_the_transaction_is_caught_even_if_it_may_be_repeated(shop: Shop) -> None:
    """It ends alike when the message comes again; but if it never does, the write stays alone."""

    async def elsewhere(order: OrderPlaced) -> None:
        with closing(sqlite3.connect(shop.elsewhere)) as connection, connection:
            connection.execute("INSERT OR REPLACE INTO stock VALUES (?, 1)", (order.item,))

    said = await failure(shop, elsewhere, ORDERS[0])

    assert "the attempt that failed left something behind" in said


async def test_a_swallowed_error_is_caught(shop: Shop) -> None:
    async def swallow(order: OrderPlaced) -> StockReserved:
        with suppress(Exception):
            await shop.reserve(order)
        return StockReserved(order.item)

    said = await failure(shop, swallow, ORDERS[0])

    assert "- use 1 of the transaction refused, then delivered again:" in said
    assert "state['stock']: expected [['chair', 2]], found []" in said


@pytest.mark.requirement("G8")
async def test_a_middleware_that_swallows_errors_is_caught(shop: Shop) -> None:
    """What is acknowledged without its effect is lost."""

    async def forgive(message: Message, call_next: Next) -> Sequence[Message]:
        try:
            return await call_next(message)
        except Exception:  # noqa: BLE001 -- that is the point
            return []

    with pytest.raises(AssertionError) as caught:
        await shop.check(shop.reserve, ORDERS[0], middlewares=[forgive, transactional(shop.store, consumer="stock")])

    assert "'order.placed' with key 'chair' was acknowledged although its transaction had failed" in str(caught.value)


async def test_a_swallowed_cancellation_is_caught(shop: Shop) -> None:
    async def swallow(order: OrderPlaced) -> StockReserved:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return StockReserved("nothing")
        await shop.reserve(order)
        return StockReserved(order.item)

    said = await failure(shop, swallow, ORDERS[0])

    assert "swallowed its cancellation" in said


async def test_a_task_that_writes_late_is_caught(shop: Shop) -> None:
    """What it writes is no longer part of the transaction."""

    async def late(order: OrderPlaced) -> None:
        async def write_late() -> None:
            await asyncio.sleep(0.01)
            await shop.reserve(order)

        shop.tasks.append(asyncio.create_task(write_late()))

    said = await failure(shop, late, ORDERS[0])

    assert "a task that it had started was at work" in said
    assert "write_late" in said
    assert all(task.done() for task in shop.tasks)


async def test_a_task_that_the_handler_waits_for_is_fine(shop: Shop) -> None:
    async def parallel(order: OrderPlaced) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            group.create_task(shop.reserve(order))

    await shop.check(parallel, ORDERS[0])


@pytest.mark.requirement("S1-15")
async def test_a_missing_inbox_is_caught(shop: Shop) -> None:
    """Without it every redelivery counts, and its outputs are sent again."""
    stack: list[Middleware] = [TransactionMiddleware(shop.store), OutboxMiddleware(shop.store.outbox())]

    with pytest.raises(AssertionError) as caught:
        await shop.check(shop.reserve, ORDERS[0], middlewares=stack)

    said = str(caught.value)
    assert "- delivered twice in a row:" in said
    assert "- delivered twice at the same time:" in said
    assert "- crashed after the commit and before the acknowledgement, then delivered again:" in said
    assert "state['stock'][0][1]: expected 2, found 4" in said
    assert "outbox: too many, ('stock.reserved', 'stock.reserved'" in said


async def test_an_output_that_is_sent_past_the_transaction_is_caught(shop: Shop) -> None:
    async def tell(order: OrderPlaced) -> None:
        with closing(sqlite3.connect(shop.elsewhere)) as connection, connection:
            SQLiteStore.create_tables(connection)
            Outbox().add(connection, StockReserved(order.item), topic="stock")
            connection.execute("INSERT INTO log SELECT 'told', count(*) FROM postroom_outbox")

    def state() -> object:
        return shop.rows(shop.elsewhere, "log")

    with pytest.raises(AssertionError, match="once again after a reset"):
        await check_idempotency(tell, ORDERS[:1], store=shop.store, state=state, reset=shop.reset)


# -- what cannot be checked ------------------------------------------------------------------------------------


async def test_a_handler_that_fails_is_told_with_its_error(shop: Shop) -> None:
    async def fail(order: OrderPlaced) -> None:
        raise KeyError(order.item)

    with pytest.raises(AssertionError, match=r"delivered once: 'order.placed' with key 'chair' was never") as caught:
        await shop.check(fail, ORDERS[0])

    assert "KeyError: 'chair'" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_message_that_is_rejected_is_told(shop: Shop) -> None:
    async def reject(order: OrderPlaced) -> None:
        raise RejectError("no such item")

    stack: list[Middleware] = [transactional(shop.store, consumer="stock", max_attempts=None)]

    with pytest.raises(AssertionError, match="never acknowledged: RejectError: no such item"):
        await shop.check(reject, ORDERS[0], middlewares=stack)


async def test_chance_is_told_from_a_handler_that_is_not_idempotent(shop: Shop) -> None:
    async def roll(order: OrderPlaced) -> StockReserved:
        return StockReserved(str(random.random()))

    said = await failure(shop, roll, ORDERS[0])

    assert said.startswith("- delivered once, and once again after a reset:")
    assert "output= says what has to be the same" in said


async def test_the_user_may_say_what_has_to_be_the_same_of_an_output(shop: Shop) -> None:
    async def roll(order: OrderPlaced) -> StockReserved:
        return StockReserved(str(random.random()))

    await check_idempotency(
        roll, ORDERS[:1], store=shop.store, state=list, reset=list, output=lambda message: message.type
    )


async def test_state_and_reset_may_be_coroutines(shop: Shop) -> None:
    async def state() -> object:
        return shop.state()

    async def reset() -> None:
        shop.reset()

    await check_idempotency(shop.reserve, ORDERS[:1], store=shop.store, state=state, reset=reset)


async def test_every_fault_happens(shop: Shop) -> None:
    """A check whose faults do not happen would let everything pass."""
    deliveries: list[Delivery] = []
    errors: set[str] = set()

    async def watch(message: Message, call_next: Next) -> Sequence[Message]:
        deliveries.append(current_delivery())
        try:
            return await call_next(message)
        except Exception as error:
            errors.add(describe(error))  # what is an outage the delivery does not tell
            raise

    await shop.check(shop.reserve, ORDERS[0], middlewares=[watch, transactional(shop.store, consumer="stock")])

    assert errors | {delivery.error for delivery in deliveries if delivery.error} == {
        "StoreUnavailableError: simulated: the process died before the commit",
        "StoreUnavailableError: simulated: the process died before the message was acknowledged",
        "StoreUnavailableError: simulated: the database refused",
    }
    outcomes = [delivery.outcome for delivery in deliveries]
    assert outcomes.count(Release()) > 4  # cancelled
    assert None not in outcomes


async def test_a_store_is_left_as_it_was_found(shop: Shop) -> None:
    await shop.check(shop.reserve, ORDERS[0])
    was_closed = await shop.store.open()

    await shop.check(shop.reserve, ORDERS[0])

    is_closed = await shop.store.open()
    await shop.store.close()
    assert (was_closed, is_closed) == (True, False)


async def test_nothing_to_deliver_is_an_error(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="needs messages"):
        await check_idempotency(shop.reserve, [], store=shop.store, state=list, reset=list)


async def test_middlewares_in_a_wrong_order_are_refused(shop: Shop) -> None:
    stack: list[Middleware] = [InboxMiddleware(shop.store.inbox("stock")), TransactionMiddleware(shop.store)]

    with pytest.raises(MiddlewareOrderError):
        await shop.check(shop.reserve, middlewares=stack)


# -- differences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["state['a']: expected 1, found 2"]),
        ({"a": 1}, {"b": 1}, ["state['a']: expected 1, found nothing", "state['b']: expected nothing, found 1"]),
        ([1, [2, 3]], [1, [2, 4]], ["state[1][1]: expected 3, found 4"]),
        ([1], [1, 2], ["state: expected [1], found [1, 2]"]),
        ("a" * 300, "b", ["state: expected '" + "a" * 199 + "… (302 characters), found 'b'"]),
    ],
)
def test_a_difference_names_its_place(expected: object, found: object, said: list[str]) -> None:
    assert differences(expected, found) == said


def test_many_differences_are_cut_short() -> None:
    said = differences(dict.fromkeys(range(30), 1), dict.fromkeys(range(30), 2))

    assert len(said) == 11
    assert said[-1] == "and 20 more differences"


def test_ids_are_known_again_in_whatever_form() -> None:
    old, new, other = uuid4(), uuid4(), uuid4()

    def forms(identity: UUID) -> list[object]:
        texts = [str(identity), identity.hex, f"/orders/{identity}"]
        return [identity, *texts, identity.bytes, str(identity).encode(), {identity}, {"id": identity}, other]

    assert known(tuple(forms(old)), {old: new}) == forms(new)


def test_rows_are_compared_by_their_columns() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.row_factory = sqlite3.Row
        row = connection.execute("SELECT 1 AS one, 'two' AS two").fetchone()

    assert known([row], {}) == [{"one": 1, "two": "two"}]


async def test_outputs_may_be_compared_as_sets(shop: Shop) -> None:
    async def announce(order: Message) -> Message:
        return Message(topic="log", type="announced", payload=order.payload)

    def output(message: Message) -> frozenset[str]:
        return frozenset({message.topic, message.type})

    await check_idempotency(announce, ORDERS[:1], store=shop.store, state=list, reset=list, output=output)
