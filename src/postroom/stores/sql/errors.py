"""What the errors of database servers mean, by their codes, and what to do about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...errors import (
    ReadOnlyStoreError,
    StoreAuthenticationError,
    StoreContentionError,
    StoreError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
)

__all__ = ["ADVICE", "mysql_error", "postgres_error", "sqlite_error"]

#: What to do about an error, where the server does not say it.
ADVICE: Final[Mapping[type[StoreError], str]] = {
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
