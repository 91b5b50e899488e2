"""What the errors of database servers mean, by their codes."""

from __future__ import annotations

from typing import Final

from ...errors import (
    ReadOnlyStoreError,
    StoreAuthenticationError,
    StoreContentionError,
    StoreError,
    StoreUnavailableError,
)

__all__ = ["SETTINGS", "mysql_error", "postgres_error", "sqlite_error"]

#: What a PostgreSQL session of ours is set to.
SETTINGS: Final = {
    "application_name": "postroom",
    # The flush of a claim also flushes the producers' earlier commits, so nothing can be published and then vanish.
    "synchronous_commit": "on",
    "idle_in_transaction_session_timeout": "60000",
}

_POSTGRES: Final = {
    "40001": StoreContentionError,
    "40P01": StoreContentionError,
    "55P03": StoreContentionError,
    "25006": ReadOnlyStoreError,
    "3D000": StoreAuthenticationError,
}
# By class: wrong credentials; connection lost; out of resources; shut down by the operator.
_POSTGRES_CLASSES: Final = {
    "28": StoreAuthenticationError,
    "08": StoreUnavailableError,
    "53": StoreUnavailableError,
    "57": StoreUnavailableError,
}
_MYSQL: Final = {
    1205: StoreContentionError,
    1213: StoreContentionError,
    1020: StoreContentionError,
    1044: StoreAuthenticationError,
    1045: StoreAuthenticationError,
    1049: StoreAuthenticationError,
    1698: StoreAuthenticationError,
    1290: ReadOnlyStoreError,
    1040: StoreUnavailableError,
    1053: StoreUnavailableError,
    1927: StoreUnavailableError,
}
_SQLITE: Final = {
    "SQLITE_BUSY": StoreContentionError,
    "SQLITE_LOCKED": StoreContentionError,
    "SQLITE_READONLY": ReadOnlyStoreError,
    "SQLITE_CANTOPEN": StoreUnavailableError,
    "SQLITE_NOTADB": StoreUnavailableError,
    "SQLITE_IOERR": StoreUnavailableError,
    "SQLITE_FULL": StoreUnavailableError,
    "SQLITE_INTERRUPT": StoreUnavailableError,
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
