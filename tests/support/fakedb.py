"""A library that postroom does not know, which is PyMySQL under another name with a pool, and its whole support."""

from __future__ import annotations

import importlib.util
import socket
import sys
from typing import Any, Final

import pymysql

from postroom.stores.sql.driver import Begun, Driver, Foreign, Steps
from postroom.stores.sql.errors import fault_of
from postroom.stores.sql.source import Source

_SPEC: Any = importlib.util.spec_from_file_location(
    "fakedb", pymysql.__file__, submodule_search_locations=[*pymysql.__path__]
)
library: Final[Any] = sys.modules.setdefault("fakedb", importlib.util.module_from_spec(_SPEC))
_SPEC.loader.exec_module(library)


class Pool(list[Any]):
    __module__ = "fakedb"

    def __init__(self, **place: object) -> None:
        self.place = place


class FakeDriver(Driver):
    dialect, is_async = "mysql", False

    def acquire(self, pool: Foreign) -> Steps[Foreign]:
        yield from ()
        return pool.pop() if pool else library.connect(**pool.place)

    def release(self, pool: Foreign, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        yield pool.append(connection) if is_sound else connection.close()

    def is_closed(self, connection: Foreign, begun: Begun) -> bool:
        return not connection.open

    def abort(self, connection: Foreign, begun: Begun) -> None:
        connection._sock.shutdown(socket.SHUT_RDWR)  # noqa: SLF001


_DRIVER: Final = FakeDriver()
CONNECTIONS: Final = {"fakedb.Connection": _DRIVER}
POOLS: Final = {"fakedb.Pool": lambda pool: Source(_DRIVER, pool)}
classify: Final = fault_of
