"""The documentation is true: its snippets run, its links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
import logging
import pkgutil
import re
import socket
import sqlite3
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from urllib.error import HTTPError
from uuid import UUID, uuid4

import asyncpg
import pytest
import redis.asyncio
import sqlalchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import postroom
from postroom import Consumer, Dispatcher, Message, Outbox, OutboxSubscriber, Router, transactional
from postroom.brokers import MemoryBroker
from postroom.decisions import Enqueued
from postroom.errors import (
    BrokerUnavailableError,
    CommitUnknownError,
    DecodeError,
    PublishUnknownError,
    RejectError,
    SchemaMissingError,
)
from postroom.middleware import Next
from postroom.store import ClaimTerms, Release, Settlement
from postroom.stores import MemoryStore, PostgresStore, SQLiteStore, store_from_url
from postroom.testing.clients import ValkeyClient
from postroom.testing.waiting import until

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: str) -> list[str]:
    """Return the Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


class Base(DeclarativeBase):
    """The tables of the snippets."""


class Order(Base):
    """An order of the snippets."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Client:
    """The broker's client of the snippets: keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, str | None]] = []

    async def send(self, topic: str, payload: bytes, *, key: str | None) -> None:
        self.sent.append((topic, payload, key))


@pytest.fixture
async def names(postgres_dsn: str) -> AsyncIterator[dict[str, Any]]:
    """What the README takes as given: a pool, an engine, a table, a broker's client."""
    engine = sqlalchemy.create_engine(postgres_dsn.replace("postgresql://", "postgresql+psycopg://"))
    Base.metadata.create_all(engine)
    store = PostgresStore(postgres_dsn, namespace="shop")
    await store.apply_schema()
    await store.close()
    async with asyncpg.create_pool(postgres_dsn, min_size=1, max_size=2) as pool:
        await pool.execute("CREATE TABLE reservations (order_id int)")
        yield {"pool": pool, "engine": engine, "Order": Order, "dsn": postgres_dsn, "client": Client()}
    engine.dispose()


async def execute(snippet: str, names: dict[str, Any]) -> None:
    """Run a snippet as it stands, ``await`` at the top included."""
    code = compile(snippet, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    made = eval(code, names)  # noqa: S307 -- our own README
    if inspect.isawaitable(made):
        await made


async def run_until(snippet: str, names: dict[str, Any], condition: Any) -> None:  # noqa: ANN401
    """Run a snippet that goes on for ever until it has done what it says."""
    running = asyncio.create_task(execute(snippet, names))
    await until(lambda: condition() or running.done(), "the snippet doing its work")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Have something run for ever beside a block, and end it then; it must not end before."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def reads(pool: Any, query: str, value: object) -> Callable[[], Awaitable[bool]]:  # noqa: ANN401
    """Return the condition that a query reads a value."""

    async def condition() -> bool:
        return bool(await pool.fetchval(query) == value)

    return condition


@pytest.mark.requirement("F-18", "S4-18")
async def test_the_snippets_of_the_readme_run(names: dict[str, Any]) -> None:
    """Produce through asyncpg and SQLAlchemy, deliver, receive and read: as printed."""
    produce_async, produce_sync, deliver, receive, read = snippets("README.md")
    await execute(produce_async, names)
    await execute(produce_sync, names)
    client: Client = names["client"]

    await run_until(deliver, names, lambda: len(client.sent) == 2)

    assert client.sent == [("orders", b'{"order_id":42}', "42"), ("orders", b'{"order_id":43}', "43")]

    pool = names["pool"]
    async with pool.acquire() as connection, connection.transaction():
        await names["outbox"].add(connection, names["OrderPlaced"](order_id=44), topic="orders")
    async with running(execute(receive, names)):
        await until(reads(pool, "SELECT type FROM postroom_outbox WHERE namespace = 'stock'", "stock.reserved"), "it")
        delivered = "SELECT count(*) FROM postroom_outbox WHERE namespace = 'shop' AND status = 'delivered'"
        await until(reads(pool, delivered, 3), "the acknowledgement")
    assert [row["order_id"] for row in await pool.fetch("SELECT order_id FROM reservations")] == [44]

    handled: list[Message] = []

    async def handle(message: Message) -> None:
        handled.append(message)

    async with pool.acquire() as connection, connection.transaction():
        await names["outbox"].add(connection, {"order_id": 45}, topic="orders")
    await run_until(read, {**names, "handle": handle}, lambda: bool(handled))

    assert [message.payload for message in handled] == [b'{"order_id":45}']


@pytest.fixture
def receiving(names: dict[str, Any]) -> dict[str, Any]:
    """What the page about receiving takes as given besides: a broker, and a subscriber of it."""
    broker = MemoryBroker()
    return {**names, "broker": broker, "subscriber": broker.subscribe("orders", group="stock"), "filed": []}


def placed(order_id: int, **more: Any) -> Message:  # noqa: ANN401
    return Message(topic="orders", type="order.placed", payload=b'{"order_id": %d}' % order_id, **more)


@pytest.mark.requirement("F-02", "F-05", "F-18", "F-22", "S1-01", "S1-02", "S1-15")
async def test_the_page_about_receiving_is_true(receiving: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Every snippet runs as printed, and does what the page says."""
    caplog.set_level(logging.DEBUG, "postroom")
    names, pool, broker = receiving, receiving["pool"], receiving["broker"]
    whole, fan_out, handlers, acking, *others = snippets("docs/consuming.md")
    inbox, tables, unknown, strict, dead, stack, commands = others

    async def reserved() -> list[int]:
        return [row["order_id"] for row in await pool.fetch("SELECT order_id FROM reservations ORDER BY order_id")]

    async with running(execute(whole, names)):
        message = placed(42)
        await broker.publish_batch([message, message])
        await until(lambda: "duplicate skipped" in caplog.text, "the second one being known")
    assert await reserved() == [42]
    assert (
        await pool.fetchval("SELECT count(*) FROM postroom_outbox WHERE namespace = 'stock' AND topic = 'stock'") == 1
    )

    await execute(fan_out, names)
    await _check_fan_out(names)

    names["router"] = Router(topic="stock")
    names["router"].add(names["OrderPlaced"], names["reserve"])
    await execute(handlers, names)
    imported = await names["router"](Message(topic="orders", type="orders.imported", payload=b"[1, 2]"))
    assert [output.payload for output in imported] == [b'{"order_id":1}', b'{"order_id":2}']

    await execute(acking, names)
    async with running(names["manual"].run()):
        await broker.publish_batch([placed(43)])
        # What was not acknowledged when the consumer before ended comes again first.
        await until(lambda: 43 in names["filed"], "the handler acknowledging")
    async with running(names["forwarding"].run()):
        await broker.publish_batch([placed(44)])
        await until(lambda: any(message.topic == "stock" for message in broker.received), "the output being sent on")
    assert await reserved() == [42, 44]

    await execute(inbox, names)
    await execute(tables, names)
    assert await pool.fetchval("SELECT count(*) FROM warehouse.postroom_outbox") == 0
    await execute(unknown, names)
    await execute(strict, names)
    await execute(dead, names)
    await _check_errors(names)

    await execute(stack, names)
    async with running(names["stack"].run()):
        await broker.publish_batch([placed(45, headers={"ce-correlationid": "story"})])
        await until(
            reads(pool, "SELECT headers ->> 'ce-correlationid' FROM postroom_outbox ORDER BY seq DESC", "story"), "it"
        )
    assert await reserved() == [42, 44, 45]

    await execute(commands, names)
    assert names["placing"].type == "place-order"
    assert await pool.fetchval("SELECT id FROM orders") == 7
    assert await pool.fetchval("SELECT type FROM postroom_outbox WHERE namespace = 'shop'") == "order.placed"
    await names["store"].close()


async def _check_fan_out(names: dict[str, Any]) -> None:
    """Have a message of an outbox taken to every group."""
    async with names["pool"].acquire() as connection, connection.transaction():
        await Outbox(namespace="shop").add(connection, names["OrderPlaced"](1), topic="orders")
    await names["dispatcher"].run(until_idle=True)
    assert [names["post"].backlog(group) for group in ("stock", "billing")] == [1, 1]
    await names["pool"].execute("DELETE FROM postroom_outbox WHERE namespace = 'shop'")


async def _check_errors(names: dict[str, Any]) -> None:
    """Hold what the page says about unknown commits and dead letters against what happens."""
    query, _ = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "consuming.md").read_text(), flags=re.DOTALL)

    def raising(error: Exception) -> Next:
        async def call_next(_: Message) -> Sequence[Message]:
            raise error

        return call_next

    async def was_stored() -> bool:
        return True

    lost = CommitUnknownError()
    lost.witness = was_stored
    assert await names["ask"](placed(1), raising(lost)) == []

    with pytest.raises(RejectError, match="not JSON"):
        await names["reject_unreadable"](placed(1), raising(DecodeError("the payload is not JSON")))
    for around in ("careful", "around"):
        assert not await names[around](placed(1), raising(RejectError("never")))
    letters = await names["pool"].fetch(query)
    assert [(letter["consumer"], letter["error"]) for letter in letters] == [("billing", "RejectError: never")]
    assert [message.topic for message in names["broker"].received][-1] == "stock.dead"


UNITS = {"day": 86400.0, "days": 86400.0, "minute": 60.0, "minutes": 60.0, "s": 1.0, "ms": 0.001}


def meant(cell: str) -> object:
    """Return the value that a cell of a table of defaults stands for."""
    if cell == "none":
        return None
    if cell.startswith("`"):
        return cell.strip('`"')
    number, _, unit = cell.partition(" ")
    return timedelta(seconds=int(number) * UNITS[unit]) if unit else int(number)


def defaults(owner: object, *options: str) -> list[object]:
    parameters = inspect.signature(cast("Callable[..., object]", owner)).parameters
    return [parameters[option].default for option in options]


@pytest.mark.requirement("S1-13", "S1-29", "S1-38")
def test_the_defaults_on_the_page_about_receiving_are_those_of_the_code() -> None:
    """A default that is changed is changed on the page."""
    rows = re.findall(r"^\| `(\w+)\((\w+)=…\)` \| (.*?) \|", (ROOT / "docs" / "consuming.md").read_text(), re.MULTILINE)
    owners = {**vars(postroom), **vars(postroom.middleware), **vars(postroom.stores)}

    assert len(rows) >= 20
    for owner, option, cell in rows:
        assert [meant(cell)] == defaults(owners[owner], option), f"{owner}({option}=…)"


def test_the_defaults_of_the_consumer_on_its_page_are_those_of_the_code() -> None:
    section = (ROOT / "docs" / "consuming.md").read_text().partition("## The consumer")[2].partition("\n\nMessages")[0]
    options = ("concurrency", "timeout", "shutdown_grace", "acking")
    cells = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))

    assert [meant(cells[option]) for option in options] == defaults(Consumer, *options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """A page that was moved takes its links along."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())

    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_decision_says_when_to_revisit_it() -> None:
    """A decision without an end is a dogma."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))

    assert pages
    assert [page.name for page in pages if "**Revisit when**" not in page.read_text()] == []
    assert [page.name for page in pages if len(page.read_text().splitlines()) > 40] == []


def modules() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(postroom.__path__, "postroom.")]
    return ["postroom", *(name for name in found if not name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public API is documented with examples that work."""
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)

    assert results.failed == 0


@pytest.mark.parametrize("name", modules())
def test_every_module_lists_what_it_offers_and_says_what_it_is(name: str) -> None:
    """A module begins with a sentence, and ``__all__`` names only what is there."""
    module = importlib.import_module(name)

    assert module.__doc__
    assert [item for item in getattr(module, "__all__", []) if not hasattr(module, item)] == []


@pytest.mark.requirement("S4-21")
def test_no_page_promises_what_nobody_can() -> None:
    """At-least-once delivery and effectively-once handling, never more."""
    sources = [*PAGES, *(ROOT / "src").rglob("*.py")]

    assert [str(path) for path in sources if "exactly-once" in path.read_text().lower()] == []


@pytest.mark.requirement("S2-41", "S4-19")
async def test_the_patterns_work_as_printed(names: dict[str, Any]) -> None:
    """A command handler's events are stored with its effect; a consumer skips what it has handled."""
    pool: asyncpg.Pool = names["pool"]
    await pool.execute("CREATE TABLE handled (consumer text, message_id uuid, PRIMARY KEY (consumer, message_id))")
    await pool.execute("CREATE TABLE stock (reserved int)")
    await pool.execute("INSERT INTO stock VALUES (0)")
    command_handler, consumer, *_ = snippets("docs/patterns.md")

    await execute(command_handler, names)

    async def refused(connection: Any, command: Any) -> list[object]:  # noqa: ANN401
        await connection.execute("INSERT INTO orders (id) VALUES (8)")
        raise ValueError("out of stock")

    with pytest.raises(ValueError, match="out of stock"):
        await names["handle"]({"order_id": 8}, refused)
    assert [row["id"] for row in await pool.fetch("SELECT id FROM orders")] == [7]
    assert await pool.fetchval("SELECT count(*) FROM postroom_outbox") == 1

    await execute(consumer, names)
    message = Message(topic="orders", payload=b"{}")
    for _ in range(3):
        await names["reserve"](message)
    await names["reserve"](Message(topic="orders", payload=b"{}"))
    assert await pool.fetchval("SELECT reserved FROM stock") == 2


async def test_the_pattern_of_a_web_application_works_as_printed(
    names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """An outage costs no attempt, a refusal costs one; the dispatcher ends with the application."""
    [snippet] = [snippet for snippet in snippets("docs/patterns.md") if "lifespan" in snippet]
    statuses = [503, 500]

    class Failing(Hook):
        posted: ClassVar[list[tuple[str | None, bytes]]] = []

        def do_POST(self) -> None:
            if statuses:
                self.send_error(statuses.pop(0))
            else:
                super().do_POST()

    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # no server listens, so connections are refused
        address = unheard.getsockname()
        await execute(snippet.replace("localhost:8000", f"127.0.0.1:{address[1]}"), names)
        pool, app = names["pool"], SimpleNamespace(state=SimpleNamespace())
        async with names["lifespan"](app):
            assert names["is_healthy"](app)
            async with pool.acquire() as connection, connection.transaction():
                added = await names["outbox"].add(connection, {"order_id": 42}, topic="orders", key="42")
            await until(lambda: "destination orders (key 42) is down" in caplog.text, "the outage")
            unheard.close()
            with serving(Failing, address):
                await until(reads(pool, "SELECT status FROM postroom_outbox", "delivered"), "the delivery")

    assert not names["is_healthy"](app)
    assert Failing.posted == [(str(added.id), b'{"order_id":42}')]
    assert await pool.fetchval("SELECT attempts FROM postroom_outbox") == 2


@contextmanager
def serving(endpoint: type[BaseHTTPRequestHandler], address: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[int]:
    """Serve an endpoint of its own address, and yield the port."""
    with ThreadingHTTPServer(address, endpoint) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


async def test_the_health_of_a_web_application_shows_a_dispatcher_that_has_ended(
    names: dict[str, Any],
) -> None:
    """Its error comes out when the application ends."""
    [snippet] = [snippet for snippet in snippets("docs/patterns.md") if "lifespan" in snippet]
    await execute(snippet.replace('namespace="shop"', 'namespace="shop", table="missing"'), names)
    app = SimpleNamespace(state=SimpleNamespace())

    with pytest.raises(SchemaMissingError, match="missing"):
        async with names["lifespan"](app):
            await until(lambda: not names["is_healthy"](app), "the end of the dispatcher")


async def test_the_pattern_of_messages_over_http_works_as_printed(names: dict[str, Any]) -> None:
    """What is posted twice is handled once, and a failure is answered as one until the message is a dead letter."""
    [snippet] = [snippet for snippet in snippets("docs/patterns.md") if "handle_post" in snippet]
    handled: list[int] = []

    async def handle(order: dict[str, int]) -> None:
        if order["order_id"] == 13:
            raise ValueError("out of luck")
        handled.append(order["order_id"])

    names["router"] = Router()
    names["router"].add("order.placed", handle)
    await execute(snippet, names)

    def posting(order_id: int, attempt: int, message_id: UUID) -> Awaitable[int]:
        headers = {"x-message-type": "order.placed", "content-type": "application/json"}
        headers |= {"idempotency-key": str(message_id), "x-message-attempt": str(attempt)}
        return cast("Awaitable[int]", names["handle_post"]("orders", headers, b'{"order_id": %d}' % order_id))

    good, bad = uuid4(), uuid4()
    async with running(names["consumer"].run()):
        async with asyncio.timeout(30):
            statuses = [await posting(42, attempt, good) for attempt in (1, 2)]
            statuses += [await posting(13, attempt, bad) for attempt in (1, 10)]

    assert statuses == [204, 204, 500, 204]
    assert handled == [42]
    assert await names["pool"].fetchval("SELECT message_id FROM postroom_inbox_dead") == bad


async def test_a_dead_letter_is_handled_again_as_printed(names: dict[str, Any]) -> None:
    """The message is delivered again, the letter is gone, and the effect happens."""
    pool, dsn = names["pool"], names["dsn"]
    [redrive] = re.findall(r"```sql\nBEGIN;\n(.*?)COMMIT;\n```", (ROOT / "docs/consuming.md").read_text(), re.DOTALL)
    handled: list[int] = []
    is_mended = False

    async def handle(order: dict[str, int]) -> None:
        if not is_mended:
            raise ValueError("not yet")
        handled.append(order["order_id"])

    async with pool.acquire() as connection, connection.transaction():
        added = await Outbox(namespace="shop").add(connection, {"order_id": 42}, topic="orders", type="order.placed")
    router = Router()
    router.add("order.placed", handle)
    letters = "SELECT count(*) FROM postroom_inbox_dead"

    async def consume(condition: Callable[[], Any]) -> None:
        stores = PostgresStore(dsn, namespace="shop"), PostgresStore(dsn, namespace="stock")
        around = transactional(stores[1], consumer="stock", max_attempts=1)
        async with running(Consumer(OutboxSubscriber(stores[0]), router, around).run()):
            await until(condition, "the consumer")
            await until(reads(pool, "SELECT status FROM postroom_outbox", "delivered"), "the acknowledgement")
        for store in stores:
            await store.close()

    await consume(reads(pool, letters, 1))
    is_mended = True
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute(redrive.replace("…", str(added.id)))
    await consume(lambda: bool(handled))

    assert handled == [42]
    assert await pool.fetchval(letters) == 0


@pytest.mark.requirement("S3-25", "S3-27")
async def test_the_pattern_of_tickets_works_as_printed(names: dict[str, Any], valkey_server: ValkeyClient) -> None:
    """On SQL and in Redis."""
    pool = names["pool"]
    await pool.execute("CREATE TABLE seats (name text PRIMARY KEY)")
    *_, on_sql, in_redis = snippets("docs/patterns.md")

    await execute(on_sql, names)
    await names["reserve"]("A1", hold=timedelta(0))
    await names["reserve"]("A2", hold=timedelta(0))
    await names["reserve"]("A3")
    in_time = await names["give_back"]("A2")
    for _ in range(2):
        await names["expire"]()
    too_late = await names["give_back"]("A1")

    assert (in_time, too_late) == (True, False)
    assert [row["name"] for row in await pool.fetch("SELECT name FROM seats ORDER BY name")] == ["A2", "A3"]
    topics = [row["topic"] for row in await pool.fetch("SELECT topic FROM postroom_outbox ORDER BY seq")]
    assert topics == ["seats.given_back", "seats.expired"]

    namespace = f"ns-{uuid4().hex}"
    async with redis.asyncio.Redis.from_url(valkey_server.dsn) as client:
        names["client"] = client
        await execute(in_redis.replace('"shop"', f'"{namespace}"').replace("seat:7", namespace), names)
        assert await names["decisions"].find_due(client) == []
    assert isinstance(names["answer"], Enqueued)


@pytest.mark.requirement("S0-31")
async def test_the_page_about_redis_is_true_of_clusters() -> None:
    """Stores know by the URL what their server is."""
    [naming] = [snippet for snippet in snippets("docs/redis.md") if "redis+cluster:" in snippet]
    names: dict[str, Any] = {}

    await execute(naming, names)

    assert type(names["in_cluster"].client).__name__ == "RedisCluster"
    assert names["by_sentinel"].client.connection_pool.service_name == "mymaster"


@pytest.mark.requirement("S4-10")
async def test_the_snippet_about_configuration_is_true() -> None:
    """A preset is spread into constructors, and a part of it replaced; nothing is opened by that."""
    [snippet] = snippets("docs/configuration.md")
    names: dict[str, Any] = {}

    await execute(snippet, names)

    assert names["store"].keep_delivered == timedelta(hours=24)
    assert names["patient"].dispatcher["max_attempts"] == 20


class Hook(BaseHTTPRequestHandler):
    """The endpoint of the snippets: notes what it is posted."""

    posted: ClassVar[list[tuple[str | None, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append((self.headers["Idempotency-Key"], body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- its base calls it so
        """Print nothing."""


async def test_the_plain_publisher_of_the_guarantees_tells_an_outage_from_a_failure() -> None:
    """No server, a server that refuses, and one that does not answer in time."""
    [snippet] = [snippet for snippet in snippets("docs/guarantees.md") if "urlopen" in snippet]
    names: dict[str, Any] = {}
    message = Message(topic="orders", payload=b"{}")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        await execute(snippet.replace("localhost:8000", f"127.0.0.1:{port}").replace("timeout=5", "timeout=0.1"), names)
        with pytest.raises(PublishUnknownError):
            await asyncio.to_thread(names["post"], message)
    with pytest.raises(BrokerUnavailableError, match="refused"):
        await asyncio.to_thread(names["post"], message)

    class Refusing(Hook):
        def do_POST(self) -> None:
            self.send_error(422)

    with serving(Refusing) as port:
        await execute(snippet.replace("localhost:8000", f"127.0.0.1:{port}"), names)
        with pytest.raises(HTTPError, match="422"):
            await asyncio.to_thread(names["post"], message)


async def test_the_plain_publisher_of_the_guarantees_delivers() -> None:
    """It blocks its thread, and nothing else."""
    [snippet] = [snippet for snippet in snippets("docs/guarantees.md") if "urlopen" in snippet]
    names: dict[str, Any] = {}
    store = MemoryStore()
    with store.transaction() as transaction:
        added = Outbox().add(transaction, {"order_id": 42}, topic="orders")

    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        await execute(snippet.replace("localhost:8000", f"127.0.0.1:{server.server_port}"), names)
        await Dispatcher(store, names["post"]).run(until_idle=True)
        server.shutdown()
        serving.join()

    assert Hook.posted == [(str(added.id), b'{"order_id":42}')]


@pytest.mark.requirement("S0-05", "S0-06", "S0-29", "S0-58")
async def test_the_page_about_redis_is_true(valkey_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Added in a pipeline, delivered, and handled by code that knows no Redis."""
    adding, delivering, handling, stacking = (
        snippet.replace("redis://localhost:6379", valkey_url)
        for snippet in snippets("docs/redis.md")
        if "redis+cluster:" not in snippet
    )
    names: dict[str, Any] = {}
    await execute(adding, names)
    await names["place"](7)
    client = names["client"]
    await execute(delivering, names)
    await names["dispatcher"].run(until_idle=True)
    printed = capsys.readouterr().out
    stats = await names["store"].stats()
    await names["store"].close()
    await execute(handling, names)
    broker = MemoryBroker()
    names["consumer"] = Consumer(
        broker.subscribe("orders", group="stock"), names["router"], transactional(names["store"], consumer="stock")
    )
    async with running(names["consumer"].run()):
        order = Message(topic="orders", type="order.placed", payload=b'{"item": "apple"}')
        for _ in range(2):
            await broker.publish_batch([order])
            await until(lambda: not broker.backlog("stock"), "the acknowledgement")

    await execute(stacking, names)
    names["stacked"].stop_soon()
    await names["stacked"].run()  # which refuses an order that cannot work

    assert printed.startswith("Message(")
    assert (stats.delivered, stats.dead) == (1, 0)
    assert await client.hgetall("{shop}:orders") == {b"7": b"placed"}
    assert await client.hgetall("{shop}:stock") == {b"apple": b"-1"}
    await names["store"].close()
    await client.aclose()


async def with_parked_sqlite(request: pytest.FixtureRequest) -> str:
    path: Path = request.getfixturevalue("sqlite_path")
    with closing(sqlite3.connect(path)) as connection, connection:
        SQLiteStore.create_tables(connection)
        Outbox(namespace="shop").add(connection, ORDERS)
    return f"sqlite:///{path}"


async def with_parked_postgres(request: pytest.FixtureRequest) -> str:
    dsn: str = request.getfixturevalue("postgres_dsn")
    store = PostgresStore(dsn)
    await store.apply_schema()
    await store.close()
    connection = await asyncpg.connect(dsn)
    await Outbox(namespace="shop").add(connection, ORDERS, outside_transaction=True)
    await connection.close()
    return dsn


async def with_parked_redis(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue("valkey_url")
    async with redis.asyncio.Redis.from_url(url, retry=None) as client:
        await Outbox(namespace="shop").add(client, ORDERS)
    return url


#: Of three destinations, one of which has more messages than a call makes due.
ORDERS = [Message(topic="orders", payload=b"{}", key=str(number)) for number in range(1003)]


def destination_of(message: Message) -> str:
    return f"to {message.key}" if message.key in {"0", "1"} else "east"


@pytest.mark.parametrize("fill", [with_parked_sqlite, with_parked_postgres, with_parked_redis])
async def test_everything_parked_is_due_before_going_back_to_an_earlier_release(
    fill: Callable[[pytest.FixtureRequest], Awaitable[str]],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An earlier release knows no parked messages, and would find them an hour later."""
    url = await fill(request)
    store, terms = store_from_url(url, namespace="shop"), ClaimTerms(worker=uuid4())
    while claims := await store.claim(500, terms):
        await store.settle([Settlement(one, Release(destination=destination_of(one.message))) for one in claims])
    assert await store.parked() == ["east", "to 0", "to 1"]

    [unparking] = snippets("docs/upgrading.md")
    await execute(unparking.replace("redis://localhost:6379", url), {})

    assert capsys.readouterr().out == "1003 messages are due\n"
    assert await store.parked() == []
    due: set[str | None] = set()
    while claims := await store.claim(500, terms):
        due |= {claim.message.key for claim in claims}
    assert len(due) == len(ORDERS)
    await store.close()
