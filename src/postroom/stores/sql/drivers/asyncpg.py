"""PostgreSQL through asyncpg."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ....errors import MissingExtraError, StoreError, StoreUnavailableError
from ..errors import postgres_error
from ..sessions import Pooler
from ..statement import Result, Statement
from ..transactions.block import Link
from ..transactions.network import AsyncpgLink, Source
from ..url import Place
from .postgres import PostgresDriver

try:
    import asyncpg
except ImportError as _error:
    raise MissingExtraError("asyncpg", "postgres") from _error

__all__ = ["AsyncpgDriver"]


class AsyncpgDriver(PostgresDriver["asyncpg.Connection[asyncpg.Record]"]):
    """Connections of asyncpg."""

    def __init__(
        self,
        place: Place,
        *,
        size: int = 5,
        statement_cache_size: int = 100,
        timeout: timedelta | None = None,
        pooler: Pooler | None = None,
    ) -> None:
        super().__init__(place, size=size, timeout=timeout, pooler=pooler)
        self._cache = statement_cache_size

    async def dial(self, *, prepares: bool) -> asyncpg.Connection[asyncpg.Record]:
        return await asyncpg.connect(self._dsn, statement_cache_size=self._cache if prepares else 0)

    def backend_pid(self, connection: asyncpg.Connection[asyncpg.Record]) -> int:
        return connection.get_server_pid()

    def link(self, source: Source) -> Link:
        return AsyncpgLink(source, self._handler_settings)

    async def execute(self, connection: asyncpg.Connection[asyncpg.Record], statement: Statement) -> Result:
        sql, params = statement.bind("numeric", arrays=True)
        if statement.returns:
            rows: list[Any] = await connection.fetch(sql, *params)
            return Result(rows, len(rows))
        tag = await connection.execute(sql, *params)
        count = tag.rpartition(" ")[2]
        return Result((), int(count) if count.isdecimal() else 0)

    def abort(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        connection.terminate()

    def kind_of(self, error: Exception) -> type[StoreError]:
        if isinstance(error, asyncpg.PostgresError):
            return postgres_error(error.sqlstate)
        unreachable = isinstance(error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError)
        return StoreUnavailableError if unreachable else StoreError

    async def listen(self, channel: str, wake: Callable[[], None], *, timeout: timedelta) -> None:  # noqa: ASYNC109
        """Listen on a connection of its own until it breaks or the task is cancelled."""
        connection = await self._listener(timeout)
        lost = asyncio.Event()

        def notified(*_: object) -> None:
            wake()

        connection.add_termination_listener(lambda _: lost.set())
        try:
            await connection.add_listener(channel, notified)
            wake()  # what was notified before is not told again
            await lost.wait()
        except Exception as error:  # noqa: BLE001 -- translated, whatever it is
            raise self._translated(error) from self._cause(error)
        finally:
            self.abort(connection)
        raise StoreUnavailableError(f"{self._place}: the listening connection was closed")
