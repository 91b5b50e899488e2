"""The SQL of the outbox: the wording that databases share, for dialects to override where they differ."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from textwrap import dedent
from typing import Any, ClassVar
from uuid import UUID

from ...errors import DecodeError
from ...message import Message
from ...outbox import Added, Addition
from ...store import Claim, ClaimTerms, Dead, Delivered, Release, Retry, Settlement, Stats
from .names import Names
from .statement import Row, Script, Statement

__all__ = ["Dialect", "Server", "suspect_after"]

#: Counts stop here, so that looking at a large table costs no more than looking at a small one.
CEILING = 10_000
#: How many due rows are looked at for one that may be claimed in order.
WINDOW = 4
#: The least number of messages of one key that travel together when there are many keys.
RUN = 8
#: How many rows one pass of the sweep or the purge touches.
CHUNK = 1000

# A name in braces; the braces of JSON hold none.
_WORD = re.compile(r"\{([a-z_]+)\}")

LEASE_RAN_OUT = "the lease ran out on the last attempt: the worker crashed or stalled"


@dataclass(frozen=True, slots=True)
class Server:
    """What a database server says of itself."""

    product: str
    version: tuple[int, ...]
    read_only: bool = False


def suspect_after(max_attempts: int) -> int:
    """Return after how many attempts a message whose lease ran out is claimed alone.

    It may be the one that kills its worker; its neighbours must not pay with their attempts.
    """
    return min(3, max(max_attempts - 1, 1))


class Dialect:
    """One database's SQL for one outbox table, as statements and scripts without any I/O.

    A claim here takes several steps in one transaction: look, lock, check, take.
    """

    name: ClassVar[str]
    quote: ClassVar[str] = '"'
    #: The database's clock, now and at the start of the statement.
    now: ClassVar[str]
    #: ``now`` and a parameter of the type that `duration` makes.
    later: ClassVar[str]
    earlier: ClassVar[str]
    #: How a SELECT locks what nobody else has locked, and how it waits for the others.
    locking: ClassVar[str] = ""
    waiting: ClassVar[str] = ""
    #: Which rows have no key, which have one, and which of those are not settled; as the indexes say it.
    loose: ClassVar[str] = "{key} IS NULL"
    ordered: ClassVar[str] = "{key} IS NOT NULL"
    unsettled: ClassVar[str] = "{key} IS NOT NULL AND status IN ('pending', 'processing')"
    of_tenant: ClassVar[str] = "(:tenant_id IS NULL OR tenant_id = :tenant_id)"
    skip_dead: ClassVar[str] = ":skip_dead"
    #: Whether the scripts of claim and settle are one transaction or need none.
    atomic: ClassVar[bool] = True
    needed: ClassVar[str]

    def __init__(self, names: Names) -> None:
        self.names = names
        self.identifiers = names.render(self.quote)
        self._texts: dict[str, str] = {}

    def sql(self, text: str, /, *, returns: bool = False, **params: Any) -> Statement:  # noqa: ANN401
        """Return a statement, its ``{identifiers}`` and the words of this dialect filled in."""
        return Statement(self._formatted(text), params, returns=returns)

    def _formatted(self, text: str) -> str:
        if text not in self._texts:
            words, filled = self._words, text
            while (more := _WORD.sub(lambda match: words[match[1]], filled)) != filled:  # words may hold words
                filled = more
            self._texts[text] = dedent(filled).strip()
        return self._texts[text]

    @property
    def _words(self) -> Mapping[str, str]:
        return {
            **self.identifiers,
            "now": self.now,
            "later": self.later,
            "earlier": self.earlier,
            "locking": self.locking,
            "waiting": self.waiting,
            "loose": self.loose,
            "ordered": self.ordered,
            "unsettled": self.unsettled,
            "of_tenant": self.of_tenant,
            "skip_dead": self.skip_dead,
        }

    def channel(self, namespace: str) -> str:
        """Return where hints about a namespace are sent, if the database can send any."""
        name = f"{self.names.schema}.{self.names.table}.{namespace}".encode()
        return f"postroom_{hashlib.blake2b(name, digest_size=12).hexdigest()}"

    # -- values ------------------------------------------------------------------------------------------------

    def uuid(self, value: UUID) -> Any:  # noqa: ANN401 -- each database has its own type
        """Return an id as the database stores it."""
        return value

    def to_uuid(self, value: Any) -> UUID:  # noqa: ANN401
        """Return a stored id."""
        return value if isinstance(value, UUID) else UUID(value)

    def time(self, value: datetime) -> Any:  # noqa: ANN401
        """Return a moment as the database stores it."""
        return value

    def to_time(self, value: Any) -> datetime:  # noqa: ANN401
        """Return a stored moment."""
        assert isinstance(value, datetime)
        return value

    def duration(self, value: timedelta) -> Any:  # noqa: ANN401
        """Return a length of time as the wording of ``later`` wants it."""
        return value

    def decode(self, row: Row, namespace: str) -> Message:
        """Return the message of a claimed row; raise `DecodeError` if it is damaged."""
        try:
            headers = {} if row[6] in {"{}", b"{}"} else _headers(row[6])
            return Message(
                id=self.to_uuid(row[0]),
                topic=row[1],
                type=row[2],
                key=row[3],
                payload=bytes(row[4]),
                content_type=row[5],
                headers=headers,
                tenant_id=None if row[7] is None else self.to_uuid(row[7]),
                dedupe_key=row[8],
                time=self.to_time(row[9]),
                attempt=row[10],
                token=row[11],
                namespace=namespace,
            )
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise DecodeError(f"the stored row cannot be decoded: {type(error).__name__}: {error}") from error

    # -- add ---------------------------------------------------------------------------------------------------

    def add(self, additions: Sequence[Addition], *, strict_order: bool) -> Script[list[Added]]:
        """Insert messages in the caller's transaction; tell of each whether it is new."""
        if strict_order:
            yield from self._lock_keys(additions)
        result = yield self._insert(additions)
        return (yield from self._outcome(additions, {self.to_uuid(row[0]) for row in result.rows}))

    def _outcome(self, additions: Sequence[Addition], added: set[UUID]) -> Script[list[Added]]:
        """Look up which messages stand in the way of those that were not added."""
        missed = [a.message for a in additions if a.message.id not in added and a.message.dedupe_key is not None]
        existing: dict[tuple[str, str], UUID] = {}
        if missed:
            found = yield self.sql(
                self._existing,
                returns=True,
                namespace=missed[0].namespace,
                topics=[message.topic for message in missed],
                keys=[message.dedupe_key for message in missed],
            )
            existing = {(row[1], row[2]): self.to_uuid(row[0]) for row in found.rows}
        return [self._added(addition, added, existing) for addition in additions]

    def _added(self, addition: Addition, added: set[UUID], existing: Mapping[tuple[str, str], UUID]) -> Added:
        message = addition.message
        if message.id in added:
            return Added(message.id, added=True)
        if message.dedupe_key is None:
            return Added(message.id, added=False)
        return Added(existing.get((message.topic, message.dedupe_key)), added=False)

    _existing: ClassVar[str] = (
        "SELECT id, topic, dedupe_key FROM {outbox} "
        "WHERE namespace = :namespace AND dedupe_key IN :keys AND topic IN :topics"
    )

    def _insert(self, additions: Sequence[Addition]) -> Statement:
        raise NotImplementedError

    def _lock_keys(self, additions: Sequence[Addition]) -> Script[None]:
        """Take the lock of every key, so that messages of one key get their place in commit order."""
        raise NotImplementedError

    def _values(self, addition: Addition) -> dict[str, Any]:
        message = addition.message
        return {
            "id": self.uuid(message.id),
            "namespace": message.namespace,
            "topic": message.topic,
            "type": message.type,
            "key": message.key,
            "tenant_id": None if message.tenant_id is None else self.uuid(message.tenant_id),
            "dedupe_key": message.dedupe_key,
            "payload": message.payload,
            "content_type": message.content_type,
            "headers": json.dumps(dict(message.headers)) if message.headers else "{}",
            "due_at": None if addition.due_at is None else self.time(addition.due_at),
            "delay": self.duration(addition.delay),
        }

    def _rows_of_values(self, additions: Sequence[Addition], row: str) -> tuple[str, dict[str, Any]]:
        """Return ``(…), (…)`` and its parameters, for databases without arrays."""
        params: dict[str, Any] = {}
        rows: list[str] = []
        for number, addition in enumerate(additions):
            suffix = letters(number)
            params.update({f"{name}_{suffix}": value for name, value in self._values(addition).items()})
            rows.append(row.replace("#", suffix))
        return ",\n".join(rows), params

    # -- claim -------------------------------------------------------------------------------------------------

    def claim_loose(self, namespace: str, limit: int, terms: ClaimTerms) -> Script[Sequence[Row]]:
        """Claim messages without a key."""
        params = self._eligibility(namespace, terms)
        expired = yield self.sql(self._expired, returns=True, limit=limit, **params)
        found = list(expired.rows)
        if len(found) < limit:
            due = yield self.sql(self._due, returns=True, limit=limit - len(found), **params)
            found.extend(due.rows)
        yield from self._take(found, terms)
        return found

    def claim_keyed(self, namespace: str, limit: int, terms: ClaimTerms) -> Script[Sequence[Row]]:
        """Claim runs of keys that begin with the head of their key."""
        window = WINDOW * limit
        params = self._eligibility(namespace, terms)
        expired = yield self.sql(self._expired_keys, returns=True, limit=window, **params)
        due = yield self.sql(self._due_keys, returns=True, limit=window, **params)
        keys = list(dict.fromkeys((row[0], row[1]) for row in (*expired.rows, *due.rows)))
        claimed = yield from self._claim_runs(keys, limit, params, terms)
        if len(claimed) < limit and len(due.rows) == window:
            more = yield from self._walk_keys(namespace, limit - len(claimed), exclude=keys)
            claimed += yield from self._claim_runs(more, limit - len(claimed), params, terms)
        return claimed

    def _walk_keys(
        self, namespace: str, limit: int, exclude: Sequence[tuple[str, str]]
    ) -> Script[list[tuple[str, str]]]:
        """Step from key to key, when followers of blocked keys fill the whole window."""
        keys: list[tuple[str, str]] = []
        topic, key = "", ""
        for _ in range(limit + len(exclude)):
            step = yield self.sql(self._next_key, returns=True, namespace=namespace, topic=topic, key=key)
            if not step.rows:
                break
            topic, key = step.rows[0]
            if (topic, key) not in exclude:
                keys.append((topic, key))
        return keys

    def _claim_runs(
        self, keys: Sequence[tuple[str, str]], limit: int, params: Mapping[str, Any], terms: ClaimTerms
    ) -> Script[list[Row]]:
        planned: dict[Any, tuple[tuple[str, str], int]] = {}
        length = max(limit // max(len(keys), 1), min(RUN, limit))
        for key in keys:
            room = min(length, limit - len(planned))
            if room == 0:
                break
            run = yield self.sql(self._run, returns=True, topic=key[0], key=key[1], length=room, **params)
            for place, (identity, eligible) in enumerate(run.rows):
                if not eligible:
                    break
                planned[identity] = (key, place)
        if not planned:
            return []
        locked = yield self.sql(self._lock, returns=True, ids=list(planned), **params)
        chosen = _unbroken(locked.rows, planned)
        yield from self._take(chosen, terms)
        return chosen

    def claim_suspect(self, namespace: str, terms: ClaimTerms) -> Script[Sequence[Row]]:
        """Claim one message that may have killed its worker, if it is the head of its key."""
        picked = yield self.sql(self._suspect, returns=True, **self._eligibility(namespace, terms))
        yield from self._take(picked.rows, terms)
        return picked.rows

    def _take(self, rows: Sequence[Row], terms: ClaimTerms) -> Script[None]:
        if rows:
            yield self.sql(
                """
                UPDATE {outbox}
                SET status = 'processing', attempts = attempts + 1, token = token + 1,
                    locked_by = :worker, locked_until = {later}, updated_at = {now}
                WHERE id IN :ids
                """,
                ids=[row[0] for row in rows],
                worker=self.uuid(terms.worker),
                duration=self.duration(terms.lease),
            )

    def _eligibility(self, namespace: str, terms: ClaimTerms) -> dict[str, Any]:
        return {
            "namespace": namespace,
            "max_attempts": terms.max_attempts,
            "suspect_after": suspect_after(terms.max_attempts),
            "tenant_id": None if terms.tenant_id is None else self.uuid(terms.tenant_id),
            "skip_dead": terms.on_dead == "skip",
        }

    #: What publishing needs, as it will be after the claim.
    columns: ClassVar[str] = (
        "id, topic, type, {key}, payload, content_type, headers, tenant_id, dedupe_key, created_at, "
        "attempts + 1, token + 1, seq"
    )
    is_due: ClassVar[str] = (
        "status = 'pending' AND next_attempt_at <= {now} AND attempts < :max_attempts AND {of_tenant}"
    )
    is_expired: ClassVar[str] = (
        "status = 'processing' AND locked_until < {now} AND attempts < :suspect_after AND {of_tenant}"
    )
    _due: ClassVar[str] = f"""
        SELECT {columns} FROM {{outbox}}
        WHERE namespace = :namespace AND {{loose}} AND {is_due}
        ORDER BY next_attempt_at, seq LIMIT :limit{{locking}}
        """
    _expired: ClassVar[str] = f"""
        SELECT {columns} FROM {{outbox}}
        WHERE namespace = :namespace AND {{loose}} AND {is_expired}
        ORDER BY locked_until, seq LIMIT :limit{{locking}}
        """
    _due_keys: ClassVar[str] = f"""
        SELECT topic, {{key}} FROM {{outbox}}
        WHERE namespace = :namespace AND {{ordered}} AND {is_due}
        ORDER BY next_attempt_at, seq LIMIT :limit
        """
    _expired_keys: ClassVar[str] = f"""
        SELECT topic, {{key}} FROM {{outbox}}
        WHERE namespace = :namespace AND {{ordered}} AND {is_expired}
        ORDER BY locked_until, seq LIMIT :limit
        """
    #: That no dead message stands before ``head`` in its key, unless dead ones are passed over.
    not_blocked: ClassVar[str] = """
        ({skip_dead} OR NOT EXISTS (
            SELECT 1 FROM {outbox} AS dead
            WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
              AND dead.{key} = head.{key} AND dead.seq < head.seq))
        """
    _run: ClassVar[str] = f"""
        SELECT id, (({is_due}) OR ({is_expired})) AND {not_blocked} AS eligible
        FROM {{outbox}} AS head
        WHERE {{unsettled}} AND namespace = :namespace AND topic = :topic AND {{key}} = :key
        ORDER BY seq LIMIT :length
        """
    _lock: ClassVar[str] = f"""
        SELECT {columns} FROM {{outbox}}
        WHERE id IN :ids AND namespace = :namespace AND (({is_due}) OR ({is_expired})){{locking}}
        """
    suspect: ClassVar[str] = f"""
        WHERE namespace = :namespace AND status = 'processing' AND locked_until < {{now}}
          AND attempts >= :suspect_after AND attempts < :max_attempts AND {{of_tenant}}
          AND {not_blocked}
          AND NOT EXISTS (
            SELECT 1 FROM {{outbox}} AS earlier
            WHERE earlier.status IN ('pending', 'processing') AND earlier.namespace = head.namespace
              AND earlier.topic = head.topic AND earlier.{{key}} = head.{{key}} AND earlier.seq < head.seq)
        ORDER BY locked_until, seq LIMIT 1{{locking}}
        """
    _suspect: ClassVar[str] = f"SELECT {columns} FROM {{outbox}} AS head {suspect}"
    _next_key: ClassVar[str] = """
        SELECT topic, {key} FROM {outbox}
        WHERE {unsettled} AND namespace = :namespace AND (topic > :topic OR (topic = :topic AND {key} > :key))
        ORDER BY topic, {key} LIMIT 1
        """

    # -- settle ------------------------------------------------------------------------------------------------

    def settle(self, settlements: Sequence[Settlement], *, keep_delivered: bool) -> Script[list[Claim]]:
        """Record outcomes whose token is current; return the claims that were lost."""
        states = yield self.sql(
            "SELECT id, token, status FROM {outbox} WHERE id IN :ids{waiting}",
            returns=True,
            ids=[self.uuid(settlement.claim.message.id) for settlement in settlements],
        )
        known = {self.to_uuid(row[0]): (row[1], row[2]) for row in states.rows}
        current = [s for s in settlements if is_current(s, known.get(s.claim.message.id))]
        for statement in self._settling(current, keep_delivered=keep_delivered):
            yield statement
        return [s.claim for s in settlements if s not in current and is_lost(s, known.get(s.claim.message.id))]

    def _settling(self, settlements: Sequence[Settlement], *, keep_delivered: bool) -> Iterable[Statement]:
        """Yield one statement for each kind of outcome."""
        delivered = [s.claim for s in settlements if isinstance(s.outcome, Delivered)]
        if delivered:
            yield self._deliver(delivered, keep=keep_delivered)
        retried = [(s.claim, s.outcome) for s in settlements if isinstance(s.outcome, Retry)]
        if retried:
            yield self._retry(retried)
        dead = [(s.claim, s.outcome.error) for s in settlements if isinstance(s.outcome, Dead)]
        if dead:
            yield self._bury(dead)
        released = [(s.claim, s.outcome.delay) for s in settlements if isinstance(s.outcome, Release)]
        if released:
            yield self._release(released)

    def _deliver(self, claims: Sequence[Claim], *, keep: bool) -> Statement:
        text = (
            """
            UPDATE {outbox}
            SET status = 'delivered', delivered_at = {now}, updated_at = {now},
                locked_by = NULL, locked_until = NULL, last_error = NULL
            WHERE id IN :ids
            """
            if keep
            else "DELETE FROM {outbox} WHERE id IN :ids"
        )
        return self.sql(text, ids=[self.uuid(claim.message.id) for claim in claims])

    def _retry(self, retried: Sequence[tuple[Claim, Retry]]) -> Statement:
        raise NotImplementedError

    def _bury(self, dead: Sequence[tuple[Claim, str]]) -> Statement:
        raise NotImplementedError

    def _release(self, released: Sequence[tuple[Claim, timedelta]]) -> Statement:
        raise NotImplementedError

    def extend(self, claims: Sequence[Claim], lease: timedelta) -> Script[list[Claim]]:
        """Move the end of leases; return the claims that were lost."""
        states = yield self.sql(
            "SELECT id, token, status FROM {outbox} WHERE id IN :ids{waiting}",
            returns=True,
            ids=[self.uuid(claim.message.id) for claim in claims],
        )
        tokens = {self.to_uuid(row[0]): row[1] for row in states.rows if row[2] == "processing"}
        held = [claim for claim in claims if tokens.get(claim.message.id) == claim.message.token]
        if held:
            yield self.sql(
                "UPDATE {outbox} SET locked_until = {later}, updated_at = {now} WHERE id IN :ids",
                ids=[self.uuid(claim.message.id) for claim in held],
                duration=self.duration(lease),
            )
        return [claim for claim in claims if claim not in held]

    # -- upkeep ------------------------------------------------------------------------------------------------

    def sweep(self, namespace: str, terms: ClaimTerms) -> Script[int]:
        """Bury messages without an attempt left."""
        params = {"namespace": namespace, "max_attempts": terms.max_attempts, "chunk": CHUNK}
        crashed = yield self.sql(self._crashed, returns=True, **params)
        spent = yield self.sql(self._spent, returns=True, **params)
        count = 0
        for rows, reason in ((crashed.rows, LEASE_RAN_OUT), (spent.rows, None)):
            if rows:
                buried = yield self.sql(
                    """
                    UPDATE {outbox}
                    SET status = 'dead', locked_by = NULL, locked_until = NULL, updated_at = {now},
                        last_error = COALESCE(:reason, last_error, 'no attempts left')
                    WHERE id IN :ids
                    """,
                    ids=[row[0] for row in rows],
                    reason=reason,
                )
                count += buried.count
        return count

    _crashed: ClassVar[str] = """
        SELECT id FROM {outbox}
        WHERE namespace = :namespace AND status = 'processing' AND locked_until < {now} AND attempts >= :max_attempts
        ORDER BY locked_until LIMIT :chunk{locking}
        """
    # Only the front of what is due is looked at: claims pass over such rows, so they gather there.
    _spent: ClassVar[str] = """
        SELECT id FROM (
            SELECT id, attempts FROM {outbox}
            WHERE namespace = :namespace AND status = 'pending' AND next_attempt_at <= {now}
            ORDER BY next_attempt_at, seq LIMIT :chunk) AS front
        WHERE attempts >= :max_attempts
        """

    def purge(self, namespace: str, older_than: timedelta, limit: int) -> Statement:
        """Delete delivered messages past their retention."""
        return self.sql(
            self._purge, namespace=namespace, duration=self.duration(older_than), limit=limit
        )

    _purge: ClassVar[str] = """
        DELETE FROM {outbox}
        WHERE id IN (
            SELECT id FROM {outbox}
            WHERE namespace = :namespace AND status = 'delivered' AND delivered_at <= {earlier}
            ORDER BY delivered_at LIMIT :limit)
        """

    def stats(self, namespace: str) -> Script[Stats]:
        """Count up to a ceiling, and find the oldest message that is due."""
        counts: dict[str, int] = {}
        for status in ("pending", "processing", "delivered", "dead"):
            counted = yield self.sql(
                "SELECT count(*) FROM (SELECT 1 AS one FROM {outbox} "
                f"WHERE namespace = :namespace AND status = '{status}' LIMIT :ceiling) AS counted",
                returns=True,
                namespace=namespace,
                ceiling=CEILING,
            )
            counts[status] = counted.rows[0][0]
        oldest = yield self.sql(self._oldest, returns=True, namespace=namespace)
        ages = [float(row[0]) for row in oldest.rows if row[0] is not None]
        return Stats(
            **counts,
            oldest_due=timedelta(seconds=max(ages)) if ages else None,
            ceiling=CEILING,
        )

    #: The age in seconds of the first row of each lane that is due.
    _oldest: ClassVar[str]

    # -- server ------------------------------------------------------------------------------------------------

    def probe(self) -> Script[Server]:
        """Ask the server what it is."""
        raise NotImplementedError

    def is_supported(self, server: Server) -> bool:
        """Tell whether the server has what claims need."""
        raise NotImplementedError


def is_current(settlement: Settlement, state: tuple[int, str] | None) -> bool:
    """Tell whether a settlement may still be recorded.

    A message that the sweep buried may yet be confirmed by the worker that was only slow.
    """
    if state is None or state[0] != settlement.claim.message.token:
        return False
    return state[1] == "processing" or (state[1] == "dead" and isinstance(settlement.outcome, Delivered))


_SETTLED: Mapping[type, str] = {Delivered: "delivered", Retry: "pending", Release: "pending", Dead: "dead"}


def is_lost(settlement: Settlement, state: tuple[int, str] | None) -> bool:
    """Tell whether somebody else decided about a claim, rather than this settlement earlier."""
    if state is None:
        # Only delivered messages are ever deleted.
        return not isinstance(settlement.outcome, Delivered)
    return state != (settlement.claim.message.token, _SETTLED[type(settlement.outcome)])


def _unbroken(rows: Sequence[Row], planned: Mapping[Any, tuple[tuple[str, str], int]]) -> list[Row]:
    """Keep the rows whose whole run before them could be locked as well."""
    chosen: list[Row] = []
    expected: dict[tuple[str, str], int] = {}
    for row in sorted(rows, key=lambda row: planned[row[0]]):
        key, place = planned[row[0]]
        if place == expected.get(key, 0):
            chosen.append(row)
            expected[key] = place + 1
    return chosen


def _headers(text: str | bytes) -> dict[str, str]:
    headers = json.loads(text)
    if not isinstance(headers, dict):
        raise TypeError("headers are not an object")
    return headers  # pyright: ignore[reportUnknownVariableType] -- written by add, checked there


def letters(number: int) -> str:
    """Return a number in letters, which is what parameter names are made of."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))
