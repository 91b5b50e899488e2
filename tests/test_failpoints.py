"""Failpoints: where they are, what happens there, and that nothing has them that did not ask."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

import postroom
from postroom import Consumer, Delivered, Dispatcher, Message, Outbox, Router, transactional
from postroom.brokers import MemoryBroker
from postroom.dead_letters import StoredDeadLetters
from postroom.errors import ConfigurationError, RejectError, StoreUnavailableError
from postroom.store import Store
from postroom.stores import MemoryStore, SQLiteStore
from postroom.testing.failpoints import POINTS, Failpoints, block, cancel, raising, wait
from postroom.testing.taps import (
    TappedDeadLetters,
    TappedHandlers,
    TappedPool,
    TappedPublisher,
    TappedStore,
    TappedSubscriber,
    tapped_send,
)

SOURCE = Path(postroom.__file__).parent
TICK = timedelta(milliseconds=30)


@pytest.fixture
async def store(sqlite_path: Path) -> AsyncIterator[SQLiteStore]:
    """A store with one message."""
    store = SQLiteStore(sqlite_path)
    await store.apply_schema()
    with closing(sqlite3.connect(sqlite_path)) as connection, connection:
        Outbox().add(connection, {"n": 1}, topic="t")
    yield store
    await store.close()


async def deliver(_: Message) -> None:
    """Take a message."""


class Recording(Failpoints):
    """Points that remember the order in which they were first reached."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def _act(self, point: str) -> object:
        if point not in self.order:
            self.order.append(point)
        return super()._act(point)


def test_an_action_is_taken_the_nth_time_and_no_other() -> None:
    """A case of the matrix names one moment."""
    points = Failpoints()
    taken: list[int] = []
    points.on("claim.statement", lambda: taken.append(points.hits["claim.statement"]), nth=2)

    for _ in range(4):
        points.hit_now("claim.statement")

    assert taken == [2]


def test_a_point_that_does_not_exist_cannot_be_armed() -> None:
    """A misspelt point would make a test that shows nothing."""
    with pytest.raises(ConfigurationError, match=r"claim\.befor.*claim\.before"):
        Failpoints().on("claim.befor", raising(RuntimeError()))


async def test_a_pause_stops_the_loop_and_a_slow_call_does_not() -> None:
    """A long garbage collection and a slow network are different faults."""
    points = Failpoints()
    points.on("publish.before", block(TICK))
    points.on("publish.sent", wait(TICK))
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    began, before = time.monotonic(), beats
    await points.hit("publish.before")
    paused, during_pause = time.monotonic() - began, beats - before
    await points.hit("publish.sent")
    during_wait = beats - before
    beating.cancel()

    assert paused >= TICK.total_seconds()
    assert during_pause == 0
    assert during_wait > 0


async def test_a_stall_can_last_until_something_happened() -> None:
    """Time is not what a case waits for."""
    points, happened = Failpoints(), asyncio.Event()
    points.on("publish.before", wait(happened.is_set))
    stalled = asyncio.create_task(points.hit("publish.before"))
    await asyncio.sleep(0)
    assert not stalled.done()

    happened.set()
    await stalled


async def test_cancelling_reaches_the_task_at_the_point_or_another() -> None:
    """What stops a program is not always the task that is busy."""
    points = Failpoints()
    sleeping = asyncio.create_task(asyncio.sleep(60))
    points.on("add.before", cancel(sleeping))
    points.on("add.after", cancel())

    async def both() -> None:
        await points.hit("add.before")
        await points.hit("add.after")
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(both())
    with pytest.raises(asyncio.CancelledError):
        await sleeping


def test_nothing_can_be_awaited_between_two_statements() -> None:
    """SQLite runs a script on a thread; an action that was silently left out would make a test that shows nothing."""
    points = Failpoints()
    points.on("claim.statement", wait(TICK))

    with pytest.raises(ConfigurationError, match="use an action that blocks"):
        points.hit_now("claim.statement")


async def test_a_message_passes_every_point_of_its_life_in_order(store: SQLiteStore) -> None:
    """A tap around each port is enough to stop between any two steps."""
    points = Recording()

    await Dispatcher(TappedStore(store, points), tapped_send(deliver, points)).run(until_idle=True)

    assert points.order == [
        "claim.before",
        "claim.statement",
        "claim.applied",
        "claim.after",
        "publish.before",
        "publish.sent",
        "publish.confirmed",
        "settle.before",
        "settle.statement",
        "settle.applied",
        "settle.after",
    ]
    assert set(points.order) < POINTS


async def receive(store: SQLiteStore, points: Failpoints, router: Router) -> None:
    """Have a message handled with every tap of a consumer around it, until the broker has heard of it."""
    broker = MemoryBroker()
    letters = StoredDeadLetters(store.inbox("stock"), store.transactions())
    stack = transactional(
        store,
        consumer="stock",
        pool=TappedPool(store, points),
        dead_letters=TappedDeadLetters(letters, points),
        listener=lambda _: None,
    )
    consumer = Consumer(
        TappedSubscriber(broker.subscribe("orders", group="stock"), points),
        router,
        stack,
        TappedHandlers(points),
        backoff=lambda _: timedelta(0),
        listener=lambda _: None,
    )
    points.on("ack.after", consumer.stop_soon)
    await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}")])
    await consumer.run()


@pytest.mark.requirement("F-01", "F-14", "F-16")
async def test_a_delivery_passes_every_point_up_to_its_acknowledgement_in_order(store: SQLiteStore) -> None:
    """Acknowledging is outermost, and comes after the commit."""
    points, router = Recording(), Router()

    @router.on("order.placed")
    async def handle(_: Message) -> Message:
        return Message(topic="t", payload=b"{}")

    await receive(store, points, router)

    assert points.order == [
        "deliver.after",
        "tx.begin",
        "tx.begun",
        "handle.before",
        "handle.after",
        "commit.before",
        "commit.after",
        "ack.before",
        "ack.after",
    ]


@pytest.mark.requirement("G8")
async def test_a_rejected_delivery_is_a_dead_letter_before_it_is_acknowledged(store: SQLiteStore) -> None:
    """A crash in between leads to a second delivery, never to none."""
    points, router = Recording(), Router()

    @router.on("order.placed")
    async def handle(_: Message) -> None:
        raise RejectError("never")

    await receive(store, points, router)

    assert points.order[-4:] == ["bury.before", "bury.after", "ack.before", "ack.after"]
    assert "commit.before" not in points.order


@pytest.mark.requirement("F-03")
async def test_a_delivery_that_failed_is_given_back_between_two_points(store: SQLiteStore) -> None:
    """What is raised before COMMIT undoes the transaction, and the message comes again."""
    points, router = Recording(), Router()
    points.on("commit.before", raising(RuntimeError("made to fail")))
    handled: list[int] = []

    @router.on("order.placed")
    async def handle(message: Message) -> None:
        handled.append(message.attempt)

    await receive(store, points, router)

    assert handled == [1, 2]
    assert points.hits["nack.before"] == points.hits["nack.after"] == points.hits["ack.after"] == 1


async def test_what_is_raised_between_statements_undoes_the_transaction(store: SQLiteStore, sqlite_path: Path) -> None:
    """The tap of a driver is inside the transaction, not beside it."""
    points = Failpoints()
    points.on("claim.applied", raising(StoreUnavailableError("made to fail")))
    told: list[str] = []
    tapped: Store = TappedStore(store, points)

    await Dispatcher(
        tapped, tapped_send(deliver, points), listener=lambda event: told.append(type(event).__name__)
    ).run(until_idle=True)

    assert "StoreFailed" in told
    assert points.hits["publish.before"] == 1
    with closing(sqlite3.connect(sqlite_path)) as connection:
        assert connection.execute("SELECT status, token FROM postroom_outbox").fetchall() == [("delivered", 1)]


async def test_a_store_without_a_driver_has_the_points_around_its_calls() -> None:
    """Any store can be tapped."""
    store, points = MemoryStore(), Failpoints()
    with store.transaction() as transaction:
        Outbox().add(transaction, {"n": 1}, topic="t")

    class Everything:
        async def publish_batch(self, messages: list[Message]) -> list[Delivered]:
            return [Delivered()] * len(messages)

    await Dispatcher(TappedStore(store, points), TappedPublisher(Everything(), points)).run(until_idle=True)  # type: ignore[arg-type]

    assert points.hits["settle.after"] == points.hits["publish.confirmed"] == 1
    assert points.hits["settle.statement"] == 0


def test_a_kill_is_a_kill() -> None:
    """No `finally` and no exit handler runs."""
    program = "from postroom.testing.failpoints import kill\ntry:\n kill()\nfinally:\n print('alive')"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_production_has_no_failpoints_whatever_the_environment_says() -> None:
    """Importing all of postroom loads nothing of them, and no variable changes that."""
    program = (
        "import sys, postroom, postroom.stores, postroom.brokers, postroom.cli, postroom.cli.app, postroom.consumer\n"
        "import postroom.stores.sql.writer, postroom.stores.sql.sqlite_pool\n"
        "print([name for name in sys.modules if name.startswith('postroom.testing')])"
    )
    names = ["TESTING", "TEST", "FAILPOINTS", "FAILPOINT", "CHAOS", "DEBUG"]
    environment = os.environ | {f"POSTROOM_{name}": "1" for name in names} | {"FAILPOINTS": "claim.before=kill"}

    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_no_module_of_production_imports_the_testing_ones() -> None:
    """Not at the top and not within a function; and nothing but the command line reads the environment."""
    modules = [path for path in SOURCE.rglob("*.py") if "testing" not in path.relative_to(SOURCE).parts]
    assert len(modules) > 40
    for path in modules:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not [name for name in imported if "testing" in name.split(".")], path
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute)} & {"environ", "getenv"}
        assert not read, f"{path} reads the environment"


def test_failpoints_read_no_environment() -> None:
    """They are armed by a call, in the process they are meant for."""
    for name in ("failpoints.py", "taps.py"):
        assert "environ" not in (SOURCE / "testing" / name).read_text()
