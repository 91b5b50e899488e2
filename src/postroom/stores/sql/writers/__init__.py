"""Writing through the caller's transaction, whatever library holds it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from ....writer import Writer
from .drivers import Aiosqlite, Asyncmy, Asyncpg, Psycopg, PsycopgAsync, PyMySQL, SQLite3
from .frameworks import (
    Django,
    SQLAlchemyAsync,
    SQLAlchemyAsyncScopedSession,
    SQLAlchemyConnection,
    SQLAlchemyScopedSession,
    SQLAlchemySession,
)

__all__ = ["writer_for"]

_WRITERS: Final[Mapping[str, Writer]] = {
    "asyncpg.Connection": Asyncpg(),
    "asyncpg.PoolConnectionProxy": Asyncpg(),
    "psycopg.Connection": Psycopg(),
    "psycopg.AsyncConnection": PsycopgAsync(),
    "sqlite3.Connection": SQLite3(),
    "aiosqlite.Connection": Aiosqlite(),
    "pymysql.Connection": PyMySQL(),
    "asyncmy.Connection": Asyncmy(),
    "sqlalchemy.Connection": SQLAlchemyConnection(),
    "sqlalchemy.Session": SQLAlchemySession(),
    "sqlalchemy.scoped_session": SQLAlchemyScopedSession(),
    "sqlalchemy.AsyncConnection": SQLAlchemyAsync(SQLAlchemyConnection()),
    "sqlalchemy.AsyncSession": SQLAlchemyAsync(SQLAlchemySession()),
    "sqlalchemy.async_scoped_session": SQLAlchemyAsyncScopedSession(SQLAlchemySession()),
    "django.ConnectionProxy": Django(),
    "django.BaseDatabaseWrapper": Django(),
}


def writer_for(connection: object) -> Writer | None:
    """Return what writes through a connection, None if nothing does."""
    return _writer_of(type(connection))  # type: ignore[arg-type]  # mypy takes a class for unhashable


@lru_cache(maxsize=256)
def _writer_of(kind: type) -> Writer | None:
    names = (f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__)
    return next((_WRITERS[name] for name in names if name in _WRITERS), None)
