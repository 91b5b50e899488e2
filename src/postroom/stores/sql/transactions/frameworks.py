"""Transactions of SQLAlchemy and Django; neither is imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from .block import Foreign, Link, require_open
from .network import break_off, is_broken
from .outcome import ANCHOR, PROBE, RELEASE, aborted_is_told, lost, unknown_is_told
from .threads import Plain

__all__ = ["DjangoPlain", "SQLAlchemyLink", "SQLAlchemyPlain"]

#: Where a savepoint tells whether the transaction is still the one that was begun.
_ANCHORED: Final = frozenset({"mysql", "mariadb", "sqlite"})
# The write lock comes first: a transaction that reads and then writes would fail as "locked", not wait.
_BEGIN: Final = "BEGIN IMMEDIATE"


class _Work:
    """What is done to a ``Connection`` or ``Session``, at once: on a thread, or inside the greenlet of an async one."""

    def __init__(self) -> None:
        self.raw: Foreign = None
        self._begun: Foreign = None
        self._dialect: str = ""

    def begin(self, holder: Foreign) -> None:
        # Begun by name, so that a commit by anybody else is noticed.
        self._begun = holder.begin()
        connection = _connection(holder)
        self.raw = connection.connection.driver_connection
        self._dialect = connection.dialect.name
        if self._dialect == "sqlite" and not self.raw.in_transaction:
            # The driver begins at the first write: before that, the RELEASE of a savepoint would be a COMMIT.
            connection.exec_driver_sql(_BEGIN)
        if self._dialect in _ANCHORED:
            connection.exec_driver_sql(ANCHOR)

    def commit(self, holder: Foreign) -> None:
        if is_broken(self.raw):
            raise lost()
        require_open(is_open=self._begun.is_active)
        if hasattr(holder, "flush"):
            holder.flush()  # what fails here has nothing to do with the COMMIT
        with aborted_is_told():
            self._probe(holder)
        with unknown_is_told():
            holder.commit()

    def _probe(self, holder: Foreign) -> None:
        if self._dialect in _ANCHORED:
            _connection(holder).exec_driver_sql(RELEASE)
        elif self._dialect == "postgresql":
            _connection(holder).exec_driver_sql(PROBE)
        if hasattr(self.raw, "is_in_transaction"):
            require_open(is_open=self.raw.is_in_transaction())  # a ROLLBACK by hand passes SQLAlchemy by

    def roll_back(self, holder: Foreign) -> None:
        holder.rollback()

    def mark(self, holder: Foreign) -> Foreign:
        return holder.begin_nested()

    def keep(self, holder: Foreign, mark: Foreign) -> None:
        if hasattr(holder, "flush"):
            holder.flush()
        mark.commit()

    def undo(self, holder: Foreign, mark: Foreign) -> None:
        mark.rollback()


def _connection(holder: Foreign) -> Foreign:
    is_session = hasattr(holder, "get_bind")
    return holder.connection() if is_session else holder


class SQLAlchemyLink(Link):
    """A transaction of an ``AsyncEngine`` or ``async_sessionmaker``."""

    connection: Foreign = None

    def __init__(self, opener: Callable[[], Foreign], *, is_session: bool) -> None:
        self._opener = opener
        self._work = _Work()
        #: A session tells of its commit by itself, once something was added to it.
        self.is_telling = is_session

    async def begin(self) -> None:
        opened = self._opener()
        self.connection = opened if self.is_telling else await opened.start()
        await self.connection.run_sync(self._work.begin)

    async def commit(self) -> None:
        await self.connection.run_sync(self._work.commit)

    async def roll_back(self) -> None:
        await self.connection.run_sync(self._work.roll_back)

    async def release(self, *, is_sound: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        try:
            if not is_sound:
                await connection.invalidate()
            await connection.close()
        finally:
            self._work.raw = None  # it may be another's by now

    def abort(self) -> None:
        if self._work.raw is not None:
            break_off(self._work.raw)

    async def mark(self) -> Foreign:
        return await self.connection.run_sync(self._work.mark)

    async def keep(self, mark: Foreign) -> None:
        await self.connection.run_sync(self._work.keep, mark)

    async def undo(self, mark: Foreign) -> None:
        await self.connection.run_sync(self._work.undo, mark)


class SQLAlchemyPlain(Plain):
    """A transaction of an ``Engine`` or ``sessionmaker``."""

    connection: Foreign = None

    def __init__(self, opener: Callable[[], Foreign], *, is_session: bool) -> None:
        self._opener = opener
        self._work = _Work()
        self.is_telling = is_session

    def begin(self) -> None:
        self.connection = self._opener()
        self._work.begin(self.connection)

    def commit(self) -> None:
        self._work.commit(self.connection)

    def roll_back(self) -> None:
        self._work.roll_back(self.connection)

    def release(self, *, is_sound: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        try:
            if not is_sound:
                connection.invalidate()
            connection.close()
        finally:
            self._work.raw = None  # it may be another's by now

    def abort(self) -> None:
        if self._work.raw is not None:
            break_off(self._work.raw)

    def mark(self) -> Foreign:
        return self._work.mark(self.connection)

    def keep(self, mark: Foreign) -> None:
        self._work.keep(self.connection, mark)

    def undo(self, mark: Foreign) -> None:
        self._work.undo(self.connection, mark)


class DjangoPlain(Plain):
    """A transaction of Django's ``atomic``, whose connections belong to threads."""

    connection: Foreign = None

    is_telling = True

    def __init__(self, atomic: Callable[..., Foreign], alias: str) -> None:
        self._atomic = atomic
        self._alias = alias
        #: The blocks that were entered and not left; Django has them left in order.
        self._blocks: list[Foreign] = []

    def begin(self) -> None:
        connection: Foreign = sys.modules["django.db"].connections[self._alias]
        connection.close_if_unusable_or_obsolete()  # as Django itself does before a request
        self.connection = connection
        self.mark()
        if connection.vendor in _ANCHORED:
            self._execute(ANCHOR)

    def commit(self) -> None:
        connection = self.connection
        require_open(is_open=connection.in_atomic_block and not connection.needs_rollback)
        with aborted_is_told():
            if connection.vendor == "postgresql":
                self._execute(PROBE)
            elif connection.vendor in _ANCHORED:
                self._execute(RELEASE)
        with unknown_is_told():
            self.keep(self._blocks[0])

    def _execute(self, sql: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(sql)

    def roll_back(self) -> None:
        while self._blocks:
            self.undo(self._blocks[-1])

    def release(self, *, is_sound: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        try:
            self.roll_back()
        finally:
            if is_sound:
                connection.close_if_unusable_or_obsolete()
            else:
                connection.close()

    def abort(self) -> None:
        raw = None if self.connection is None else self.connection.connection
        if raw is not None:
            break_off(raw)

    def mark(self) -> Foreign:
        begun = self._atomic(using=self._alias)
        begun.__enter__()
        self._blocks.append(begun)
        return begun

    def keep(self, mark: Foreign) -> None:
        self._blocks.remove(mark)
        mark.__exit__(None, None, None)

    def undo(self, mark: Foreign) -> None:
        self._blocks.remove(mark)
        mark.__exit__(_Undone, _Undone(), None)


class _Undone(Exception):  # noqa: N818 -- it is never raised
    """Tells Django to roll back."""
