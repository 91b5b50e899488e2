"""PostgreSQL through psycopg 3, async or not."""

from __future__ import annotations

import contextlib
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Final

from ....errors import (
    CommitUnknownError,
    MissingExtraError,
    NotInTransactionError,
    StoreAuthenticationError,
    StoreError,
    TransactionAbortedError,
)
from ..commit_errors import lost
from ..driver import Begun, Driver, Foreign, Steps, require_open
from ..errors import fault_of as classify
from ..sessions import spelled
from ..source import Source
from ..statement import Result, Statement
from .postgres import PostgresConnector

try:
    import psycopg
    from psycopg import sql
    from psycopg.rows import tuple_row
except ImportError as _error:
    raise MissingExtraError("psycopg", "psycopg") from _error

__all__ = ["CONNECTIONS", "POOLS", "PsycopgConnector", "PsycopgDriver", "classify"]

#: After how many executions psycopg prepares a statement by name, as it does by default.
_PREPARED_AFTER: Final = 5
#: What a refused login says; it carries no code.
_REFUSALS: Final = (
    *("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied"),
    "not permitted to log in",
)


class PsycopgDriver(Driver):
    """psycopg's connections; a transaction refuses a commit by anybody else."""

    dialect = "postgresql"
    arrays = True

    def __init__(self, *, is_async: bool) -> None:
        self.is_async: bool = is_async
        self.takes_along: bool = is_async

    def require_transaction(self, connection: Foreign) -> Steps[None]:
        status = connection.info.transaction_status.name
        if status == "INERROR":
            raise TransactionAbortedError
        if connection.autocommit and status != "INTRANS":
            raise NotInTransactionError("open one with `with connection.transaction():`, or leave autocommit off")
        yield from ()

    def cursor(self, connection: Foreign) -> Foreign:
        # Not by connection.cursor(): the caller's factory may make cursors with other parameters.
        kind = psycopg.AsyncCursor if self.is_async else psycopg.Cursor
        return kind(connection, row_factory=tuple_row)

    def acquire(self, pool: Foreign) -> Steps[Foreign]:
        return (yield pool.getconn())

    def release(self, pool: Foreign, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        if not is_sound:
            yield connection.close()
        yield pool.putconn(connection)  # it replaces a connection that is closed

    def begin(
        self, connection: Foreign, begun: Begun, *, settings: str = "", along: Statement | None = None
    ) -> Steps[Result | None]:
        begun.handle = yield from self.mark(connection, begun)
        begun.note()
        if not settings:
            return None
        # As one text without parameters: the mark costs no round trip more than the settings alone.
        cursor = self.cursor(connection)
        yield cursor.execute(settings + (spelled(along) if along else ""))
        while cursor.nextset():
            pass
        return Result((), cursor.rowcount) if along else None

    def check(self, connection: Foreign, begun: Begun) -> Steps[None]:
        if connection.closed:
            raise lost()  # psycopg itself would say nothing, and send nothing
        require_open(is_open=connection.info.transaction_status.name == "INTRANS")
        yield from ()

    def commit(self, connection: Foreign, begun: Begun) -> Steps[None]:
        yield from self.keep(connection, begun, begun.handle)
        # Of a broken connection psycopg says nothing.
        if connection.closed or not _is_idle(connection):
            raise CommitUnknownError

    def roll_back(self, connection: Foreign, begun: Begun) -> Steps[None]:
        # Also where a handler has sent COMMIT: psycopg counts the transactions that it has not ended itself.
        if not (_is_idle(connection) and begun.is_ending):
            yield from self.undo(connection, begun, begun.handle)
        if not _is_idle(connection):
            raise TransactionAbortedError  # the rollback did not come about, and psycopg only logs why

    def mark(self, connection: Foreign, begun: Begun) -> Steps[Foreign]:
        savepoint = connection.transaction()
        yield savepoint.__aenter__() if self.is_async else savepoint.__enter__()
        return savepoint

    def keep(self, connection: Foreign, begun: Begun, mark: Foreign) -> Steps[None]:
        yield self._exit_of(mark)(None, None, None)

    def undo(self, connection: Foreign, begun: Begun, mark: Foreign) -> Steps[None]:
        yield self._exit_of(mark)(_Undone, _Undone(), None)

    def _exit_of(self, savepoint: Foreign) -> Foreign:
        return savepoint.__aexit__ if self.is_async else savepoint.__exit__

    def is_closed(self, connection: Foreign, begun: Begun) -> bool:
        return bool(connection.closed)

    def abort(self, connection: Foreign, begun: Begun) -> None:
        # The socket is shut, not closed: the event loop or a thread watches it, and its number may be another's soon.
        with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=connection.fileno()) as wire:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.detach()

    def free(self, connection: Foreign) -> None:
        connection.pgconn.finish()


class _Undone(Exception):  # noqa: N818 -- it is never raised
    """Tells psycopg to roll back."""


def _is_idle(connection: Foreign) -> bool:
    return bool(connection.info.transaction_status.name == "IDLE")


_SYNC: Final = PsycopgDriver(is_async=False)
_ASYNC: Final = PsycopgDriver(is_async=True)


class PsycopgConnector(PostgresConnector):
    """Opens async connections of psycopg for a store."""

    driver: Driver = _ASYNC
    lost: tuple[type[Exception], ...] = (OSError, psycopg.OperationalError)

    async def dial(self, *, prepares: bool) -> Foreign:
        threshold = _PREPARED_AFTER if prepares else None
        try:
            return await psycopg.AsyncConnection.connect(self._place.dsn, autocommit=True, prepare_threshold=threshold)
        except BaseException as error:
            # The socket of a connection that did not come about: psycopg leaves it to the garbage collector.
            traceback.clear_frames(error.__traceback__)
            raise

    def backend_pid(self, connection: Foreign) -> int:
        pid: int = connection.info.backend_pid
        return pid

    def kind_of(self, error: Exception) -> type[StoreError]:
        kind = super().kind_of(error)
        is_refusal = isinstance(error, psycopg.OperationalError) and error.sqlstate is None
        return StoreAuthenticationError if is_refusal and any(words in str(error) for words in _REFUSALS) else kind

    async def listen(self, connection: Foreign, channel: str, wake: Callable[[], None]) -> None:
        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        wake()  # what was notified before is not notified again
        async for _ in connection.notifies():
            wake()


CONNECTIONS: Final[Mapping[str, Driver]] = {"psycopg.Connection": _SYNC, "psycopg.AsyncConnection": _ASYNC}
POOLS: Final[Mapping[str, Callable[[Foreign], Source]]] = {
    "psycopg_pool.ConnectionPool": lambda pool: Source(_SYNC, pool),
    "psycopg_pool.AsyncConnectionPool": lambda pool: Source(_ASYNC, pool, is_limited=True),
}
