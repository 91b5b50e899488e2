"""What an error says about a transaction: that it has failed before, was refused, stood in the way, or is not known."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Generator
from typing import Any, Final

from ....errors import (
    CommitUnknownError,
    PostroomError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
    TransactionAbortedError,
)
from ....text import without_rows
from ..errors import ADVICE, mysql_error, postgres_error, sqlite_error

__all__ = [
    "ANCHOR",
    "PROBE",
    "RELEASE",
    "aborted_is_told",
    "hide_parameters",
    "lost",
    "translated",
    "unknown_is_told",
    "unreachable",
    "was_refused",
]

#: Fails in a transaction of PostgreSQL's that has failed; nothing else tells before COMMIT.
PROBE: Final = "SELECT 1"
#: MySQL ends a whole transaction at a deadlock, SQLite some at a full disk, a handler by a COMMIT of its own, and what
#: follows is another one: only a savepoint that was made at the start, and is there no more, tells.
ANCHOR: Final = "SAVEPOINT postroom"
RELEASE: Final = "RELEASE SAVEPOINT postroom"

#: PostgreSQL's "the transaction is aborted", and MySQL's "no such savepoint".
_ABORTED: Final = frozenset({"25P02", 1305})
#: What SQLite says without a code of its own.
_NO_ANCHOR: Final = "no such savepoint"
#: MySQL's "got error during COMMIT", which does not tell on which side of it.
_DURING_COMMIT: Final = 1180
#: Whose errors come from the connection.
_DRIVERS: Final = frozenset({"asyncpg", "psycopg", "psycopg_pool", "asyncmy", "pymysql", "aiomysql", "sqlite3"})
_SHOWN: Final = 300
#: SQLAlchemy's, for whatever comes after an error that was caught; its code tells whether the connection was lost.
_PENDING: Final = "PendingRollbackError"
_INVALIDATED: Final = "8s2b"
_ORIGINAL: Final = " Original exception was: "
#: What asyncpg says without a code; a cursor that is closed is the fault of whoever uses it.
_CLOSED: Final = re.compile(r"connection (is|was|has been) closed")


@contextlib.contextmanager
def aborted_is_told() -> Generator[None]:
    """Tell of a failed transaction: PostgreSQL answers its COMMIT with a silent ROLLBACK."""
    try:
        yield
    except Exception as error:
        cause = _of_the_driver(error)
        if _code(cause) in _ABORTED or (isinstance(cause, sqlite3.Error) and _NO_ANCHOR in str(cause)):
            raise TransactionAbortedError from error
        raise


@contextlib.contextmanager
def unknown_is_told() -> Generator[None]:
    """Call the outcome of a COMMIT unknown unless the server itself refused it."""
    try:
        yield
    except Exception as error:
        if was_refused(error):
            raise
        raise CommitUnknownError from error


def lost() -> StoreUnavailableError:
    """Return what to raise if a connection was lost before COMMIT was sent, and its error was caught."""
    return StoreUnavailableError(f"the connection was lost before the commit; {ADVICE[StoreUnavailableError]}")


def translated(error: BaseException, *, is_lost: bool = False) -> PostroomError | None:
    """Return what to raise for an error of a database library that says nothing about the message: it may work later.

    Everything else stays as the library says it, unless the connection is known to be lost.
    """
    if type(error).__name__ == _PENDING:
        return lost() if getattr(error, "code", "") == _INVALIDATED else TransactionAbortedError()
    cause = _of_the_driver(error)
    if isinstance(error, PostroomError) or not (cause is not error or _is_of_a_driver(cause)):
        return None
    kind = _kind(cause)
    if getattr(error, "connection_invalidated", False) or (is_lost and kind is StoreError):
        kind = StoreUnavailableError
    if kind in {StoreError, StorePermissionError}:  # the tables of a handler are its own; of ours, a writer tells
        return None
    words = " ".join(without_rows(str(cause)).split())[:_SHOWN]
    said = f"{type(cause).__name__}: {words}"
    return kind(f"{said}; {ADVICE[kind]}" if kind in ADVICE else said)


def hide_parameters(error: BaseException) -> None:
    """Keep an error of SQLAlchemy's, and those it came from, from showing what was written: they end up in logs."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if hasattr(found, "hide_parameters"):
            found.hide_parameters = True  # pyright: ignore[reportAttributeAccessIssue] -- of SQLAlchemy's StatementError
        elif type(found).__name__ == _PENDING:
            found.args = tuple(str(word).partition(_ORIGINAL)[0] for word in found.args)
        left += [found.__cause__, found.__context__, *getattr(found, "exceptions", ())]


def unreachable(error: BaseException) -> PostroomError | None:
    """Return what to raise for an error of opening a connection, where also the system tells that a server is down."""
    told = translated(error)
    # SQLAlchemy's pool has an error of its own for a connection that was not to be had in time.
    if told is None and (isinstance(error, OSError | EOFError) or type(error).__name__ == "TimeoutError"):
        told = StoreUnavailableError(f"{type(error).__name__}: {error}; {ADVICE[StoreUnavailableError]}")
    return told


def _kind(cause: BaseException) -> type[StoreError]:
    code = _code(cause)
    if isinstance(cause, sqlite3.Error):
        return sqlite_error(getattr(cause, "sqlite_errorname", ""))
    if isinstance(code, int):
        return mysql_error(code)
    if isinstance(code, str):
        return postgres_error(code)
    # Without a code of the server's, it is the library that says that the connection is gone, or could not be had.
    names = {base.__name__ for base in type(cause).__mro__}
    gone = isinstance(cause, OSError | EOFError) or not names.isdisjoint({"OperationalError", "InternalClientError"})
    return StoreUnavailableError if gone or _CLOSED.search(str(cause)) else StoreError


def _code(cause: BaseException) -> str | int | None:
    """Return the SQLSTATE of PostgreSQL, or the number of MySQL."""
    number = cause.args[0] if cause.args else None
    if isinstance(number, int) and not isinstance(cause, sqlite3.Error):
        return number
    state: Any = getattr(cause, "sqlstate", None)
    return state if isinstance(state, str) else None


def _of_the_driver(error: BaseException) -> BaseException:
    """Return what SQLAlchemy or Django have wrapped."""
    original: BaseException | None = getattr(error, "orig", None)
    if original is None and type(error).__module__.startswith("django.db"):
        original = error.__cause__
    return original or error


def was_refused(error: Exception) -> bool:
    """Tell whether an error of COMMIT says that nothing was committed."""
    if isinstance(error, PostroomError):
        return True
    cause = _of_the_driver(error)
    if cause is error and not isinstance(error, OSError | EOFError) and not _is_of_a_driver(error):
        return True  # by a hook of the caller's
    if getattr(error, "connection_invalidated", False) or isinstance(cause, OSError | EOFError):
        return False
    if isinstance(cause, sqlite3.Error):
        return True
    code = _code(cause)
    if isinstance(code, int):
        return code != _DURING_COMMIT and mysql_error(code) is not StoreUnavailableError
    return code is not None and postgres_error(code) is not StoreUnavailableError


def _is_of_a_driver(error: BaseException) -> bool:
    return any(base.__module__.partition(".")[0] in _DRIVERS for base in type(error).__mro__)
