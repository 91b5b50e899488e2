"""What all writers share: how additions become statements on the caller's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, TypeVar
from uuid import UUID

from ...errors import SchemaMissingError, TransactionAbortedError, UnsupportedDatabaseError
from ...outbox import Added, Addition, Outbox
from .dialect import Dialect
from .dialects.mysql import MySQL
from .dialects.postgres import PostgreSQL
from .dialects.sqlite import SQLite
from .names import Names
from .statement import ParamStyle, Result, Script, Statement, run, run_async

__all__ = ["AsyncWriter", "Connection", "SyncWriter", "to_its_end"]

T = TypeVar("T")

# Connections of other libraries have no type that could be named without importing them.
Connection = Any

_DIALECTS: Final[Mapping[str, type[Dialect]]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "mariadb": MySQL,
    "sqlite": SQLite,
}
#: One statement stays within the limits of parameters and, escaped, of packets that servers come with.
_ROWS_AT_ONCE: Final = 500
_BYTES_AT_ONCE: Final = 4 * 1024 * 1024


@lru_cache(maxsize=256)
def _dialect(name: str, table: str, schema: str | None) -> Dialect:
    if name not in _DIALECTS:
        raise UnsupportedDatabaseError(name, "PostgreSQL, MySQL, MariaDB or SQLite")
    return _DIALECTS[name](Names(table=table, schema=schema))


def _script(dialect: Dialect, additions: Sequence[Addition], *, strict_order: bool) -> Script[list[Added]]:
    if len(additions) == 1:
        return (yield from dialect.add(additions, strict_order=strict_order))
    if strict_order:
        # All at once: chunks that lock in turns could wait for the chunks of another add, and it for them.
        yield from dialect.lock_keys(additions)
    added: list[Added] = []
    for chunk in _chunks(additions):
        added += yield from dialect.add(chunk, strict_order=False)
    return _first_of_each(added) if any(addition.given for addition in additions) else added


def _chunks(additions: Sequence[Addition]) -> Iterator[Sequence[Addition]]:
    chunk: list[Addition] = []
    size = 0
    for addition in additions:
        size += len(addition.message.payload)
        if chunk and (len(chunk) == _ROWS_AT_ONCE or size > _BYTES_AT_ONCE):
            yield chunk
            chunk, size = [], len(addition.message.payload)
        chunk.append(addition)
    if chunk:
        yield chunk


def _first_of_each(added: list[Added]) -> list[Added]:
    """Say of a message that is listed twice that it was added once."""
    seen: set[UUID] = set()
    for place, item in enumerate(added):
        if item.added and item.id is not None:
            if item.id in seen:
                added[place] = Added(item.id, added=False)
            seen.add(item.id)
    return added


#: As PostgreSQL calls it, for a table and for its schema, and MySQL with and without its SQLSTATE.
_NO_TABLE: Final = frozenset({"42P01", "3F000", "42S02", 1146})


def _explain(error: Exception, dialect: Dialect) -> None:
    """Raise our error for the failures that have a remedy of ours; others stay as the caller's library says them."""
    if hasattr(error, "hide_parameters"):
        setattr(error, "hide_parameters", True)  # noqa: B010 -- SQLAlchemy shows the payload otherwise
    for cause in (error, getattr(error, "orig", None), error.__cause__):
        code = getattr(cause, "sqlstate", None) or (cause.args[0] if cause is not None and cause.args else None)
        if code == "25P02":
            raise TransactionAbortedError from error
        if code in _NO_TABLE or (isinstance(code, str) and code.startswith("no such table")):
            raise SchemaMissingError(dialect.identifiers["outbox"]) from error


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that is done on a thread, also when cancelled: the thread goes on in any case.

    A statement of SQLite's whose rows nobody fetches keeps the database locked, even when its connection is closed.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # the caller has other worries
        raise


class SyncWriter:
    """Writes through a connection whose calls return at once."""

    style: ClassVar[ParamStyle] = "format"
    arrays: ClassVar[bool] = False
    dialect: ClassVar[str]

    def write(
        self, connection: Connection, additions: Sequence[Addition], outbox: Outbox, *, outside_transaction: bool
    ) -> list[Added]:
        """Write, and arrange for the wake-up after the commit where the library can."""
        dialect = _dialect(self.dialect_of(connection), outbox.table, outbox.schema)
        if not outside_transaction:
            self.require_transaction(connection)
        if not additions:
            return []
        script = _script(dialect, additions, strict_order=outbox.strict_order)
        try:
            added = run(script, partial(self.execute, connection))
        except Exception as error:
            _explain(error, dialect)
            raise
        if outbox.wake is not None:
            self.after_commit(connection, outbox.wake)
        return added

    def dialect_of(self, connection: Connection) -> str:
        """Return the name of the dialect that the connection speaks."""
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

    def cursor(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign cursor
        """Return a cursor that answers with tuples, whatever the caller has set."""
        return connection.cursor()

    def after_commit(self, connection: Connection, wake: Callable[[], object]) -> None:
        """Call ``wake`` after the commit, if the library tells of it."""


class AsyncWriter:
    """Writes through a connection whose calls are awaited."""

    style: ClassVar[ParamStyle] = "format"
    arrays: ClassVar[bool] = False
    dialect: ClassVar[str]

    async def write(
        self, connection: Connection, additions: Sequence[Addition], outbox: Outbox, *, outside_transaction: bool
    ) -> list[Added]:
        """Write in the caller's transaction."""
        dialect = _dialect(self.dialect, outbox.table, outbox.schema)
        if not outside_transaction:
            self.require_transaction(connection)
        if not additions:
            return []
        script = _script(dialect, additions, strict_order=outbox.strict_order)
        try:
            return await run_async(script, partial(self.execute, connection))
        except Exception as error:
            _explain(error, dialect)
            raise

    def require_transaction(self, connection: Connection) -> None:
        """Raise `NotInTransactionError` unless a write would be part of a transaction."""
        raise NotImplementedError

    async def execute(self, connection: Connection, statement: Statement) -> Result:
        """Run one statement."""
        sql, params = statement.bind(self.style, arrays=self.arrays)
        async with self.cursor(connection) as cursor:
            await cursor.execute(sql, params)
            return Result(await cursor.fetchall() if statement.returns else (), cursor.rowcount)

    def cursor(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign cursor
        """Return a cursor that answers with tuples, whatever the caller has set."""
        return connection.cursor()
