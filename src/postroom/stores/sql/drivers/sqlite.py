"""SQLite through the standard library and aiosqlite, and transactions on a file."""

from __future__ import annotations

import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Final, TypeAlias, cast

from ....errors import (
    ConfigurationError,
    NotInTransactionError,
    StoreContentionError,
    StoreFileMissingError,
    StoreUnavailableError,
)
from ..driver import ANCHOR, Begun, Driver, Foreign, Steps, finish_async, require_open, to_its_end
from ..errors import Fault, fault_of, sqlite_error, sqlite_fault
from ..source import Source, Threads, Turns
from ..statement import ParamStyle, Result, Row, Statement

__all__ = ["CONNECTIONS", "POOLS", "SQLiteDriver", "SQLiteFile", "classify", "connected"]

#: How many seconds a transaction holds the writer for long, and for how many it is left to others then.
_LONG: Final = 0.25
_MOMENT: Final = 0.12
#: A connection, and the process that opened it.
_Kept: TypeAlias = tuple[int, sqlite3.Connection]
#: Kept, because to collect them would close what the parent of this process uses.
_inherited: Final[list[_Kept]] = []


class SQLiteDriver(Driver):
    """Connections of the standard library, or of aiosqlite, whose thread goes on with what was begun."""

    dialect = "sqlite"
    style: ClassVar[ParamStyle] = "qmark"
    # The write lock comes first: a transaction that reads and then writes would fail as "locked", not wait.
    begins_with: ClassVar[str] = "BEGIN IMMEDIATE"

    def __init__(self, *, is_async: bool) -> None:
        self.is_async: bool = is_async

    def require_transaction(self, connection: Foreign) -> Steps[None]:
        if connection.in_transaction:
            return
        # Only the connection's own thread may ask for its mode.
        mode = (yield connection._execute(_mode, connection._conn)) if self.is_async else _mode(connection)  # noqa: SLF001
        # In the legacy mode an isolation level makes the first write begin a transaction.
        if not (connection.isolation_level is not None if mode == -1 else not mode):
            raise NotInTransactionError("run `BEGIN IMMEDIATE` first")

    def execute(self, connection: Foreign, statement: Statement) -> Steps[Result]:
        steps = self._execute(connection, statement)
        return cast("Result", (yield to_its_end(finish_async(steps)))) if self.is_async else (yield from steps)

    def _execute(self, connection: Foreign, statement: Statement) -> Steps[Result]:
        sql, params = statement.bind(self.style, arrays=False)
        cursor = yield connection.execute(sql, params)
        try:
            cursor.row_factory = None
            rows = (yield cursor.fetchall()) if statement.returns else ()
            return Result(rows if connection.text_factory is str else _as_text(rows), cursor.rowcount)
        finally:
            yield cursor.close()

    def acquire(self, pool: Foreign) -> Steps[Foreign]:
        """Return the caller's one connection, which is the pool."""
        if not self.is_async:
            try:
                pool.cursor().close()
            except sqlite3.ProgrammingError as error:
                raise ConfigurationError(
                    "the connection is bound to the thread that made it, or closed; open it with "
                    "check_same_thread=False, or pass the path of the file"
                ) from error
        yield from ()
        return pool

    def release(self, pool: Foreign, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        if not is_sound and begun.is_begun and connection.in_transaction:
            yield connection.rollback()

    def begin(
        self, connection: Foreign, begun: Begun, *, settings: str = "", along: Statement | None = None
    ) -> Steps[Result | None]:
        # Since 3.12 a connection may be asked to be in a transaction always.
        if not (connection.in_transaction and not self.is_async and _mode(connection) == 0):
            return (yield from super().begin(connection, begun))
        begun.note()
        yield from self.command(connection, ANCHOR)
        return None

    def check(self, connection: Foreign, begun: Begun) -> Steps[None]:
        # Some errors, such as a full disk, end the whole transaction.
        require_open(is_open=connection.in_transaction)
        yield from super().check(connection, begun)

    def is_closed(self, connection: Foreign, begun: Begun) -> bool:
        return False

    def abort(self, connection: Foreign, begun: Begun) -> None:
        with suppress(Exception, StopIteration):
            interrupted = connection.interrupt()
            if self.is_async:
                interrupted.send(None)  # it is called at once, although it may be awaited


def _mode(connection: Foreign) -> int:
    """Return ``autocommit`` of a connection, which there is since Python 3.12; -1 stands for the legacy mode."""
    return int(getattr(connection, "autocommit", -1))


def _as_text(rows: Sequence[Row]) -> list[Row]:
    """Undo a ``text_factory`` of the caller's that answers with bytes."""
    return [[bytes(value).decode() if isinstance(value, bytes | bytearray) else value for value in row] for row in rows]


_SYNC: Final = SQLiteDriver(is_async=False)
_ASYNC: Final = SQLiteDriver(is_async=True)


class SQLiteFile(Source):
    """A file, on which one transaction follows another, on a connection that is kept for the next one.

    A transaction that held the writer for long leaves it to others for a moment. Who waits for a lock of SQLite's asks
    again and again, up to a tenth of a second apart: a queue of handlers would take the lock each time before anybody
    else asks, and a dispatcher could not renew its leases, in any process.
    """

    def __init__(self, path: Path, connect: Callable[[], sqlite3.Connection] | None = None) -> None:
        super().__init__(_SYNC, path, lanes=Threads(1))
        self._connect = connect or (
            lambda: connected(path, wal=False, busy_timeout=timedelta(seconds=5), any_thread=True)
        )
        self._kept: list[_Kept] = []
        self._free_at = 0.0
        weakref.finalize(self, _close, self._kept)

    def acquire(self) -> Steps[Foreign]:
        if self._free_at and (left := self._free_at - time.monotonic()) > 0:
            time.sleep(left)  # on a thread of the transaction's own
        yield from ()
        return _own(self._kept) or self._connect()

    def release(self, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        if begun.is_begun:
            now = time.monotonic()
            self._free_at = now + _MOMENT if now - begun.since > _LONG else 0.0
        if is_sound and not self._kept:
            self._kept.append((os.getpid(), connection))
        else:
            connection.close()
        yield from ()

    def close(self) -> None:
        """Close the connection that is kept."""
        _close(self._kept)


def _close(kept: list[_Kept]) -> None:
    connection = _own(kept)
    if connection is not None:
        connection.close()


def _own(kept: list[_Kept]) -> sqlite3.Connection | None:
    """Take the connection that is kept, unless it was carried over a fork, which SQLite does not bear."""
    while kept:
        one = kept.pop()
        if one[0] == os.getpid():
            return one[1]
        _inherited.append(one)
    return None


def connected(path: Path, *, wal: bool, busy_timeout: timedelta, any_thread: bool) -> sqlite3.Connection:
    """Open a file; on the connection, transactions are begun by name."""
    if not path.parent.is_dir():
        raise StoreUnavailableError(f"{path.parent} is not a directory; create it first")
    if not path.exists():
        raise StoreFileMissingError(path)
    patience = busy_timeout.total_seconds()
    uri = f"{path.absolute().as_uri()}?mode=rw"  # by default SQLite creates a file that is missing
    connection = sqlite3.connect(
        uri, uri=True, timeout=patience, isolation_level=None, check_same_thread=not any_thread
    )
    try:
        if wal:
            _write_ahead(connection, patience)
        # A commit must survive the loss of power, which WAL alone does not promise.
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _write_ahead(connection: sqlite3.Connection, patience: float) -> None:
    """Switch to write-ahead logging, waiting for others who do: SQLite itself does not wait here."""
    deadline = time.monotonic() + patience
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if sqlite_error(error.sqlite_errorname) is not StoreContentionError or time.monotonic() > deadline:
                raise
            time.sleep(0.01)  # on a thread of our own, where nothing else could run
        else:
            return


CONNECTIONS: Final[Mapping[str, Driver]] = {"sqlite3.Connection": _SYNC, "aiosqlite.Connection": _ASYNC}
POOLS: Final[Mapping[str, Callable[[Foreign], Source]]] = {
    "sqlite3.Connection": lambda connection: Source(_SYNC, connection, lanes=Threads(1), is_shared=True),
    "aiosqlite.Connection": lambda connection: Source(_ASYNC, connection, lanes=Turns(), is_shared=True),
}


def classify(error: BaseException) -> Fault:
    """Return what an error of SQLite means."""
    if not isinstance(error, sqlite3.Error):
        return fault_of(error)  # a warning
    return sqlite_fault(error, getattr(error, "sqlite_errorname", ""))
