"""The connection of a store's own to a SQLite file, on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

from ...errors import StoreError, StoreTimeoutError, StoreUnavailableError
from .driver import atomically, finish
from .drivers.sqlite import SQLiteDriver, SQLiteFile, connected
from .errors import sqlite_error
from .statement import Script
from .transactions import SQLTransactions

__all__ = ["SQLitePool"]

T = TypeVar("T")

_DRIVER: Final = SQLiteDriver(is_async=False)


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


class SQLitePool:
    """One connection on one thread for a store's own calls: a script costs one hop, whatever it does."""

    def __init__(self, path: Path, *, wal: bool = True, busy_timeout: timedelta = timedelta(seconds=5)) -> None:
        self._path = path
        self._wal = wal
        self._busy_timeout = busy_timeout
        self._session: _Session | None = None
        self._file: SQLiteFile | None = None
        self._transactions: SQLTransactions | None = None
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
            self._inherited += [self._session, self._transactions, self._file]
            self._session, self._transactions, self._file, self._pid = None, None, None, os.getpid()

    def _work(self, session: _Session, script: Script[T]) -> T:
        session.running = script
        try:
            connection = session.connection = session.connection or self._connect()
            return finish(atomically(_DRIVER, connection, script, _DRIVER.begins_with))
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorname", None)
            kind = sqlite_error(code) if code else StoreError
            raise kind(f"{self._path}: {error}") from error
        finally:
            session.running = None
            if session.connection is not None and session.connection.in_transaction:
                session.connection.rollback()  # after what is no Exception

    def _connect(self, *, any_thread: bool = False) -> sqlite3.Connection:
        return connected(self._path, wal=self._wal, busy_timeout=self._busy_timeout, any_thread=any_thread)

    async def create(self) -> None:
        """Create an empty file unless there is one."""
        try:
            await asyncio.to_thread(self._path.touch)
        except OSError as error:
            raise StoreUnavailableError(f"{self._path} cannot be created: {error.strerror}") from error

    async def listen(self, channel: str, wake: Callable[[], None], *, timeout: timedelta) -> None:  # noqa: ASYNC109
        """Return at once: SQLite notifies nobody."""

    def transactions(self, *, timeout: timedelta) -> SQLTransactions:
        """Return what opens transactions on a connection of their own."""
        self._notice_fork()
        if self._transactions is None:
            self._file = SQLiteFile(self._path, lambda: self._connect(any_thread=True))
            self._transactions = SQLTransactions(self._file)
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
        if self._file is not None:
            self._file.close()
        session, self._session = self._session, None
        if session is None:
            return None
        closed = session.thread.submit(session.disconnect)
        session.thread.shutdown(wait=False)
        return closed
