"""Where messages live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, UnknownURLError
from ..store import Store
from .memory import MemoryStore
from .sql.ddl import schema_sql, schema_statements
from .sql.store import MySQLStore, PostgresStore, SQLiteStore, SQLStore

__all__ = [
    "MemoryStore",
    "MySQLStore",
    "PostgresStore",
    "SQLStore",
    "SQLiteStore",
    "schema_sql",
    "schema_statements",
    "store_from_url",
]

if TYPE_CHECKING:
    from .redis import RedisStore

    _proof: list[type[Store]] = [MemoryStore, MySQLStore, PostgresStore, RedisStore, SQLiteStore]

ACCEPTED = (
    "postgresql://…, postgresql+psycopg://…, mysql://…, mariadb://…, sqlite:///file, "
    "redis://…, redis+cluster://…, redis+sentinel://…, memory:"
)
#: What is said of tables only, and what of servers only that may forget.
_OF_TABLES = frozenset({"schema", "inbox"})
_OF_REDIS = frozenset({"profile", "replicas"})
_OF_MEMORY = frozenset({"namespace", "keep_delivered", "codec", "limits", "strict_order", "opaque_dedupe_keys"})
_REDIS = frozenset({"redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"})


def store_from_url(url: str, **options: Any) -> MemoryStore | SQLStore | RedisStore:  # noqa: ANN401 -- those of the store's constructor
    """Return the store that a URL names, not yet opened.

    Example:
        >>> from postroom.stores import store_from_url
        >>> store_from_url("sqlite:///shop.sqlite3", namespace="shop")
        SQLiteStore(namespace='shop', table='postroom_outbox')
    """
    scheme, _, rest = url.partition(":")
    if options.get("pooler") is not None and not scheme.startswith("postgres"):
        raise ConfigurationError(f"a pooler is for PostgreSQL only; leave pooler out for {scheme}:…")
    foreign = _OF_TABLES if scheme in _REDIS else _OF_REDIS
    options = {name: value for name, value in options.items() if name not in foreign}
    match scheme:
        case "postgresql" | "postgres" | "postgresql+asyncpg":
            return PostgresStore(url, **options)
        case "postgresql+psycopg":
            return PostgresStore(url, driver="psycopg", **options)
        case "mysql" | "mariadb" | "mysql+asyncmy" | "mariadb+asyncmy":
            options.pop("schema", None)  # a database is a schema there
            return MySQLStore(url, **options)
        case "sqlite" if rest.startswith("///"):
            options.pop("schema", None)
            return SQLiteStore(rest.removeprefix("///"), **options)
        case _ if scheme in _REDIS:
            from .redis import RedisStore  # noqa: PLC0415 -- an extra

            return RedisStore(url, **options)
        case "memory":
            return MemoryStore(**{name: options[name] for name in options.keys() & _OF_MEMORY})
        case _:
            raise UnknownURLError(f"{scheme}:…", ACCEPTED)
