"""MySQL 8.0 and MariaDB 10.6 and later: no UPDATE answers with rows, so a claim looks, locks and takes in steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from ....outbox import Addition, AddResult
from ....store import PARKED_FOR, Claim, ClaimTerms, Retry
from ..dialect import Dialect, Server
from ..statement import Row, Script, Statement
from ..wording import letters
from .postgres import lock_number

__all__ = ["MySQL"]

_MICROSECOND = timedelta(microseconds=1)
#: Keys share this many locks: enough that few meet, and a table that does not grow.
_LOCKS = 1024
#: Where the payload stands among what a claim asks of rows.
_PAYLOAD = 5
#: How many parked rows are looked at to find their destinations: many destinations have few rows each.
_STEP = 50


class MySQL(Dialect):
    """MySQL's wording; ids are 16 bytes, moments are UTC."""

    name = "mysql"
    quote = "`"
    now = "UTC_TIMESTAMP(6)"
    later = "UTC_TIMESTAMP(6) + INTERVAL :duration MICROSECOND"
    earlier = "UTC_TIMESTAMP(6) - INTERVAL :duration MICROSECOND"
    locking = " FOR UPDATE SKIP LOCKED"
    claims_deadlock = True
    waiting = " FOR UPDATE"
    holding = " FOR UPDATE"
    expiry = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', expires_at) DIV 1000"
    # There are no partial indexes; generated columns lead the full ones.
    loose = "ordered = 0"
    ordered = "ordered = 1"
    unsettled = "unsettled = 1"
    # Without fresh statistics the optimizer may take any index that begins alike, and read all of it.
    by_due = " FORCE INDEX ({ready})"
    by_lease = " FORCE INDEX ({leased})"
    by_key = " FORCE INDEX ({keyed})"
    by_dead = " FORCE INDEX ({dead})"
    by_parked = " FORCE INDEX ({parked})"
    is_parked = "is_parked = 1"
    # Comparing pairs would read the whole index.
    after_key = "(topic > :topic OR (topic = :topic AND {key} > :key))"
    age_since_due = "TIMESTAMPDIFF(MICROSECOND, next_attempt_at, {now}) / 1000000"
    age_since_created = "TIMESTAMPDIFF(MICROSECOND, created_at, {now}) / 1000000"
    unless_there = "ON DUPLICATE KEY UPDATE consumer = consumer"  # unlike IGNORE, it hides no other error
    needed = "MySQL 8.0.1 or MariaDB 10.6 or later"

    def uuid(self, value: UUID) -> bytes:
        return value.bytes

    def to_uuid(self, value: Any) -> UUID:  # noqa: ANN401
        return UUID(bytes=bytes(value))

    def time(self, value: datetime) -> datetime:
        return value.astimezone(UTC).replace(tzinfo=None)

    def to_time(self, value: Any) -> datetime:  # noqa: ANN401
        return super().to_time(value).replace(tzinfo=UTC)

    def duration(self, value: timedelta) -> int:
        return value // _MICROSECOND

    # -- add ---------------------------------------------------------------------------------------------------

    def add(self, additions: Sequence[Addition], *, strict_order: bool) -> Script[list[AddResult]]:
        if strict_order:
            yield from self.lock_keys(additions)
        there = yield from self._ids_there([a.message.id for a in additions if a.given])
        yield self._insert(additions)
        # The row count does not tell what was added: it depends on a flag of the caller's connection.
        guarded = [a.message for a in additions if a.message.dedupe_key is not None]
        added = {a.message.id for a in additions if a.message.dedupe_key is None and a.message.id not in there}
        owners: dict[tuple[str, str], UUID] = {}
        if guarded:
            found = yield self.query(
                self._existing,
                namespace=guarded[0].namespace,
                keys=[message.dedupe_key for message in guarded],
                topics=[message.topic for message in guarded],
            )
            owners = {(row[1], row[2]): self.to_uuid(row[0]) for row in found.rows}
            added |= {owner for owner in owners.values() if owner not in there}
        return [self._added(addition, added, owners) for addition in additions]

    def _ids_there(self, ids: Sequence[UUID]) -> Script[set[UUID]]:
        if not ids:
            return set()
        found = yield self.query(
            "SELECT id FROM {outbox} WHERE id IN :ids", ids=[self.uuid(identity) for identity in ids]
        )
        return {self.to_uuid(row[0]) for row in found.rows}

    # A locking read sees what was committed after this transaction's snapshot; the insert has waited for it.
    _existing: ClassVar[str] = (
        "SELECT id, topic, dedupe_key FROM {outbox} "
        "WHERE namespace = :namespace AND topic IN :topics AND dedupe_key IN :keys LOCK IN SHARE MODE"
    )

    def _insert(self, additions: Sequence[Addition]) -> Statement:
        rows, params = self._rows_of_values(
            additions,
            "(:id_#, :namespace_#, :topic_#, :type_#, :key_#, :tenant_id_#, :dedupe_key_#, :payload_#,"
            " :content_type_#, :headers_#, COALESCE(:due_at_#, {now} + INTERVAL :delay_# MICROSECOND), {now}, {now})",
        )
        return self.sql(
            "INSERT INTO {outbox} (id, namespace, topic, type, {key}, tenant_id, dedupe_key, payload,"
            " content_type, headers, next_attempt_at, created_at, updated_at) VALUES\n"
            + rows
            + "\nON DUPLICATE KEY UPDATE id = id",  # unlike IGNORE, it hides no other error
            **params,
        )

    def lock_keys(self, additions: Sequence[Addition]) -> Script[None]:
        messages = [addition.message for addition in additions]
        numbers = {lock_number(m.namespace, m.topic, m.key) % _LOCKS for m in messages if m.key is not None}
        for number in sorted(numbers):
            # A row lock ends with the transaction; GET_LOCK would end with the connection.
            yield self.sql(
                "INSERT INTO {lock} (number) VALUES (:number) ON DUPLICATE KEY UPDATE number = number", number=number
            )

    # -- claim -------------------------------------------------------------------------------------------------

    # No UPDATE answers with rows, and to fetch them afterwards is a statement more. So what is small comes at once, up
    # to half of what a claim may return, and only what is large has to be fetched.
    size = "LENGTH(payload) + LENGTH(headers)"
    found = """
        id, {size}, topic, type, {key}, CASE WHEN {size} <= :small THEN payload END, content_type,
        CASE WHEN {size} <= :small THEN headers END, tenant_id, dedupe_key, created_at, attempts + 1, token + 1, seq
        """

    def _fitting(self, found: Sequence[Row], terms: ClaimTerms) -> Sequence[Row]:
        if terms.max_bytes is None:
            return found
        size, count = sum(row[1] for row in found if row[_PAYLOAD] is not None), 0
        for count, row in enumerate(found):
            size += row[1] if row[_PAYLOAD] is None else 0
            if size > terms.max_bytes and count:
                return found[:count]
        return found

    def _take(self, found: Sequence[Row], terms: ClaimTerms) -> Script[Sequence[Row]]:
        if not found:
            return []
        worker, duration = self.uuid(terms.worker), self.duration(terms.lease)
        yield self.sql(self._lease, rows=[row[0] for row in found], worker=worker, duration=duration)
        rows: list[Row] = [(row[0], *row[2:]) for row in found if row[_PAYLOAD] is not None]
        if large := [row[0] for row in found if row[_PAYLOAD] is None]:
            fetched = yield self.query(self._taken, rows=large)
            rows += fetched.rows
        return rows

    _taken: ClassVar[str] = f"SELECT {Dialect.columns} FROM {{outbox}} WHERE id IN :rows"

    # -- other namespaces ----------------------------------------------------------------------------------------

    # No index begins with the status: to ask for it here would read all that was delivered.
    _next_namespace: ClassVar[str] = """
        SELECT namespace FROM {outbox}{by_due}
        WHERE namespace > :after
        ORDER BY namespace LIMIT 1
        """

    # -- parked ------------------------------------------------------------------------------------------------

    def parked(self, namespace: str, after: str, limit: int) -> Script[list[str]]:
        # A subquery of a recursive query would read the index from its first destination on, each time.
        names: dict[str, None] = {}
        while len(names) < limit:
            found = yield self.query(self._parked, namespace=namespace, after=after, limit=_STEP)
            if not found.rows:
                break
            names |= dict.fromkeys(row[0] for row in found.rows)
            after = found.rows[-1][0]
        return list(names)[:limit]

    _parked: ClassVar[str] = """
        SELECT destination FROM {outbox}{by_parked}
        WHERE {is_parked} AND namespace = :namespace AND destination > :after
        ORDER BY destination LIMIT :limit
        """

    # -- settle ------------------------------------------------------------------------------------------------

    def _retry(self, retried: Sequence[tuple[Claim, Retry]]) -> Statement:
        return self._update_each(
            """
            SET status = 'pending', next_attempt_at = {now} + INTERVAL changed.delay MICROSECOND,
                last_error = changed.error, locked_by = NULL, locked_until = NULL, updated_at = {now}
            """,
            [(claim, outcome.delay or timedelta(0), outcome.error) for claim, outcome in retried],
        )

    def _bury(self, dead: Sequence[tuple[Claim, str]]) -> Statement:
        return self._update_each(
            """
            SET status = 'dead', last_error = changed.error,
                locked_by = NULL, locked_until = NULL, updated_at = {now}
            """,
            [(claim, timedelta(0), error) for claim, error in dead],
        )

    def _release(self, released: Sequence[tuple[Claim, timedelta]]) -> Statement:
        return self._update_each(
            """
            SET status = 'pending', attempts = attempts - 1, locked_by = NULL, locked_until = NULL,
                next_attempt_at = CASE WHEN changed.delay > 0 THEN {now} + INTERVAL changed.delay MICROSECOND
                                       ELSE next_attempt_at END,
                updated_at = {now}
            """,
            [(claim, delay, "") for claim, delay in released],
        )

    def _park(self, parked: Sequence[tuple[Claim, str]]) -> Statement:
        return self._update_each(
            """
            SET status = 'pending', attempts = attempts - 1, locked_by = NULL, locked_until = NULL,
                next_attempt_at = {now} + INTERVAL changed.delay MICROSECOND,
                destination = changed.error, parked = token, updated_at = {now}
            """,
            [(claim, PARKED_FOR, destination) for claim, destination in parked],
        )

    def _update_each(self, text: str, changes: Sequence[tuple[Claim, timedelta, str]]) -> Statement:
        rows: list[str] = []
        params: dict[str, Any] = {}
        for number, (claim, delay, error) in enumerate(changes):
            suffix = letters(number)
            params |= {
                f"id_{suffix}": self.uuid(claim.message.id),
                f"delay_{suffix}": self.duration(delay),
                f"error_{suffix}": error,
            }
            rows.append(f"SELECT :id_{suffix} AS id, :delay_{suffix} AS delay, :error_{suffix} AS error")
        joined = " UNION ALL ".join(rows)
        return self.sql(f"UPDATE {{outbox}} JOIN ({joined}) AS changed ON {{outbox}}.id = changed.id {text}", **params)

    # -- inbox -------------------------------------------------------------------------------------------------

    # A row that is left as it is counts 0 or 1, by a flag of the caller's connection; one that is changed counts 2.
    _admit: ClassVar[str] = """
        INSERT INTO {inbox} (consumer, tenant_id, message_id, created_at)
        VALUES (:consumer, :tenant_id, :message_id, {now})
        ON DUPLICATE KEY UPDATE deliveries = deliveries + 1
        """

    def purge_inbox(self, consumer: str, older_than: timedelta, limit: int) -> Script[int]:
        found = yield self.query(self._old, consumer=consumer, duration=self.duration(older_than), limit=limit)
        ids: dict[bytes, list[bytes]] = {}
        for tenant_id, message_id in found.rows:
            ids.setdefault(bytes(tenant_id), []).append(bytes(message_id))
        count = 0
        for tenant, of_tenant in ids.items():
            deleted = yield self.sql(self._purge_inbox, consumer=consumer, tenant_id=tenant, ids=of_tenant)
            count += deleted.count
        return count

    # Apart from the DELETE, which takes no hint: by the primary key it would read, and lock, all of the consumer.
    _old: ClassVar[str] = """
        SELECT tenant_id, message_id FROM {inbox} FORCE INDEX ({inbox_old})
        WHERE consumer = :consumer AND created_at <= {earlier}
        ORDER BY created_at LIMIT :limit FOR UPDATE SKIP LOCKED
        """
    _purge_inbox: ClassVar[str] = (
        "DELETE FROM {inbox} WHERE consumer = :consumer AND tenant_id = :tenant_id AND message_id IN :ids"
    )

    # -- upkeep ------------------------------------------------------------------------------------------------

    # Without ORDER BY, which would sort, and lock, all that is old; the index gives the oldest first anyway.
    _purge: ClassVar[str] = """
        DELETE FROM {outbox}
        WHERE namespace = :namespace AND status = 'delivered' AND delivered_at <= {earlier}
        LIMIT :limit
        """

    # -- tickets -----------------------------------------------------------------------------------------------

    _schedule: ClassVar[str] = """
        INSERT INTO {tickets} (namespace, ticket, expires_at, status)
        VALUES (:namespace, :ticket, :expires_at, 'scheduled')
        ON DUPLICATE KEY UPDATE ticket = ticket
        """
    # Without ORDER BY, as for the outbox.
    _forget: ClassVar[str] = """
        DELETE FROM {tickets}
        WHERE namespace = :namespace AND ended_at <= {earlier}
        LIMIT :limit
        """

    # -- server ------------------------------------------------------------------------------------------------

    def probe(self) -> Script[Server]:
        answer = yield self.query("SELECT VERSION(), @@read_only")
        text, read_only = answer.rows[0]
        return parse_version(text, read_only=bool(read_only))

    def is_supported(self, server: Server) -> bool:
        return server.version >= ((10, 6) if server.product == "MariaDB" else (8, 0, 1))


def parse_version(text: str, *, read_only: bool = False) -> Server:
    """Return what ``VERSION()`` tells: ``10.11.6-MariaDB-0+deb12u1``, ``8.0.36``."""
    product = "MariaDB" if "mariadb" in text.lower() else "MySQL"
    # Proxies put 5.5.5- before MariaDB's version, for clients that know of no later one.
    match = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)", text)
    return Server(product, tuple(int(part) for part in match.groups()) if match else (), read_only=read_only)
