"""Which library a connection, a pool or an error belongs to; its driver is imported once one of its objects is met."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Final, cast

from ....errors import UnknownConnectionError
from ..driver import Driver, Foreign
from ..errors import Fault
from ..source import Source

__all__ = ["classify", "driver_of", "key_of", "source_of"]

#: The module of each package. It has ``CONNECTIONS``, the drivers of the package's connections by the
#: name of their class; ``POOLS``, what makes sources of its pools; and ``classify``, which says what its errors mean.
_MODULES: Final[Mapping[str, str]] = {
    "MySQLdb": "mysql",
    "aiomysql": "mysql",
    "aiosqlite": "sqlite",
    "asyncmy": "mysql",
    "asyncpg": "asyncpg",
    "django": "django",
    "psycopg": "psycopg",
    "psycopg_pool": "psycopg",
    "pymysql": "mysql",
    "sqlalchemy": "sqlalchemy",
    "sqlite3": "sqlite",
}
_POOLS: Final = (
    "asyncmy's Pool, asyncpg's Pool, SQLAlchemy's AsyncEngine or async_sessionmaker, Engine or sessionmaker, psycopg's "
    "AsyncConnectionPool or ConnectionPool, the path of a SQLite file or a connection to it, Django's atomic, a store"
)


@lru_cache(maxsize=1024)
def _known(kind: type) -> tuple[tuple[ModuleType, str], ...]:
    """Return the modules that know a class or its bases, each with the name by which it knows it."""
    return tuple(
        (_driver_module(_MODULES[package]), f"{package}.{base.__name__}")
        for base in kind.__mro__
        if (package := base.__module__.partition(".")[0]) in _MODULES
    )


def _driver_module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


@lru_cache(maxsize=256)
def _driver_for(kind: type) -> Driver | None:
    return next((module.CONNECTIONS[name] for module, name in _known(kind) if name in module.CONNECTIONS), None)


def driver_of(connection: object) -> Driver | None:
    """Return the driver of a connection or session, None if it is of no known library."""
    return _driver_for(type(connection))  # type: ignore[arg-type]  # mypy takes a class for unhashable


def classify(error: BaseException) -> Fault | None:
    """Return what an error of a database library means, None if it is not one."""
    known = _known(type(error))  # type: ignore[arg-type]  # mypy takes a class for unhashable
    return cast("Fault", known[0][0].classify(error)) if known else None


def key_of(pool: object) -> object:
    """Return what two pools have in common that open the same transactions."""
    return Path(pool).resolve() if isinstance(pool, str | Path) else _alias(pool) or id(pool)


def source_of(pool: object) -> Source:
    """Return where the connections of a pool, an engine or a file come from.

    Raises:
        UnknownConnectionError: No driver knows this kind of pool.
    """
    alias = _alias(pool)
    if alias is not None:
        return cast("Source", _driver_module("django").database(alias))
    if isinstance(pool, str | Path):
        if "://" in str(pool) or str(pool) in {"", ":memory:"}:
            raise UnknownConnectionError(pool, _POOLS)
        return cast("Source", _driver_module("sqlite").SQLiteFile(Path(pool).resolve()))
    for module, name in _known(type(pool)):  # type: ignore[arg-type]  # mypy takes a class for unhashable
        if name in module.POOLS:
            return cast("Source", module.POOLS[name](pool))
    raise UnknownConnectionError(pool, _POOLS)


def _alias(pool: Foreign) -> str | None:
    """Return the alias of its database if this is Django's ``atomic``, a function that may be a partial."""
    function, alias = pool, "default"
    if isinstance(pool, functools.partial):
        function, alias = pool.func, pool.keywords.get("using") or (pool.args[0] if pool.args else alias)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
    return alias if name == "django.db.transaction.atomic" else None
