"""The schema: versioned, applied on request and never by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Literal, TypeAlias

from ...errors import SchemaError, SchemaMissingError, SchemaVersionError
from .dialect import Dialect
from .statement import Script

__all__ = ["VERSION", "Group", "Schema"]

#: The version that this release reads and writes; the first one had no inbox, the second no tickets.
VERSION = 3
#: Which tables belong together: those of a group are compared, and created, apart from the others.
Group: TypeAlias = Literal["outbox", "inbox", "tickets"]
_GROUPS: Final[Sequence[Group]] = ("outbox", "inbox", "tickets")


class Schema:
    """The tables, indexes and views of one outbox, its tickets and its inbox."""

    ddl: ClassVar[Mapping[Group, Sequence[str]]]
    version_ddl: ClassVar[str]
    #: Counts the tables called ``:table``.
    exists: ClassVar[str]

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    def statements(self) -> list[str]:
        """Return all of it as SQL, for migrations of your own."""
        return self._statements(_GROUPS)

    def _statements(self, groups: Sequence[Group]) -> list[str]:
        tables = [text for group in groups for text in self.ddl[group]]
        return [self.dialect.sql(text).text for text in (*self.prepare(), *tables, self.version_ddl, self.record)]

    #: Says in the version table that this version is there; to say it twice changes nothing.
    record: ClassVar[str] = (
        f"INSERT INTO {{version}} (version) SELECT {VERSION} "
        f"WHERE NOT EXISTS (SELECT 1 FROM {{version}} WHERE version = {VERSION})"
    )

    def prepare(self) -> Sequence[str]:
        """Return what must stand before the tables."""
        return ()

    def take_time(self) -> Script[None]:
        """Let this transaction take longer than a call of the store; by default nothing on the server ends it."""
        yield from ()

    def lock(self) -> Script[None]:
        """Keep other runs of `apply` waiting; by default the transaction does."""
        yield from ()

    def unlock(self) -> Script[None]:
        """Let other runs of `apply` go on; by default the end of the transaction does."""
        yield from ()

    def apply(self) -> Script[bool]:
        """Create what is missing; tell whether anything was. Safe to run twice, and to run at once."""
        yield from self.take_time()
        yield from self.lock()
        try:
            found = yield from self.current()
            if found is not None and found > VERSION:
                raise SchemaVersionError(self.dialect.names.table, found, VERSION)
            differing: list[Group] = []
            for group in _GROUPS:
                if (yield from self._differences(group)):
                    differing.append(group)  # noqa: PERF401 -- a comprehension cannot yield
            is_due = bool(differing) or found != VERSION
            if is_due:
                yield from self._create(differing)
        finally:
            yield from self.unlock()
        return is_due

    def _create(self, groups: Sequence[Group]) -> Script[None]:
        # A table that is as it should be is left alone: PostgreSQL locks it even for an index that is there already.
        for text in self._statements(groups):
            yield self.dialect.sql(text)
        left = yield from self.check()
        if left:
            # Nothing is ever altered or dropped here: that may lock the table for long, or lose data.
            raise SchemaError(f"{self.dialect.names.table} is there but not as needed; repair it: {'; '.join(left)}")

    def current(self) -> Script[int | None]:
        """Return the version that is there, None if there is none."""
        table = f"{self.dialect.names.table}_version"
        there = yield self.dialect.query(self.exists, **self._table(table))
        if not there.rows[0][0]:
            return None
        found = yield self.dialect.query("SELECT max(version) FROM {version}")
        version: int | None = found.rows[0][0]
        return version

    def verify(self) -> Script[None]:
        """Raise the error that tells what to do, unless the version is the right one."""
        table = self.dialect.names.table
        there = yield self.dialect.query(self.exists, **self._table(table))
        found = yield from self.current()
        if not there.rows[0][0]:
            raise SchemaMissingError(table)
        if found != VERSION:
            raise SchemaVersionError(table, found or 0, VERSION)

    def check(self) -> Script[list[str]]:
        """Return every difference between what is there and what should be, as sentences."""
        yield from self.take_time()
        version = yield from self.current()
        differences = [] if version == VERSION else [f"version is {version or 'missing'}, should be {VERSION}"]
        for group in _GROUPS:
            differences += yield from self._differences(group)
        return differences

    def _differences(self, group: Group) -> Script[list[str]]:
        found = yield from self.describe(group)
        wanted = yield from self.wanted(group)
        differences: list[str] = []
        for part, definition in wanted.items():
            if part not in found:
                differences.append(f"{part} is missing")
            elif found[part] != definition:
                differences.append(f"{part} is {found[part]!r}, should be {definition!r}")
        return differences

    def _table(self, table: str) -> dict[str, str]:
        return {"table": table}

    def tables(self, group: Group) -> dict[str, str]:
        """Return the tables of a group, each with what stands before the names of its parts."""
        names = self.dialect.names
        if group == "outbox":
            return {names.table: ""}
        if group == "tickets":
            return {f"{names.table}_tickets": f"{names.table}_tickets."}
        return {table: f"{table}." for table in (names.inbox, f"{names.inbox}_dead")}

    def describe(self, group: Group) -> Script[dict[str, str]]:
        """Return each part of a group that is there, with its definition."""
        raise NotImplementedError

    def wanted(self, group: Group) -> Script[dict[str, str]]:
        """Return what `describe` should find."""
        raise NotImplementedError
