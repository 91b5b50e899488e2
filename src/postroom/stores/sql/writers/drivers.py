"""Writers through the connections of database drivers; none of them is imported here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from ....errors import NotInTransactionError, TransactionAbortedError
from ..statement import ParamStyle, Result, Row, Statement
from ..writer import AsyncWriter, Connection, SyncWriter, Task, to_its_end

__all__ = ["Aiosqlite", "Asyncmy", "Asyncpg", "Psycopg", "PsycopgAsync", "PyMySQL", "SQLite3"]

T = TypeVar("T")


class Asyncpg(AsyncWriter):
    """asyncpg's connections, pooled or not."""

    style: ClassVar[ParamStyle] = "numeric"
    dialect = "postgresql"

    def require_transaction(self, connection: Connection) -> None:
        if not connection.is_in_transaction():
            raise NotInTransactionError("open one with `async with connection.transaction():`")

    async def execute(self, connection: Connection, statement: Statement) -> Result:
        sql, params = statement.bind(self.style, arrays=True)
        if statement.returns:
            rows = await connection.fetch(sql, *params)
            return Result(rows, len(rows))
        tag: str = await connection.execute(sql, *params)
        return Result((), int(tag.rpartition(" ")[2]))


def _require_psycopg_transaction(connection: Connection) -> None:
    status = connection.info.transaction_status.name
    if status == "INERROR":
        raise TransactionAbortedError
    if connection.autocommit and status != "INTRANS":
        raise NotInTransactionError("open one with `with connection.transaction():`, or leave autocommit off")


class Psycopg(SyncWriter):
    """psycopg's sync connections."""

    arrays = True
    dialect = "postgresql"

    def require_transaction(self, connection: Connection) -> None:
        _require_psycopg_transaction(connection)

    def cursor(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign cursor
        # Not by connection.cursor(): the caller's factory may make cursors with other parameters.
        return sys.modules["psycopg"].Cursor(connection, row_factory=sys.modules["psycopg.rows"].tuple_row)


class PsycopgAsync(AsyncWriter):
    """psycopg's async connections."""

    arrays = True
    dialect = "postgresql"

    def require_transaction(self, connection: Connection) -> None:
        _require_psycopg_transaction(connection)

    def cursor(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign cursor
        return sys.modules["psycopg"].AsyncCursor(connection, row_factory=sys.modules["psycopg.rows"].tuple_row)


def _sqlite_mode(connection: Connection) -> int:
    """Return ``autocommit`` of a connection, which there is since Python 3.12; -1 stands for the legacy mode."""
    return int(getattr(connection, "autocommit", -1))


def _require_sqlite_transaction(connection: Connection, mode: int) -> None:
    # In the legacy mode an isolation level makes the first write begin a transaction.
    begins = connection.isolation_level is not None if mode == -1 else not mode
    if not connection.in_transaction and not begins:
        raise NotInTransactionError("run `BEGIN IMMEDIATE` first")


class SQLite3(SyncWriter):
    """The standard library's connections."""

    style: ClassVar[ParamStyle] = "qmark"
    dialect = "sqlite"

    def require_transaction(self, connection: Connection) -> None:
        _require_sqlite_transaction(connection, _sqlite_mode(connection))

    def execute(self, connection: Connection, statement: Statement) -> Result:
        found = super().execute(connection, statement)
        return Result(_as_text(found.rows), found.count)

    def cursor(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign cursor
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor


class Aiosqlite(AsyncWriter):
    """aiosqlite's connections."""

    style: ClassVar[ParamStyle] = "qmark"
    dialect = "sqlite"

    async def perform(self, connection: Connection, task: Task[T]) -> T:
        if not (task.outside_transaction or connection.in_transaction):
            # Only the connection's own thread may ask for its mode.
            mode = await connection._execute(_sqlite_mode, connection._conn)  # noqa: SLF001
            _require_sqlite_transaction(connection, mode)
        return await super().perform(connection, task)

    def require_transaction(self, connection: Connection) -> None:
        """Do nothing: `perform` has checked, because the check has to be awaited."""

    async def execute(self, connection: Connection, statement: Statement) -> Result:
        return await to_its_end(self._execute(connection, statement))

    async def _execute(self, connection: Connection, statement: Statement) -> Result:
        sql, params = statement.bind(self.style, arrays=False)
        async with connection.execute(sql, params) as cursor:
            cursor.row_factory = None
            return Result(_as_text(await cursor.fetchall()) if statement.returns else (), cursor.rowcount)


def _as_text(rows: Sequence[Row]) -> list[Row]:
    """Undo a ``text_factory`` of the caller's that answers with bytes."""
    return [[bytes(value).decode() if isinstance(value, bytes | bytearray) else value for value in row] for row in rows]


_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS of the MySQL protocol


def _require_mysql_transaction(connection: Connection) -> None:
    if connection.get_autocommit() and not connection.server_status & _IN_TRANSACTION:
        raise NotInTransactionError("call `connection.begin()` first, or leave autocommit off")


class PyMySQL(SyncWriter):
    """PyMySQL's connections."""

    dialect = "mysql"

    def require_transaction(self, connection: Connection) -> None:
        _require_mysql_transaction(connection)

    def cursor(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign cursor
        return connection.cursor(sys.modules["pymysql.cursors"].Cursor)


class Asyncmy(AsyncWriter):
    """asyncmy's connections."""

    dialect = "mysql"

    def require_transaction(self, connection: Connection) -> None:
        _require_mysql_transaction(connection)

    def cursor(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign cursor
        return connection.cursor(sys.modules["asyncmy.cursors"].Cursor)
