"""The schema: versioned, applied on request and never by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final, Literal, TypeAlias

from ...errors import SchemaError, SchemaMissingError, SchemaVersionError, version_text
from .dialect import Dialect
from .statement import Script

__all__ = ["EARLIER", "STEP", "VERSION", "Change", "Group", "Schema"]

#: Changes only when something is removed or altered, so that releases of another version cannot work with it; the first
#: one had no inbox, the second no tickets.
VERSION: Final = 3
#: How many additions this release needs on top of the version. A database may have more, which it does not look at.
STEP: Final = 1
#: What can be upgraded: the versions before this one, and this one with fewer steps.
EARLIER: Final[Mapping[str, tuple[int, int]]] = {
    version_text(earlier): earlier
    for earlier in (*((version, 0) for version in range(1, VERSION)), *((VERSION, step) for step in range(STEP)))
}
#: Which tables belong together: those of a group are compared, and created, apart from the others.
Group: TypeAlias = Literal["outbox", "inbox", "tickets", "version"]
_GROUPS: Final[Sequence[Group]] = ("outbox", "inbox", "tickets", "version")
#: The version that a group came with.
_SINCE: Final[Mapping[Group, int]] = {"outbox": 1, "inbox": 2, "tickets": 3, "version": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One part of the schema that a step adds to tables that are in use."""

    #: The part as `Schema.describe` names it, with ``{table}`` for the name of the outbox.
    part: str
    texts: Sequence[str]
    group: Group = "outbox"
    #: Whether it may replace a part that is there but different: nothing is lost with a view or a function.
    replaces: bool = False
    #: Whether it runs in a transaction; otherwise `Schema.build` runs it.
    is_atomic: bool = True
    #: Drops what an attempt outside a transaction left behind when it failed.
    undo: str = ""


class Schema:
    """The tables, indexes and views of one outbox, its tickets and its inbox."""

    #: Creates everything in an empty database; every statement may be run again.
    ddl: ClassVar[Mapping[Group, Sequence[str]]]
    #: What each step adds to the tables of the version, the first step first.
    steps: ClassVar[Sequence[Sequence[Change]]]
    #: Counts the tables called ``:table``.
    exists: ClassVar[str]

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    def statements(self) -> list[str]:
        """Return the SQL that creates everything in an empty database."""
        return self._statements(_GROUPS)

    def _statements(self, groups: Sequence[Group]) -> list[str]:
        tables = [text for group in groups for text in self.ddl[group]]
        return [self.dialect.sql(text).text for text in (*self.prepare(), *tables, self.record_version)]

    def upgrade(self, since: tuple[int, int]) -> list[str]:
        """Return the SQL that brings the tables of an earlier version and step up to date."""
        version, step = since
        tables = [text for group in _GROUPS if _SINCE[group] > version for text in self.ddl[group]]
        changes = [text for changes in self.steps[step:] for change in changes for text in change.texts]
        texts = (*tables, *changes, self.record_version, self.record_step)
        return [self.dialect.sql(text).text for text in texts]

    #: Record in the version table what is there; to run them again changes nothing.
    record_version: ClassVar[str] = (
        f"INSERT INTO {{version}} (version, step) SELECT {VERSION}, {STEP} "
        f"WHERE NOT EXISTS (SELECT 1 FROM {{version}} WHERE version = {VERSION})"
    )
    record_step: ClassVar[str] = (
        f"UPDATE {{version}} SET step = {STEP} WHERE version = {VERSION} AND COALESCE(step, 0) < {STEP}"
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

    def limit_waits(self, longest: timedelta) -> Script[None]:
        """Let statements wait for a table only so long; by default they do not wait."""
        yield from ()

    def unlimit_waits(self) -> Script[None]:
        """Undo `limit_waits`; by default the end of the transaction does."""
        yield from ()

    def apply(self) -> Script[bool]:
        """Create and add what is missing in one transaction; return whether anything was."""
        due = yield from self.due()
        for change in due:
            yield from self.make(change)
        is_mended = yield from self.mend()
        return is_mended or bool(due)

    def due(self) -> Script[list[Change]]:
        """Return what is to be added to tables that are there."""
        yield from self.take_time()
        yield from self.lock()
        try:
            found = yield from self.current()
            if found is not None and found[0] > VERSION:
                raise SchemaVersionError(self.dialect.names.table, found, (VERSION, STEP))
            due: list[Change] = []
            for group in _GROUPS:
                due += yield from self._due(group, is_enough=_is_enough(found))
        finally:
            yield from self.unlock()
        return due

    def _due(self, group: Group, *, is_enough: bool = False) -> Script[list[Change]]:
        steps = [change for step in self.steps for change in step if change.group == group]
        added = {self.part(change) for change in steps}
        repairs = [change for change in self.repairs(group) if is_enough or self.part(change) not in added]
        changes = repairs if is_enough else [*steps, *repairs]
        table = next(iter(self.tables(group)))
        there = yield self.dialect.query(self.exists, **self._table(table))
        if not changes or not there.rows[0][0]:
            return []
        found = yield from self.describe(group)
        wanted = yield from self.wanted(group)
        return [change for change in changes if self._is_due(change, found, wanted)]

    def repairs(self, group: Group) -> Sequence[Change]:
        """Return what adds a part of tables that are in use once more, if it is gone; by default `mend` does."""
        return ()

    def _is_due(self, change: Change, found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
        part = self.part(change)
        if part not in found:
            return True
        return found[part] != wanted[part] and (change.replaces or bool(change.undo))

    def part(self, change: Change) -> str:
        """Return the name of the part that a change adds."""
        return change.part.format(table=self.dialect.names.table)

    def make(self, change: Change, *, wait: timedelta = timedelta(0)) -> Script[None]:
        """Add one part, unless another run has added it meanwhile; wait for its table only so long."""
        if not change.is_atomic:
            yield from self.build(change)
            return
        yield from self.take_time()
        yield from self.lock()
        try:
            if change in (yield from self._due(change.group)):
                yield from self.limit_waits(wait)
                try:
                    yield from self.execute(change)
                finally:
                    yield from self.unlimit_waits()
        finally:
            yield from self.unlock()

    def build(self, change: Change) -> Script[None]:
        """Add a part outside a transaction."""
        raise NotImplementedError

    def execute(self, change: Change) -> Script[None]:
        """Run the statements of a change."""
        for text in change.texts:
            yield self.dialect.sql(text)

    def mend(self) -> Script[bool]:
        """Create what is missing, and record the version; return whether there was anything to do."""
        yield from self.take_time()
        yield from self.lock()
        try:
            found = yield from self.current()
            differing: list[Group] = []
            for group in _GROUPS:
                if (yield from self._differences(group)):
                    differing.append(group)  # noqa: PERF401 -- a comprehension cannot yield
            is_due = bool(differing) or not _is_enough(found)
            if is_due:
                yield from self._create(differing)
        finally:
            yield from self.unlock()
        return is_due

    def _create(self, groups: Sequence[Group]) -> Script[None]:
        # A table that is as it should be is left alone: PostgreSQL locks it even for an index that is there already.
        for text in (*self._statements(groups), self.record_step):
            yield self.dialect.sql(text)
        left = yield from self.check()
        if left:
            # Nothing is ever altered or dropped here: that may lock the table for long, or lose data.
            raise SchemaError(f"{self.dialect.names.table} is there but not as needed; repair it: {'; '.join(left)}")

    def current(self) -> Script[tuple[int, int] | None]:
        """Return the version and the step that are there, None if there is none."""
        table = f"{self.dialect.names.table}_version"
        there = yield self.dialect.query(self.exists, **self._table(table))
        if not there.rows[0][0]:
            return None
        found = yield self.dialect.query(self._current)
        version, step = found.rows[0]
        return None if version is None else (version, step or 0)

    # Before the first step the table has no column of that name; the name then means the 0 of the outer query.
    _current: ClassVar[str] = """
        SELECT version, (SELECT step FROM {version} WHERE version = newest.version)
        FROM (SELECT max(version) AS version, 0 AS step FROM {version}) AS newest
        """

    def verify(self) -> Script[None]:
        """Raise the error that says what to do, unless version and step are sufficient."""
        table = self.dialect.names.table
        there = yield self.dialect.query(self.exists, **self._table(table))
        found = yield from self.current()
        if not there.rows[0][0]:
            raise SchemaMissingError(table)
        if not _is_enough(found):
            raise SchemaVersionError(table, found or (0, 0), (VERSION, STEP))

    def check(self) -> Script[list[str]]:
        """Return every difference between what is there and what should be, as sentences; one if nothing is there."""
        yield from self.take_time()
        if not (yield from self._has_tables()):
            return [f"tables {', '.join(self._all_tables())} are missing; run `postroom schema apply`"]
        found = yield from self.current()
        differences: list[str] = []
        if not _is_enough(found):
            version = "missing" if found is None else version_text(found)
            remedy = "upgrade postroom" if found is not None and found[0] > VERSION else "run `postroom schema apply`"
            differences.append(f"version is {version}, should be {version_text((VERSION, STEP))}; {remedy}")
        for group in _GROUPS:
            differences += yield from self._differences(group)
        return differences

    def _has_tables(self) -> Script[bool]:
        """Return whether any of the tables is there."""
        for table in self._all_tables():
            there = yield self.dialect.query(self.exists, **self._table(table))
            if there.rows[0][0]:
                return True
        return False

    def _all_tables(self) -> list[str]:
        return [table for group in _GROUPS for table in self.tables(group)]

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
        if group != "inbox":
            return {f"{names.table}_{group}": f"{names.table}_{group}."}
        return {table: f"{table}." for table in (names.inbox, f"{names.inbox}_dead")}

    def describe(self, group: Group) -> Script[dict[str, str]]:
        """Return each part of a group that is there, with its definition."""
        raise NotImplementedError

    def wanted(self, group: Group) -> Script[dict[str, str]]:
        """Return what `describe` should find."""
        raise NotImplementedError


def _is_enough(found: tuple[int, int] | None) -> bool:
    return found is not None and found[0] == VERSION and found[1] >= STEP
