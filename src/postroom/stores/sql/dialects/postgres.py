"""PostgreSQL 13 and later: a claim is one statement that looks, locks and takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final

from ....message import Message
from ....outbox import Addition, AddResult
from ....store import PARKED_FOR, Claim, ClaimTerms, Release, Retry, Settlement, destination_name
from ..claiming import NO_BOUND, RUN, WINDOW, Walk, in_order
from ..dialect import Dialect, Server
from ..settling import is_lost
from ..statement import Row, Script, Statement
from .postgres_bounds import MARK, Bounded

__all__ = ["PostgreSQL", "lock_number"]

#: As far as any time is reckoned: `timedelta.max` would lead out of the database's calendar, which is an error there.
_LONGEST: Final = timedelta(days=365_250)


def lock_number(namespace: str, topic: str, key: str) -> int:
    """Return the number of the advisory lock of a key."""
    digest = hashlib.blake2b(f"{namespace}\x00{topic}\x00{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _is_alike(one: Addition, other: Addition) -> bool:
    """Tell whether two messages differ in id and payload only, and have nothing that may be there already."""
    a, b = one.message, other.message
    return (
        not one.given
        and a.dedupe_key is None
        and a.topic == b.topic
        and a.type == b.type
        and a.key == b.key
        and a.tenant_id == b.tenant_id
        and a.content_type == b.content_type
        and a.headers == b.headers
        and one.delay == other.delay
        and one.due_at == other.due_at
    )


def _is_plain(addition: Addition) -> bool:
    """Tell whether a message is new, due at once, and has nothing but what every message has."""
    message = addition.message
    return not (
        addition.given
        or addition.due_at is not None
        or addition.delay
        or message.headers
        or message.dedupe_key is not None
        or message.tenant_id is not None
    )


class PostgreSQL(Bounded):
    """PostgreSQL's wording; lists are arrays."""

    name = "postgresql"
    # A claim is its own transaction, so now() is its start; a volatile clock could not be found in an index.
    now = "now()"
    # Asked once for the whole statement, so that what is claimed together also expires together.
    later = "(SELECT clock_timestamp()) + :duration::interval"
    earlier = "now() - :duration::interval"
    locking = " FOR UPDATE SKIP LOCKED"
    of_tenant = "(:tenant_id::uuid IS NULL OR tenant_id = :tenant_id)"
    skip_dead = ":skip_dead::boolean"
    # Neither needs what is stored out of line.
    size = "octet_length(payload) + pg_column_size(headers)"
    after_key = "(topic, {key}) > (:topic::text, :key::text)"
    age_since_due = "extract(epoch FROM now() - next_attempt_at)"
    age_since_created = "extract(epoch FROM now() - created_at)"
    json_headers = "(:headers::text)::jsonb"
    holding = " FOR UPDATE"
    expiry = "(extract(epoch FROM expires_at) * 1000)::bigint"
    atomic = False
    needed = "PostgreSQL 13 or later"

    def duration(self, value: timedelta) -> timedelta:
        return min(value, _LONGEST)

    # -- add ---------------------------------------------------------------------------------------------------

    def add(self, additions: Sequence[Addition], *, strict_order: bool) -> Script[list[AddResult]]:
        alike = len(additions) > 1 and all(_is_alike(addition, additions[0]) for addition in additions)
        if len(additions) > 1 and not alike:
            return (yield from super().add(additions, strict_order=strict_order))
        if strict_order:
            yield from self.lock_keys(additions)
        # Here a producer without the right to read can add, since no row is asked for.
        if alike:
            yield self._insert_new(additions)
            return [AddResult(addition.message.id, is_new=True) for addition in additions]
        if _is_plain(additions[0]):
            yield self._insert_plain(additions[0].message)
            return [AddResult(additions[0].message.id, is_new=True)]
        inserted = yield self.sql(self._insert_one, **self._values(additions[0]))
        if inserted.count:
            return [AddResult(additions[0].message.id, is_new=True)]
        return (yield from self._outcome(additions, set()))

    def _insert_plain(self, message: Message) -> Statement:
        return self.sql(
            """
            INSERT INTO {outbox} (id, namespace, topic, type, {key}, payload, content_type)
            VALUES (:id::uuid, :namespace::text, :topic::text, :type::text, :key::text, :payload::bytea,
                    :content_type::text)
            """,
            id=message.id,
            namespace=message.namespace,
            topic=message.topic,
            type=message.type,
            key=message.key,
            payload=message.payload,
            content_type=message.content_type,
        )

    def _insert_new(self, additions: Sequence[Addition]) -> Statement:
        messages = [addition.message for addition in additions]
        return self.sql(
            self._insert_alike,
            **self._values(additions[0]),
            ids=[message.id for message in messages],
            payloads=[message.payload for message in messages],
        )

    def _insert(self, additions: Sequence[Addition]) -> Statement:
        rows = [self._values(addition) for addition in additions]
        columns: dict[str, list[Any]] = {f"{name}s": [row[name] for row in rows] for name in rows[0]}
        return self.query(self._insert_many, **columns)

    _insert_one: ClassVar[str] = """
        INSERT INTO {outbox} (id, namespace, topic, type, {key}, tenant_id, dedupe_key, payload, content_type,
                              headers, next_attempt_at)
        VALUES (:id::uuid, :namespace::text, :topic::text, :type::text, :key::text, :tenant_id::uuid,
                :dedupe_key::text, :payload::bytea, :content_type::text, (:headers::text)::jsonb,
                COALESCE(:due_at::timestamptz, statement_timestamp() + :delay::interval))
        ON CONFLICT DO NOTHING
        """
    # Arrays are what a batch costs: most batches differ in these two columns only, and can conflict with nothing.
    _insert_alike: ClassVar[str] = """
        INSERT INTO {outbox} (id, namespace, topic, type, {key}, tenant_id, payload, content_type, headers,
                              next_attempt_at)
        SELECT id, :namespace::text, :topic::text, :type::text, :key::text, :tenant_id::uuid, payload,
               :content_type::text, (:headers::text)::jsonb,
               COALESCE(:due_at::timestamptz, statement_timestamp() + :delay::interval)
        FROM unnest(:ids::uuid[], :payloads::bytea[]) AS t(id, payload)
        """
    _insert_many: ClassVar[str] = """
        INSERT INTO {outbox} (id, namespace, topic, type, {key}, tenant_id, dedupe_key, payload, content_type,
                              headers, next_attempt_at)
        SELECT id, namespace, topic, type, k, tenant_id, dedupe_key, payload, content_type, headers::jsonb,
               COALESCE(due_at, statement_timestamp() + delay)
        FROM unnest(:ids::uuid[], :namespaces::text[], :topics::text[], :types::text[], :keys::text[],
                    :tenant_ids::uuid[], :dedupe_keys::text[], :payloads::bytea[], :content_types::text[],
                    :headerss::text[], :due_ats::timestamptz[], :delays::interval[])
             AS t(id, namespace, topic, type, k, tenant_id, dedupe_key, payload, content_type, headers, due_at, delay)
        ON CONFLICT DO NOTHING
        RETURNING id
        """
    _existing: ClassVar[str] = """
        SELECT id, topic, dedupe_key FROM {outbox}
        WHERE namespace = :namespace::text AND topic = ANY (:topics::text[]) AND dedupe_key = ANY (:keys::text[])
        """

    def lock_keys(self, additions: Sequence[Addition]) -> Script[None]:
        messages = [addition.message for addition in additions]
        numbers = {lock_number(m.namespace, m.topic, m.key) for m in messages if m.key is not None}
        if numbers:
            # Sorted, so that two transactions that add several keys at once cannot wait for each other.
            yield self.query(
                "SELECT pg_advisory_xact_lock(number) FROM unnest(:numbers::bigint[]) AS t(number)",
                numbers=sorted(numbers),
            )

    # -- claim -------------------------------------------------------------------------------------------------

    def claim_loose(self, namespace: str, limit: int, terms: ClaimTerms) -> Script[Sequence[Row]]:
        text, bound = self.leased(in_order(self._claim_loose, terms), namespace)
        claimed = yield self.query(text, limit=limit, **bound, **self._claiming(namespace, terms))
        return claimed.rows

    def claim_keyed(self, namespace: str, limit: int, terms: ClaimTerms, walk: Walk) -> Script[Sequence[Row]]:
        params = {**self._claiming(namespace, terms), "limit": limit, "window": WINDOW * limit, "run": min(RUN, limit)}
        was_due, walk.is_due = walk.is_due, False
        if was_due:
            walked = yield from self._walk(params, walk)
            if walked:
                return walked
        seen = yield from self.look(in_order(self._claim_seen, terms), params, terms)
        claimed = [row for row in seen if row[0] is not None]
        # Followers of keys that wait may fill the whole window; behind them there may be keys that could go.
        is_clogged = seen[0][MARK] and len(claimed) < limit
        if is_clogged and not claimed and not was_due:
            return (yield from self._walk(params, walk))
        # What is claimed is committed: another statement that failed would leave it to nobody until its lease ends.
        walk.is_due = is_clogged
        return claimed

    def _walk(self, params: Mapping[str, Any], walk: Walk) -> Script[list[Row]]:
        walked = yield self.query(self._claim_walked, from_topic=walk.topic, from_key=walk.key, **params)
        walk.topic, walk.key = walked.rows[0][MARK:]
        return [row for row in walked.rows if row[0] is not None]

    def claim_suspect(self, namespace: str, terms: ClaimTerms) -> Script[Sequence[Row]]:
        text, bound = self.leased(self._claim_suspect, namespace)
        claimed = yield self.query(text, **bound, **self._claiming(namespace, terms))
        return claimed.rows

    def _claiming(self, namespace: str, terms: ClaimTerms) -> dict[str, Any]:
        return {
            **self._eligibility(namespace, terms),
            "worker": terms.worker,
            "duration": terms.lease,
            "max_bytes": NO_BOUND if terms.max_bytes is None else terms.max_bytes,
        }

    #: Takes the rows of ``chosen``; an array of ids is found by the primary key whatever the planner believes.
    take: ClassVar[str] = """
        UPDATE {outbox}
        SET status = 'processing', attempts = attempts + 1, token = token + 1,
            locked_by = :worker::uuid, locked_until = {later}, updated_at = clock_timestamp()
        WHERE id = ANY (ARRAY(SELECT id FROM chosen))
        RETURNING id, topic, type, {key}, payload, content_type, headers::text, tenant_id, dedupe_key, created_at,
                  attempts, token, seq
        """
    _shown: ClassVar[str] = """
        SELECT id, topic, type, {key}, payload, content_type, headers::text, tenant_id, dedupe_key, created_at,
               attempts, token, seq
        FROM {outbox}
        WHERE id = ANY (:rows::uuid[])
        """
    #: That the rows up to this one fit into a claim; the first always does, since no row has a size of zero.
    fits: ClassVar[str] = "total <= :max_bytes::bigint OR total = size"
    # MATERIALIZED keeps the planner from running the locking SELECT twice, which would take more than the limit.
    _claim_loose: ClassVar[str] = f"""
        WITH expired AS MATERIALIZED (
            SELECT id, {{size}} AS size FROM {{outbox}}
            WHERE namespace = :namespace::text AND {{loose}} AND {Dialect.is_expired}{{leased_from}}
            ORDER BY locked_until LIMIT :limit::bigint FOR UPDATE SKIP LOCKED
        ), due AS MATERIALIZED (
            SELECT id, {{size}} AS size FROM {{outbox}}
            WHERE namespace = :namespace AND {{loose}} AND {Dialect.is_due}
            ORDER BY next_attempt_at, seq LIMIT :limit - (SELECT count(*) FROM expired) FOR UPDATE SKIP LOCKED
        ), chosen AS (
            SELECT id
            FROM (
                SELECT id, size, sum(size) OVER (ROWS UNBOUNDED PRECEDING) AS total
                FROM (SELECT * FROM expired UNION ALL SELECT * FROM due) AS either) AS summed
            WHERE {fits}
        )
        {take}
        """
    _bounded: ClassVar[str] = Dialect.suspect.replace("locked_until < {now}", "locked_until < {now}{leased_from}")
    _claim_suspect: ClassVar[str] = f"""
        WITH chosen AS MATERIALIZED (SELECT id FROM {{outbox}} AS head {_bounded})
        {take}
        """
    #: Claims runs of ``keys``, in their turn.
    runs: ClassVar[str] = f"""
        heads AS MATERIALIZED (
            SELECT keys.topic, keys.{{key}}{{with_start}}
            FROM (SELECT * FROM keys ORDER BY turn) AS keys CROSS JOIN LATERAL (
                SELECT (({Dialect.is_due}) OR ({Dialect.is_expired})) AND {Dialect.not_blocked} AS eligible
                FROM {{outbox}} AS head
                WHERE {{unsettled}} AND namespace = :namespace
                  AND topic = keys.topic AND {{key}} = keys.{{key}}{{from_start_of_keys}}
                ORDER BY seq LIMIT 1) AS head
            WHERE head.eligible
            LIMIT :limit::bigint
        ), planned AS MATERIALIZED (
            SELECT run.id, heads.topic, heads.{{key}}, run.place, row_number() OVER () AS turn
            FROM heads CROSS JOIN LATERAL (
                SELECT id, row_number() OVER (ORDER BY seq) AS place, bool_and(eligible) OVER (ORDER BY seq) AS unbroken
                FROM (
                    SELECT id, seq, (({Dialect.is_due}) OR ({Dialect.is_expired})) AND {Dialect.not_blocked} AS eligible
                    FROM {{outbox}} AS head
                    WHERE {{unsettled}} AND namespace = :namespace
                      AND topic = heads.topic AND {{key}} = heads.{{key}}{{from_start_of_heads}}
                    ORDER BY seq
                    LIMIT GREATEST(:limit / GREATEST((SELECT count(*) FROM heads), 1), :run::bigint)) AS next
                ) AS run
            WHERE run.unbroken
            LIMIT :limit
        ), locked AS MATERIALIZED (
            SELECT id, {{size}} AS size FROM {{outbox}}
            WHERE id = ANY (ARRAY(SELECT id FROM planned)) AND (({Dialect.is_due}) OR ({Dialect.is_expired}))
            FOR UPDATE SKIP LOCKED
        ), chosen AS (
            SELECT id
            FROM (
                -- What was taken meanwhile leaves a gap; nothing behind a gap may go.
                SELECT id, size, sum(size) OVER (ORDER BY turn) AS total
                FROM (
                    SELECT id, size, turn, place, row_number() OVER (PARTITION BY topic, {{key}} ORDER BY place) AS nth
                    FROM planned JOIN locked USING (id)) AS numbered
                WHERE nth = place) AS summed
            WHERE {fits}
        ), taken AS (
        {take}
        )
        -- One row at least, for what is told of the claim itself.
        SELECT taken.*, mark.* FROM mark LEFT JOIN taken ON true
        """
    _claim_seen: ClassVar[str] = f"""
        WITH expired AS MATERIALIZED (
            SELECT topic, {{key}} FROM {{outbox}}
            WHERE namespace = :namespace::text AND {{ordered}} AND {Dialect.is_expired}
            ORDER BY locked_until LIMIT :window::bigint
        ), due AS MATERIALIZED (
            SELECT topic, {{key}}, row_number() OVER () AS turn
            FROM (
                SELECT topic, {{key}} FROM {{outbox}}
                WHERE namespace = :namespace AND {{ordered}} AND {Dialect.is_due}
                ORDER BY next_attempt_at, seq LIMIT :window) AS first
        ), mark AS (
            SELECT :window IN ((SELECT count(*) FROM expired), (SELECT count(*) FROM due)) AS is_full
        ), keys AS MATERIALIZED (
            SELECT topic, {{key}}, min(turn) AS turn
            FROM (SELECT topic, {{key}}, 0 AS turn FROM expired UNION ALL SELECT * FROM due) AS either
            GROUP BY topic, {{key}}
        ), {runs}
        """
    _claim_walked: ClassVar[str] = f"""
        WITH RECURSIVE walked AS (
            SELECT :from_topic::text AS topic, :from_key::text AS {{key}}, 0 AS step, 0 AS lap
            UNION ALL
            SELECT next.topic, next.{{key}}, walked.step + 1, walked.lap + next.lap
            FROM walked CROSS JOIN LATERAL (
                (SELECT topic, {{key}}, 0 AS lap FROM {{outbox}}
                WHERE {{unsettled}} AND namespace = :namespace::text
                  AND (topic, {{key}}) > (walked.topic, walked.{{key}})
                ORDER BY topic, {{key}} LIMIT 1)
                UNION ALL -- after the last key comes the first
                (SELECT topic, {{key}}, 1 FROM {{outbox}}
                WHERE {{unsettled}} AND namespace = :namespace
                ORDER BY topic, {{key}} LIMIT 1)
                LIMIT 1) AS next
            WHERE walked.step < :window::bigint
              -- Once around is enough, also from the last key, after which every key comes before it.
              AND (walked.lap + next.lap = 0
                   OR (walked.lap + next.lap = 1 AND (next.topic, next.{{key}}) <= (:from_topic, :from_key)))
        ), mark AS (
            SELECT topic, {{key}} FROM walked ORDER BY step DESC LIMIT 1
        ), keys AS MATERIALIZED (
            -- A key that came twice would be planned twice, and then a gap in it would not be seen.
            SELECT topic, {{key}}, min(step) AS turn FROM walked WHERE step > 0 GROUP BY topic, {{key}}
        ), {runs}
        """

    # -- settle ------------------------------------------------------------------------------------------------

    def settle(self, settlements: Sequence[Settlement], *, keep_delivered: bool) -> Script[list[Claim]]:
        changed = 0
        for statement in self._settling(settlements, keep_delivered=keep_delivered):
            result = yield statement
            changed += result.count
        if any(type(settlement.outcome) is Release for settlement in settlements):
            self.forget_bounds()  # released messages keep their old due time
        if changed == len(settlements):
            return []
        known = yield from self._states([settlement.claim for settlement in settlements])
        return [s.claim for s in settlements if is_lost(s, known.get(s.claim.message.id))]

    def _states(self, claims: Sequence[Claim]) -> Script[dict[Any, tuple[int, str]]]:
        states = yield self.query(
            "SELECT id, token, status FROM {outbox} WHERE id = ANY (:ids::uuid[])",
            ids=[claim.message.id for claim in claims],
        )
        return {self.to_uuid(row[0]): (row[1], row[2]) for row in states.rows}

    # The planner knows how many rows were leased when it last looked, which says nothing about now. So ids are found by
    # the primary key, tokens in a hashed list (that is what the double NOT is for), and states are named by what they
    # are not, which no partial index can be mistaken for.
    held: ClassVar[str] = """
        WHERE id = ANY (:ids::uuid[])
          AND NOT ((id, token) NOT IN (SELECT * FROM unnest(:ids::uuid[], :tokens::bigint[])))
        """
    #: The same for claims that have one token in common, as nearly all have.
    held_alike: ClassVar[str] = "WHERE id = ANY (:ids::uuid[]) AND token = :token::bigint"
    _keep: ClassVar[str] = """
        UPDATE {outbox}
        SET status = 'delivered', delivered_at = clock_timestamp(), updated_at = clock_timestamp(),
            locked_by = NULL, locked_until = NULL, last_error = NULL
        """

    def _delivering(self, claims: Sequence[Claim], *, keep: bool) -> Iterator[Statement]:
        held = _held(claims)
        are_alike = len(set(held["tokens"])) == 1
        text = (self._keep if keep else self._delete) + (self.held_alike if are_alike else self.held)
        params = {"ids": held["ids"], "token": held["tokens"][0]} if are_alike else held
        yield self.sql(text + f" AND {self.deliverable}", **params)

    changing: ClassVar[str] = """
        FROM unnest(:ids::uuid[], :tokens::bigint[], :delays::interval[], :errors::text[])
             AS held(id, token, delay, error)
        WHERE {outbox}.id = held.id AND {outbox}.token = held.token AND status NOT IN ('pending', 'delivered', 'dead')
        """

    def _retry(self, retried: Sequence[tuple[Claim, Retry]]) -> Statement:
        return self.sql(
            """
            UPDATE {outbox}
            SET status = 'pending', next_attempt_at = clock_timestamp() + held.delay, last_error = held.error,
                locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp()
            """
            + self.changing,
            delays=[outcome.delay or timedelta(0) for _, outcome in retried],
            errors=[outcome.error for _, outcome in retried],
            **_held([claim for claim, _ in retried]),
        )

    def _bury(self, dead: Sequence[tuple[Claim, str]]) -> Statement:
        return self.sql(
            """
            UPDATE {outbox}
            SET status = 'dead', last_error = held.error,
                locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp()
            """
            + self.changing,
            delays=[timedelta(0)] * len(dead),
            errors=[error for _, error in dead],
            **_held([claim for claim, _ in dead]),
        )

    def _release(self, released: Sequence[tuple[Claim, timedelta]]) -> Statement:
        return self.sql(
            """
            UPDATE {outbox}
            SET status = 'pending', attempts = attempts - 1,
                next_attempt_at = CASE WHEN held.delay > interval '0' THEN clock_timestamp() + held.delay
                                       ELSE next_attempt_at END,
                locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp()
            """
            + self.changing,
            delays=[delay for _, delay in released],
            errors=[""] * len(released),
            **_held([claim for claim, _ in released]),
        )

    def _park(self, parked: Sequence[tuple[Claim, str]]) -> Statement:
        return self.sql(
            """
            UPDATE {outbox}
            SET status = 'pending', attempts = attempts - 1, next_attempt_at = {later},
                destination = held.error, parked = {outbox}.token,
                locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp()
            """
            + self.changing,
            duration=PARKED_FOR,
            delays=[timedelta(0)] * len(parked),
            errors=[destination for _, destination in parked],
            **_held([claim for claim, _ in parked]),
        )

    def extend(self, claims: Sequence[Claim], lease: timedelta) -> Script[list[Claim]]:
        extended = yield self.sql(
            "UPDATE {outbox} SET locked_until = {later}, updated_at = clock_timestamp()"
            + self.held
            + "AND status NOT IN ('pending', 'delivered', 'dead')",
            duration=lease,
            **_held(claims),
        )
        if extended.count == len(claims):
            return []
        known = yield from self._states(claims)
        return [c for c in claims if known.get(c.message.id) != (c.message.token, "processing")]

    # -- upkeep ------------------------------------------------------------------------------------------------

    def unpark(self, namespace: str, destination: str, limit: int) -> Script[int]:
        name = destination_name(destination)
        changed = yield self.sql(self._unpark, namespace=namespace, destination=name, limit=limit)
        self.forget_bounds()  # they are due as of their creation
        return min(changed.count, limit)

    # A head that another statement has locked is on its way.
    _unpark: ClassVar[str] = """
        WITH chosen AS MATERIALIZED (
            SELECT id, topic, {key} FROM {outbox}
            WHERE {is_parked} AND namespace = :namespace::text AND destination = :destination::text
            ORDER BY next_attempt_at, seq LIMIT :limit::bigint FOR UPDATE SKIP LOCKED
        ), heads AS MATERIALIZED (
            SELECT id FROM {outbox}
            WHERE id = ANY (ARRAY(
                    SELECT (
                        SELECT id FROM {outbox}
                        WHERE {unsettled} AND namespace = :namespace
                          AND topic = keys.topic AND {key} = keys.{key}
                        ORDER BY seq LIMIT 1)
                    FROM (SELECT DISTINCT topic, {key} FROM chosen WHERE {key} IS NOT NULL) AS keys))
              AND parked = token AND destination = :destination AND status NOT IN ('processing', 'delivered', 'dead')
            FOR UPDATE SKIP LOCKED
        )
        UPDATE {outbox}
        SET next_attempt_at = created_at, parked = NULL, updated_at = clock_timestamp()
        WHERE id = ANY (ARRAY(SELECT id FROM chosen UNION SELECT id FROM heads))
        """

    def sweep(self, namespace: str, terms: ClaimTerms) -> Script[int]:
        count = 0
        for text, reason, still in self._hopeless:
            buried = yield self.sql(
                f"""
                UPDATE {{outbox}}
                SET status = 'dead', locked_by = NULL, locked_until = NULL, updated_at = clock_timestamp(),
                    last_error = COALESCE(:reason::text, last_error, 'no attempts left')
                WHERE id = ANY (ARRAY({text})) AND attempts >= :max_attempts AND {still}
                """,
                namespace=namespace,
                max_attempts=terms.max_attempts,
                reason=reason,
            )
            count += buried.count
        return count

    _purge: ClassVar[str] = """
        DELETE FROM {outbox}
        WHERE id = ANY (ARRAY(
            SELECT id FROM {outbox}
            WHERE namespace = :namespace AND status = 'delivered' AND delivered_at <= {earlier}
            ORDER BY delivered_at LIMIT :limit FOR UPDATE SKIP LOCKED))
        """
    # Whoever purges at the same time takes other rows; what a handler has just written is never this old.
    _purge_inbox: ClassVar[str] = """
        DELETE FROM {inbox}
        WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM {inbox}
            WHERE consumer = :consumer AND created_at <= {earlier}
            ORDER BY created_at LIMIT :limit FOR UPDATE SKIP LOCKED))
        """

    # -- tickets -----------------------------------------------------------------------------------------------

    _forget: ClassVar[str] = """
        DELETE FROM {tickets}
        WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM {tickets}
            WHERE namespace = :namespace AND ended_at <= {earlier}
            ORDER BY ended_at LIMIT :limit FOR UPDATE SKIP LOCKED))
        """

    # -- server ------------------------------------------------------------------------------------------------

    def probe(self) -> Script[Server]:
        self.bounds.clear()  # this may be another server than before
        answer = yield self.query(
            "SELECT current_setting('server_version_num')::int, current_setting('transaction_read_only')::boolean"
        )
        number, read_only = answer.rows[0]
        return Server("PostgreSQL", (number // 10000,), read_only=read_only)

    def is_supported(self, server: Server) -> bool:
        return server.version >= (13,)


def _held(claims: Sequence[Claim]) -> dict[str, list[Any]]:
    return {"ids": [claim.message.id for claim in claims], "tokens": [claim.message.token for claim in claims]}
