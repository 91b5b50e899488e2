"""SQLite through the standard library, on a thread of its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from ....errors import StoreError, StoreTimeoutError, StoreUnavailableError
from ..errors import sqlite_error
from ..statement import Result, Script, Statement, run

__all__ = ["SQLiteDriver"]

T = TypeVar("T")


class SQLiteDriver:
    """One connection on one thread: a script costs one hop, whatever it does."""

    def __init__(self, path: Path, *, wal: bool = True, busy_timeout: timedelta = timedelta(seconds=5)) -> None:
        self._path = path
        self._wal = wal
        self._busy_timeout = busy_timeout
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def run(self, script: Script[T], *, atomic: bool = True, timeout: timedelta) -> T:  # noqa: ASYNC109
        """Run a script as one transaction, which is the only way SQLite writes."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="postroom-sqlite")
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._work, script)
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                return await asyncio.shield(work)
        except TimeoutError:
            if self._connection is not None:
                self._connection.interrupt()
            work.add_done_callback(_forget)
            raise StoreTimeoutError(f"{self._path} did not answer within {timeout.total_seconds():g} s") from None
        except asyncio.CancelledError:
            work.add_done_callback(_forget)
            raise

    def _work(self, script: Script[T]) -> T:
        try:
            connection = self._connection = self._connection or self._connect()
            return self._transact(connection, script)
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorname", None)
            kind = sqlite_error(code) if code else StoreError
            raise kind(f"{self._path}: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        if not self._path.parent.is_dir():
            raise StoreUnavailableError(f"{self._path.parent} is not a directory; create it first")
        connection = sqlite3.connect(self._path, timeout=self._busy_timeout.total_seconds(), isolation_level=None)
        try:
            if self._wal:
                connection.execute("PRAGMA journal_mode = WAL")
            # A commit must survive the loss of power, which WAL alone does not promise.
            connection.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _transact(self, connection: sqlite3.Connection, script: Script[T]) -> T:
        # Taking the write lock first: a transaction that reads and then writes would fail as "locked" instead of waiting.
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = run(script, lambda statement: _execute(connection, statement))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    async def listen(self, channel: str, wake: Callable[[], None]) -> None:
        """Return at once: SQLite notifies nobody."""

    async def close(self) -> None:
        """Close the connection and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._disconnect)
            thread.shutdown()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _execute(connection: sqlite3.Connection, statement: Statement) -> Result:
    sql, params = statement.bind("qmark", arrays=False)
    cursor = connection.execute(sql, params)
    return Result(cursor.fetchall() if statement.returns else (), cursor.rowcount)


def _forget(work: asyncio.Future[object]) -> None:
    if not work.cancelled():
        work.exception()
