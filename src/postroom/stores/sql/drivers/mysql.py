"""MySQL and MariaDB through asyncmy, PyMySQL and mysqlclient, whose calls have the same names."""

from __future__ import annotations

import importlib
import os
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

from ....errors import ConfigurationError, MissingExtraError, NotInTransactionError
from ..driver import Begun, Driver, Foreign, Steps
from ..errors import fault_of as classify
from ..pool import Connector
from ..source import Source
from ..url import Place

__all__ = ["CONNECTIONS", "POOLS", "AsyncmyConnector", "MySQLDriver", "MySQLdbDriver", "classify"]

_IN_TRANSACTION: Final = 1  # SERVER_STATUS_IN_TRANS of the protocol


class MySQLDriver(Driver):
    """Connections of a library that has PyMySQL's interface, awaited or not."""

    dialect = "mysql"

    def __init__(self, cursors: str, *, is_async: bool) -> None:
        self.is_async: bool = is_async
        self._cursors = cursors

    def require_transaction(self, connection: Foreign) -> Steps[None]:
        if connection.get_autocommit() and not connection.server_status & _IN_TRANSACTION:
            raise NotInTransactionError("call `connection.begin()` first, or leave autocommit off")
        yield from ()

    def cursor(self, connection: Foreign) -> Foreign:
        return connection.cursor(sys.modules[self._cursors].Cursor)

    def command(self, connection: Foreign, sql: str) -> Steps[None]:
        yield connection.query(sql)

    def acquire(self, pool: Foreign) -> Steps[Foreign]:
        return (yield pool.acquire())

    def release(self, pool: Foreign, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        if not is_sound:
            connection.close()
            yield connection.ensure_closed()
        yield pool.release(connection)  # it forgets a connection that knows that it is closed

    def is_closed(self, connection: Foreign, begun: Begun) -> bool:
        return not (connection.connected if self.is_async else connection.open)

    def abort(self, connection: Foreign, begun: Begun) -> None:
        if self.is_async:
            connection.close()
        elif (wire := getattr(connection, "_sock", None)) is not None:
            # Shut, not closed: a thread waits on it.
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)


class MySQLdbDriver(MySQLDriver):
    """Connections of mysqlclient: they keep the status to themselves, and refuse other threads while they are busy."""

    def require_transaction(self, connection: Foreign) -> Steps[None]:
        if not connection.get_autocommit():
            return
        # Outside of a transaction a savepoint is gone at once. MariaDB has @@in_transaction, which MySQL has not.
        yield from self.command(connection, "SAVEPOINT postroom_probe")
        try:
            yield from self.command(connection, "RELEASE SAVEPOINT postroom_probe")
        except Exception as error:
            if classify(error).is_aborted:
                raise NotInTransactionError("call `connection.begin()` first, or leave autocommit off") from None
            raise

    def prepare_abort(self, connection: Foreign, begun: Begun) -> None:
        number = connection.fileno()
        begun.wire = number, os.fstat(number).st_ino

    def abort(self, connection: Foreign, begun: Begun) -> None:
        # Shut, not closed: a thread waits on it. The number of one that was closed may be another's by now.
        with suppress(OSError):
            number, inode = begun.wire or (-1, 0)
            if os.fstat(number).st_ino == inode:
                wire = socket.socket(fileno=number)
                with suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)
                wire.detach()


_ASYNCMY: Final = MySQLDriver("asyncmy.cursors", is_async=True)


class AsyncmyConnector(Connector):
    """Opens connections of asyncmy for a store."""

    driver: Driver = _ASYNCMY

    def __init__(self, place: Place) -> None:
        try:
            self._library: ModuleType = importlib.import_module("asyncmy")
        except ImportError as error:
            raise MissingExtraError("asyncmy", "mysql") from error
        self.lost: tuple[type[Exception], ...] = (OSError, EOFError, self._library.errors.MySQLError)
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

    async def connect(self) -> Foreign:
        # In the default isolation claims would lock gaps, and so hold up producers.
        isolation = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
        return await self._library.connect(**self._options, init_command=isolation)

    async def connect_plain(self) -> Foreign:
        return await self._library.connect(**self._options)


def _wants_tls(place: Place) -> bool:
    """Read the options of a URL; none is passed over, since it may be the one that asks for encryption."""
    unknown = sorted({name for name, _ in place.options if name != "ssl"})
    if unknown:
        raise ConfigurationError(f"{place}: unknown options {', '.join(unknown)}; the one that is known is ssl=true")
    value = dict(place.options).get("ssl", "false").lower()
    if value not in {"true", "false"}:
        raise ConfigurationError(f"{place}: the option ssl must be true or false")
    return value == "true"


CONNECTIONS: Final[Mapping[str, Driver]] = {
    "MySQLdb.Connection": MySQLdbDriver("MySQLdb.cursors", is_async=False),
    "asyncmy.Connection": _ASYNCMY,
    "pymysql.Connection": MySQLDriver("pymysql.cursors", is_async=False),
}
POOLS: Final[Mapping[str, Callable[[Foreign], Source]]] = {
    "asyncmy.Pool": lambda pool: Source(_ASYNCMY, pool, is_limited=True)
}
