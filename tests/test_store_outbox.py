"""The outbox of a store: what it takes over, so that a dispatcher of the store delivers what it adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from postroom import JSONCodec, Limits, Outbox
from postroom.stores import MemoryStore, MySQLStore, PostgresStore, SQLiteStore, store_from_url
from postroom.stores.redis import RedisStore, RedisStreamStore

POSTGRES, MYSQL, REDIS = "postgresql://localhost/shop", "mysql://localhost/shop", "redis://localhost"
#: Every kind of store, and what is said of it besides the settings of messages.
STORES: dict[str, tuple[Callable[..., Any], dict[str, object]]] = {
    "asyncpg": (lambda **o: PostgresStore(POSTGRES, **o), {"table": "post", "schema": "app", "strict_order": True}),
    "psycopg": (lambda **o: PostgresStore(POSTGRES, driver="psycopg", **o), {"table": "post", "strict_order": True}),
    "mysql": (lambda **o: MySQLStore(MYSQL, **o), {"table": "post", "strict_order": True}),
    "sqlite": (lambda **o: SQLiteStore("shop.sqlite3", **o), {"table": "post", "strict_order": True}),
    "redis": (lambda **o: RedisStore(REDIS, **o), {"table": "post", "strict_order": True}),
    "stream": (lambda **o: RedisStreamStore(REDIS, **o), {"table": "post"}),
    "memory": (MemoryStore, {"strict_order": True}),
}


class Framed(JSONCodec):
    content_type = "application/framed+json"


@pytest.mark.parametrize("kind", STORES)
def test_the_outbox_of_a_store_has_everything_that_was_said_of_the_store(kind: str) -> None:
    """What is said once need not be said again, and cannot differ."""
    make, special = STORES[kind]
    said = {
        "namespace": "shop",
        "codec": Framed(),
        "limits": Limits(payload=100),
        "opaque_dedupe_keys": True,
        **special,
    }

    outbox: Outbox = make(**said).outbox()

    assert {name: getattr(outbox, name) for name in said} == said


@pytest.mark.parametrize("kind", STORES)
def test_a_keyword_that_no_store_takes_is_refused_as_python_does_it(kind: str) -> None:
    """A misspelt setting would otherwise be none."""
    make, _ = STORES[kind]

    with pytest.raises(TypeError, match=r"Store\(\) got an unexpected keyword argument 'codek'"):
        make(codek=Framed())


def test_a_stream_has_no_order_to_be_strict_about() -> None:
    """It promises no order, so that nothing can be said of it."""
    with pytest.raises(TypeError, match="strict_order"):
        RedisStreamStore(REDIS, strict_order=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("url", [POSTGRES, MYSQL, REDIS, "sqlite:///shop.sqlite3", "memory:"])
def test_a_store_by_its_url_passes_its_settings_on(url: str) -> None:
    """Whatever the URL names."""
    codec = Framed()

    outbox = store_from_url(url, namespace="shop", codec=codec, strict_order=True).outbox()

    assert (outbox.namespace, outbox.codec, outbox.strict_order) == ("shop", codec, True)
