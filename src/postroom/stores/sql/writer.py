"""What all writers share: how messages, added or handled, become statements on the caller's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar
from uuid import UUID

from ...decisions import Enqueued, FindDue, Question
from ...duplicates import log_duplicates
from ...errors import SchemaMissingError, StorePermissionError, TransactionAbortedError, UnsupportedDatabaseError
from ...inbox import Inbox
from ...message import Message
from ...outbox import Addition, AddResult, Answer, Outbox
from ...text import without_rows
from .decisions import answering
from .dialect import Dialect
from .dialects.mysql import MySQL
from .dialects.postgres import PostgreSQL
from .dialects.sqlite import SQLite
from .errors import ADVICE, mysql_error, postgres_error
from .names import Names
from .statement import ParamStyle, Result, Script, Statement, run, run_async

__all__ = ["AsyncWriter", "Connection", "SyncWriter", "Task", "explain", "inbox_dialect", "to_its_end"]

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


class Task(NamedTuple, Generic[T]):
    """What is to be asked of a connection, once it is known which database that leads to."""

    #: The table that is missed if there is none, as statements call it, and what it is called by the user.
    identifier: str
    table: str
    schema: str | None
    script: Callable[[Dialect], Script[T]]
    outside_transaction: bool = False

    def dialect(self, name: str) -> Dialect:
        """Return the dialect for the tables of this task."""
        return _dialect(name, self.identifier in {"outbox", "tickets"}, self.table, self.schema)


@lru_cache(maxsize=256)
def _dialect(name: str, is_outbox: bool, table: str, schema: str | None) -> Dialect:  # noqa: FBT001
    if name not in _DIALECTS:
        raise UnsupportedDatabaseError(name, "PostgreSQL, MySQL, MariaDB or SQLite")
    return _DIALECTS[name](Names(table=table, schema=schema) if is_outbox else Names(inbox=table, schema=schema))


def inbox_dialect(name: str, inbox: Inbox) -> Dialect:
    """Return the dialect for the tables of an inbox."""
    return _dialect(name, False, inbox.table, inbox.schema)  # noqa: FBT003


def _adding(additions: Sequence[Addition], outbox: Outbox, answer: Answer[T], *, outside_transaction: bool) -> Task[T]:
    script = partial(_script, additions, answer=answer, strict_order=outbox.strict_order)
    return Task("outbox", outbox.table, outbox.schema, script, outside_transaction)


def _admitting(inbox: Inbox, message: Message) -> Task[bool]:
    def script(dialect: Dialect) -> Script[bool]:
        return dialect.admit(inbox.consumer, inbox.known(message))

    return Task("inbox", inbox.table, inbox.schema, script)


def _having(inbox: Inbox, message: Message) -> Task[bool]:
    def script(dialect: Dialect) -> Script[bool]:
        return dialect.has(inbox.consumer, inbox.known(message))

    return Task("inbox", inbox.table, inbox.schema, script)


def _purging(inbox: Inbox, limit: int) -> Task[int]:
    def script(dialect: Dialect) -> Script[int]:
        return dialect.purge_inbox(inbox.consumer, inbox.retention, limit)

    return Task("inbox", inbox.table, inbox.schema, script)


def _burying(inbox: Inbox, message: Message, error: str) -> Task[None]:
    def script(dialect: Dialect) -> Script[None]:
        return dialect.bury_letter(inbox.consumer, message, error)

    return Task("inbox_dead", inbox.table, inbox.schema, script)


def _asking(outbox: Outbox, question: Question) -> Task[Any]:
    script = answering(outbox.namespace, question, strict_order=outbox.strict_order)
    return Task("tickets", outbox.table, outbox.schema, script, isinstance(question, FindDue))


def _script(additions: Sequence[Addition], dialect: Dialect, *, answer: Answer[T], strict_order: bool) -> Script[T]:
    if len(additions) == 1:
        added = yield from dialect.add(additions, strict_order=strict_order)
        log_duplicates(additions, added)
        return answer(added)
    if strict_order:
        # All at once: chunks that lock in turns could wait for the chunks of another add, and it for them.
        yield from dialect.lock_keys(additions)
    added = list[AddResult]()
    for chunk in _chunks(additions):
        added += yield from dialect.add(chunk, strict_order=False)
    if any(addition.given for addition in additions):
        _first_of_each(added)
    log_duplicates(additions, added)
    return answer(added)


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


def _first_of_each(added: list[AddResult]) -> None:
    """Say of a message that is listed twice that it was added once."""
    seen: set[UUID] = set()
    for place, item in enumerate(added):
        if item.is_new and item.id is not None:
            if item.id in seen:
                added[place] = AddResult(item.id, is_new=False)
            seen.add(item.id)


#: As PostgreSQL calls it, for a table and for its schema, and MySQL with and without its SQLSTATE.
_NO_TABLE: Final = frozenset({"42P01", "3F000", "42S02", 1146})


def explain(error: Exception, table: str) -> None:
    """Raise our error for the failures that have a remedy of ours; others stay as the caller's library says them."""
    if hasattr(error, "hide_parameters"):
        setattr(error, "hide_parameters", True)  # noqa: B010 -- SQLAlchemy shows the payload otherwise
    for cause in (error, getattr(error, "orig", None), error.__cause__):
        code = getattr(cause, "sqlstate", None) or (cause.args[0] if cause is not None and cause.args else None)
        if code == "25P02":
            raise TransactionAbortedError from error
        if code in _NO_TABLE or (isinstance(code, str) and code.startswith("no such table")):
            raise SchemaMissingError(table) from error
        if _is_denied(cause, code):
            raise _denial(cause, table) from error


def _denial(cause: BaseException | None, table: str) -> StorePermissionError:
    words = " ".join(without_rows(str(cause)).split())
    denial = StorePermissionError(f"{words}; {ADVICE[StorePermissionError]}")
    denial.table = table
    return denial


def _is_denied(cause: BaseException | None, code: object) -> bool:
    number = cause.args[0] if cause is not None and cause.args else None
    if isinstance(number, int):  # MySQL has one SQLSTATE for many kinds of errors
        return mysql_error(number) is StorePermissionError
    return isinstance(code, str) and postgres_error(code) is StorePermissionError and not _is_policy(cause)


def _is_policy(cause: BaseException | None) -> bool:
    """Tell whether PostgreSQL refused one row by row-level security, under the code of a missing permission.

    Only the function that reports it tells the two apart in every language of the server.
    """
    source = getattr(cause, "server_source_function", None) or getattr(
        getattr(cause, "diag", None), "source_function", None
    )
    return source == "ExecWithCheckOptions"


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
        self,
        connection: Connection,
        additions: Sequence[Addition],
        outbox: Outbox,
        answer: Answer[T],
        *,
        outside_transaction: bool,
    ) -> T:
        """Add messages, and arrange for the wake-up after the commit where the library can."""
        added = self.perform(connection, _adding(additions, outbox, answer, outside_transaction=outside_transaction))
        if outbox.wake is not None and additions:
            self.after_commit(connection, outbox.wake)
        return added

    def admit(self, connection: Connection, inbox: Inbox, message: Message) -> bool:
        """Mark a message as handled; tell whether it was not before."""
        return self.perform(connection, _admitting(inbox, message))

    def has(self, connection: Connection, inbox: Inbox, message: Message) -> bool:
        """Tell whether a message is marked as handled."""
        return self.perform(connection, _having(inbox, message))

    def purge_inbox(self, connection: Connection, inbox: Inbox, limit: int) -> int:
        """Delete marks past their retention; return how many."""
        return self.perform(connection, _purging(inbox, limit))

    def bury(self, connection: Connection, inbox: Inbox, message: Message, error: str) -> None:
        """Write a dead letter, unless there is one of this consumer and message."""
        self.perform(connection, _burying(inbox, message, error))

    def ask(self, connection: Connection, outbox: Outbox, question: Question) -> Any:  # noqa: ANN401 -- its answer
        """Answer a question about tickets."""
        answer = self.perform(connection, _asking(outbox, question))
        if outbox.wake is not None and isinstance(answer, Enqueued):
            self.after_commit(connection, outbox.wake)
        return answer

    def perform(self, connection: Connection, task: Task[T]) -> T:
        """Run a task in the caller's transaction."""
        dialect = task.dialect(self.dialect_of(connection))
        if not task.outside_transaction:
            self.require_transaction(connection)
        try:
            return run(task.script(dialect), partial(self.execute, connection))
        except Exception as error:
            explain(error, dialect.identifiers[task.identifier])
            raise

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

    # Not async, but returning what is to be awaited: every layer costs, for every message.
    def write(
        self,
        connection: Connection,
        additions: Sequence[Addition],
        outbox: Outbox,
        answer: Answer[T],
        *,
        outside_transaction: bool,
    ) -> Coroutine[Any, Any, T]:
        """Add messages."""
        return self.perform(connection, _adding(additions, outbox, answer, outside_transaction=outside_transaction))

    def admit(self, connection: Connection, inbox: Inbox, message: Message) -> Coroutine[Any, Any, bool]:
        """Mark a message as handled; tell whether it was not before."""
        return self.perform(connection, _admitting(inbox, message))

    def has(self, connection: Connection, inbox: Inbox, message: Message) -> Coroutine[Any, Any, bool]:
        """Tell whether a message is marked as handled."""
        return self.perform(connection, _having(inbox, message))

    async def purge_inbox(self, connection: Connection, inbox: Inbox, limit: int) -> int:
        """Delete marks past their retention; return how many."""
        return await self.perform(connection, _purging(inbox, limit))

    async def bury(self, connection: Connection, inbox: Inbox, message: Message, error: str) -> None:
        """Write a dead letter, unless there is one of this consumer and message."""
        await self.perform(connection, _burying(inbox, message, error))

    async def ask(self, connection: Connection, outbox: Outbox, question: Question) -> Any:  # noqa: ANN401
        """Answer a question about tickets."""
        return await self.perform(connection, _asking(outbox, question))

    async def perform(self, connection: Connection, task: Task[T]) -> T:
        """Run a task in the caller's transaction."""
        dialect = task.dialect(self.dialect)
        if not task.outside_transaction:
            self.require_transaction(connection)
        try:
            return await run_async(task.script(dialect), partial(self.execute, connection))
        except Exception as error:
            explain(error, dialect.identifiers[task.identifier])
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
