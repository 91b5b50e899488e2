"""How transactions end: the wake-up after a commit, and a commit whose answer never came."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import Any, ClassVar, Final, Self

from ...errors import CommitUnknownError, StoreUnavailableError, TransactionAbortedError, UnknownConnectionError
from .errors import mysql_error, postgres_error

__all__ = ["hint", "hint_after_commit", "transaction"]

# Pools and sessions of other libraries have no type that could be named without importing them.
Foreign = Any
Wake = Callable[[], object]

_ACCEPTED: Final = "asyncpg's Pool, SQLAlchemy's AsyncEngine or async_sessionmaker"
_WAITING: Final = "postroom_wake"
#: Fails in a transaction that has failed; nothing else tells before COMMIT.
_PROBE: Final = "SELECT 1"
#: MySQL's "got error during COMMIT", which does not tell on which side of it.
_DURING_COMMIT: Final = 1180
#: Whose errors come from the connection.
_DRIVERS: Final = frozenset({"asyncpg", "psycopg", "asyncmy", "pymysql", "aiomysql", "sqlite3"})
_logger = logging.getLogger("postroom")


def transaction(pool: Foreign, wake: Wake | None) -> AbstractAsyncContextManager[Foreign]:
    """Open a transaction on a pool, yield what it holds, commit it and call ``wake``."""
    opener = _opener(type(pool))  # type: ignore[arg-type]  # mypy takes a class for unhashable
    if opener is None:
        raise UnknownConnectionError(pool, _ACCEPTED)
    return opener(pool, wake)


@lru_cache(maxsize=64)
def _opener(kind: type) -> Callable[[Foreign, Wake | None], AbstractAsyncContextManager[Foreign]] | None:
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__}
    if "asyncpg.Pool" in names:
        return _asyncpg
    if "sqlalchemy.AsyncEngine" in names:
        return _engine
    return _sessions if "sqlalchemy.async_sessionmaker" in names else None


@contextlib.asynccontextmanager
async def _asyncpg(pool: Foreign, wake: Wake | None) -> AsyncGenerator[Foreign]:
    connection = await pool.acquire()
    try:
        begun = connection.transaction()
        await begun.start()
        try:
            yield connection
            is_asked = not _Heard.is_understood
            if is_asked:
                with _aborted_is_told():
                    await connection.execute(_PROBE)
        except BaseException:
            # Without a connection there is nothing left to roll back, and the first error says why.
            with contextlib.suppress(Exception):
                await begun.rollback()
            raise
        await _commit(begun, connection, is_asked=is_asked)
        if wake is not None:
            hint(wake)  # before the pool resets the connection, which is another round trip
    finally:
        # A pool that cannot reset a connection closes it and raises: how the transaction ended is known by then,
        # and an error now would tell of a commit as if it had failed.
        with contextlib.suppress(Exception):
            await pool.release(connection)


async def _commit(begun: Foreign, connection: Foreign, *, is_asked: bool) -> None:
    heard = _Heard.listen(begun)
    # To a connection that is known to be closed COMMIT is not even sent.
    with contextlib.nullcontext() if connection.is_closed() else _unknown_is_told():
        await begun.commit()
    if heard.answer == "ROLLBACK":
        raise TransactionAbortedError
    if not is_asked and heard.answer != "COMMIT":
        raise CommitUnknownError  # the connections of another pool may answer in ways of their own


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


@contextlib.asynccontextmanager
async def _engine(engine: Foreign, wake: Wake | None) -> AsyncGenerator[Foreign]:
    async with _sessions(engine.connect, None) as connection:
        yield connection
    if wake is not None:
        hint(wake)


@contextlib.asynccontextmanager
async def _sessions(opener: Foreign, _: Wake | None) -> AsyncGenerator[Foreign]:
    """Open what has a ``commit``; a session tells of its own by itself, once something was added to it."""
    async with opener() as connection:  # closing it rolls back
        yield connection
        if hasattr(connection, "flush"):
            await connection.flush()  # what fails here has nothing to do with the COMMIT
        if connection.in_transaction():
            with _aborted_is_told():
                await connection.run_sync(_probe)
        with _unknown_is_told():
            await connection.commit()


def _probe(holder: Foreign) -> None:
    is_session = hasattr(holder, "get_bind")
    connection: Foreign = holder.connection() if is_session else holder
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_PROBE)


@contextlib.contextmanager
def _aborted_is_told() -> Generator[None]:
    """Tell of a failed transaction: PostgreSQL answers its COMMIT with a silent ROLLBACK."""
    try:
        yield
    except Exception as error:
        if getattr(_of_the_driver(error), "sqlstate", None) == "25P02":
            raise TransactionAbortedError from error
        raise


@contextlib.contextmanager
def _unknown_is_told() -> Generator[None]:
    """Call the outcome of a COMMIT unknown unless the server itself refused it."""
    try:
        yield
    except Exception as error:
        if _was_refused(error):
            raise
        raise CommitUnknownError from error


def _of_the_driver(error: Exception) -> Exception:
    original: Exception | None = getattr(error, "orig", None)  # what SQLAlchemy has wrapped
    return original or error


def _was_refused(error: Exception) -> bool:
    cause = _of_the_driver(error)
    if cause is error and not isinstance(error, OSError | EOFError) and not _is_of_a_driver(error):
        return True  # by a hook of the caller's
    if getattr(error, "connection_invalidated", False) or isinstance(cause, OSError | EOFError):
        return False
    if isinstance(cause, sqlite3.Error):
        return True
    number = cause.args[0] if cause.args else None
    if isinstance(number, int):
        return number != _DURING_COMMIT and mysql_error(number) is not StoreUnavailableError
    state: str | None = getattr(cause, "sqlstate", None)
    return state is not None and postgres_error(state) is not StoreUnavailableError


def _is_of_a_driver(error: Exception) -> bool:
    return any(base.__module__.partition(".")[0] in _DRIVERS for base in type(error).__mro__)


def hint(wake: Wake) -> None:
    """Call ``wake``; a hint that fails costs latency, and must not look like a commit that failed."""
    try:
        wake()
    except Exception:
        _logger.exception("the wake-up after a commit failed; polling will find the messages")


def hint_after_commit(session: Foreign, wake: Wake) -> None:
    """Call ``wake`` once after the commit of the transaction that a SQLAlchemy session is in, if it comes."""
    event = sys.modules["sqlalchemy.event"]
    # One pair of listeners for the life of the session: those that remove themselves outlive a rollback.
    if not event.contains(session, "after_commit", _after_commit):
        event.listen(session, "after_commit", _after_commit)
        event.listen(session, "after_transaction_end", _after_transaction_end)
    waiting: list[Wake] = session.info.setdefault(_WAITING, [])
    if wake not in waiting:
        waiting.append(wake)


def _after_commit(session: Foreign) -> None:
    if not session.in_nested_transaction():  # the release of a savepoint is told as a commit
        for wake in session.info.pop(_WAITING, []):
            hint(wake)


def _after_transaction_end(session: Foreign, ended: Foreign) -> None:
    if ended.parent is None:
        session.info.pop(_WAITING, None)
