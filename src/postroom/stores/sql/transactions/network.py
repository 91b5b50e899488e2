"""Transactions of the libraries that speak to a server; none of them is imported here."""

from __future__ import annotations

import contextlib
import socket
from typing import ClassVar, Final, Protocol, Self

from ....errors import CommitUnknownError, TransactionAbortedError
from .block import Foreign, Link, require_open
from .outcome import ANCHOR, PROBE, RELEASE, aborted_is_told, unknown_is_told
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
]

_SAVEPOINT: Final = "postroom_nested"


class Source(Protocol):
    """Where connections come from and go to."""

    async def take(self) -> Foreign:
        """Return a connection that nobody else uses."""
        ...

    async def give_back(self, connection: Foreign, *, is_sound: bool) -> None:
        """Take a connection back; one that is not sound is never used again."""
        ...


def break_off(connection: Foreign) -> None:
    """Break a connection of some driver at once, failing whoever waits on it."""
    package = type(connection).__module__.partition(".")[0]
    if package == "psycopg":
        # The socket is shut, not closed: the event loop or a thread watches it, and its number may be another's soon.
        with contextlib.suppress(Exception), socket.socket(fileno=connection.fileno()) as wire:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.detach()
    elif hasattr(connection, "terminate"):
        connection.terminate()
    elif package == "asyncmy":
        connection.close()
    elif package == "pymysql" and (pipe := getattr(connection, "_sock", None)) is not None:
        with contextlib.suppress(OSError):
            pipe.shutdown(socket.SHUT_RDWR)


class AsyncpgPool:
    """asyncpg's ``Pool``."""

    def __init__(self, pool: Foreign) -> None:
        self.pool = pool

    async def take(self) -> Foreign:
        """Acquire a connection."""
        return await self.pool.acquire()

    async def give_back(self, connection: Foreign, *, is_sound: bool) -> None:
        """Release a connection; the pool replaces one that is closed."""
        if not is_sound:
            connection.terminate()
        await self.pool.release(connection)


class PsycopgPool:
    """psycopg's ``AsyncConnectionPool``."""

    def __init__(self, pool: Foreign) -> None:
        self.pool = pool

    async def take(self) -> Foreign:
        """Get a connection."""
        return await self.pool.getconn()

    async def give_back(self, connection: Foreign, *, is_sound: bool) -> None:
        """Put a connection back; the pool replaces one that is closed."""
        if not is_sound:
            await connection.close()
        await self.pool.putconn(connection)


class AsyncmyPool:
    """asyncmy's ``Pool``."""

    def __init__(self, pool: Foreign) -> None:
        self.pool = pool

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

    def __init__(self, source: Source) -> None:
        self._source = source

    async def release(self, *, is_sound: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            await self._source.give_back(connection, is_sound=is_sound)

    def abort(self) -> None:
        if self.connection is not None:
            break_off(self.connection)


class AsyncpgLink(_FromSource):
    """A transaction of asyncpg's."""

    _begun: Foreign = None

    async def begin(self) -> None:
        self.connection = await self._source.take()
        self._begun = self.connection.transaction()
        await self._begun.start()

    async def commit(self) -> None:
        connection = self.connection
        is_asked = not _Heard.is_understood
        if is_asked:
            with aborted_is_told():
                await connection.execute(PROBE)
        is_closed = connection.is_closed()
        require_open(is_open=is_closed or connection.is_in_transaction())
        heard = _Heard.listen(self._begun)
        # To a connection that is known to be closed COMMIT is not even sent.
        with contextlib.nullcontext() if is_closed else unknown_is_told():
            await self._begun.commit()
        if heard.answer == "ROLLBACK":
            raise TransactionAbortedError
        if not is_asked and heard.answer != "COMMIT":
            raise CommitUnknownError  # the connections of another pool may answer in ways of their own

    async def roll_back(self) -> None:
        if self.connection.is_in_transaction():
            await self._begun.rollback()

    async def mark(self) -> Foreign:
        begun = self.connection.transaction()
        await begun.start()
        return begun

    async def keep(self, mark: Foreign) -> None:
        await mark.commit()

    async def undo(self, mark: Foreign) -> None:
        await mark.rollback()


class _Heard:
    """Stands between a transaction of asyncpg and its connection, to hear what COMMIT is answered.

    asyncpg keeps that to itself, and to ask before every COMMIT whether the transaction has failed would cost a round
    trip. Should another version of it not go through here, the answer is not heard, and asking goes on.
    """

    #: Whether an answer was ever heard.
    is_understood: ClassVar[bool] = False

    #: What it has of its own; everything else is the connection's.
    _connection: Foreign
    answer: str

    def __init__(self, connection: Foreign) -> None:
        self.__dict__.update(_connection=connection, answer="")

    @classmethod
    def listen(cls, begun: Foreign) -> Self:
        heard = cls(getattr(begun, "_connection", None))
        with contextlib.suppress(AttributeError):  # it may be called otherwise one day
            begun._connection = heard  # noqa: SLF001
        return heard

    async def execute(self, query: str) -> str:
        answer: str = await self._connection.execute(query)
        self.__dict__["answer"] = answer
        _Heard.is_understood = answer == "COMMIT"
        return answer

    def __getattr__(self, name: str) -> Foreign:
        return getattr(self._connection, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._connection, name, value)


def _check_psycopg(connection: Foreign) -> None:
    """Refuse a transaction that is no longer open, or has failed: psycopg knows, and nobody has to be asked."""
    status = connection.info.transaction_status.name
    require_open(is_open=status == "INTRANS" or connection.closed)


class PsycopgLink(_FromSource):
    """A transaction on an async connection of psycopg's; it refuses a commit by anybody else."""

    _begun: Foreign = None

    async def begin(self) -> None:
        self.connection = await self._source.take()
        self._begun = await self.mark()

    async def commit(self) -> None:
        _check_psycopg(self.connection)
        with contextlib.nullcontext() if self.connection.closed else unknown_is_told():
            await self.keep(self._begun)

    async def roll_back(self) -> None:
        if self.connection.info.transaction_status.name != "IDLE":
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

    def __init__(self, pool: Foreign) -> None:
        self._pool = pool
        self._begun: Foreign = None

    def begin(self) -> None:
        self.connection = self._pool.getconn()
        self._begun = self.mark()

    def commit(self) -> None:
        _check_psycopg(self.connection)
        with contextlib.nullcontext() if self.connection.closed else unknown_is_told():
            self.keep(self._begun)

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

    _marks: int = 0

    async def begin(self) -> None:
        self.connection = await self._source.take()
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
