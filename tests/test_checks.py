"""What constructors refuse: every duration, count, flag and choice of the wrong kind, by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from postroom import (
    Backoff,
    Consumer,
    Dispatcher,
    Each,
    Inbox,
    Limits,
    Match,
    Message,
    Outbox,
    OutboxSubscriber,
    Router,
    TransactionMiddleware,
    transactional,
)
from postroom.brokers import FileBroker, MemoryBroker
from postroom.dead_letters import PublishedDeadLetters
from postroom.errors import ConfigurationError, UnknownURLError
from postroom.middleware import DeadLetterMiddleware, InboxMiddleware, RetryMiddleware
from postroom.stores import MemoryStore, MySQLStore, PostgresStore, SQLiteStore, store_from_url
from postroom.stores.redis import RedisInbox, RedisStore, RedisStreamStore
from postroom.testing.published import Published, SQLiteOutbox

SQLITE = SQLiteStore("nowhere.sqlite3")


def subscriber() -> Any:  # noqa: ANN401 -- whatever reads
    return MemoryBroker().subscribe("orders", group="g")


#: What makes each object, with what it needs at the least.
MAKERS: dict[str, tuple[Callable[..., object], dict[str, object]]] = {
    "Dispatcher": (Dispatcher, {"store": MemoryStore(), "publisher": print}),
    "OutboxSubscriber": (OutboxSubscriber, {"store": MemoryStore()}),
    "Consumer": (Consumer, {"subscriber": subscriber(), "router": Router()}),
    "Outbox": (Outbox, {}),
    "Inbox": (Inbox, {"consumer": "stock"}),
    "transactional": (transactional, {"store": SQLITE, "consumer": "stock"}),
    "Router": (Router, {}),
    "MemoryStore": (MemoryStore, {}),
    "PostgresStore": (PostgresStore, {"dsn": "postgresql://localhost/shop"}),
    "MySQLStore": (MySQLStore, {"url": "mysql://localhost/shop"}),
    "SQLiteStore": (SQLiteStore, {"path": "nowhere.sqlite3"}),
    "RedisStore": (RedisStore, {"server": "redis://localhost:6379"}),
    "RedisStreamStore": (RedisStreamStore, {"server": "redis://localhost:6379"}),
    "RedisInbox": (RedisInbox, {"consumer": "stock"}),
    "MemoryBroker": (MemoryBroker, {}),
    "FileBroker": (FileBroker, {"path": "nowhere.jsonl"}),
    "Each": (Each, {"send": print}),
    "Backoff": (Backoff, {}),
    "Limits": (Limits, {}),
    "InboxMiddleware": (InboxMiddleware, {"inbox": Inbox("stock")}),
    "TransactionMiddleware": (TransactionMiddleware, {"pool": SQLITE}),
    "DeadLetterMiddleware": (
        DeadLetterMiddleware,
        {"letters": PublishedDeadLetters(print, "dead", consumer="stock")},
    ),
    "RetryMiddleware": (RetryMiddleware, {}),
}


def arguments(kind: str) -> list[tuple[str, str]]:
    """Return every argument that is annotated with a type, with what takes it; one that may be None, too."""
    return [
        (name, parameter.name)
        for name, (make, _) in MAKERS.items()
        for parameter in inspect.signature(make).parameters.values()
        if parameter.annotation in {kind, f"{kind} | None"}
    ]


def refusal(name: str, argument: str, value: object) -> str:
    """Return what a constructor says of an argument that it refuses."""
    make, needed = MAKERS[name]
    with pytest.raises(ConfigurationError) as refused:
        make(**{**needed, argument: value})
    return str(refused.value)


def test_what_is_needed_is_enough() -> None:
    """Otherwise the other tests of this file would see errors of their own."""
    for make, needed in MAKERS.values():
        make(**needed)


def test_the_arguments_of_the_signatures_are_found() -> None:
    """A test that finds nothing to try proves nothing."""
    durations = {argument for name, argument in arguments("timedelta") if name == "Dispatcher"}
    counts = {argument for name, argument in arguments("int") if name == "Dispatcher"}

    assert durations == {
        "poll_interval",
        "lease",
        "publish_timeout",
        "shutdown_grace",
        "sweep_interval",
        "cleanup_interval",
    }
    assert counts == {"batch", "batch_bytes", "batches_in_flight", "concurrency", "max_attempts"}
    assert ("Consumer", "timeout") in arguments("timedelta")
    assert ("SQLiteStore", "wal") in arguments("bool")


@pytest.mark.parametrize(("name", "argument"), arguments("timedelta"))
def test_a_duration_is_a_timedelta(name: str, argument: str) -> None:
    """A number says nothing of its unit; the error says how to write it."""
    for value, example in ((5, 5), (0.5, 0.5), (True, 5)):
        wanted = f"a timedelta, such as timedelta(seconds={example})"
        assert refusal(name, argument, value).startswith(f"{argument}={value} must be {wanted}")
    assert refusal(name, argument, "5s").startswith(f"{argument} of type str must be a timedelta, such as")
    if (name, argument) != ("RedisInbox", "retention"):  # where it means the default
        assert refusal(name, argument, timedelta(-1)).startswith(f"{argument}=-1 day, 0:00:00 must ")


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, argument in arguments("timedelta")
        if argument not in {"shutdown_grace", "keep_delivered", "redelivery_horizon", "longest", "claim_interval"}
        and (name, argument) != ("RedisInbox", "retention")  # where it means the default
    ],
)
def test_a_duration_is_positive_unless_zero_has_a_meaning(name: str, argument: str) -> None:
    """Zero is no interval."""
    assert refusal(name, argument, timedelta(0)).startswith(f"{argument}=0:00:00 must be positive")


@pytest.mark.parametrize(("name", "argument"), arguments("int"))
@pytest.mark.parametrize("value", [True, 1.5, -1])
def test_a_count_is_a_whole_number_and_no_bool(name: str, argument: str, value: object) -> None:
    """``batch=True`` would be a batch of one."""
    assert refusal(name, argument, value).startswith(f"{argument}={value} must be an int ")


@pytest.mark.parametrize(("name", "argument"), arguments("int"))
def test_a_count_is_no_text(name: str, argument: str) -> None:
    """Settings from the environment are texts; the value may be a secret, so it is not shown."""
    assert refusal(name, argument, "hunter2").startswith(f"{argument} of type str must be an int ")


@pytest.mark.parametrize(("name", "argument"), arguments("bool"))
def test_a_flag_is_a_bool(name: str, argument: str) -> None:
    """``"no"`` is true."""
    assert refusal(name, argument, "no") == f"{argument} of type str must be True or False"


@pytest.mark.parametrize(("name", "argument"), arguments("UUID"))
def test_an_id_is_a_uuid(name: str, argument: str) -> None:
    """A text would match no row, and deliver nothing without a word."""
    assert refusal(name, argument, str(UUID(int=1))) == f"{argument} of type str must be a UUID or None"


@pytest.mark.parametrize(("name", "argument"), arguments("str"))
def test_a_name_is_a_text(name: str, argument: str) -> None:
    """A name that is none is refused by what names it, or by the rule for such names."""
    said = refusal(name, argument, 5)
    assert said.startswith((f"{argument}=5 must be a string", f"5 cannot name a {argument}", "5 cannot name a table"))


CHOICES = [
    ("Dispatcher", "on_dead", "'block', 'skip'"),
    ("OutboxSubscriber", "on_dead", "'block', 'skip'"),
    ("Consumer", "acking", "'on_success', 'manual', 'forward'"),
    ("Inbox", "mode", "'pessimistic', 'optimistic'"),
    ("transactional", "mode", "'pessimistic', 'optimistic'"),
    ("PostgresStore", "driver", "'asyncpg', 'psycopg'"),
    ("PostgresStore", "pooler", "None, 'transaction'"),
    ("Backoff", "jitter", "'equal', 'none'"),
    ("TransactionMiddleware", "nested", "'join', 'savepoint'"),
]


@pytest.mark.parametrize(("name", "argument", "choices"), CHOICES)
def test_a_choice_is_one_of_those_that_there_are(name: str, argument: str, choices: str) -> None:
    """The error lists them."""
    assert refusal(name, argument, "maybe") == f"{argument}='maybe' must be one of {choices}"
    assert refusal(name, argument, 5) == f"{argument}=5 must be one of {choices}"


FUNCTIONS = [
    ("Dispatcher", "backoff"),
    ("Dispatcher", "outage_backoff"),
    ("Dispatcher", "destination"),
    ("Dispatcher", "listener"),
    ("OutboxSubscriber", "backoff"),
    ("OutboxSubscriber", "listener"),
    ("Consumer", "backoff"),
    ("Consumer", "listener"),
    ("Outbox", "wake"),
    ("transactional", "wake"),
    ("transactional", "listener"),
    ("MemoryStore", "clock"),
    ("RedisInbox", "key_func"),
    ("RetryMiddleware", "backoff"),
]


@pytest.mark.parametrize(("name", "argument"), FUNCTIONS)
def test_a_function_can_be_called(name: str, argument: str) -> None:
    """``backoff=timedelta(seconds=1)`` would fail with the first message that does."""
    said = refusal(name, argument, timedelta(seconds=1))
    assert said.startswith(f"{argument} of type timedelta must be a function of ")


async def answers_later(_: object) -> None:
    """Answer with a coroutine."""


@pytest.mark.parametrize(("name", "argument"), FUNCTIONS)
def test_a_function_is_neither_async_nor_a_class(name: str, argument: str) -> None:
    """The events that an async listener is called with, or the answers of an async function, would be lost."""
    said = refusal(name, argument, answers_later)
    assert said.startswith(f"{argument} must be a plain function of ")
    assert said.endswith(", not an async one: nothing awaits it")
    assert refusal(name, argument, Backoff) == f"{argument} must not be the class Backoff: pass an instance"


@pytest.mark.parametrize("match", ["order.*", answers_later, Match], ids=["text", "async", "class"])
def test_a_router_takes_a_plain_function_as_match(match: Any) -> None:  # noqa: ANN401 -- what is wrong
    """What an async one returns is true, so that it would refuse nothing."""
    with pytest.raises(ConfigurationError, match=r"^match .*must "):
        Router().on("order.placed", match=match)(print)


class Reserve:
    """A handler that is an object."""

    async def __call__(self, order: object) -> None:
        """Handle."""


@pytest.mark.parametrize("handler", [None, "reserve", Reserve], ids=["None", "text", "class"])
def test_a_router_takes_a_function_as_handler(handler: Any) -> None:  # noqa: ANN401 -- what is wrong
    with pytest.raises(ConfigurationError, match=r"^handler.* must "):
        Router().add("order.placed", handler)


def test_a_topic_of_a_route_and_a_glob_are_texts() -> None:
    with pytest.raises(ConfigurationError, match="topic=5 must be a string or None"):
        Router().on("order.placed", topic=5)(print)  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="type=5 must be a string"):
        Match(type=5)  # type: ignore[arg-type]


OBJECTS = [
    ("Dispatcher", "store", None, "store=None must be a store, such as PostgresStore(dsn), or the URL of one"),
    ("Dispatcher", "store", 5, "store=5 must be a store, such as PostgresStore(dsn), or the URL of one"),
    ("Dispatcher", "store", MemoryStore, "store must not be the class MemoryStore: pass an instance"),
    ("Dispatcher", "publisher", None, "publisher must not be None; it takes a function"),
    ("OutboxSubscriber", "store", 5, "store=5 must be a store, such as"),
    ("transactional", "store", 5, "store=5 must be a store with an inbox, such as"),
    ("transactional", "store", MemoryStore(), "store of type MemoryStore must be a store with an inbox, such as"),
    ("transactional", "dead_letters", 5, "dead_letters=5 must be a place for dead letters or None"),
    (
        "Consumer",
        "subscriber",
        print,
        "subscriber of type builtin_function_or_method must be a Subscriber, such as OutboxSubscriber(store)",
    ),
    ("Consumer", "router", print, "router of type builtin_function_or_method must be a Router; add a handler"),
    ("Consumer", "router", Router, "router must not be the class Router: pass an instance"),
    ("Outbox", "codec", 5, "codec=5 must be a Codec or None"),
    ("Outbox", "limits", 5, "limits=5 must be a Limits or None"),
    ("Router", "codec", 5, "codec=5 must be a Codec or None"),
    ("InboxMiddleware", "inbox", "stock", "inbox of type str must be a Inbox"),
    ("DeadLetterMiddleware", "letters", 5, "letters=5 must be a place for dead letters"),
    ("Each", "send", 5, "send=5 must be a function of a message"),
]


@pytest.mark.parametrize(("name", "argument", "value", "said"), OBJECTS)
def test_an_object_has_what_it_is_used_for(name: str, argument: str, value: object, said: str) -> None:
    """It is refused where it is passed, and not with an AttributeError at the first message."""
    assert refusal(name, argument, value).startswith(said)


def test_a_middleware_can_be_called() -> None:
    """A consumer names what cannot."""
    with pytest.raises(ConfigurationError, match="middleware of type str must be a function of a message"):
        Consumer(subscriber(), Router(), "log")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="middleware must not be the class RetryMiddleware: pass an instance"):
        Consumer(subscriber(), Router(), RetryMiddleware)  # type: ignore[arg-type]


# -- URLs ----------------------------------------------------------------------------------------------------------


async def test_a_url_stands_for_its_store(tmp_path: Path) -> None:
    """A URL is taken wherever a store is: by `Dispatcher`, `OutboxSubscriber`, `transactional` and `Published`."""
    outbox = SQLiteOutbox(tmp_path / "shop.sqlite3")
    url, sent = f"sqlite:///{outbox.path}", list[Message]()

    def add() -> None:
        with outbox.connection as connection:
            outbox.add(connection, {"order_id": 42}, topic="orders", type="order.placed")

    add()
    await Dispatcher(url, sent.append).run(until_idle=True)
    add()
    async with OutboxSubscriber(url) as deliveries:
        delivery = await anext(deliveries)
        await delivery.ack()
    add()
    drained = await Published(url).drain()

    assert [len(sent), len(drained)] == [1, 1]
    assert (await outbox.store.stats()).delivered == 3
    outbox.close()


async def test_transactional_takes_a_url(tmp_path: Path) -> None:
    """The effect of a message that comes twice happens once."""
    outbox, broker, router, handled = SQLiteOutbox(tmp_path / "shop.sqlite3"), MemoryBroker(), Router(), list[int]()

    @router.on("order.placed")
    async def reserve(order: dict[str, int]) -> None:
        handled.append(order["order_id"])
        if order["order_id"] == 2:
            consumer.stop_soon()

    middleware = transactional(f"sqlite:///{outbox.path}", consumer="stock")
    consumer = Consumer(broker.subscribe("orders", group="g"), router, middleware, concurrency=1)
    first, last = (
        Message(topic="orders", type="order.placed", key="k", payload=b'{"order_id": %d}' % number) for number in (1, 2)
    )
    await broker.publish_batch([first, first, last])
    await consumer.run()

    assert handled == [1, 2]
    outbox.close()


def test_a_url_that_no_store_has_is_refused_without_its_password() -> None:
    """It names the scheme and what there is."""
    with pytest.raises(UnknownURLError) as refused:
        Dispatcher("nats://app:hunter2@localhost", print)

    assert "nats" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_store_from_url_opens_nothing(tmp_path: Path) -> None:
    """Hence its name."""
    path = tmp_path / "shop.sqlite3"

    store_from_url(f"sqlite:///{path}")

    assert not path.exists()
