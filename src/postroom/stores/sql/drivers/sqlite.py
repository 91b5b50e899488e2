"""SQLite through the standard library, on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from ....errors import (
    StoreContentionError,
    StoreError,
    StoreFileMissingError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from ..errors import sqlite_error
from ..statement import Result, Script, Statement, run
from ..transactions.sqlite import FileTransactions

__all__ = ["SQLiteDriver", "connected"]

T = TypeVar("T")


class _Session:
    """A thread and the connection that it alone uses."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="postroom-sqlite")
        self.connection: sqlite3.Connection | None = None
        #: The script that the thread is busy with.
        self.running: object = None

    def disconnect(self) -> None:
        """Close the connection, on the thread."""
        if self.connection is not None:
            self.connection.close()


class SQLiteDriver:
    """One connection on one thread: a script costs one hop, whatever it does."""

    def __init__(self, path: Path, *, wal: bool = True, busy_timeout: timedelta = timedelta(seconds=5)) -> None:
        self._path = path
        self._wal = wal
        self._busy_timeout = busy_timeout
        self._session: _Session | None = None
        self._transactions: FileTransactions | None = None
        self._pid = os.getpid()
        self._inherited: list[object] = []

    async def run(self, script: Script[T], *, atomic: bool = True, timeout: timedelta) -> T:  # noqa: ASYNC109
        """Run a script as one transaction, which is the only way SQLite writes."""
        self._notice_fork()
        session = self._session = self._session or _Session()
        # Cancelled or late, it is not begun any more; what was begun goes on to its end.
        work = asyncio.get_running_loop().run_in_executor(session.thread, self._work, session, script)
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                return await work
        except TimeoutError:
            if session.running is script and session.connection is not None:
                session.connection.interrupt()
            raise StoreTimeoutError(f"{self._path} did not answer within {timeout.total_seconds():g} s") from None

    def _notice_fork(self) -> None:
        """Let a forked child begin anew: it has no thread, and SQLite must not be carried over a fork."""
        if self._pid != os.getpid():
            # Kept, because to collect them would close what the parent uses.
            self._inherited += [self._session, self._transactions]
            self._session, self._transactions, self._pid = None, None, os.getpid()

    def _work(self, session: _Session, script: Script[T]) -> T:
        session.running = script
        try:
            connection = session.connection = session.connection or self._connect()
            return self._transact(connection, script)
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorname", None)
            kind = sqlite_error(code) if code else StoreError
            raise kind(f"{self._path}: {error}") from error
        finally:
            session.running = None

    def _connect(self, *, any_thread: bool = False) -> sqlite3.Connection:
        return connected(self._path, wal=self._wal, busy_timeout=self._busy_timeout, any_thread=any_thread)

    def _transact(self, connection: sqlite3.Connection, script: Script[T]) -> T:
        # The write lock comes first: a transaction that reads and then writes would fail as "locked", not wait.
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = run(script, lambda statement: _execute(connection, statement))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    async def create(self) -> None:
        """Create an empty file unless there is one."""
        try:
            await asyncio.to_thread(self._path.touch)
        except OSError as error:
            raise StoreUnavailableError(f"{self._path} cannot be created: {error.strerror}") from error

    async def listen(self, channel: str, wake: Callable[[], None], *, timeout: timedelta) -> None:  # noqa: ASYNC109
        """Return at once: SQLite notifies nobody."""

    def transactions(self, *, timeout: timedelta) -> FileTransactions:
        """Return what opens transactions on a connection of their own."""
        self._notice_fork()
        if self._transactions is None:
            self._transactions = FileTransactions(partial(self._connect, any_thread=True))
        return self._transactions

    async def close(self) -> None:
        """Close the connections and end the thread."""
        closed = self.disconnect()
        if closed is not None:
            # Who stops waiting must not leave the connection open.
            await asyncio.shield(asyncio.wrap_future(closed))

    def disconnect(self) -> Future[None] | None:
        """Have the thread close its connection and end, behind what it is busy with; return what can be waited for.

        A connection that the thread is still making is closed too, and the one that is kept for handlers.
        """
        self._notice_fork()
        if self._transactions is not None:
            self._transactions.close()
        session, self._session = self._session, None
        if session is None:
            return None
        closed = session.thread.submit(session.disconnect)
        session.thread.shutdown(wait=False)
        return closed


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


def _execute(connection: sqlite3.Connection, statement: Statement) -> Result:
    sql, params = statement.bind("qmark", arrays=False)
    cursor = connection.execute(sql, params)
    return Result(cursor.fetchall() if statement.returns else (), cursor.rowcount)
