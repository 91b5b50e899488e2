"""Writers through the sessions and connections of SQLAlchemy and Django; neither is imported here."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from ....decisions import Question
from ....errors import NotInTransactionError
from ....inbox import Inbox
from ....message import Message
from ....outbox import Addition, Answer, Outbox
from ..statement import ParamStyle, Result, Statement
from ..transaction import hint, hint_after_commit
from ..writer import Connection, SyncWriter, Task, to_its_end

__all__ = [
    "Django",
    "SQLAlchemyAsync",
    "SQLAlchemyAsyncScopedSession",
    "SQLAlchemyConnection",
    "SQLAlchemyScopedSession",
    "SQLAlchemySession",
]

T = TypeVar("T")


class SQLAlchemyConnection(SyncWriter):
    """SQLAlchemy's ``Connection``.

    Statements go through SQLAlchemy: it sends BEGIN only with its first one, so a row written past it, through the
    connection of the driver, would escape the rollback.
    """

    _STYLES: ClassVar[dict[str, ParamStyle]] = {"numeric_dollar": "numeric", "qmark": "qmark"}

    def dialect_of(self, connection: Connection) -> str:
        name: str = connection.dialect.name
        return name

    def require_transaction(self, connection: Connection) -> None:
        pooled = connection.connection
        if not _is_autocommit(connection, pooled.dbapi_connection):
            return
        if connection.dialect.name == "sqlite":
            # A well-known recipe takes BEGIN away from the driver and sends it in SQLAlchemy's begin event.
            if not connection.in_transaction():
                connection.begin()
            if pooled.driver_connection.in_transaction:
                return
        raise NotInTransactionError("the isolation level is AUTOCOMMIT; use a connection with another one")

    def execute(self, connection: Connection, statement: Statement) -> Result:
        style = self._STYLES.get(connection.dialect.paramstyle, "format")
        sql, params = statement.bind(style, arrays=connection.dialect.name == "postgresql")
        result = connection.exec_driver_sql(sql, tuple(params))
        return Result([tuple(row) for row in result] if statement.returns else (), result.rowcount)


def _is_autocommit(connection: Connection, driver: Connection) -> bool:
    try:
        return bool(connection.dialect.detect_autocommit_setting(driver))
    except (AttributeError, NotImplementedError):  # before SQLAlchemy 2.0.43, or a dialect that does not tell
        level = connection.get_execution_options().get("isolation_level")
        return "AUTOCOMMIT" in {level, getattr(connection.dialect, "_on_connect_isolation_level", None)}


class SQLAlchemySession(SyncWriter):
    """SQLAlchemy's ``Session``, through the connection that holds its transaction."""

    def perform(self, connection: Connection, task: Task[T]) -> T:
        session = self.session(connection)
        if not session.autobegin and not session.in_transaction():
            raise NotInTransactionError("call `session.begin()` first, since the session does not by itself")
        return SQLAlchemyConnection().perform(session.connection(), task)

    def after_commit(self, connection: Connection, wake: Callable[[], object]) -> None:
        hint_after_commit(self.session(connection), wake)

    def session(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign session
        """Return the session itself."""
        return connection


class SQLAlchemyScopedSession(SQLAlchemySession):
    """SQLAlchemy's ``scoped_session``; a listener on the proxy would hear of all its sessions."""

    def session(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign session
        return connection()


class SQLAlchemyAsync:
    """SQLAlchemy's ``AsyncConnection`` and ``AsyncSession``: the sync writer inside its greenlet."""

    def __init__(self, writer: SyncWriter) -> None:
        self.writer = writer

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

        def write(inner: Connection) -> T:
            return self.writer.write(inner, additions, outbox, answer, outside_transaction=outside_transaction)

        return self._call(connection, write)

    async def admit(self, connection: Connection, inbox: Inbox, message: Message) -> bool:
        """Mark a message as handled; tell whether it was not before."""
        return await self._call(connection, self.writer.admit, inbox, message)

    async def has(self, connection: Connection, inbox: Inbox, message: Message) -> bool:
        """Tell whether a message is marked as handled."""
        return await self._call(connection, self.writer.has, inbox, message)

    async def purge_inbox(self, connection: Connection, inbox: Inbox, limit: int) -> int:
        """Delete marks past their retention; return how many."""
        return await self._call(connection, self.writer.purge_inbox, inbox, limit)

    async def bury(self, connection: Connection, inbox: Inbox, message: Message, error: str) -> None:
        """Write a dead letter, unless there is one of this consumer and message."""
        await self._call(connection, self.writer.bury, inbox, message, error)

    async def ask(self, connection: Connection, outbox: Outbox, question: Question) -> Any:  # noqa: ANN401 -- its answer
        """Answer a question about tickets."""
        return await self._call(connection, self.writer.ask, outbox, question)

    async def _call(self, connection: Connection, function: Callable[..., T], *arguments: object) -> T:
        inner = self.inner(connection)
        is_sqlite = _is_sqlite(inner)
        called: Coroutine[Any, Any, T] = inner.run_sync(function, *arguments)
        return await (to_its_end(called) if is_sqlite else called)

    def inner(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign session
        """Return the connection or session itself."""
        return connection


def _is_sqlite(holder: Connection) -> bool:
    bound: Connection = holder.get_bind() if hasattr(holder, "get_bind") else holder
    return bool(bound.dialect.name == "sqlite")


class SQLAlchemyAsyncScopedSession(SQLAlchemyAsync):
    """SQLAlchemy's ``async_scoped_session``."""

    def inner(self, connection: Connection) -> Any:  # noqa: ANN401 -- a foreign session
        return connection()


class Django(SyncWriter):
    """Django's ``connection``, within ``atomic``."""

    def dialect_of(self, connection: Connection) -> str:
        vendor: str = connection.vendor
        return vendor

    def require_transaction(self, connection: Connection) -> None:
        if connection.get_autocommit() and not connection.in_atomic_block:
            raise NotInTransactionError("use `with transaction.atomic():`")

    def execute(self, connection: Connection, statement: Statement) -> Result:
        sql, params = statement.bind(self.style, arrays=connection.vendor == "postgresql")
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return Result(cursor.fetchall() if statement.returns else (), cursor.rowcount)

    def after_commit(self, connection: Connection, wake: Callable[[], object]) -> None:
        # Where the caller sends COMMIT by hand, Django does not know of it.
        if connection.in_atomic_block or connection.get_autocommit():
            connection.on_commit(lambda: hint(wake))
