"""SQLite 3.35 and later: one writer at a time, so there is nothing to lock and nothing to skip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from ....outbox import Addition
from ....store import PARKED_FOR, Claim, ClaimTerms, Retry
from ..decisions import Ticket
from ..dialect import Dialect, Server
from ..statement import Row, Script, Statement

__all__ = ["SQLite"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
#: In the text of an id, besides its dashes.
_DIGITS = 32


class SQLite(Dialect):
    """SQLite's wording; moments are whole milliseconds since 1970."""

    name = "sqlite"
    now = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
    later = f"{now} + :duration"
    earlier = f"{now} - :duration"
    needed = "SQLite 3.35 or later"

    def uuid(self, value: UUID) -> str:
        return str(value)

    def time(self, value: datetime) -> int:
        return (value - _EPOCH) // _MILLISECOND

    def to_uuid(self, value: Any) -> UUID:  # noqa: ANN401
        digits = value.replace("-", "")
        if len(digits) != _DIGITS or not digits.isalnum():
            raise ValueError(f"{value!r} is no id")
        return UUID(int=int.from_bytes(bytes.fromhex(digits)))  # half the time of UUID(value)

    def to_time(self, value: Any) -> datetime:  # noqa: ANN401
        return _EPOCH + timedelta(milliseconds=value)

    def duration(self, value: timedelta) -> int:
        return value // _MILLISECOND

    def _insert(self, additions: Sequence[Addition]) -> Statement:
        rows, params = self._rows_of_values(
            additions,
            "(:id_#, :namespace_#, :topic_#, :type_#, :key_#, :tenant_id_#, :dedupe_key_#, :payload_#,"
            " :content_type_#, :headers_#, COALESCE(:due_at_#, {now} + :delay_#), {now}, {now})",
        )
        return self.query(
            "INSERT INTO {outbox} (id, namespace, topic, type, {key}, tenant_id, dedupe_key, payload,"
            " content_type, headers, next_attempt_at, created_at, updated_at) VALUES\n"
            + rows
            + "\nON CONFLICT DO NOTHING RETURNING id",
            **params,
        )

    def lock_keys(self, additions: Sequence[Addition]) -> Script[None]:
        """Do nothing: the one writer gives out ``seq`` and commits before the next may write."""
        yield from ()

    # Rows are found by their number rather than by the text of their id.
    row = "seq"
    age_since_due = f"({now} - next_attempt_at) / 1000.0"
    age_since_created = f"({now} - created_at) / 1000.0"

    def _take(self, found: Sequence[Row], terms: ClaimTerms) -> Script[Sequence[Row]]:
        if not found:
            return []
        rows = [row[0] for row in found]
        worker, duration = self.uuid(terms.worker), self.duration(terms.lease)
        taken = yield self.query(self._lease + self._returning, rows=rows, worker=worker, duration=duration)
        return taken.rows

    _returning: ClassVar[str] = f"RETURNING {Dialect.columns}"

    def _retry(self, retried: Sequence[tuple[Claim, Retry]]) -> Statement:
        return self._update_each(
            """
            UPDATE {outbox}
            SET status = 'pending', next_attempt_at = {now} + changed.delay, last_error = changed.error,
                locked_by = NULL, locked_until = NULL, updated_at = {now}
            """,
            [(claim, outcome.delay or timedelta(0), outcome.error) for claim, outcome in retried],
        )

    def _bury(self, dead: Sequence[tuple[Claim, str]]) -> Statement:
        return self._update_each(
            """
            UPDATE {outbox}
            SET status = 'dead', last_error = changed.error,
                locked_by = NULL, locked_until = NULL, updated_at = {now}
            """,
            [(claim, timedelta(0), error) for claim, error in dead],
        )

    def _release(self, released: Sequence[tuple[Claim, timedelta]]) -> Statement:
        return self._update_each(
            """
            UPDATE {outbox}
            SET status = 'pending', attempts = attempts - 1,
                next_attempt_at = CASE WHEN changed.delay > 0 THEN {now} + changed.delay ELSE next_attempt_at END,
                locked_by = NULL, locked_until = NULL, updated_at = {now}
            """,
            [(claim, delay, "") for claim, delay in released],
        )

    def _park(self, parked: Sequence[tuple[Claim, str]]) -> Statement:
        return self._update_each(
            """
            UPDATE {outbox}
            SET status = 'pending', attempts = attempts - 1, next_attempt_at = {now} + changed.delay,
                destination = changed.error, parked = token,
                locked_by = NULL, locked_until = NULL, updated_at = {now}
            """,
            [(claim, PARKED_FOR, destination) for claim, destination in parked],
        )

    def _update_each(self, text: str, changes: Sequence[tuple[Claim, timedelta, str]]) -> Statement:
        rows = [(self.uuid(claim.message.id), self.duration(delay), error) for claim, delay, error in changes]
        return self.sql(
            text
            + """
            FROM (
                SELECT json_extract(value, '$[0]') AS changed_id, json_extract(value, '$[1]') AS delay,
                       json_extract(value, '$[2]') AS error
                FROM json_each(:changes)) AS changed
            WHERE id = changed.changed_id
            """,
            changes=json.dumps(rows),
        )

    _purge_inbox: ClassVar[str] = """
        DELETE FROM {inbox}
        WHERE rowid IN (
            SELECT rowid FROM {inbox}
            WHERE consumer = :consumer AND created_at <= {earlier}
            ORDER BY created_at LIMIT :limit)
        """
    _forget: ClassVar[str] = """
        DELETE FROM {tickets}
        WHERE rowid IN (
            SELECT rowid FROM {tickets}
            WHERE namespace = :namespace AND ended_at <= {earlier}
            ORDER BY ended_at LIMIT :limit)
        """

    def _held(self, namespace: str, ticket: str) -> Script[Ticket | None]:
        # A SELECT begins no transaction and locks nothing: whoever writes first is alone with what it reads.
        yield self.sql(self._touch, namespace=namespace, ticket=ticket)
        return (yield from super()._held(namespace, ticket))

    _touch: ClassVar[str] = """
        UPDATE {tickets} SET status = status
        WHERE namespace = :namespace AND ticket = :ticket
        """

    def probe(self) -> Script[Server]:
        """Ask the library for its version."""
        answer = yield self.query("SELECT sqlite_version()")
        return Server("SQLite", tuple(int(part) for part in answer.rows[0][0].split(".")))

    def is_supported(self, server: Server) -> bool:
        """RETURNING came with 3.35."""
        return server.version >= (3, 35)
