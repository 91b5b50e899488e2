"""Transactions of the libraries that speak to a server; none of them is imported here."""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Final

from ....deadline import Limit, Within
from ....errors import CommitUnknownError, StoreTimeoutError, TransactionAbortedError
from ..opening import admission, explain_admission
from .block import Foreign, Link, require_open
from .heard import Heard
from .outcome import ANCHOR, PROBE, RELEASE, aborted_is_told, lost, unknown_is_told, was_refused
from .threads import Plain

__all__ = [
    "AsyncmyLink",
    "AsyncmyPool",
    "AsyncpgLink",
    "AsyncpgPool",
    "PsycopgLink",
    "PsycopgPlain",
    "PsycopgPool",
    "Source",
    "break_off",
    "is_broken",
]

_SAVEPOINT: Final = "postroom_nested"
#: What tells of a library that its connection is open.
_TELLING: Final = {"asyncmy": "connected", "pymysql": "open"}


#: How long a transaction may take to begin on a connection of the application's pool. One that is half open never
#: answers, and while other messages move on, it passes for one that waits in a queue.
BEGINNING: Final = timedelta(seconds=20)


class Source(ABC):
    """Where connections come from and go to."""

    #: How long a transaction may take to begin on a connection; None for no limit.
    limit: Limit | None = None

    @abstractmethod
    async def take(self) -> Foreign:
        """Return a connection that nobody else uses."""

    @abstractmethod
    async def give_back(self, connection: Foreign, *, is_sound: bool) -> None:
        """Take a connection back; one that is not sound is never used again."""

    def hear_of_loss(self) -> None:  # noqa: B027 -- most pools find out by themselves
        """Hear that a connection was lost, and others may have been with it."""


def break_off(connection: Foreign) -> None:
    """Break a connection of some driver at once, failing whoever waits on it."""
    package = type(connection).__module__.partition(".")[0]
    if package == "psycopg":
        # The socket is shut, not closed: the event loop or a thread watches it, and its number may be another's soon.
        with contextlib.suppress(Exception), socket.socket(fileno=connection.fileno()) as wire:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.detach()
    elif package == "sqlite3":
        with contextlib.suppress(Exception):
            connection.interrupt()
    elif package == "aiosqlite":
        with contextlib.suppress(Exception, StopIteration):
            connection.interrupt().send(None)  # it is called at once, although it may be awaited
    elif hasattr(connection, "terminate"):
        connection.terminate()
    elif package == "asyncmy":
        connection.close()
    elif package == "pymysql" and (pipe := getattr(connection, "_sock", None)) is not None:
        with contextlib.suppress(OSError):
            pipe.shutdown(socket.SHUT_RDWR)


def is_broken(connection: Foreign) -> bool:
    """Tell whether a connection of some driver knows that it is closed."""
    package = type(connection).__module__.partition(".")[0]
    if package == "psycopg":
        return bool(connection.closed)
    if package in _TELLING:
        return not getattr(connection, _TELLING[package])
    return hasattr(connection, "is_closed") and _is_closed(connection)


def _is_closed(connection: Foreign) -> bool:
    try:
        return bool(connection.is_closed())
    except Exception:  # noqa: BLE001 -- asyncpg's pool takes a lost connection away from whoever holds it
        return True


class AsyncpgPool(Source):
    """asyncpg's ``Pool``."""

    def __init__(self, pool: Foreign) -> None:
        self.pool = pool
        self.limit: Limit | None = Limit(BEGINNING)

    async def take(self) -> Foreign:
        """Acquire a connection."""
        return await self.pool.acquire()

    async def give_back(self, connection: Foreign, *, is_sound: bool) -> None:
        """Release a connection; the pool replaces one that is closed."""
        if not is_sound:
            connection.terminate()
        await self.pool.release(connection)


class PsycopgPool(Source):
    """psycopg's ``AsyncConnectionPool``."""

    def __init__(self, pool: Foreign) -> None:
        self.pool = pool
        self.limit: Limit | None = Limit(BEGINNING)

    async def take(self) -> Foreign:
        """Get a connection."""
        return await self.pool.getconn()

    async def give_back(self, connection: Foreign, *, is_sound: bool) -> None:
        """Put a connection back; the pool replaces one that is closed."""
        if not is_sound:
            await connection.close()
        await self.pool.putconn(connection)


class AsyncmyPool(Source):
    """asyncmy's ``Pool``."""

    def __init__(self, pool: Foreign) -> None:
        self.pool = pool
        self.limit: Limit | None = Limit(BEGINNING)

    async def take(self) -> Foreign:
        """Acquire a connection."""
        return await self.pool.acquire()

    async def give_back(self, connection: Foreign, *, is_sound: bool) -> None:
        """Release a connection; the pool forgets one that knows that it is closed."""
        if not is_sound:
            connection.close()
            await connection.ensure_closed()
        await self.pool.release(connection)


class _FromSource(Link):
    """A link to a connection of a source."""

    connection: Foreign = None

    def __init__(self, source: Source, settings: str = "") -> None:
        """Set up; ``settings`` are statements that follow BEGIN."""
        self._source = source
        self._settings = settings

    async def begin(self) -> None:
        self.connection = await self._source.take()
        limit = self._source.limit
        if limit is None:
            await self._start()
            return
        work = Within(limit)
        try:
            await self._start()
        except BaseException as error:
            if work.end(error) is error:
                raise
            raise StoreTimeoutError(
                f"no transaction began within {limit.seconds:g} s: the database does not answer, or another "
                "transaction has marked the same message and is still open"
            ) from None
        work.end()

    @abstractmethod
    async def _start(self) -> None:
        """Begin a transaction on the connection, set it, and mark its message if there is one to be marked."""

    async def release(self, *, is_sound: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        if not is_sound and not self.is_cut_off:
            self._source.hear_of_loss()
        await self._source.give_back(connection, is_sound=is_sound)

    def is_lost(self) -> bool:
        return self.connection is not None and is_broken(self.connection)

    def abort(self) -> None:
        if self.connection is not None:
            break_off(self.connection)


class AsyncpgLink(_FromSource):
    """A transaction of asyncpg's."""

    connection: Foreign = None

    _begun: Foreign = None
    #: Whether asyncpg was asked to commit: it takes the transaction for ended then, whatever came of it.
    _is_ended: bool = False

    async def _start(self) -> None:
        self._begun = self.connection.transaction()
        along = self._settings + ("" if self.opening is None else admission(self.opening))
        if not along:
            await self._begun.start()
            return
        heard = Heard.listen(self._begun, along)
        try:
            await self._begun.start()
        except Exception as error:
            if self.opening is not None:
                explain_admission(error, self.opening)
            raise
        heard.leave(self._begun)
        if heard.answer and self.opening is not None:
            self.is_admitted: bool | None = heard.answer == "INSERT 0 1"
        elif self._settings and not heard.answer:
            await self.connection.execute(self._settings)

    async def commit(self) -> None:
        connection = self.connection
        if _is_closed(connection):
            raise lost()
        is_asked = not Heard.is_understood
        if is_asked:
            with aborted_is_told():
                await connection.execute(PROBE)
        require_open(is_open=connection.is_in_transaction())
        heard = Heard.listen(self._begun)
        self._is_ended = True
        try:
            await self._begun.commit()
        except Exception as error:
            if was_refused(error):
                raise
            raise CommitUnknownError from error
        if heard.answer == "ROLLBACK":
            raise TransactionAbortedError
        if not is_asked and heard.answer != "COMMIT":
            raise CommitUnknownError  # the connections of another pool may answer in ways of their own

    async def roll_back(self) -> None:
        # A handler that has sent COMMIT has ended it for the server, and not for asyncpg, which would only make
        # savepoints on this connection from then on.
        if self.connection.is_in_transaction() or not self._is_ended:
            await self._begun.rollback()

    async def mark(self) -> Foreign:
        begun = self.connection.transaction()
        await begun.start()
        return begun

    async def keep(self, mark: Foreign) -> None:
        await mark.commit()

    async def undo(self, mark: Foreign) -> None:
        await mark.rollback()


def _check_psycopg(connection: Foreign) -> None:
    """Refuse a transaction that is no longer open, or has failed: psycopg knows, and nobody has to be asked."""
    if connection.closed:
        raise lost()  # psycopg itself would say nothing, and send nothing
    require_open(is_open=connection.info.transaction_status.name == "INTRANS")


def _require_committed(connection: Foreign) -> None:
    """Raise if nothing tells that COMMIT came about: of a broken connection psycopg says nothing."""
    if connection.closed or connection.info.transaction_status.name != "IDLE":
        raise CommitUnknownError


class PsycopgLink(_FromSource):
    """A transaction on an async connection of psycopg's; it refuses a commit by anybody else."""

    connection: Foreign = None

    _begun: Foreign = None
    _is_ended: bool = False

    async def _start(self) -> None:
        self._begun = await self.mark()
        if not self._settings:
            return
        along = self._settings + ("" if self.opening is None else admission(self.opening))
        try:
            # As one text without parameters: the mark costs no round trip more than the settings alone.
            cursor = await self.connection.execute(along.encode())
        except Exception as error:
            if self.opening is not None:
                explain_admission(error, self.opening)
            raise
        if self.opening is not None:
            while cursor.nextset():
                pass
            self.is_admitted: bool | None = cursor.rowcount == 1

    async def commit(self) -> None:
        _check_psycopg(self.connection)
        self._is_ended = True
        with unknown_is_told():
            await self.keep(self._begun)
            _require_committed(self.connection)

    async def roll_back(self) -> None:
        # Also where a handler has sent COMMIT: psycopg counts the transactions that it has not ended itself.
        if self.connection.info.transaction_status.name != "IDLE" or not self._is_ended:
            await self.undo(self._begun)
        _require_idle(self.connection)

    async def mark(self) -> Foreign:
        begun = self.connection.transaction()
        await begun.__aenter__()
        return begun

    async def keep(self, mark: Foreign) -> None:
        await mark.__aexit__(None, None, None)

    async def undo(self, mark: Foreign) -> None:
        await mark.__aexit__(_Undone, _Undone(), None)


class PsycopgPlain(Plain):
    """A transaction on a connection of psycopg's ``ConnectionPool``."""

    connection: Foreign = None

    def __init__(self, pool: Foreign) -> None:
        self._pool = pool
        self._begun: Foreign = None

    def begin(self) -> None:
        self.connection = self._pool.getconn()
        self._begun = self.mark()

    def commit(self) -> None:
        _check_psycopg(self.connection)
        with unknown_is_told():
            self.keep(self._begun)
            _require_committed(self.connection)

    def roll_back(self) -> None:
        if self.connection.info.transaction_status.name != "IDLE":
            self.undo(self._begun)
        _require_idle(self.connection)

    def release(self, *, is_sound: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            if not is_sound:
                connection.close()
            self._pool.putconn(connection)

    def abort(self) -> None:
        if self.connection is not None:
            break_off(self.connection)

    def mark(self) -> Foreign:
        begun = self.connection.transaction()
        begun.__enter__()
        return begun

    def keep(self, mark: Foreign) -> None:
        mark.__exit__(None, None, None)

    def undo(self, mark: Foreign) -> None:
        mark.__exit__(_Undone, _Undone(), None)


class _Undone(Exception):  # noqa: N818 -- it is never raised
    """Tells psycopg to roll back."""


def _require_idle(connection: Foreign) -> None:
    """Raise if a rollback did not come about: psycopg only logs why."""
    if connection.info.transaction_status.name != "IDLE":
        raise TransactionAbortedError


class AsyncmyLink(_FromSource):
    """A transaction of asyncmy's."""

    connection: Foreign = None

    _marks: int = 0

    async def _start(self) -> None:
        await self.connection.begin()
        await self._execute(ANCHOR)

    async def commit(self) -> None:
        with aborted_is_told():
            await self._execute(RELEASE)
        with unknown_is_told():
            await self.connection.commit()

    async def roll_back(self) -> None:
        await self.connection.rollback()

    async def _execute(self, sql: str) -> None:
        await self.connection.query(sql)

    async def mark(self) -> Foreign:
        self._marks += 1
        name = f"{_SAVEPOINT}_{self._marks}"
        await self._execute(f"SAVEPOINT {name}")
        return name

    async def keep(self, mark: Foreign) -> None:
        await self._execute(f"RELEASE SAVEPOINT {mark}")

    async def undo(self, mark: Foreign) -> None:
        await self._execute(f"ROLLBACK TO SAVEPOINT {mark}")
