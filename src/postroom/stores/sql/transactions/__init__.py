"""Transactions on the pools, engines and files of other libraries; each is known by the package of its class."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from ....errors import UnknownConnectionError
from .block import Block, Foreign, SQLTransactions
from .frameworks import DjangoPlain, SQLAlchemyLink, SQLAlchemyPlain
from .network import AsyncmyLink, AsyncmyPool, AsyncpgLink, AsyncpgPool, PsycopgLink, PsycopgPlain, PsycopgPool
from .sqlite import AiosqliteLink, ConnectionLink, FileTransactions
from .threads import Gate, OnThread, Plain, Threads

__all__ = ["Block", "SQLTransactions", "transactions_for"]

_ACCEPTED: Final = (
    "asyncmy's Pool, asyncpg's Pool, SQLAlchemy's AsyncEngine or async_sessionmaker, Engine or sessionmaker, psycopg's "
    "AsyncConnectionPool or ConnectionPool, the path of a SQLite file or a connection to it, Django's atomic, a store"
)
_DJANGO: Final = "django.db.transaction"

#: Those that somebody uses, so that a handler finds the transaction of its own pool; they keep their pools alive.
_known: WeakValueDictionary[object, SQLTransactions] = WeakValueDictionary()


def transactions_for(pool: object) -> SQLTransactions:
    """Return what opens transactions on a pool, an engine or a file: the same for the same one.

    Raises:
        UnknownConnectionError: Nothing is known of this kind of pool.
    """
    key = _key(pool)
    known = _known.get(key)
    if known is None:
        known = _known[key] = _made(pool)
    return known


def _key(pool: object) -> object:
    if isinstance(pool, str | Path):
        return Path(pool).resolve()
    if callable(pool):
        atomic, alias = _atomic(pool)
        if atomic is not None:
            return alias
    return id(pool)


def _made(pool: Foreign) -> SQLTransactions:
    if isinstance(pool, str | Path):
        if "://" in str(pool) or str(pool) in {"", ":memory:"}:
            raise UnknownConnectionError(pool, _ACCEPTED)
        return FileTransactions(partial(_connected, Path(pool).resolve()))
    if callable(pool):
        atomic, alias = _atomic(pool)
        if atomic is not None:
            return _on_threads(partial(DjangoPlain, atomic, alias))
    make = _maker(type(pool))  # type: ignore[arg-type]  # mypy takes a class for unhashable
    if make is None:
        raise UnknownConnectionError(pool, _ACCEPTED)
    return make(pool)


@lru_cache(maxsize=64)
def _maker(kind: type) -> Callable[[Foreign], SQLTransactions] | None:
    names = (f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__)
    return next((_MAKERS[name] for name in names if name in _MAKERS), None)


def _atomic(pool: Callable[..., object]) -> tuple[Callable[..., object] | None, str]:
    """Return Django's ``atomic`` and the alias of its database, if that is what this is."""
    function, alias = pool, "default"
    if isinstance(pool, functools.partial):
        function, alias = pool.func, pool.keywords.get("using") or (pool.args[0] if pool.args else alias)
    is_atomic = getattr(function, "__module__", "") == _DJANGO and getattr(function, "__name__", "") == "atomic"
    return (function if is_atomic else None), alias


def _connected(path: Path) -> sqlite3.Connection:
    from ..drivers.sqlite import connected  # noqa: PLC0415 -- the driver knows these transactions as well

    return connected(path, wal=False, busy_timeout=timedelta(seconds=5), any_thread=True)


def _on_threads(make: Callable[[], Plain], size: int | None = None) -> SQLTransactions:
    threads = Threads() if size is None else Threads(size)
    return SQLTransactions(lambda: OnThread(make(), threads), is_async=False)


def _aiosqlite(connection: Foreign) -> SQLTransactions:
    return SQLTransactions(partial(AiosqliteLink, connection, Gate(1)))


_MAKERS: Final[Mapping[str, Callable[[Foreign], SQLTransactions]]] = {
    "asyncpg.Pool": lambda pool: SQLTransactions(partial(AsyncpgLink, AsyncpgPool(pool))),
    "psycopg_pool.AsyncConnectionPool": lambda pool: SQLTransactions(partial(PsycopgLink, PsycopgPool(pool))),
    "psycopg_pool.ConnectionPool": lambda pool: _on_threads(partial(PsycopgPlain, pool)),
    "asyncmy.Pool": lambda pool: SQLTransactions(partial(AsyncmyLink, AsyncmyPool(pool))),
    "sqlalchemy.AsyncEngine": lambda engine: SQLTransactions(partial(SQLAlchemyLink, engine.connect, is_session=False)),
    "sqlalchemy.async_sessionmaker": lambda maker: SQLTransactions(partial(SQLAlchemyLink, maker, is_session=True)),
    "sqlalchemy.Engine": lambda engine: _on_threads(partial(SQLAlchemyPlain, engine.connect, is_session=False)),
    "sqlalchemy.sessionmaker": lambda maker: _on_threads(partial(SQLAlchemyPlain, maker, is_session=True)),
    "sqlite3.Connection": lambda connection: _on_threads(partial(ConnectionLink, connection), 1),
    "aiosqlite.Connection": _aiosqlite,
}
