"""What every error of every database library means to postroom, kept in tests/error_table.txt.

An error says whether a message is tried again, costs an attempt, or stops a worker, so a change of meaning loses or
repeats work, and few other tests would notice. ``UPDATE_ERRORS=1 pytest tests/test_error_table.py`` writes the table
anew; every changed line needs a reason in the commit.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import socket
import sqlite3
import ssl
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import asyncmy.errors
import asyncpg
import django.core.exceptions  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import django.db.transaction  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import django.db.utils  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import psycopg
import psycopg_pool
import pymysql.err
import pytest
import sqlalchemy.exc
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi

from postroom.errors import PostroomError, StoreError, TransactionAbortedError
from postroom.stores.sql.commit_errors import explain, is_aborted, translated, unreachable, was_refused
from postroom.stores.sql.drivers.asyncpg import AsyncpgConnector
from postroom.stores.sql.drivers.mysql import AsyncmyConnector
from postroom.stores.sql.drivers.psycopg import PsycopgConnector
from postroom.stores.sql.errors import sqlite_error
from postroom.stores.sql.url import Place

from .support.server_fixtures import mysqldb

TABLE: Final = Path(__file__).with_name("error_table.txt")
WIDTH: Final = 120
#: The columns: an error of a handler's statement, the same on a connection that is known to be lost, of BEGIN, of
#: COMMIT, of what tells whether a transaction has failed, and of a statement of ours on a caller's connection.
HEADING: Final = "statement / lost / begin / commit / probe / write"
OWN: Final = "on a connection of our own"
UNCHANGED: Final = "-"

Case: TypeAlias = tuple[str, Exception]
Meaning: TypeAlias = str

MYSQL_NUMBERS: Final = (
    *(0, 1020, 1021, 1040, 1044, 1045, 1048, 1049, 1053, 1062, 1064, 1114, 1142, 1143, 1146, 1180, 1203, 1205, 1213),
    *(1227, 1290, 1305, 1370, 1406, 1452, 1644, 1698, 1792, 1836, 1927, 1969, 2000, 2002, 2003, 2006, 2013, 2026, 2055),
    *(2999, 3000, 3024, 3572, 4031),
)
SQLITE_CODES: Final = (
    *("ABORT", "AUTH", "BUSY", "BUSY_RECOVERY", "BUSY_SNAPSHOT", "CANTOPEN", "CANTOPEN_ISDIR", "CONSTRAINT"),
    *("CONSTRAINT_CHECK", "CONSTRAINT_UNIQUE", "CORRUPT", "EMPTY", "ERROR", "FORMAT", "FULL", "INTERNAL", "INTERRUPT"),
    *("IOERR", "IOERR_FSYNC", "IOERR_READ", "LOCKED", "LOCKED_SHAREDCACHE", "MISMATCH", "MISUSE", "NOLFS", "NOMEM"),
    *("NOTADB", "NOTFOUND", "PERM", "PROTOCOL", "RANGE", "READONLY", "READONLY_DBMOVED", "READONLY_ROLLBACK", "SCHEMA"),
    *("TOOBIG", "WARNING"),
)
#: What SQLAlchemy makes of the errors of asyncpg, before it wraps them.
ADAPTER: Final[Any] = AsyncAdapt_asyncpg_dbapi(asyncpg)  # type: ignore[no-untyped-call]
ADAPTED: Final[Mapping[type, Callable[..., Exception]]] = ADAPTER._asyncpg_error_translate  # noqa: SLF001
#: What libraries say without a code.
ASYNCPG_SAYS: Final = (
    *("connection is closed", "connection was closed in the middle of operation", "connection has been closed"),
    *("cursor is closed", "cannot perform operation: another operation is in progress", "pool is closing"),
    "cannot call Connection.execute(): connection has been released back to the pool",
)
PSYCOPG_SAYS: Final = (
    *("the connection is closed", "server closed the connection unexpectedly", "consuming input failed: SSL error"),
    'connection failed: FATAL: password authentication failed for user "a"',
    *('connection failed: FATAL: database "a" does not exist', "fe_sendauth: no password supplied"),
    *('FATAL: role "a" is not permitted to log in', "FATAL: no pg_hba.conf entry for host", "the cursor is closed"),
    "connection timeout expired",
)
MYSQL_SAYS: Final = ("Packet sequence number wrong", "Not connected", "(0, 'Not connected')")
SQLITE_SAYS: Final = (
    *("no such table: outbox", "no such savepoint: postroom", "Cannot operate on a closed database."),
    *("cannot commit - no transaction is active", "SQLite objects created in a thread can only be used in that thread"),
)


def classes(*modules: ModuleType) -> Iterator[type[Exception]]:
    found = {kind for module in modules for kind in vars(module).values() if issubclass(type(kind), type)}
    raised = (kind for kind in found if issubclass(kind, Exception) and kind.__module__ != "builtins")
    yield from sorted(raised, key=lambda kind: (kind.__module__, kind.__qualname__))


def cases_of_asyncpg() -> Iterator[Case]:
    for kind in classes(asyncpg.exceptions):
        if issubclass(kind, asyncpg.PostgresLogMessage):
            continue  # a notice, which is logged
        yield _name(kind, getattr(kind, "sqlstate", None)), kind("it failed")
    for kind in (asyncpg.InterfaceError, asyncpg.InternalClientError, asyncpg.PostgresError):
        yield from ((_name(kind, said), kind(said)) for said in ASYNCPG_SAYS)


def cases_of_psycopg() -> Iterator[Case]:
    for kind in classes(psycopg.errors, psycopg_pool):
        yield _name(kind, getattr(kind, "sqlstate", None)), kind("it failed")
    for kind in (psycopg.OperationalError, psycopg.InterfaceError, psycopg.ProgrammingError):
        yield from ((_name(kind, said), kind(said)) for said in PSYCOPG_SAYS)


def cases_of_mysql(module: ModuleType) -> Iterator[Case]:
    for kind in classes(module):
        yield _name(kind), kind()
        yield from ((_name(kind, said), kind(said)) for said in MYSQL_SAYS)
        yield from ((_name(kind, number), kind(number, "it failed")) for number in MYSQL_NUMBERS)


def cases_of_sqlite() -> Iterator[Case]:
    for kind in classes(sqlite3):
        yield _name(kind), kind("it failed")
        yield from ((_name(kind, said), kind(said)) for said in SQLITE_SAYS)
        for code in SQLITE_CODES:
            error: Any = kind("it failed")
            error.sqlite_errorname = f"SQLITE_{code}"
            yield _name(kind, code), error


def cases_of_python() -> Iterator[Case]:
    errors = (
        *(OSError(28, "No space left on device"), ConnectionRefusedError(111, "Connection refused")),
        *(ConnectionResetError(104, "Connection reset by peer"), BrokenPipeError(32, "Broken pipe")),
        *(TimeoutError(), EOFError(), asyncio.IncompleteReadError(b"", 4), socket.gaierror(-2, "Name not known")),
        *(ssl.SSLError(1, "bad certificate"), ValueError("it failed"), RuntimeError("it failed"), KeyError("sku")),
        *(
            TypeError("it failed"),
            AttributeError("it failed"),
            AssertionError("it failed"),
            ExceptionGroup("", [OSError()]),
        ),
    )
    yield from ((_name(type(error)), error) for error in errors)


def cases_of_sqlalchemy() -> Iterator[Case]:
    for kind in classes(sqlalchemy.exc):
        if issubclass(kind, sqlalchemy.exc.StatementError) or issubclass(kind, Warning):
            continue
        try:
            yield _name(kind), kind("it failed")
        except TypeError:
            continue  # one that only SQLAlchemy itself can make
    for code in ("8s2b", "7s2a"):
        yield (
            _name(sqlalchemy.exc.PendingRollbackError, code),
            sqlalchemy.exc.PendingRollbackError("it failed", code=code),
        )


def cases_of_django() -> Iterator[Case]:
    yield from ((_name(kind), kind("it failed")) for kind in classes(django.db.utils))


def in_sqlalchemy(error: Exception) -> Exception:
    return _wrapped(error, is_invalidated=False)


def in_sqlalchemy_invalidated(error: Exception) -> Exception:
    return _wrapped(error, is_invalidated=True)


def in_sqlalchemy_over_asyncpg(error: Exception) -> Exception:
    adapted = next((ADAPTED[base] for base in type(error).__mro__ if base in ADAPTED), None)
    if adapted is None:
        return error  # SQLAlchemy raises it as it is
    wrapped = adapted(error.args[0], error)
    wrapped.__cause__ = error
    return _wrapped(wrapped, is_invalidated=False)


def in_django(error: Exception) -> Exception:
    wrapped: Exception = django.db.utils.OperationalError(*error.args)
    wrapped.__cause__ = error
    return wrapped


def _wrapped(error: Exception, *, is_invalidated: bool) -> Exception:
    wrapped: Exception = sqlalchemy.exc.DBAPIError("SELECT 1", {}, error, connection_invalidated=is_invalidated)
    return wrapped


PLACE: Final = Place.parse("postgresql://user@localhost/database", schemes=("postgresql",))
LIBRARIES: Final[Mapping[str, tuple[Callable[[], Iterable[Case]], Callable[[Exception], type[StoreError]] | None]]] = {
    "asyncpg": (cases_of_asyncpg, AsyncpgConnector(PLACE).kind_of),
    "psycopg": (cases_of_psycopg, PsycopgConnector(PLACE).kind_of),
    "asyncmy": (lambda: cases_of_mysql(asyncmy.errors), AsyncmyConnector(PLACE).kind_of),
    "pymysql": (lambda: cases_of_mysql(pymysql.err), None),
    "mysqlclient": (
        lambda: cases_of_mysql(importlib.import_module("MySQLdb._exceptions")) if find_spec("MySQLdb") else (),
        None,
    ),
    "sqlite3": (cases_of_sqlite, lambda error: sqlite_error(getattr(error, "sqlite_errorname", ""))),
    "python": (cases_of_python, AsyncpgConnector(PLACE).kind_of),
    "sqlalchemy": (cases_of_sqlalchemy, None),
    "django": (cases_of_django, None),
}
WRAPPINGS: Final[Mapping[str, tuple[Callable[[Exception], Exception], frozenset[str]]]] = {
    "in SQLAlchemy": (in_sqlalchemy, frozenset({"psycopg", "asyncmy", "pymysql", "mysqlclient", "sqlite3", "python"})),
    "in SQLAlchemy, invalidated": (
        in_sqlalchemy_invalidated,
        frozenset({"asyncpg", "psycopg", "asyncmy", "pymysql", "mysqlclient", "sqlite3", "python"}),
    ),
    "in SQLAlchemy over asyncpg": (in_sqlalchemy_over_asyncpg, frozenset({"asyncpg", "python"})),
    "in Django": (in_django, frozenset({"psycopg", "pymysql", "mysqlclient", "sqlite3", "python"})),
}


def meaning(error: Exception) -> Meaning:
    """Return what an error means in each place where one can come up, as `HEADING` names them."""
    return " / ".join(
        (
            _short(translated(error)),
            _short(translated(error, is_lost=True)),
            _short(unreachable(error)),
            "refused" if was_refused(error) else "unknown",
            _short(TransactionAbortedError if is_aborted(error) else None),
            _short(_raised(error, write)),
        )
    )


def write(error: Exception) -> None:
    explain(error, "outbox")


def _raised(error: Exception, place: Callable[[Exception], None]) -> PostroomError | None:
    try:
        place(error)
    except PostroomError as raised:
        return raised
    except Exception:  # noqa: BLE001 -- it is passed on as the library raised it
        return None
    return None


def _short(error: PostroomError | type[PostroomError] | None) -> str:
    if error is None:
        return UNCHANGED
    kind = error if isinstance(error, type) else type(error)
    return re.sub(r"^Store(?=.)|Error$", "", kind.__name__).lower() or "store"


def _name(kind: type[Exception], code: object = None) -> str:
    return kind.__qualname__ if code is None else f"{kind.__qualname__}({code})"


def meanings() -> dict[tuple[str, str, str], Meaning]:
    """Return what each case means, by its library, how it is wrapped, and its name.

    A wrapped one is left out if it means the same as the error that it wraps.
    """
    found: dict[tuple[str, str, str], Meaning] = {}
    for library, (cases, own) in LIBRARIES.items():
        for name, error in cases():
            found[library, "", name] = meaning(error)
            if own is not None:
                found[library, OWN, name] = _short(own(error))
            for wrapping, (wrap, libraries) in WRAPPINGS.items():
                if library in libraries and (told := meaning(wrap(error))) != found[library, "", name]:
                    found[library, wrapping, name] = told
    return found


def rendered(found: Mapping[tuple[str, str, str], Meaning]) -> str:
    """Write the table: a line of meanings, under it the cases that have them."""
    groups: dict[tuple[str, str], dict[Meaning, list[str]]] = {}
    for (library, wrapping, name), told in found.items():
        groups.setdefault((library, wrapping), {}).setdefault(told, []).append(name)
    lines = [HEADING]
    for (library, wrapping), by_meaning in groups.items():
        lines += ["", f"== {library} {wrapping}".rstrip()]
        for told, names in sorted(by_meaning.items()):
            lines += [told, *textwrap.wrap(" | ".join(names), WIDTH, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[tuple[str, str, str], Meaning]:
    """Read what `rendered` has written."""
    found: dict[tuple[str, str, str], Meaning] = {}
    for section in text.split("\n\n== ")[1:]:
        title, _, body = section.partition("\n")
        library, _, wrapping = title.partition(" ")
        for told, names in re.findall(r"^(\S.*)\n((?: {4}.*\n?)+)", body, re.MULTILINE):
            for name in " ".join(names.split()).split(" | "):
                found[library, wrapping, name] = told
    return found


def test_no_error_has_changed_its_meaning() -> None:
    found = meanings()
    if os.environ.get("UPDATE_ERRORS"):
        mysqldb()
        TABLE.write_text(rendered(found))

    kept = read(TABLE.read_text())

    both = {case: (kept.get(case), found.get(case)) for case in kept.keys() | found.keys()}
    changed = {case: told for case, told in both.items() if told[0] != told[1]}
    if changed and {library for library, _, _ in changed} == {"mysqlclient"}:
        mysqldb()  # skips the test where it is missing
    assert changed == {}


def test_the_table_tells_errors_apart() -> None:
    """A lost connection is no bug of a statement, and a failed transaction is neither."""
    kept = read(TABLE.read_text())

    assert len(kept) > 2_500
    assert kept["asyncpg", "", "DeadlockDetectedError(40P01)"].startswith("contention / ")
    assert kept["asyncpg", "", "UniqueViolationError(23505)"].startswith(f"{UNCHANGED} / ")
    assert kept["psycopg", "", "InFailedSqlTransaction(25P02)"].split(" / ")[4] == _short(TransactionAbortedError)
    assert kept["pymysql", "", "OperationalError(1180)"].split(" / ")[3] == "unknown"


class OperationalError(Exception):
    """As of MySQL's own connector, which SQLAlchemy can use, and for which postroom has no driver."""

    __module__ = "mysql.connector.errors"


@pytest.mark.parametrize("wrap", [in_sqlalchemy, in_django])
@pytest.mark.parametrize("number", MYSQL_NUMBERS)
def test_a_framework_may_use_a_library_that_is_not_known(wrap: Callable[[Exception], Exception], number: int) -> None:
    """A deadlock is no outage, and a COMMIT that was refused is not unknown."""
    unknown, known = OperationalError(number, "it failed"), pymysql.err.OperationalError(number, "it failed")

    assert meaning(wrap(unknown)) == meaning(wrap(known))


def test_an_error_of_django_that_is_not_of_its_databases_means_nothing() -> None:
    """Whatever a handler made it from: a message that is refused must not be tried for ever."""
    error = django.core.exceptions.ValidationError("the address is unknown")
    error.__cause__ = ConnectionResetError(104, "Connection reset by peer")

    assert translated(error) is None
    assert was_refused(error)


@pytest.mark.parametrize("cause", [psycopg.errors.UndefinedTable("x"), psycopg.errors.InsufficientPrivilege("x")])
def test_what_django_says_after_an_error_is_not_that_error(cause: Exception) -> None:
    """It was about a table of the application's, not about the one that a statement of ours names."""
    caught = django.db.utils.ProgrammingError("it failed")
    caught.__cause__ = cause
    error = django.db.transaction.TransactionManagementError("the transaction is broken")
    error.__cause__ = caught

    write(error)


def test_an_error_that_sqlalchemy_made_of_another_keeps_its_meaning() -> None:
    """Its adapter of aiosqlite makes an error of SQLite's of a ``ValueError``."""
    made, plain = sqlite3.OperationalError("no active connection"), sqlite3.OperationalError("no active connection")
    made.__cause__ = ValueError("no active connection")

    assert meaning(in_sqlalchemy(made)) == meaning(in_sqlalchemy(plain))
