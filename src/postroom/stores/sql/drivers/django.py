"""Django's connections, which belong to threads, and its ``atomic``; the raw connection has a driver of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Final

from ....errors import NotInTransactionError
from ..driver import ANCHOR, PROBE, RELEASE, Begun, Driver, Foreign, Steps, Wake, hint, require_open
from ..errors import Fault, fault_of
from ..source import Source
from ..statement import Result, Statement
from . import classify as classify_cause
from . import driver_of

__all__ = ["CONNECTIONS", "POOLS", "DjangoDriver", "classify", "database"]

#: Where a savepoint shows whether the transaction is still the one that was begun.
_ANCHORED: Final = frozenset({"mysql", "sqlite"})


class DjangoDriver(Driver):
    """Connections of Django, within ``atomic``; a pool is the alias of a database."""

    is_async = False
    has_commit_hook = True

    def dialect_of(self, connection: Foreign) -> str:
        return str(connection.vendor)

    def require_transaction(self, connection: Foreign) -> Steps[None]:
        if connection.get_autocommit() and not connection.in_atomic_block:
            raise NotInTransactionError("use `with transaction.atomic():`")
        yield from ()

    def execute(self, connection: Foreign, statement: Statement) -> Steps[Result]:
        sql, params = statement.bind(self.style, arrays=connection.vendor == "postgresql")
        with connection.cursor() as cursor:
            cursor.execute(sql, params or None)
            yield from ()
            return Result(cursor.fetchall() if statement.returns else (), cursor.rowcount)

    def after_commit(self, connection: Foreign, wake: Wake) -> None:
        # Where the caller sends COMMIT by hand, Django does not know of it.
        if connection.in_atomic_block or connection.get_autocommit():
            connection.on_commit(lambda: hint(wake))

    def acquire(self, pool: Foreign) -> Steps[Foreign]:
        connection: Foreign = sys.modules["django.db"].connections[pool]
        connection.close_if_unusable_or_obsolete()  # as Django itself does before a request
        yield from ()
        return connection

    def release(self, pool: Foreign, connection: Foreign, begun: Begun, *, is_sound: bool) -> Steps[None]:
        try:
            yield from self.roll_back(connection, begun)
        finally:
            if is_sound:
                connection.close_if_unusable_or_obsolete()
            else:
                connection.close()

    def begin(
        self, connection: Foreign, begun: Begun, *, settings: str = "", along: Statement | None = None
    ) -> Steps[Result | None]:
        begun.handle = list[Foreign]()  # the blocks that were entered and not left; Django has them left in order
        yield from self.mark(connection, begun)
        if (driver := driver_of(connection.connection)) is not None:
            driver.prepare_abort(connection.connection, begun)
        begun.note()
        if connection.vendor in _ANCHORED:
            yield from self.command(connection, ANCHOR)
        return None

    def check(self, connection: Foreign, begun: Begun) -> Steps[None]:
        require_open(is_open=connection.in_atomic_block and not connection.needs_rollback)
        if connection.vendor == "postgresql":
            yield from self.command(connection, PROBE)
        elif connection.vendor in _ANCHORED:
            yield from self.command(connection, RELEASE)

    def commit(self, connection: Foreign, begun: Begun) -> Steps[None]:
        yield from self.keep(connection, begun, begun.handle[0])

    def roll_back(self, connection: Foreign, begun: Begun) -> Steps[None]:
        while begun.handle:
            yield from self.undo(connection, begun, begun.handle[-1])

    def mark(self, connection: Foreign, begun: Begun) -> Steps[Foreign]:
        block = sys.modules["django.db.transaction"].atomic(using=connection.alias)
        block.__enter__()
        begun.handle.append(block)
        yield from ()
        return block

    def keep(self, connection: Foreign, begun: Begun, mark: Foreign) -> Steps[None]:
        begun.handle.remove(mark)
        mark.__exit__(None, None, None)
        yield from ()

    def undo(self, connection: Foreign, begun: Begun, mark: Foreign) -> Steps[None]:
        begun.handle.remove(mark)
        mark.__exit__(_Undone, _Undone(), None)
        yield from ()

    def is_closed(self, connection: Foreign, begun: Begun) -> bool:
        raw = connection.connection
        driver = driver_of(raw)
        return driver is not None and driver.is_closed(raw, begun)

    def abort(self, connection: Foreign, begun: Begun) -> None:
        raw = connection.connection
        driver = driver_of(raw)
        if driver is not None:
            driver.abort(raw, begun)


class _Undone(Exception):  # noqa: N818 -- it is never raised
    """Tells Django to roll back."""


_DRIVER: Final = DjangoDriver()
CONNECTIONS: Final[Mapping[str, Driver]] = {"django.ConnectionProxy": _DRIVER, "django.BaseDatabaseWrapper": _DRIVER}
POOLS: Final[Mapping[str, Callable[[Foreign], Source]]] = {}


def database(alias: str) -> Source:
    """Return the connections of a database of the settings."""
    return Source(_DRIVER, alias)


def classify(error: BaseException) -> Fault | None:
    """Return what an error of Django's databases means: that of the driver, which it wraps."""
    cause = error.__cause__
    if cause is None or not _is_of_databases(error):
        return None
    # The statements after an error that was caught fail because of that one, which says nothing about them; and of
    # some drivers, such as MySQL's own, there is no module.
    return (None if _is_of_databases(cause) else classify_cause(cause)) or fault_of(cause)


def _is_of_databases(error: BaseException) -> bool:
    return type(error).__module__.startswith("django.db")
