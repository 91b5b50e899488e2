"""Where producers write: one transaction for business rows and messages, through the usual library of each store."""

from __future__ import annotations

import contextlib
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Unpack
from uuid import UUID

from postroom import Added, Outbox
from postroom.outbox import Options

__all__ = ["BUSINESS", "EFFECTS", "Desk", "Rollback", "desk_for"]

BUSINESS = "chaos_business"
EFFECTS = "chaos_effects"


class Rollback(Exception):  # noqa: N818 -- no error but a decision
    """Raised in a transaction that is not to be committed."""


class Desk(ABC):
    """Opens transactions, adds messages in them, and notes the business rows that go with them."""

    @abstractmethod
    def transaction(self, outbox: Outbox) -> AbstractAsyncContextManager[Any]:
        """Open a transaction that commits unless something is raised."""

    @abstractmethod
    async def note(self, connection: Any, ids: Sequence[UUID]) -> None:  # noqa: ANN401 -- each knows its own
        """Write the business rows of messages."""

    async def add(
        self,
        outbox: Outbox,
        connection: Any,  # noqa: ANN401 -- each knows its own
        events: Sequence[object],
        **options: Unpack[Options],
    ) -> list[Added]:
        """Add one event by itself, or several at once."""
        if len(events) == 1:
            one: Added = await outbox.add(connection, events[0], **options)
            return [one]
        many: list[Added] = await outbox.add(connection, list(events), **options)
        return many


class PostgresDesk(Desk):
    """Writes through a pool of asyncpg."""

    def __init__(self, pool: Any) -> None:  # noqa: ANN401 -- named only where it is imported
        self._pool = pool

    def transaction(self, outbox: Outbox) -> AbstractAsyncContextManager[Any]:
        return outbox.transaction(self._pool)

    async def note(self, connection: Any, ids: Sequence[UUID]) -> None:  # noqa: ANN401
        await connection.executemany(f"INSERT INTO {BUSINESS} (id) VALUES ($1)", [(str(one),) for one in ids])


class MariaDBDesk(Desk):
    """Writes through an engine of SQLAlchemy."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401
        self._engine = engine

    def transaction(self, outbox: Outbox) -> AbstractAsyncContextManager[Any]:
        return outbox.transaction(self._engine)

    async def note(self, connection: Any, ids: Sequence[UUID]) -> None:  # noqa: ANN401
        for one in ids:
            await connection.exec_driver_sql(f"INSERT INTO {BUSINESS} (id) VALUES (%s)", (str(one),))


class SQLiteDesk(Desk):
    """Writes through sqlite3, whose calls are not awaited."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @contextlib.asynccontextmanager
    async def transaction(self, outbox: Outbox) -> AsyncIterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise

    async def note(self, connection: Any, ids: Sequence[UUID]) -> None:  # noqa: ANN401
        connection.executemany(f"INSERT INTO {BUSINESS} (id) VALUES (?)", [(str(one),) for one in ids])

    async def add(
        self,
        outbox: Outbox,
        connection: sqlite3.Connection,
        events: Sequence[object],
        **options: Unpack[Options],
    ) -> list[Added]:
        if len(events) == 1:
            return [outbox.add(connection, events[0], **options)]
        return outbox.add(connection, list(events), **options)


@contextlib.asynccontextmanager
async def _postgres(url: str) -> AsyncIterator[Desk]:
    import asyncpg  # noqa: PLC0415 -- a process imports its own library alone: it is started often

    async with asyncpg.create_pool(url, min_size=0, max_size=2, command_timeout=3, timeout=3) as pool:
        yield PostgresDesk(pool)


@contextlib.asynccontextmanager
async def _mariadb(url: str) -> AsyncIterator[Desk]:
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 -- as above

    # A connection that a fault has left behind must not be found by the next transaction.
    engine = create_async_engine(url.replace("mysql://", "mysql+asyncmy://"), pool_pre_ping=True)
    try:
        yield MariaDBDesk(engine)
    finally:
        await engine.dispose()


@contextlib.asynccontextmanager
async def _sqlite(url: str) -> AsyncIterator[Desk]:
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=4)) as connection:
        connection.isolation_level = None
        yield SQLiteDesk(connection)


def desk_for(store: str, url: str) -> AbstractAsyncContextManager[Desk]:
    """Open what writes to a store; nothing is connected before the first transaction."""
    return {"postgres": _postgres, "mariadb": _mariadb, "sqlite": _sqlite}[store](url)
