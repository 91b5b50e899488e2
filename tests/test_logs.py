"""The log: what an operator with a plain formatter can read of it, and what must never be in it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import pytest

from postroom import (
    Consumer,
    Dispatcher,
    Message,
    Outbox,
    OutboxSubscriber,
    Outcome,
    Retry,
    Router,
    events,
    transactional,
)
from postroom.brokers import MemoryBroker
from postroom.brokers.lines import encode_line
from postroom.destination import Naming
from postroom.errors import BrokerUnavailableError, RejectError, StoreError
from postroom.events import log_event
from postroom.middleware import RetryMiddleware
from postroom.retry import guarded
from postroom.stores import MemoryStore, PostgresStore, SQLiteStore
from postroom.stores.sql.driver import hint
from postroom.testing.servers import PostgresServer
from postroom.testing.waiting import until

LONG = timedelta(seconds=60)
HOUR = timedelta(hours=1)


class Plain:
    """The log of postroom as the usual formatter writes it."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    def lines(self, level: str) -> list[str]:
        """Return the records of a level, without their tracebacks."""
        return [line for line in self.text.splitlines() if line.startswith(f"{level} postroom ")]


@pytest.fixture
def plain() -> Iterator[Plain]:
    log, logger = Plain(), logging.getLogger("postroom")
    before = logger.level
    logger.addHandler(log.handler)
    logger.setLevel(logging.INFO)
    yield log
    logger.removeHandler(log.handler)
    logger.setLevel(before)


def stored(count: int = 1, *, key: str | None = None) -> MemoryStore:
    store = MemoryStore()
    with store.transaction() as transaction:
        for number in range(count):
            Outbox().add(transaction, {"number": number}, topic="orders", key=key)
    return store


def an_hour(_: int) -> timedelta:
    return HOUR


# -- what a record says ------------------------------------------------------------------------------------------------


async def test_a_failed_delivery_names_its_message_and_carries_the_traceback(plain: Plain) -> None:
    """One failure is one warning, from which the message, the attempt and the cause can be told."""
    store = stored(key="42")

    async def send(_: Message) -> None:
        raise ConnectionResetError("peer went away")

    await Dispatcher(store, send, backoff=an_hour).run(until_idle=True)

    [line] = plain.lines("WARNING")
    identity = store.rows[0].message.id
    assert line.endswith(
        f" delivery failed: message {identity} topic=orders key=42 attempt=1/10: ConnectionResetError: peer went away"
    )
    assert 'raise ConnectionResetError("peer went away")' in plain.text
    assert plain.text.count("Traceback (most recent call last)") == 1


async def test_a_failed_handler_names_its_message_and_carries_the_traceback(plain: Plain) -> None:
    """The same of a consumer."""
    router, broker = Router(), MemoryBroker()

    @router.on("order.placed")
    async def reserve(order: dict[str, int]) -> None:
        consumer.stop_soon()
        order["sku"] += 1

    message = Message(topic="orders", type="order.placed", key="42", payload=b'{"order_id": 7}')
    consumer = Consumer(broker.subscribe("orders", group="stock"), router)
    await broker.publish_batch([message])
    await consumer.run()

    [line] = plain.lines("WARNING")
    assert line.endswith(
        f" handling failed: message {message.id} topic=orders type=order.placed key=42 attempt=1: KeyError: 'sku'"
    )
    assert 'order["sku"] += 1' in plain.text


async def test_a_dispatcher_that_ends_by_an_error_logs_it_as_an_error(plain: Plain) -> None:
    """It may run in a task of which nobody asks the result."""

    class Broken(MemoryStore):
        async def open(self) -> bool:
            raise StoreError("the table postroom_outbox is missing")

    with pytest.raises(StoreError):
        await Dispatcher(Broken(), refuse).run()

    [line] = plain.lines("ERROR")
    assert line.endswith(" dispatcher failed: StoreError: the table postroom_outbox is missing")
    assert "Traceback (most recent call last)" in plain.text


async def test_a_consumer_that_ends_by_an_error_logs_it_as_an_error(plain: Plain) -> None:
    """The same of a consumer whose middleware fails beside the handlers."""

    class Serving:
        async def __call__(self, message: Message, call_next: object) -> Sequence[Message]:
            return []

        async def serve(self, _: object) -> None:
            raise RuntimeError("the inbox is gone")

    with pytest.raises(RuntimeError):
        await Consumer(MemoryBroker().subscribe("orders", group="stock"), Router(), Serving()).run()

    [line] = plain.lines("ERROR")
    assert line.endswith(" consumer failed: RuntimeError: the inbox is gone")
    assert 'raise RuntimeError("the inbox is gone")' in plain.text


class Refusing:
    """A publisher of batches whose destination is down."""

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        raise BrokerUnavailableError("queue.example:5672 refused the connection")


async def refuse(_: Message) -> None:
    raise ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 5672)")


@pytest.mark.parametrize(
    ("publisher", "cause"),
    [
        (refuse, "ConnectionRefusedError: [Errno 111] Connect call failed ('127.0.0.1', 5672)"),
        (Refusing(), "BrokerUnavailableError: queue.example:5672 refused the connection"),
    ],
    ids=["function", "batch"],
)
async def test_an_outage_names_its_cause(publisher: Refusing, cause: str, plain: Plain) -> None:
    """A destination that is down is of no use to an operator without what was raised."""
    dispatcher = Dispatcher(stored(3), publisher, outage_backoff=an_hour)
    await dispatcher.run(until_idle=True)

    assert any(
        line.endswith(f" destination orders is down: {cause}; its messages wait") for line in plain.lines("WARNING")
    )


class Answering:
    """A publisher of batches that gives the same answer for each message, or raises it."""

    def __init__(self, answer: Outcome | Exception | None) -> None:
        self._answer = answer

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return [self._answer] * len(messages)


async def test_a_batch_that_fails_is_one_warning_with_one_traceback(plain: Plain) -> None:
    store = stored(3)
    await Dispatcher(store, Answering(ValueError("too large")), backoff=an_hour).run(until_idle=True)

    [line] = plain.lines("WARNING")
    first = store.rows[0].message.id
    assert line.endswith(
        f" delivery failed: message {first} and 2 more of its batch topic=orders attempt=1/10: ValueError: too large"
    )
    assert plain.text.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Retry("quota"), "quota"),
        (None, "PublishUnknownError: no answer came in time; the message may have been delivered"),
    ],
    ids=["retry", "unknown"],
)
async def test_a_failure_that_a_publisher_reports_is_a_warning_too(
    answer: Outcome | None, error: str, plain: Plain
) -> None:
    """It need not raise: an answer for each message says the same."""
    dispatcher = Dispatcher(stored(), Answering(answer), backoff=an_hour, outage_backoff=an_hour)
    await dispatcher.run(until_idle=True)

    assert plain.lines("WARNING")[0].endswith(f" topic=orders attempt=1/10: {error}")


async def test_a_failure_that_a_function_returns_is_a_warning_too(plain: Plain) -> None:
    async def send(_: Message) -> Outcome:
        return Retry("quota")

    await Dispatcher(stored(), send, backoff=an_hour).run(until_idle=True)

    [line] = plain.lines("WARNING")
    assert line.endswith(" topic=orders attempt=1/10: quota")


async def test_what_a_reader_nacks_is_no_warning(plain: Plain) -> None:
    """The reader knows, and a consumer has logged it."""
    async with OutboxSubscriber(stored(), backoff=an_hour) as deliveries:
        await (await anext(deliveries)).nack("not today")

    assert plain.lines("WARNING") == []


async def test_a_publish_that_takes_too_long_says_so_and_where_it_was(plain: Plain) -> None:
    async def send(_: Message) -> None:
        await asyncio.Event().wait()

    limit = timedelta(milliseconds=50)
    await Dispatcher(stored(), send, publish_timeout=limit, outage_backoff=an_hour).run(until_idle=True)

    failed, down = plain.lines("WARNING")
    assert failed.endswith(": TimeoutError: no answer within 0.05 s")
    assert re.search(r" destination orders \(message \S+\) is down: TimeoutError: no answer within 0.05 s; ", down)
    assert "await asyncio.Event().wait()" in plain.text


async def test_repeats_are_summed_up_when_the_dispatcher_stops(plain: Plain) -> None:
    async def send(_: Message) -> None:
        raise ConnectionResetError("peer went away")

    await Dispatcher(stored(42), send, backoff=an_hour).run(until_idle=True)

    first, summary = plain.lines("WARNING")
    assert " delivery failed: " in first
    assert "postroom 41 more in the last " in summary
    assert "most recently: delivery failed: message " in summary


async def test_every_dead_message_is_named(plain: Plain) -> None:
    store = stored(10)

    async def send(_: Message) -> None:
        raise RejectError("no such customer")

    await Dispatcher(store, send).run(until_idle=True)

    dead = plain.lines("ERROR")
    assert {line.split()[3] for line in dead} == {str(row.message.id) for row in store.rows}
    assert all(line.endswith(" is dead: RejectError: no such customer") for line in dead)


# -- functions of users that fail outside of a delivery ----------------------------------------------------------------

FORGED = "gone\nERROR postroom forged\x1b[2J"


def forging(_: object) -> Any:  # noqa: ANN401 -- takes the place of functions of several types
    raise RuntimeError(FORGED)


def is_one_warning(plain: Plain, said: str) -> None:
    """Fail unless a failure that was repeated is one record, with a traceback and without forged lines."""
    assert plain.lines("ERROR") == []
    (line,) = plain.lines("WARNING")
    assert said in line
    assert r"RuntimeError: gone\nERROR postroom forged\x1b[2J" in line
    assert plain.text.count("Traceback (most recent call last)") == 1
    assert "\x1b" not in plain.text


def test_a_function_that_cannot_name_destinations_is_one_warning(plain: Plain) -> None:
    """It is called for every message, so a log with a record for each call would hide everything else."""
    naming, message = Naming(forging), Message(topic="orders", payload=b"", key="42")

    names = {naming.destination(message) for _ in range(50)}

    assert names == {"orders"}
    is_one_warning(
        plain, f"naming the destination failed, so the topic is used: message {message.id} topic=orders key=42"
    )


def test_a_backoff_function_that_fails_is_one_warning(plain: Plain) -> None:
    wait = guarded(forging)

    assert all(wait(3) > timedelta(0) for _ in range(50))

    is_one_warning(plain, "the backoff function failed, so the default backoff is used: ")


def test_a_wake_up_that_fails_is_one_warning(plain: Plain) -> None:
    for _ in range(50):
        hint(lambda: forging(None))

    is_one_warning(plain, "a callback after a commit failed; the commit stands, and polling finds its messages: ")


async def test_listeners_are_told_of_functions_that_fail() -> None:
    """Metrics count what the log shows."""
    heard: list[events.Event] = []

    async def send(_: Message) -> None:
        raise ValueError("not yet")

    dispatcher = Dispatcher(stored(), send, backoff=forging, destination=forging, listener=heard.append)
    await dispatcher.run(until_idle=True)

    assert {events.NamingFailed, events.BackoffFailed} <= {type(event) for event in heard}


async def test_the_listener_of_a_consumer_is_told_of_a_retry_middleware_whose_backoff_fails(plain: Plain) -> None:
    """The middleware has no listener of its own, and the log would be the wrong place if the consumer has another."""
    heard: list[events.Event] = []
    router, broker, calls = Router(), MemoryBroker(), 0

    @router.on("order.placed")
    async def reserve(order: dict[str, int]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("not yet")
        consumer.stop_soon()

    subscriber = broker.subscribe("orders", group="stock")
    consumer = Consumer(subscriber, router, RetryMiddleware(2, backoff=forging), listener=heard.append)
    await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}")])
    await consumer.run()

    assert [type(event) for event in heard].count(events.BackoffFailed) == 1
    assert plain.text == ""


def test_a_filter_of_the_log_that_fails_does_not_undo_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wake-up comes after the commit: an error would look like a commit that failed."""
    log_event.flush()
    monkeypatch.setattr(logging.getLogger("postroom"), "filters", [forging])

    hint(lambda: forging(None))


# -- what a terminal is sent -------------------------------------------------------------------------------------------

UNSAFE = "a\x1b[31mb\r\nERROR c\u2028d\u202ee\x07\x9b"
ESCAPED = r"a\x1b[31mb\r\nERROR c\u2028d\u202ee\x07\x9b"


async def test_an_error_sends_no_control_character_to_the_log(plain: Plain) -> None:
    """Neither in the message nor in the traceback, which shows the text of the error again."""

    async def send(_: Message) -> None:
        raise ValueError(UNSAFE)

    await Dispatcher(stored(), send, backoff=an_hour).run(until_idle=True)

    assert plain.text.count(f"ValueError: {ESCAPED}\n") == 2
    assert all(line.isprintable() for line in plain.text.split("\n"))


def with_an_unsafe_row(folder: Path) -> Path:
    """Return a database with a message that only raw SQL can write."""
    path = folder / "shop.sqlite3"
    with closing(sqlite3.connect(path)) as connection, connection:
        SQLiteStore.create_tables(connection)
        Outbox().add(connection, {"number": 1}, topic="orders", key="1")
        connection.execute("UPDATE postroom_outbox SET topic = ?, key = ?", (UNSAFE, UNSAFE))
    return path


def test_a_row_of_raw_sql_sends_no_control_character_to_the_terminal(tmp_path: Path) -> None:
    """Nothing but SQL stands between a topic and the terminal of an operator."""
    told = dispatched(with_an_unsafe_row(tmp_path))

    assert ESCAPED in told
    assert all(line.isprintable() for line in told.split("\n"))
    assert not any(line.startswith("ERROR") for line in told.split("\n"))


async def test_lines_of_json_on_a_terminal_hold_no_control_character() -> None:
    """What a ``stdout:`` broker writes may be read by a person."""
    message = Message(topic=UNSAFE + "\x7f", key=UNSAFE, type=UNSAFE, payload=b'"\x7f\\u001b"', headers={"a": UNSAFE})

    line = encode_line(message).decode()

    assert line.removesuffix("\n").isprintable()
    assert json.loads(line)["topic"] == UNSAFE + "\x7f"
    assert json.loads(line)["data"] == "\x7f\x1b"


def dispatched(path: Path, *arguments: str) -> str:
    """Return what `postroom dispatch --once` writes to stderr, with a broker that is down."""
    command = [sys.executable, "-m", "postroom.cli", "dispatch", "--store", f"sqlite:///{path}", "--once"]
    broker = f"file:{path.parent}/missing/x"
    ended = subprocess.run([*command, "--broker", broker, *arguments], capture_output=True, check=False)
    return (ended.stderr + ended.stdout).decode()


def test_events_as_json_hold_no_control_character(tmp_path: Path) -> None:
    told = dispatched(with_an_unsafe_row(tmp_path), "--json")

    lines = [json.loads(line) for line in told.splitlines()]
    [down] = [line for line in lines if line["event"] == "BreakerOpened"]
    assert down["destination"].startswith(UNSAFE)
    assert f"destination {ESCAPED} (key {ESCAPED}) is down: BrokerUnavailableError: cannot write: " in down["text"]
    assert all(line.isprintable() for line in told.split("\n"))


@pytest.mark.parametrize("command", ["status", "dispatch"])
def test_an_error_of_the_command_line_holds_no_control_character(command: str, tmp_path: Path) -> None:
    """The name of a file may come from anywhere."""
    arguments = ["--broker", "stdout:"] if command == "dispatch" else []
    store = f"sqlite:///{tmp_path}/a\x1b[2J\u202eb.sqlite3"
    ended = subprocess.run(
        [sys.executable, "-m", "postroom.cli", command, "--store", store, *arguments], capture_output=True, check=False
    )

    assert ended.returncode == 1
    assert r"a\x1b[2J\u202eb.sqlite3 does not exist" in ended.stderr.decode()
    assert all(line.isprintable() for line in ended.stderr.decode().split("\n"))


# -- three failures, from the lines alone ------------------------------------------------------------------------------


async def failure_of(url: str, plain: Plain) -> str:
    """Run a dispatcher on a database that it cannot use, and return the first record that is more than information."""
    dispatcher = Dispatcher(PostgresStore(url), refuse)
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: bool(plain.lines("WARNING") + plain.lines("ERROR")), "the failure in the log", within=LONG)
    await dispatcher.stop()
    await asyncio.wait({running})
    running.exception()
    return (plain.lines("WARNING") + plain.lines("ERROR"))[0]


async def test_a_wrong_port_can_be_told_from_the_log(postgres_dsn: str, plain: Plain) -> None:
    line = await failure_of(postgres_dsn.replace(f":{urlsplit(postgres_dsn).port}/", ":1/"), plain)

    assert line.startswith("WARNING postroom store call 'open' failed (attempt 1), retrying in 0.")
    assert "@127.0.0.1:1/" in line
    assert line.endswith("; check that the server runs, and its host and port")


async def test_a_wrong_database_can_be_told_from_the_log(postgres_dsn: str, plain: Plain) -> None:
    line = await failure_of(urlsplit(postgres_dsn)._replace(path="/shpo").geturl(), plain)

    assert line.startswith("ERROR postroom dispatcher failed: StoreAuthenticationError: postgresql://")
    assert 'database "shpo" does not exist' in line
    assert line.endswith("; check the user, the password and the name of the database")


async def test_a_wrong_password_can_be_told_from_the_log(private_postgres: PostgresServer, plain: Plain) -> None:
    """Neither the right password nor the wrong one is in the log."""
    assert private_postgres.home
    rules = "host all app 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"
    (private_postgres.home / "data" / "pg_hba.conf").write_text(rules)
    connection = await asyncpg.connect(private_postgres.dsn)
    await connection.execute("CREATE ROLE app LOGIN PASSWORD 'correct-horse'")
    await connection.execute("SELECT pg_reload_conf()")
    url = f"postgresql://app:battery-staple@127.0.0.1:{private_postgres.port}/postgres"
    await until(lambda: is_refused(url), "the server reading its rules", within=LONG)
    await connection.close()

    line = await failure_of(url, plain)

    assert line.startswith("ERROR postroom dispatcher failed: StoreAuthenticationError: postgresql://app@127.0.0.1:")
    assert 'password authentication failed for user "app"' in line
    assert "battery-staple" not in plain.text
    assert "correct-horse" not in plain.text


async def is_refused(url: str) -> bool:
    try:
        connection = await asyncpg.connect(url)
    except asyncpg.InvalidPasswordError:
        return True
    await connection.close()
    return False


async def with_an_order(dsn: str) -> tuple[PostgresStore, UUID]:
    """Return a store with the message of one order, and its id."""
    store = PostgresStore(dsn)
    await store.apply_schema()
    connection = await asyncpg.connect(dsn)
    async with connection.transaction():
        added = await Outbox().add(connection, {"order_id": 7}, topic="orders", type="order.placed", key="42")
    await connection.close()
    assert added.id is not None
    return store, added.id


async def test_a_bug_in_a_handler_can_be_told_from_the_log(postgres_dsn: str, plain: Plain) -> None:
    store, message_id = await with_an_order(postgres_dsn)
    router = Router()

    @router.on("order.placed")
    async def reserve(order: dict[str, int]) -> None:
        consumer.stop_soon()
        order["sku"] += 1

    consumer = Consumer(OutboxSubscriber(store), router, transactional(store, consumer="stock"))
    await consumer.run()
    await store.close()

    [line] = plain.lines("WARNING")
    assert line == (
        f"WARNING postroom handling failed: message {message_id} topic=orders type=order.placed key=42 attempt=1: "
        "KeyError: 'sku'"
    )
    traceback = plain.text.partition(line)[2]
    assert 'in reserve\n    order["sku"] += 1\n' in traceback


async def test_a_broker_that_is_down_can_be_told_from_the_log(postgres_dsn: str, plain: Plain) -> None:
    store, message_id = await with_an_order(postgres_dsn)

    async def send(_: Message) -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    await Dispatcher(store, send, outage_backoff=an_hour).run(until_idle=True)

    failed, down = plain.lines("WARNING")
    cause = "ConnectionRefusedError: [Errno 111] Connect call failed ('127.0.0.1', 1)"
    assert failed == (
        f"WARNING postroom delivery failed: message {message_id} topic=orders key=42 attempt=1/10: {cause}"
    )
    assert down == f"WARNING postroom destination orders (key 42) is down: {cause}; its messages wait"
