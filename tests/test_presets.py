"""The defaults and the preset beside them: to change a value is to change a promise."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from postroom import (
    Backoff,
    Consumer,
    Dispatcher,
    Each,
    Inbox,
    Limits,
    Outbox,
    OutboxSubscriber,
    Router,
    TransactionMiddleware,
    presets,
    transactional,
)
from postroom.brokers import FileBroker, MemoryBroker
from postroom.dispatcher import OUTAGE_BACKOFF
from postroom.events import log_event
from postroom.middleware import DeadLetterMiddleware, InboxMiddleware, RetryMiddleware
from postroom.stores import MemoryStore, MySQLStore, PostgresStore, SQLiteStore

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
MS = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)

DEFAULTS: dict[str, tuple[Callable[..., object], dict[str, object]]] = {
    "Dispatcher": (
        Dispatcher,
        {
            "batch": 500,
            "batch_bytes": 4_194_304,
            "batches_in_flight": 4,
            "concurrency": 100,
            "poll_interval": 500 * MS,
            "lease": 30 * SECOND,
            "publish_timeout": 10 * SECOND,
            "max_attempts": 10,
            "backoff": None,
            "outage_backoff": None,
            "destination": None,
            "on_dead": "block",
            "tenant_id": None,
            "shutdown_grace": 30 * SECOND,
            "sweep_interval": 5 * SECOND,
            "cleanup_interval": 60 * SECOND,
            "worker": None,
            "listener": log_event,
        },
    ),
    "OutboxSubscriber": (
        OutboxSubscriber,
        {
            "batch": 100,
            "poll_interval": 500 * MS,
            "lease": 30 * SECOND,
            "max_attempts": 10,
            "backoff": None,
            "on_dead": "block",
            "tenant_id": None,
            "cleanup_interval": 60 * SECOND,
            "listener": log_event,
        },
    ),
    "Consumer": (
        Consumer,
        {
            "acking": "on_success",
            "publisher": None,
            "concurrency": 5,
            "buffer": None,
            "timeout": 30 * SECOND,
            "shutdown_grace": 30 * SECOND,
            "backoff": None,
            "listener": log_event,
        },
    ),
    "transactional": (
        transactional,
        {
            "pool": None,
            "topic": None,
            "mode": "pessimistic",
            "by": "id",
            "retention": None,
            "redelivery_horizon": None,
            "max_attempts": 10,
            "dead_letters": None,
            "wake": None,
            "cleanup_interval": 60 * SECOND,
            "listener": None,
        },
    ),
    "Outbox": (
        Outbox,
        {
            "namespace": "default",
            "table": "postroom_outbox",
            "schema": None,
            "codec": None,
            "limits": None,
            "strict_order": False,
            "opaque_dedupe_keys": False,
            "wake": None,
        },
    ),
    "Inbox": (
        Inbox,
        {
            "table": "postroom_inbox",
            "schema": None,
            "mode": "pessimistic",
            "by": "id",
            "retention": timedelta(days=7),
            "redelivery_horizon": None,
        },
    ),
    "Router": (Router, {"codec": None, "topic": None, "source": None, "unhandled": "fail"}),
    "PostgresStore": (
        PostgresStore,
        {
            "namespace": "default",
            "table": "postroom_outbox",
            "inbox": "postroom_inbox",
            "schema": None,
            "driver": "asyncpg",
            "keep_delivered": timedelta(days=7),
            "timeout": 10 * SECOND,
            "connections": 5,
            "pooler": None,
        },
    ),
    "MySQLStore": (
        MySQLStore,
        {
            "namespace": "default",
            "table": "postroom_outbox",
            "inbox": "postroom_inbox",
            "keep_delivered": timedelta(days=7),
            "timeout": 10 * SECOND,
            "connections": 5,
        },
    ),
    "SQLiteStore": (
        SQLiteStore,
        {
            "namespace": "default",
            "table": "postroom_outbox",
            "inbox": "postroom_inbox",
            "keep_delivered": timedelta(days=7),
            "timeout": 10 * SECOND,
            "wal": True,
        },
    ),
    "MemoryBroker": (MemoryBroker, {"keep": 100_000, "capacity": 100_000}),
    "FileBroker": (FileBroker, {"patience": 5 * SECOND}),
    "Each": (Each, {"concurrency": 100, "timeout": 10 * SECOND}),
    "Backoff": (Backoff, {"base": SECOND, "max": 300 * SECOND, "jitter": "equal"}),
    "Limits": (Limits, {"payload": 262_144, "headers": 64, "header_bytes": 8192}),
    "InboxMiddleware": (InboxMiddleware, {"cleanup_interval": 60 * SECOND, "listener": None}),
    "TransactionMiddleware": (TransactionMiddleware, {"nested": "join", "retries": 3}),
    "DeadLetterMiddleware": (DeadLetterMiddleware, {"max_attempts": 10, "was_handled": None, "listener": None}),
    "RetryMiddleware": (RetryMiddleware, {"attempts": 3, "on": Exception, "backoff": None}),
}


def defaults_of(make: Callable[..., object]) -> dict[str, object]:
    parameters = inspect.signature(make).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


@pytest.mark.requirement("S2-35", "S4-10")
@pytest.mark.parametrize(("make", "values"), DEFAULTS.values(), ids=DEFAULTS)
def test_the_defaults_are_these(make: Callable[..., object], values: dict[str, object]) -> None:
    """Whoever changes one changes it here, in the documentation and in the changelog."""
    assert defaults_of(make) == values


def test_the_defaults_of_a_store_in_memory_are_these() -> None:
    """Its clock is a function of its own."""
    values = defaults_of(MemoryStore)

    assert (values["namespace"], values["keep_delivered"]) == ("default", timedelta(days=7))


def test_the_defaults_behind_none_are_these() -> None:
    """What is left out is a backoff that doubles, and ends sooner for destinations that are down."""
    assert Backoff() == Backoff(base=SECOND, max=300 * SECOND, jitter="equal")
    assert Backoff(base=SECOND, max=30 * SECOND, jitter="equal") == OUTAGE_BACKOFF


@pytest.mark.requirement("S4-10")
def test_the_preset_has_the_values_of_the_design() -> None:
    """Poll 1 s, batch 100, at most 10 attempts, cleanup every hour of what is older than a day."""
    assert presets.MODERATE.dispatcher == {
        "poll_interval": SECOND,
        "batch": 100,
        "max_attempts": 10,
        "backoff": Backoff(base=SECOND, max=60 * SECOND),
        "cleanup_interval": timedelta(hours=1),
    }
    assert presets.MODERATE.store == {"keep_delivered": timedelta(hours=24)}


def test_the_preset_fits_the_constructors() -> None:
    """Each of its keywords is one of theirs, so that it may be spread; a part of it can be replaced."""
    store = PostgresStore("postgresql://localhost/shop", **presets.MODERATE.store)
    Dispatcher(store, print, **replace(presets.MODERATE, batch=7).dispatcher, shutdown_grace=SECOND)

    assert store.keep_delivered == timedelta(hours=24)
    assert presets.MODERATE.dispatcher.keys() <= inspect.signature(Dispatcher).parameters.keys()


def test_nobody_changes_the_preset_for_others() -> None:
    """What is spread is a copy."""
    presets.MODERATE.dispatcher["batch"] = 1

    assert presets.MODERATE.dispatcher["batch"] == 100


@pytest.mark.requirement("S4-10")
def test_the_page_shows_the_values_side_by_side() -> None:
    """The table of the page is held to the signatures and to the preset."""
    rows = re.findall(r"^\| `(\w+)\((\w+)=…\)` \| `(.+?)` \| `(.+?)` \|$", PAGE.read_text(), flags=re.MULTILINE)
    known = {"timedelta": timedelta, "Backoff": Backoff}
    moderate = {**presets.MODERATE.dispatcher, **presets.MODERATE.store}

    assert {argument for _, argument, _, _ in rows} == moderate.keys()
    for owner, argument, default, preset in rows:
        found = defaults_of(DEFAULTS[owner][0])[argument]
        wanted = eval(default, known)  # noqa: S307 -- our own page
        assert (Backoff() if argument == "backoff" else found) == wanted, argument
        assert moderate[argument] == eval(preset, known)  # noqa: S307 -- our own page
