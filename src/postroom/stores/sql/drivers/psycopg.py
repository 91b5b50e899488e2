"""PostgreSQL through psycopg 3."""

from __future__ import annotations

import contextlib
import socket
import traceback
from collections.abc import Callable, Generator
from datetime import timedelta

from ....errors import MissingExtraError, StoreError, StoreUnavailableError
from ..errors import postgres_error
from ..sessions import Pooler
from ..statement import Result, Statement
from ..transactions.block import Link
from ..transactions.network import PsycopgLink, Source
from ..url import Place
from .postgres import PostgresDriver

try:
    import psycopg
    from psycopg import sql
    from psycopg.rows import TupleRow
except ImportError as _error:
    raise MissingExtraError("psycopg", "psycopg") from _error

__all__ = ["PsycopgDriver"]

#: After how many executions psycopg prepares a statement by name, as it does by default.
_PREPARED_AFTER = 5
#: What a refused login says; it carries no code.
_REFUSALS = (
    *("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied"),
    "not permitted to log in",
)


class PsycopgDriver(PostgresDriver["psycopg.AsyncConnection[TupleRow]"]):
    """Async connections of psycopg."""

    def __init__(
        self, place: Place, *, size: int = 5, timeout: timedelta | None = None, pooler: Pooler | None = None
    ) -> None:
        super().__init__(place, size=size, timeout=timeout, pooler=pooler)

    async def dial(self, *, prepares: bool) -> psycopg.AsyncConnection[TupleRow]:
        try:
            threshold = _PREPARED_AFTER if prepares else None
            return await psycopg.AsyncConnection.connect(self._dsn, autocommit=True, prepare_threshold=threshold)
        except BaseException as error:
            _close_half_made(error)
            raise

    def backend_pid(self, connection: psycopg.AsyncConnection[TupleRow]) -> int:
        return connection.info.backend_pid

    def link(self, source: Source) -> Link:
        return PsycopgLink(source, self._handler_settings)

    async def execute(self, connection: psycopg.AsyncConnection[TupleRow], statement: Statement) -> Result:
        text, params = statement.bind("format", arrays=True)
        # As bytes, since psycopg takes a str only if it is a literal, to keep values out; here they are parameters.
        cursor = await connection.execute(text.encode(), params or None)
        return Result(await cursor.fetchall() if statement.returns else (), cursor.rowcount)

    def abort(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        # The socket is shut from outside: a cancelled wait would go on for seconds, and to close the socket while the
        # event loop watches it would give its number to another connection.
        with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=connection.fileno()) as wire:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.detach()

    def free(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        connection.pgconn.finish()

    def kind_of(self, error: Exception) -> type[StoreError]:
        if isinstance(error, psycopg.Error) and error.sqlstate is not None:
            return postgres_error(error.sqlstate)
        if isinstance(error, psycopg.OperationalError) and any(words in str(error) for words in _REFUSALS):
            return postgres_error("28P01")
        return StoreUnavailableError if isinstance(error, psycopg.OperationalError | OSError) else StoreError

    async def listen(self, channel: str, wake: Callable[[], None], *, timeout: timedelta) -> None:  # noqa: ASYNC109
        """Listen on a connection of its own until it breaks or the task is cancelled."""
        connection = await self._listener(timeout)
        try:
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            wake()  # what was notified before is not told again
            async for _ in connection.notifies():
                wake()
        except psycopg.Error as error:
            raise self._translated(error) from self._cause(error)
        finally:
            self.abort(connection)
            self.free(connection)
        raise StoreUnavailableError(f"{self._place}: the listening connection was closed")


def _close_half_made(error: BaseException) -> None:
    """Close the socket of a connection that did not come about; psycopg leaves it to the garbage collector."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("psycopg."):
            for value in frame.f_locals.values():
                if isinstance(value, Generator):
                    value.close()
