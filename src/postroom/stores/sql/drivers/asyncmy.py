"""MySQL and MariaDB through asyncmy."""

from __future__ import annotations

import ssl
from typing import Any

from ....errors import ConfigurationError, MissingExtraError, StoreError, StoreUnavailableError
from ..driver import NetworkDriver
from ..errors import mysql_error
from ..statement import Result, Statement
from ..transactions.block import Link
from ..transactions.network import AsyncmyLink, Source
from ..url import Place

try:
    import asyncmy
    from asyncmy import errors as asyncmy_errors
    from asyncmy.cursors import Cursor
except ImportError as _error:
    raise MissingExtraError("asyncmy", "mysql") from _error

__all__ = ["AsyncmyDriver"]


class AsyncmyDriver(NetworkDriver[Any]):
    """Connections of asyncmy, which is not typed."""

    def __init__(self, place: Place, *, size: int = 5) -> None:
        super().__init__(place, size=size)
        self._options: dict[str, Any] = {
            "host": place.host or "127.0.0.1",
            "port": place.port or 3306,
            "user": place.user or "root",
            "password": place.password or "",
            "db": place.database,
            "charset": "utf8mb4",
            "autocommit": True,
        }
        if _wants_tls(place):
            self._options["ssl"] = ssl.create_default_context()

    async def connect(self) -> Any:  # noqa: ANN401
        # In the default isolation claims would lock gaps, and so hold up producers.
        isolation = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
        return await asyncmy.connect(**self._options, init_command=isolation)  # pyright: ignore[reportUnknownMemberType] -- it has no types

    async def connect_plain(self) -> Any:  # noqa: ANN401
        return await asyncmy.connect(**self._options)  # pyright: ignore[reportUnknownMemberType] -- it has no types

    def link(self, source: Source) -> Link:
        return AsyncmyLink(source)

    async def execute(self, connection: Any, statement: Statement) -> Result:  # noqa: ANN401
        sql, params = statement.bind("format", arrays=False)
        async with connection.cursor(Cursor) as cursor:
            await cursor.execute(sql, params or None)
            return Result(await cursor.fetchall() if statement.returns else (), cursor.rowcount)

    def abort(self, connection: Any) -> None:  # noqa: ANN401
        connection.close()

    def kind_of(self, error: Exception) -> type[StoreError]:
        if isinstance(error, asyncmy_errors.MySQLError) and error.args and isinstance(error.args[0], int):
            return mysql_error(error.args[0])
        unreachable = isinstance(error, OSError | EOFError | asyncmy_errors.MySQLError)
        return StoreUnavailableError if unreachable else StoreError


def _wants_tls(place: Place) -> bool:
    """Read the options of a URL; none is passed over, since it may be the one that asks for encryption."""
    unknown = sorted({name for name, _ in place.options if name != "ssl"})
    if unknown:
        raise ConfigurationError(f"{place}: unknown options {', '.join(unknown)}; the one that is known is ssl=true")
    value = dict(place.options).get("ssl", "false").lower()
    if value not in {"true", "false"}:
        raise ConfigurationError(f"{place}: the option ssl must be true or false")
    return value == "true"
