"""Writing through the caller's transaction, whatever library holds it; none of them is imported here."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from ...errors import NotInTransactionError, TransactionAbortedError
from ...outbox import Added, Addition, Outbox, Writer
from .dialect import Dialect
from .dialects.mysql import MySQL
from .dialects.postgres import PostgreSQL
from .dialects.sqlite import SQLite
from .names import Names
from .statement import ParamStyle, Result, Script, Statement, run, run_async

__all__ = ["writer_for"]

# Connections of other libraries have no type that could be named without importing them.
Connection = Any

_DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "mariadb": MySQL,
    "sqlite": SQLite,
}
#: More would come near the limits of parameters and packet sizes.
_ROWS_AT_ONCE = 500


def writer_for(connection: Connection) -> Writer | None:
    """Return what writes through a connection, None if nothing does."""
    for kind in type(connection).__mro__:
        package = kind.__module__.partition(".")[0]
        found = _WRITERS.get(f"{package}.{kind.__name__}")
        if found is not None:
            return found()
    return None


@lru_cache(maxsize=256)
def _dialect(kind: type[Dialect], table: str, schema: str | None) -> Dialect:
    return kind(Names(table=table, schema=schema))


def _script(dialect: Dialect, additions: Sequence[Addition], *, strict_order: bool) -> Script[list[Added]]:
    added: list[Added] = []
    for start in range(0, len(additions), _ROWS_AT_ONCE):
        added += yield from dialect.add(additions[start : start + _ROWS_AT_ONCE], strict_order=strict_order)
    return added


@dataclass(frozen=True, slots=True)
class SyncWriter:
    """Writes through a connection whose calls return at once."""

    style: ClassVar[ParamStyle] = "format"
    arrays: ClassVar[bool] = False
    dialect: ClassVar[type[Dialect]]

    def write(
        self, connection: Connection, additions: Sequence[Addition], outbox: Outbox, *, outside_transaction: bool
    ) -> list[Added]:
        """Write, and arrange for the wake-up after the commit where the library can."""
        if not outside_transaction:
            self.require_transaction(connection)
        if not additions:
            return []
        dialect = _dialect(self.dialect_of(connection), outbox.table, outbox.schema)
        script = _script(dialect, additions, strict_order=outbox.strict_order)
        added = run(script, lambda statement: self.execute(connection, statement))
        if outbox.wake is not None:
            self.after_commit(connection, outbox.wake)
        return added

    def dialect_of(self, connection: Connection) -> type[Dialect]:
        """Return the dialect that the connection speaks."""
        return self.dialect

    def require_transaction(self, connection: Connection) -> None:
        """Raise `NotInTransactionError` unless a write would be part of a transaction."""
        raise NotImplementedError

    def execute(self, connection: Connection, statement: Statement) -> Result:
        """Run one statement."""
        sql, params = statement.bind(self.style, arrays=self.arrays)
        cursor = self.cursor(connection)
        try:
            cursor.execute(sql, params)
            return Result(cursor.fetchall() if statement.returns else (), cursor.rowcount)
        finally:
            cursor.close()

    def cursor(self, connection: Connection) -> Any:  # noqa: ANN401
        """Return a cursor that answers with tuples, whatever the caller has set."""
        return connection.cursor()

    def after_commit(self, connection: Connection, wake: Callable[[], object]) -> None:
        """Call ``wake`` after the commit, if the library tells of it."""


@dataclass(frozen=True, slots=True)
class AsyncWriter:
    """Writes through a connection whose calls are awaited."""

    style: ClassVar[ParamStyle] = "format"
    arrays: ClassVar[bool] = False
    dialect: ClassVar[type[Dialect]]

    async def write(
        self, connection: Connection, additions: Sequence[Addition], outbox: Outbox, *, outside_transaction: bool
    ) -> list[Added]:
        """Write in the caller's transaction."""
        if not outside_transaction:
            self.require_transaction(connection)
        if not additions:
            return []
        dialect = _dialect(self.dialect, outbox.table, outbox.schema)
        script = _script(dialect, additions, strict_order=outbox.strict_order)
        return await run_async(script, lambda statement: self.execute(connection, statement))

    def require_transaction(self, connection: Connection) -> None:
        """Raise `NotInTransactionError` unless a write would be part of a transaction."""
        raise NotImplementedError

    async def execute(self, connection: Connection, statement: Statement) -> Result:
        """Run one statement."""
        sql, params = statement.bind(self.style, arrays=self.arrays)
        async with self.cursor(connection) as cursor:
            await cursor.execute(sql, params)
            return Result(await cursor.fetchall() if statement.returns else (), cursor.rowcount)

    def cursor(self, connection: Connection) -> Any:  # noqa: ANN401
        """Return a cursor that answers with tuples, whatever the caller has set."""
        return connection.cursor()


class Asyncpg(AsyncWriter):
    """asyncpg's connections, pooled or not."""

    style = "numeric"
    dialect = PostgreSQL

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
    dialect = PostgreSQL

    def require_transaction(self, connection: Connection) -> None:
        _require_psycopg_transaction(connection)

    def cursor(self, connection: Connection) -> Any:
        return connection.cursor(row_factory=sys.modules["psycopg.rows"].tuple_row)


class PsycopgAsync(AsyncWriter):
    """psycopg's async connections."""

    arrays = True
    dialect = PostgreSQL

    def require_transaction(self, connection: Connection) -> None:
        _require_psycopg_transaction(connection)

    def cursor(self, connection: Connection) -> Any:
        return connection.cursor(row_factory=sys.modules["psycopg.rows"].tuple_row)


def _require_sqlite_transaction(connection: Connection) -> None:
    # Since 3.12 `autocommit` tells; before, and in its legacy mode, an isolation level makes writes begin one.
    autocommit = getattr(connection, "autocommit", -1)
    begins = connection.isolation_level is not None if autocommit not in {True, False} else not autocommit
    if not connection.in_transaction and not begins:
        raise NotInTransactionError("run `BEGIN IMMEDIATE` first")


class SQLite3(SyncWriter):
    """The standard library's connections."""

    style = "qmark"
    dialect = SQLite

    def require_transaction(self, connection: Connection) -> None:
        _require_sqlite_transaction(connection)

    def cursor(self, connection: Connection) -> Any:
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor


class Aiosqlite(AsyncWriter):
    """aiosqlite's connections."""

    style = "qmark"
    dialect = SQLite

    def require_transaction(self, connection: Connection) -> None:
        _require_sqlite_transaction(connection)

    async def execute(self, connection: Connection, statement: Statement) -> Result:
        sql, params = statement.bind(self.style, arrays=False)
        async with connection.execute(sql, params) as cursor:
            cursor.row_factory = None
            return Result(await cursor.fetchall() if statement.returns else (), cursor.rowcount)


_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS of the MySQL protocol


def _require_mysql_transaction(connection: Connection) -> None:
    if connection.get_autocommit() and not connection.server_status & _IN_TRANSACTION:
        raise NotInTransactionError("call `connection.begin()` first, or leave autocommit off")


class PyMySQL(SyncWriter):
    """PyMySQL's connections."""

    dialect = MySQL

    def require_transaction(self, connection: Connection) -> None:
        _require_mysql_transaction(connection)

    def cursor(self, connection: Connection) -> Any:
        return connection.cursor(sys.modules["pymysql.cursors"].Cursor)


class Asyncmy(AsyncWriter):
    """asyncmy's connections."""

    dialect = MySQL

    def require_transaction(self, connection: Connection) -> None:
        _require_mysql_transaction(connection)

    def cursor(self, connection: Connection) -> Any:
        return connection.cursor(sys.modules["asyncmy.cursors"].Cursor)


class SQLAlchemyConnection(SyncWriter):
    """SQLAlchemy's ``Connection``.

    Statements go through SQLAlchemy: it sends BEGIN only with its first one, so a row written past it, through the
    connection of the driver, would escape the rollback.
    """

    _STYLES: ClassVar[dict[str, ParamStyle]] = {"numeric_dollar": "numeric", "qmark": "qmark"}

    def dialect_of(self, connection: Connection) -> type[Dialect]:
        return _DIALECTS[connection.dialect.name]

    def require_transaction(self, connection: Connection) -> None:
        level = connection.get_execution_options().get("isolation_level")
        level = level or getattr(connection.dialect, "_on_connect_isolation_level", None)
        if level == "AUTOCOMMIT":
            raise NotInTransactionError("the isolation level is AUTOCOMMIT; use a connection with another one")

    def execute(self, connection: Connection, statement: Statement) -> Result:
        style = self._STYLES.get(connection.dialect.paramstyle, "format")
        sql, params = statement.bind(style, arrays=connection.dialect.name == "postgresql")
        result = connection.exec_driver_sql(sql, tuple(params))
        return Result([tuple(row) for row in result] if statement.returns else (), result.rowcount)


class SQLAlchemySession(SQLAlchemyConnection):
    """SQLAlchemy's ``Session``; what it holds back is written before the message."""

    def write(
        self, connection: Connection, additions: Sequence[Addition], outbox: Outbox, *, outside_transaction: bool
    ) -> list[Added]:
        added = SQLAlchemyConnection().write(
            connection.connection(), additions, outbox, outside_transaction=outside_transaction
        )
        if outbox.wake is not None:
            wake = outbox.wake
            event = sys.modules["sqlalchemy.event"]
            event.listen(connection, "after_commit", lambda _session: wake(), once=True)
        return added


@dataclass(frozen=True, slots=True)
class SQLAlchemyAsync:
    """SQLAlchemy's ``AsyncConnection`` and ``AsyncSession``: the sync writer inside its greenlet."""

    writer: Writer

    async def write(
        self, connection: Connection, additions: Sequence[Addition], outbox: Outbox, *, outside_transaction: bool
    ) -> list[Added]:
        """Write in the caller's transaction."""

        def write(inner: Connection) -> list[Added] | Awaitable[list[Added]]:
            return self.writer.write(inner, additions, outbox, outside_transaction=outside_transaction)

        added: list[Added] = await connection.run_sync(write)
        return added


class Django(SyncWriter):
    """Django's ``connection``, within ``atomic``."""

    def dialect_of(self, connection: Connection) -> type[Dialect]:
        return _DIALECTS[connection.vendor]

    def require_transaction(self, connection: Connection) -> None:
        if connection.get_autocommit() and not connection.in_atomic_block:
            raise NotInTransactionError("use `with transaction.atomic():`")

    def execute(self, connection: Connection, statement: Statement) -> Result:
        sql, params = statement.bind(self.style, arrays=connection.vendor == "postgresql")
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return Result(cursor.fetchall() if statement.returns else (), cursor.rowcount)

    def after_commit(self, connection: Connection, wake: Callable[[], object]) -> None:
        connection.on_commit(wake, robust=True)


_WRITERS: dict[str, Callable[[], Writer]] = {
    "asyncpg.Connection": Asyncpg,
    "asyncpg.PoolConnectionProxy": Asyncpg,
    "psycopg.Connection": Psycopg,
    "psycopg.AsyncConnection": PsycopgAsync,
    "sqlite3.Connection": SQLite3,
    "aiosqlite.Connection": Aiosqlite,
    "pymysql.Connection": PyMySQL,
    "asyncmy.Connection": Asyncmy,
    "sqlalchemy.Connection": SQLAlchemyConnection,
    "sqlalchemy.Session": SQLAlchemySession,
    "sqlalchemy.scoped_session": SQLAlchemySession,
    "sqlalchemy.AsyncConnection": lambda: SQLAlchemyAsync(SQLAlchemyConnection()),
    "sqlalchemy.AsyncSession": lambda: SQLAlchemyAsync(SQLAlchemySession()),
    "sqlalchemy.async_scoped_session": lambda: SQLAlchemyAsync(SQLAlchemySession()),
    "django.ConnectionProxy": Django,
    "django.BaseDatabaseWrapper": Django,
}
