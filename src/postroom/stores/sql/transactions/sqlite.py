"""Transactions of SQLite: on a file, on a connection of the standard library, or on one of aiosqlite."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
import weakref
from collections.abc import Callable
from typing import Final, TypeAlias

from ....errors import ConfigurationError
from .block import Foreign, Link, SQLTransactions, require_open
from .network import break_off
from .outcome import ANCHOR, RELEASE, aborted_is_told, unknown_is_told
from .threads import Gate, OnThread, Plain, Threads

__all__ = ["AiosqliteLink", "ConnectionLink", "FileTransactions"]

# The write lock comes first: a transaction that reads and then writes would fail as "locked", not wait.
_BEGIN: Final = "BEGIN IMMEDIATE"
_SAVEPOINT: Final = "postroom_nested"
#: How many seconds a transaction holds the writer for long, and for how many it is left to others then.
_LONG: Final = 0.25
_MOMENT: Final = 0.12


#: A connection, and the process that opened it.
_Idle: TypeAlias = tuple[int, sqlite3.Connection]
#: Kept, because to collect them would close what the parent uses.
_inherited: Final[list[_Idle]] = []


class FileTransactions(SQLTransactions):
    """Opens transactions on a file, one at a time, on a connection that is kept for the next one."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        """Set up; ``connect`` opens a connection that any thread may use."""
        threads = Threads(1)  # SQLite has one writer at a time; here they wait in order
        idle: list[_Idle] = []
        turns = _Turns()
        super().__init__(lambda: OnThread(_File(connect, idle, turns), threads), is_async=False)
        self._idle = idle
        weakref.finalize(self, _close, idle)

    def close(self) -> None:
        """Close the connection that is kept."""
        _close(self._idle)


class _Turns:
    """Leaves the writer to others for a moment after a transaction that held it for long.

    Who waits for a lock of SQLite's asks again and again, up to a tenth of a second apart. A queue of handlers would
    take the lock each time before anybody else asks: a dispatcher could not renew its leases, in any process.
    """

    def __init__(self) -> None:
        self._begun = 0.0
        self._free_at = 0.0

    def begin(self) -> None:
        """Wait for the end of the moment; to be called on a thread, before BEGIN."""
        if self._free_at and (left := self._free_at - time.monotonic()) > 0:
            time.sleep(left)

    def begun(self) -> None:
        """Take note that the writer is held."""
        self._begun = time.monotonic()

    def ended(self) -> None:
        """Take note that it is free."""
        now = time.monotonic()
        self._free_at = now + _MOMENT if now - self._begun > _LONG else 0.0


def _close(idle: list[_Idle]) -> None:
    connection = _own(idle)
    if connection is not None:
        connection.close()


def _own(idle: list[_Idle]) -> sqlite3.Connection | None:
    """Take the connection that is kept, unless it was carried over a fork, which SQLite does not bear."""
    while idle:
        kept = idle.pop()
        if kept[0] == os.getpid():
            return kept[1]
        _inherited.append(kept)
    return None


class _OnSQLite(Plain):
    """A transaction on a connection of the standard library."""

    _marks: int = 0
    #: Whether what the connection is in is ours to roll back.
    _is_begun: bool = False

    def _begin(self) -> None:
        connection = self.connection
        # Since 3.12 a connection may be asked to be in a transaction always.
        if not (connection.in_transaction and getattr(connection, "autocommit", -1) is False):
            connection.execute(_BEGIN)
        self._is_begun = True
        connection.execute(ANCHOR)

    def commit(self) -> None:
        # Some errors, such as a full disk, end the whole transaction.
        require_open(is_open=self.connection.in_transaction)
        with aborted_is_told():
            self.connection.execute(RELEASE)
        with unknown_is_told():
            self.connection.commit()

    def roll_back(self) -> None:
        self.connection.rollback()

    def abort(self) -> None:
        if self.connection is not None and self._is_begun:  # what runs before that may be somebody else's
            break_off(self.connection)

    def mark(self) -> Foreign:
        self._marks += 1
        name = f"{_SAVEPOINT}_{self._marks}"
        self.connection.execute(f"SAVEPOINT {name}")
        return name

    def keep(self, mark: Foreign) -> None:
        self.connection.execute(f"RELEASE {mark}")

    def undo(self, mark: Foreign) -> None:
        self.connection.execute(f"ROLLBACK TO {mark}")
        self.connection.execute(f"RELEASE {mark}")


class _File(_OnSQLite):
    """A transaction on a connection of our own."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], idle: list[_Idle], turns: _Turns) -> None:
        self._connect = connect
        self._idle = idle
        self._turns = turns

    def begin(self) -> None:
        self._turns.begin()
        self.connection = _own(self._idle) or self._connect()
        self._begin()
        self._turns.begun()

    def release(self, *, is_sound: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        if self._is_begun:
            self._turns.ended()
        if is_sound and not self._idle:
            self._idle.append((os.getpid(), connection))
        else:
            connection.close()


class ConnectionLink(_OnSQLite):
    """A transaction on a connection of the caller's."""

    connection: Foreign = None

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._given = connection

    def begin(self) -> None:
        try:
            self._given.cursor().close()
        except sqlite3.ProgrammingError as error:
            raise ConfigurationError(
                "the connection is bound to the thread that made it, or closed; open it with check_same_thread=False, "
                "or pass the path of the file"
            ) from error
        self.connection = self._given
        self._begin()

    def release(self, *, is_sound: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and not is_sound and self._is_begun and connection.in_transaction:
            connection.rollback()


class AiosqliteLink(Link):
    """A transaction on an aiosqlite connection; one at a time."""

    connection: Foreign = None

    _marks: int = 0

    def __init__(self, connection: Foreign, gate: Gate) -> None:
        self._given = connection
        self._gate = gate
        self._is_inside = False
        self._beginning: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        await self._gate.acquire()
        self._is_inside = True
        self.connection = self._given
        # Its thread begins also for those who were cancelled: whether it did has to be known before a ROLLBACK, which
        # would end the transaction of somebody else otherwise.
        self._beginning = asyncio.create_task(self._execute(_BEGIN))
        await asyncio.shield(self._beginning)
        await self._execute(ANCHOR)

    async def commit(self) -> None:
        require_open(is_open=self.connection.in_transaction)
        with aborted_is_told():
            await self._execute(RELEASE)
        with unknown_is_told():
            await self.connection.commit()

    async def roll_back(self) -> None:
        await self.connection.rollback()

    async def release(self, *, is_sound: bool) -> None:
        if not self._is_inside:
            return
        try:
            if not is_sound and await self._has_begun():
                await self.connection.rollback()
        finally:
            self._is_inside, self.connection = False, None
            self._gate.release()

    async def _has_begun(self) -> bool:
        if self._beginning is None:
            return False
        await asyncio.wait({self._beginning})
        return not self._beginning.cancelled() and self._beginning.exception() is None

    def abort(self) -> None:
        # What runs before BEGIN was answered is somebody else's.
        if self._is_inside and self._beginning is not None and self._beginning.done():
            break_off(self._given)

    def is_sound_after(self, error: BaseException) -> bool:
        """Tell so always: its thread goes on with a statement that nobody waits for, and this waits behind it."""
        return True

    async def mark(self) -> Foreign:
        self._marks += 1
        name = f"{_SAVEPOINT}_{self._marks}"
        await self._execute(f"SAVEPOINT {name}")
        return name

    async def keep(self, mark: Foreign) -> None:
        await self._execute(f"RELEASE {mark}")

    async def undo(self, mark: Foreign) -> None:
        await self._execute(f"ROLLBACK TO {mark}")
        await self._execute(f"RELEASE {mark}")

    async def _execute(self, sql: str) -> None:
        await (await self.connection.execute(sql)).close()
