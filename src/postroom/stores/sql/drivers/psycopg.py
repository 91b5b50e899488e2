"""PostgreSQL through psycopg 3."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import LiteralString, cast

from ....errors import MissingExtraError, StoreError, StoreUnavailableError
from ..driver import NetworkDriver
from ..errors import SETTINGS, postgres_error
from ..statement import Result, Statement
from ..url import Place

try:
    import psycopg
    from psycopg import sql
    from psycopg.rows import TupleRow
except ImportError as error:
    raise MissingExtraError("psycopg", "psycopg") from error

__all__ = ["PsycopgDriver"]


class PsycopgDriver(NetworkDriver["psycopg.AsyncConnection[TupleRow]"]):
    """Async connections of psycopg."""

    def __init__(self, place: Place, *, size: int = 5) -> None:
        super().__init__(size=size, place=str(place), secret=place.password)
        self._dsn = place.dsn

    async def connect(self) -> psycopg.AsyncConnection[TupleRow]:
        connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
        try:
            for name, value in SETTINGS.items():
                await connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        except BaseException:
            self.abort(connection)
            raise
        return connection

    async def execute(self, connection: psycopg.AsyncConnection[TupleRow], statement: Statement) -> Result:
        text, params = statement.bind("format", arrays=True)
        # psycopg asks for a literal to keep values out of the text; here they are parameters already.
        cursor = await connection.execute(cast("LiteralString", text), params or None)
        return Result(await cursor.fetchall() if statement.returns else (), cursor.rowcount)

    def abort(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        # Shut from outside, the socket ends a wait that psycopg would go on with for seconds.
        with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=connection.fileno()) as wire:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.detach()
        connection.pgconn.finish()

    def kind_of(self, error: Exception) -> type[StoreError]:
        if isinstance(error, psycopg.Error) and error.sqlstate is not None:
            return postgres_error(error.sqlstate)
        if isinstance(error, psycopg.OperationalError) and "authentication failed" in str(error):
            return postgres_error("28P01")  # a refused connection carries no code
        return StoreUnavailableError if isinstance(error, psycopg.OperationalError | OSError) else StoreError

    async def listen(self, channel: str, wake: Callable[[], None]) -> None:
        """Listen on a connection of its own until it breaks or the task is cancelled."""
        connection = await self._take()
        try:
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            wake()  # what was notified before is not told again
            async for _ in connection.notifies():
                wake()
        except psycopg.Error as error:
            raise self._translated(error) from self._cause(error)
        finally:
            self.abort(connection)
        raise StoreUnavailableError(f"{self._place}: the listening connection was closed")
