"""What the errors of database servers mean, by their codes, and what to do about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from ...errors import (
    PostroomError,
    ReadOnlyStoreError,
    SchemaMissingError,
    StoreAuthenticationError,
    StoreContentionError,
    StoreError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
    TransactionAbortedError,
)

__all__ = [
    "ADVICE",
    "Fault",
    "fault_of",
    "mysql_error",
    "postgres_error",
    "sqlite_error",
    "sqlite_fault",
]

#: What to do about an error, where the server does not say it.
ADVICE: Final[Mapping[type[PostroomError], str]] = {
    StoreAuthenticationError: "check the user, the password and the name of the database",
    StoreUnavailableError: "check that the server runs, and its host and port",
    ReadOnlyStoreError: "connect to the primary",
    StorePermissionError: "grant the user of this connection what is missing",
}

_POSTGRES: Final[Mapping[str, type[StoreError]]] = {
    "40001": StoreContentionError,
    "40P01": StoreContentionError,
    "55P03": StoreContentionError,
    "25006": ReadOnlyStoreError,
    "3D000": StoreAuthenticationError,
    "42501": StorePermissionError,
    "57014": StoreTimeoutError,
}
# By class: wrong credentials; connection lost; out of resources; shut down by the operator.
_POSTGRES_CLASSES: Final[Mapping[str, type[StoreError]]] = {
    "28": StoreAuthenticationError,
    "08": StoreUnavailableError,
    "53": StoreUnavailableError,
    "57": StoreUnavailableError,
}
_MYSQL: Final[Mapping[int, type[StoreError]]] = {
    1020: StoreContentionError,  # the record has changed since it was read
    1205: StoreContentionError,  # waited too long for a lock
    1213: StoreContentionError,  # deadlock
    1044: StorePermissionError,  # on the database
    1142: StorePermissionError,  # on a table
    1143: StorePermissionError,  # on a column
    1227: StorePermissionError,  # for an administrative statement
    1370: StorePermissionError,  # on a routine
    1045: StoreAuthenticationError,  # wrong user or password
    1049: StoreAuthenticationError,  # no such database
    1698: StoreAuthenticationError,  # the user logs in another way
    1290: ReadOnlyStoreError,
    1792: ReadOnlyStoreError,
    1836: ReadOnlyStoreError,
    1969: StoreTimeoutError,  # MariaDB's max_statement_time
    3024: StoreTimeoutError,  # MySQL's max_execution_time
    1021: StoreUnavailableError,  # the disk is full
    1040: StoreUnavailableError,  # too many connections
    1053: StoreUnavailableError,  # shutting down
    1114: StoreUnavailableError,  # the table space is full
    1203: StoreUnavailableError,  # too many connections of this user
    1927: StoreUnavailableError,  # the connection was killed
}
_SQLITE: Final[Mapping[str, type[StoreError]]] = {
    "SQLITE_BUSY": StoreContentionError,
    "SQLITE_LOCKED": StoreContentionError,
    "SQLITE_READONLY": ReadOnlyStoreError,
    "SQLITE_CANTOPEN": StoreUnavailableError,
    "SQLITE_NOTADB": StoreUnavailableError,
    "SQLITE_IOERR": StoreUnavailableError,
    "SQLITE_FULL": StoreUnavailableError,
    "SQLITE_INTERRUPT": StoreTimeoutError,
}


#: MySQL's "got error during COMMIT", which does not say on which side of it.
_DURING_COMMIT: Final = 1180
_NO_TABLE: Final = 1146
#: MySQL's "SAVEPOINT does not exist".
_NO_SAVEPOINT: Final = 1305
#: What libraries say without a code; a cursor that is closed is a fault of the application.
_CLOSED: Final = re.compile(r"connection (is|was|has been) closed")
_GONE: Final = frozenset({"OperationalError", "InternalClientError"})


class Fault(NamedTuple):
    """What an error of a database library means."""

    #: `StoreError` if it means nothing to postroom: a constraint that is violated, a syntax error.
    kind: type[PostroomError]
    #: Whether nothing was committed if this is the answer to COMMIT.
    was_refused: bool
    #: The error of the driver itself, which a framework may have wrapped.
    cause: BaseException
    #: Whether it says that the transaction has failed, or that its first savepoint is missing: it has ended.
    is_aborted: bool = False
    #: What its code alone means, None if it has none.
    of_code: type[StoreError] | None = None
    #: Whether the connection is known to be lost, whatever `kind` says.
    is_lost: bool = False
    #: What to raise in its place, where that is not `kind` with the words of the cause.
    instead: PostroomError | None = None


def postgres_error(sqlstate: str | None) -> type[StoreError]:
    """Return the error for an SQLSTATE."""
    code = sqlstate or ""
    return _POSTGRES.get(code) or _POSTGRES_CLASSES.get(code[:2], StoreError)


def mysql_error(number: int) -> type[StoreError]:
    """Return the error for an error number of the server or, from 2000 on, of the client."""
    client = 2000 <= number < 3000  # noqa: PLR2004
    return StoreUnavailableError if client or number == 0 else _MYSQL.get(number, StoreError)


def sqlite_error(name: str) -> type[StoreError]:
    """Return the error for a result code, extended or not."""
    base = "_".join(name.split("_")[:2])
    return _SQLITE.get(base, StoreError)


def _postgres_fault(cause: BaseException, sqlstate: str, function: str | None) -> Fault:
    """Return what an SQLSTATE means; ``function`` of the server reported it."""
    of_code = postgres_error(sqlstate)
    kind: type[PostroomError] = of_code
    if sqlstate == "25P02":
        kind = TransactionAbortedError
    elif sqlstate in {"42P01", "3F000"}:
        kind = SchemaMissingError
    elif function == "ExecWithCheckOptions":
        # Row-level security refused one row, under the code of a missing permission; only this tells the two apart in
        # every language of the server.
        kind = StoreError
    was_refused = of_code is not StoreUnavailableError
    return Fault(kind, was_refused, cause, is_aborted=kind is TransactionAbortedError, of_code=of_code)


def _mysql_fault(cause: BaseException, number: int) -> Fault:
    """Return what an error number of MySQL or MariaDB means."""
    of_code = mysql_error(number)
    kind = SchemaMissingError if number == _NO_TABLE else of_code
    was_refused = number != _DURING_COMMIT and of_code is not StoreUnavailableError
    return Fault(kind, was_refused, cause, is_aborted=number == _NO_SAVEPOINT, of_code=of_code)


def sqlite_fault(cause: BaseException, name: str) -> Fault:
    """Return what a result code of SQLite means; without a connection to lose, every answer is a refusal."""
    of_code = sqlite_error(name)
    kind = SchemaMissingError if str(cause).startswith("no such table") else of_code
    return Fault(kind, True, cause, is_aborted="no such savepoint" in str(cause), of_code=of_code)  # noqa: FBT003


def fault_of(cause: BaseException) -> Fault:
    """Return what an error means by the code it carries, whatever library it is of; SQLite's carry a name."""
    number = cause.args[0] if cause.args else None
    if isinstance(number, int) and not isinstance(cause, OSError):
        return _mysql_fault(cause, number)
    sqlstate = getattr(cause, "sqlstate", None)
    if isinstance(sqlstate, str):
        function = getattr(getattr(cause, "diag", cause), "source_function", None)  # of psycopg
        return _postgres_fault(cause, sqlstate, function or getattr(cause, "server_source_function", None))
    # Without a code of the server, the library may say that the connection is gone.
    names = {base.__name__ for base in type(cause).__mro__}
    is_gone = isinstance(cause, OSError | EOFError) or not names.isdisjoint(_GONE) or _CLOSED.search(str(cause))
    return Fault(StoreUnavailableError if is_gone else StoreError, False, cause)  # noqa: FBT003
