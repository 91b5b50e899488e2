"""SQLAlchemy's connections, sessions and engines, async or not; the raw connection has a driver of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Final, TypeVar, cast

from ....errors import NotInTransactionError, StoreError, TransactionAbortedError
from ..commit_errors import lost
from ..driver import (
    ANCHOR,
    PROBE,
    RELEASE,
    Begun,
    Driver,
    Foreign,
    Steps,
    Wake,
    finish,
    hint,
    require_open,
    to_its_end,
)
from ..errors import Fault, fault_of
from ..source import Source
from ..statement import ParamStyle, Result, Script, Statement
from . import classify as classify_cause
from . import driver_of

__all__ = ["CONNECTIONS", "POOLS", "SQLAlchemyDriver", "classify"]

T = TypeVar("T")

_STYLES: Final[Mapping[str, ParamStyle]] = {"numeric_dollar": "numeric", "qmark": "qmark"}
#: Where a savepoint shows whether the transaction is still the one that was begun.
_ANCHORED: Final = frozenset({"mysql", "mariadb", "sqlite"})
_WAITING: Final = "postroom_wake"


@dataclass(slots=True)
class _Handle:
    """What is known of a transaction besides its connection or session."""

    begun: Foreign
    dialect: str
    #: The connection of the database library, and its driver.
    raw: Foreign
    driver: Driver | None


def _in_greenlet(method: Callable[..., T]) -> Callable[..., Steps[T]]:
    """Make steps of what is done to a sync connection or session; an async one does it in a greenlet of its own."""

    @wraps(method)
    def steps(self: SQLAlchemyDriver, holder: Foreign, *arguments: object, **options: object) -> Steps[T]:
        if self.is_async:
            return cast("T", (yield holder.run_sync(partial(method, self), *arguments, **options)))
        return method(self, holder, *arguments, **options)

    return steps


class SQLAlchemyDriver(Driver):
    """Connections and sessions of SQLAlchemy; what is async runs in one of its greenlets.

    Statements go through SQLAlchemy: it sends BEGIN only with its first one, so a row written past it, through the
    connection of the driver, would escape the rollback.
    """

    def __init__(self, *, is_async: bool, is_session: bool, is_scoped: bool = False) -> None:
        self.is_async: bool = is_async
        #: A session calls what waits for its commit.
        self.has_commit_hook: bool = is_session
        self._is_session = is_session
        self._is_scoped = is_scoped

    def in_one_hop(self, connection: Foreign, work: Callable[[Foreign], Steps[T]]) -> Steps[T]:
        holder = connection() if self._is_scoped else connection
        if not self.is_async:
            return (yield from work(holder))

        def take(inner: Foreign) -> T:
            return finish(work(inner))

        called = holder.run_sync(take)
        return cast("T", (yield to_its_end(called) if self.dialect_of(holder) == "sqlite" else called))

    # -- inside the greenlet -----------------------------------------------------------------------------------------

    def dialect_of(self, connection: Foreign) -> str:
        bound: Foreign = connection.get_bind() if self._is_session else connection
        return str(bound.dialect.name)

    def _connection(self, holder: Foreign) -> Foreign:
        if not self._is_session:
            return holder
        if not holder.autobegin and not holder.in_transaction():
            raise NotInTransactionError("call `session.begin()` first, since the session does not by itself")
        return holder.connection()

    def require_transaction(self, connection: Foreign) -> Steps[None]:
        _require_transaction(self._connection(connection))
        yield from ()

    def run(self, connection: Foreign, script: Script[T]) -> Steps[T]:
        return super().run(self._connection(connection), script)  # of a session that has several, one for all of it

    def execute(self, connection: Foreign, statement: Statement) -> Steps[Result]:
        style: ParamStyle = _STYLES.get(connection.dialect.paramstyle, "format")
        sql, params = statement.bind(style, arrays=connection.dialect.name == "postgresql")
        result = connection.exec_driver_sql(sql, tuple(params))
        yield from ()
        return Result([tuple(row) for row in result] if statement.returns else (), result.rowcount)

    def after_commit(self, connection: Foreign, wake: Wake) -> None:
        if self._is_session:
            _call_after_commit(connection, wake)

    # -- transactions ------------------------------------------------------------------------------------------------

    def acquire(self, pool: Foreign) -> Steps[Foreign]:
        if self._is_session:
            return pool()
        return (yield pool.connect().start()) if self.is_async else pool.connect()

    def release(self, pool: Foreign, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        try:
            if not is_sound:
                yield connection.invalidate()
            yield connection.close()
        finally:
            begun.handle = None  # the raw connection may be another's by now

    @_in_greenlet
    def begin(self, holder: Foreign, begun: Begun, *, settings: str = "", along: Statement | None = None) -> None:
        # Begun by name, so that a commit by anybody else is noticed.
        transaction = holder.begin()
        connection = self._connection(holder)
        raw = connection.connection.driver_connection
        begun.handle = _Handle(transaction, connection.dialect.name, raw, driver := driver_of(raw))
        if driver is not None:
            driver.prepare_abort(raw, begun)
        if begun.handle.dialect == "sqlite" and not raw.in_transaction:
            # The driver begins at the first write: before that, the RELEASE of a savepoint would be a COMMIT.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        begun.note()
        if begun.handle.dialect in _ANCHORED:
            connection.exec_driver_sql(ANCHOR)

    @_in_greenlet
    def check(self, holder: Foreign, begun: Begun) -> None:
        handle: _Handle = begun.handle
        if self.is_closed(holder, begun):
            raise lost()
        require_open(is_open=handle.begun.is_active)
        if self._is_session:
            holder.flush()  # what fails here has nothing to do with the COMMIT
        if handle.dialect in _ANCHORED:
            self._connection(holder).exec_driver_sql(RELEASE)
        elif handle.dialect == "postgresql":
            self._connection(holder).exec_driver_sql(PROBE)
        if hasattr(handle.raw, "is_in_transaction"):
            require_open(is_open=handle.raw.is_in_transaction())  # a ROLLBACK by hand passes SQLAlchemy by

    @_in_greenlet
    def mark(self, holder: Foreign, begun: Begun) -> Foreign:
        return holder.begin_nested()

    @_in_greenlet
    def keep(self, holder: Foreign, begun: Begun, mark: Foreign) -> None:
        if self._is_session:
            holder.flush()
        mark.commit()

    @_in_greenlet
    def undo(self, holder: Foreign, begun: Begun, mark: Foreign) -> None:
        mark.rollback()

    def is_closed(self, connection: Foreign, begun: Begun) -> bool:
        handle: _Handle | None = begun.handle
        return bool(handle and handle.driver and handle.driver.is_closed(handle.raw, begun))

    def abort(self, connection: Foreign, begun: Begun) -> None:
        handle: _Handle | None = begun.handle
        if handle is not None and handle.driver is not None:
            handle.driver.abort(handle.raw, begun)


def _require_transaction(connection: Foreign) -> None:
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


def _is_autocommit(connection: Foreign, driver: Foreign) -> bool:
    try:
        return bool(connection.dialect.detect_autocommit_setting(driver))
    except (AttributeError, NotImplementedError):  # before SQLAlchemy 2.0.43, or a dialect that does not tell
        level = connection.get_execution_options().get("isolation_level")
        return "AUTOCOMMIT" in {level, getattr(connection.dialect, "_on_connect_isolation_level", None)}


def _call_after_commit(session: Foreign, wake: Wake) -> None:
    """Call ``wake`` once after the commit of the transaction that a session is in, if it comes."""
    event = sys.modules["sqlalchemy.event"]
    # One pair of listeners for the life of the session: those that remove themselves outlive a rollback.
    if not event.contains(session, "after_commit", _after_commit):
        event.listen(session, "after_commit", _after_commit)
        event.listen(session, "after_transaction_end", _after_transaction_end)
    waiting: list[Wake] = session.info.setdefault(_WAITING, [])
    if wake not in waiting:
        waiting.append(wake)


def _after_commit(session: Foreign) -> None:
    if not session.in_nested_transaction():  # the release of a savepoint is reported as a commit
        for wake in session.info.pop(_WAITING, []):
            hint(wake)


def _after_transaction_end(session: Foreign, ended: Foreign) -> None:
    if ended.parent is None:
        session.info.pop(_WAITING, None)


_SYNC: Final = SQLAlchemyDriver(is_async=False, is_session=False)
_SYNC_SESSION: Final = SQLAlchemyDriver(is_async=False, is_session=True)
_ASYNC: Final = SQLAlchemyDriver(is_async=True, is_session=False)
_ASYNC_SESSION: Final = SQLAlchemyDriver(is_async=True, is_session=True)
CONNECTIONS: Final[Mapping[str, Driver]] = {
    "sqlalchemy.Connection": _SYNC,
    "sqlalchemy.Session": _SYNC_SESSION,
    "sqlalchemy.scoped_session": SQLAlchemyDriver(is_async=False, is_session=True, is_scoped=True),
    "sqlalchemy.AsyncConnection": _ASYNC,
    "sqlalchemy.AsyncSession": _ASYNC_SESSION,
    "sqlalchemy.async_scoped_session": SQLAlchemyDriver(is_async=True, is_session=True, is_scoped=True),
}
POOLS: Final[Mapping[str, Callable[[Foreign], Source]]] = {
    "sqlalchemy.Engine": lambda engine: Source(_SYNC, engine),
    "sqlalchemy.sessionmaker": lambda maker: Source(_SYNC_SESSION, maker),
    "sqlalchemy.AsyncEngine": lambda engine: Source(_ASYNC, engine),
    "sqlalchemy.async_sessionmaker": lambda maker: Source(_ASYNC_SESSION, maker),
}


def classify(error: BaseException) -> Fault | None:
    """Return what an error of SQLAlchemy means: mostly that of the driver, which it wraps."""
    if type(error).__name__ == "PendingRollbackError":
        # It is raised for whatever comes after an error that was caught; its code says whether the connection was lost.
        is_lost = getattr(error, "code", "") == "8s2b"
        return Fault(StoreError, True, error, instead=lost() if is_lost else TransactionAbortedError())  # noqa: FBT003
    original: BaseException | None = getattr(error, "orig", None)
    if original is None:
        return None
    # Its adapters of async drivers wrap errors once more; of some drivers, such as MySQL's own, there is no module.
    inner = original.__cause__
    fault = (inner and classify_cause(inner)) or classify_cause(original) or fault_of(original)
    if getattr(error, "connection_invalidated", False):
        return fault._replace(was_refused=False, is_lost=True)
    return fault
