"""Where producers write: one transaction for business rows and messages, through the usual library of each store."""

from __future__ import annotations

import contextlib
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Unpack
from uuid import UUID

from postroom import AddResult, Outbox
from postroom.errors import CommitUnknownError
from postroom.outbox import Options

__all__ = ["BUSINESS", "BUSINESS_KEY", "EFFECTS", "EFFECTS_KEY", "Desk", "Rollback", "desk_for"]

BUSINESS = "chaos_business"
EFFECTS = "chaos_effects"
#: The same in Redis, in the slot of the messages.
BUSINESS_KEY = f"{{default}}:{BUSINESS}"
EFFECTS_KEY = f"{{default}}:{EFFECTS}"


class Rollback(Exception):  # noqa: N818 -- no error but a decision
    """Raised in a transaction that is not to be committed."""


class Desk(ABC):
    """Opens transactions, adds messages in them, and notes the business rows that go with them."""

    #: Whether `add` says only what it hopes for, since the store is asked at the end.
    only_hopes = False
    #: What the store has said of the messages of the last transaction then: 1, or the id of another message.
    answers: Sequence[str] = ()

    def outbox(self, *, strict_order: bool) -> Outbox:
        """Return what adds messages."""
        return Outbox(strict_order=strict_order)

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
    ) -> list[AddResult]:
        """Add one event by itself, or several at once."""
        if len(events) == 1:
            one: AddResult = await outbox.add(connection, events[0], **options)
            return [one]
        many: list[AddResult] = await outbox.add(connection, list(events), **options)
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
    ) -> list[AddResult]:
        if len(events) == 1:
            return [outbox.add(connection, events[0], **options)]
        return outbox.add(connection, list(events), **options)


class RedisDesk(Desk):
    """Writes through a pipeline of redis-py, with MULTI around everything."""

    only_hopes = True

    def __init__(self, client: Any, outbox: Outbox) -> None:  # noqa: ANN401
        self._client = client
        self._outbox = outbox

    def outbox(self, *, strict_order: bool) -> Outbox:
        return self._outbox

    @contextlib.asynccontextmanager
    async def transaction(self, outbox: Outbox) -> AsyncIterator[Any]:
        from redis import exceptions  # noqa: PLC0415 -- as below

        async with self._client.pipeline(transaction=True) as pipeline:
            yield pipeline
            try:
                answers = await pipeline.execute()
            except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
                # It may be that nothing was ever sent, which nobody tells.
                raise CommitUnknownError from error
        self.answers = [one.decode() for answer in answers if isinstance(answer, list) for one in answer]

    async def note(self, connection: Any, ids: Sequence[UUID]) -> None:  # noqa: ANN401
        connection.sadd(BUSINESS_KEY, *map(str, ids))


@contextlib.asynccontextmanager
async def _postgres(url: str, *, cache: int = 100) -> AsyncIterator[Desk]:
    import asyncpg  # noqa: PLC0415 -- a process imports its own library alone: it is started often

    async with asyncpg.create_pool(
        url, min_size=0, max_size=2, command_timeout=3, timeout=3, statement_cache_size=cache
    ) as pool:
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


@contextlib.asynccontextmanager
async def _redis(url: str, outbox: Outbox | None = None) -> AsyncIterator[Desk]:
    from redis.asyncio import Redis  # noqa: PLC0415 -- as above
    from redis.asyncio.retry import Retry  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415

    async with Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=3, socket_connect_timeout=3) as client:
        yield RedisDesk(client, outbox or Outbox())


def _redis_stream(url: str) -> AbstractAsyncContextManager[Desk]:
    from postroom.stores.redis.stream_outbox import StreamOutbox  # noqa: PLC0415 -- as above

    return _redis(url, StreamOutbox())


def desk_for(store: str, url: str) -> AbstractAsyncContextManager[Desk]:
    """Open what writes to a store; nothing is connected before the first transaction."""
    openers: dict[str, Callable[[str], AbstractAsyncContextManager[Desk]]] = {
        "postgres": _postgres,
        "pgbouncer": partial(_postgres, cache=0),
        "mariadb": _mariadb,
        "sqlite": _sqlite,
        "redis": _redis,
        "redis-stream": _redis_stream,
    }
    return openers[store](url)
