"""Lower bounds for the index scans of a claim, used while a long-running snapshot prevents vacuum in PostgreSQL.

Index entries of settled rows stay until no snapshot can see them, so a scan from the start of an index reads every
message of the last minutes before it reaches a pending one. `Bounds` holds the positions from which a scan suffices;
docs/decisions/0016-held-snapshots.md explains why no message is skipped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, ClassVar, Final

from ....store import ClaimTerms, OnDead
from ..dialect import Dialect
from ..names import Names
from ..statement import Row, Script

__all__ = ["MARK", "Bounded", "Bounds", "Floor", "Writers"]

#: Number of message columns in a claimed row; the columns about the claim itself follow.
MARK: Final = 13
#: Seconds above which a claim counts as slow: a base, and an allowance for each claimed message.
SLOW, SLOW_EACH = 0.02, 0.0001
#: Consecutive slow claims after which the scan for due messages is measured; a busy machine makes claims slow as well.
SLOW_CLAIMS: Final = 3
#: Pages that scan may read beyond one for each row; more switch the bounds on, and a quarter of it off.
PAGES: Final = 2000
#: Seconds between two reads of pg_locks, and between two such measurements as long as they find nothing.
PAUSE: Final = 1.0
DOUBT: Final = 10.0
#: Seconds of overlap between a scan and the one before, for rows that became visible shortly after their due time.
MARGIN: Final = 1.0
#: A survey scans all dead entries, so it is limited to 1/SHARE of the time.
SHARE: Final = 20
#: Seconds until the next survey after one that failed, for example because it took longer than the store's timeout.
AFTER_FAILURE: Final = 300.0
#: Maximum number of keys with unsettled messages below the floor, and of keys whose start is remembered.
EXCEPTIONS: Final = 500
STARTS: Final = 2000


@dataclass(frozen=True, slots=True)
class Floor:
    """A sequence number up to which all messages are settled for good, except those of the keys in ``exceptions``."""

    seq: int
    #: By topic and key: the seq of the first unsettled message, and whether that message waits for a later time.
    exceptions: dict[tuple[str, str], tuple[int, bool]]

    def release(self, keys: Iterable[tuple[str, str]]) -> bool:
        """Mark keys that were claimed as no longer waiting; return whether any of them was waiting."""
        waited = {key: (seq, False) for key in keys for seq, waits in [self.exceptions.get(key, (0, False))] if waits}
        self.exceptions.update(waited)
        return bool(waited)


@dataclass(slots=True)
class Writers:
    """Open transactions that may hold uncommitted messages with a sequence number up to ``seq``."""

    seq: int
    waiting: set[str]
    _is_handed_over: bool = False

    def have_ended(self, now: Mapping[str, bool]) -> bool:
        """Return whether all have ended, given the writers of a later moment and whether each is prepared."""
        self.waiting &= now.keys()
        if any(not now[transaction] for transaction in self.waiting):
            return False
        if not self._is_handed_over:
            # PostgreSQL 13 renames a transaction when it is prepared, so every prepared one may be one of these.
            self.waiting |= {transaction for transaction, is_prepared in now.items() if is_prepared}
            self._is_handed_over = True
        return not self.waiting


@dataclass(slots=True)
class Bounds:
    """Lower bounds of one store for one namespace; the initial values make every scan start at the beginning."""

    clock: Callable[[], float] = time.monotonic
    is_active: bool = False
    floor: Floor | None = None
    #: What floor and starts are valid for.
    on_dead: OnDead = "block"
    #: All messages up to this sequence number are visible, unless they were rolled back.
    confirmed: int = 0
    #: By topic and key: a sequence number below which the key has no unsettled message; the latest claimed come last.
    starts: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    #: Lower bounds of next_attempt_at and locked_until, in seconds since the epoch.
    due_from: float = -inf
    #: How often `due_from` was lowered.
    lowered: int = 0
    leased_from: float = -inf
    #: Identifies the server process; a server promoted in a failover may assign the same sequence numbers again.
    server: str = ""
    #: Highest sequence number claimed so far.
    highest: int = 0
    writers: Writers | None = None
    next_look: float = 0.0
    next_survey: float = 0.0
    #: For each open writer, a time before it started writing; and the time of the last read of pg_locks.
    _since: dict[str, float] = field(default_factory=dict[str, float])
    _watched_at: float = -inf
    _slow_claims: int = 0

    def forget(self) -> None:
        """Reset to the initial values."""
        self.floor = self.writers = None
        self.confirmed, self.starts = 0, {}
        self.lower(-inf)
        self.leased_from = -inf
        self.server = ""
        self._since, self._watched_at = {}, -inf
        self.is_active, self._slow_claims = False, 0

    def lower(self, due_from: float) -> None:
        """Make the next scan for due messages start no later; a claim under way must not raise the bound again."""
        self.due_from = min(self.due_from, due_from)
        self.lowered += 1

    @property
    def is_in_doubt(self) -> bool:
        """Whether claims have become slow, and the time has come to find out why."""
        return not self.is_active and self._slow_claims >= SLOW_CLAIMS and self.clock() >= self.next_look

    def claimed(self, seen: Sequence[Row], confirmed: int) -> None:
        """Record the rows of a claim, given what had been confirmed before; the first of each key was its head."""
        heads: dict[tuple[str, str], int] = {}
        for row in seen:
            if row[0] is not None:
                self.highest = max(self.highest, row[12])
                key = (row[1], row[3])
                heads[key] = min(row[12], heads.get(key, confirmed + 1))
        if self.floor and self.floor.release(heads):
            self.lower(-inf)  # the followers of such a key have been due for long
        for key, start in heads.items():
            self.starts.pop(key, None)
            self.starts[key] = start
        while len(self.starts) > STARTS:
            del self.starts[next(iter(self.starts))]

    def treat_dead_as(self, on_dead: OnDead) -> None:
        """Forget what was found for claims that treat dead messages differently: only some count them as settled."""
        if self.on_dead != on_dead:
            self.on_dead, self.floor, self.starts = on_dead, None, {}

    def timed(self, claimed: int, seconds: float) -> None:
        """Record how long a claim without bounds took."""
        is_slow = seconds > SLOW + SLOW_EACH * claimed
        self._slow_claims = self._slow_claims + 1 if is_slow else 0

    def watch(self, now: Mapping[str, bool], at: float) -> None:
        """Record the open writers, and lower ``due_from`` to the start of those that have ended since."""
        ended = [since for transaction, since in self._since.items() if transaction not in now]
        if ended:
            self.lower(min(ended))
        self._since = {transaction: self._since.get(transaction, self._watched_at) for transaction in now}
        self._watched_at = at - MARGIN

    def measured(self, pages: int) -> None:
        """Switch the bounds on or off by how many pages are read in vain from the start of the index."""
        if pages > PAGES:
            self.is_active = True
        elif pages * 4 < PAGES:
            self.forget()


class Bounded(Dialect):
    """Adds bounded variants of the claim statements to a dialect."""

    #: Claims runs of ``keys``.
    runs: ClassVar[str]

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self.bounds: dict[str, Bounds] = {}
        # Unbounded statements leave these words empty.
        self.identifiers.update(dict.fromkeys([*self._starts, "leased_from"], ""))

    def forget_bounds(self) -> None:
        """Make the next scans for due messages and for expired leases start at the beginning."""
        for bounds in self.bounds.values():
            bounds.lower(-inf)
            bounds.leased_from = -inf

    def leased(self, text: str, namespace: str) -> tuple[str, dict[str, float]]:
        """Return a statement that scans for expired leases, with a lower bound while bounds are on."""
        bounds = self._bounds(namespace)
        if not bounds.is_active:
            return text, {}
        return text.replace("{leased_from}", self._leased_from), {"leased_from": bounds.leased_from}

    def look(self, plain: str, params: Mapping[str, Any], terms: ClaimTerms) -> Script[Sequence[Row]]:
        """Claim from the keys of due messages, with the statement ``plain`` or with its bounded variant."""
        bounds = self._bounds(params["namespace"])
        yield from self._update(bounds, params, terms)
        if not bounds.server or not bounds.is_active or terms.newest_first:
            began = bounds.clock()
            seen = yield self.query(plain, **params)
            bounds.timed(len(seen.rows), bounds.clock() - began)
            bounds.highest = max(bounds.highest, *(row[12] or 0 for row in seen.rows))
        else:
            lowered, server, confirmed = bounds.lowered, bounds.server, bounds.confirmed
            bounds.treat_dead_as(terms.on_dead)
            seen = yield self.query(self._claim_bounded, **params, **_bound_params(bounds))
            bounds.claimed(seen.rows, confirmed)
            if seen.rows[0][MARK + 2] != server:
                bounds.forget()
            elif bounds.lowered == lowered:  # otherwise it was lowered while the statement ran
                bounds.due_from = seen.rows[0][MARK + 1]
        return seen.rows

    def _update(self, bounds: Bounds, params: Mapping[str, Any], terms: ClaimTerms) -> Script[None]:
        """Bring the bounds up to date if the time has come."""
        if bounds.is_in_doubt:
            bounds.next_look = bounds.clock() + DOUBT
            yield from self._measure(bounds, params)
            if bounds.is_active:
                bounds.next_look = 0.0
        if bounds.is_active and bounds.clock() >= bounds.next_look:
            yield from self._watch(bounds, params, terms)

    def _bounds(self, namespace: str) -> Bounds:
        return self.bounds.setdefault(namespace, Bounds())

    def _measure(self, bounds: Bounds, params: Mapping[str, Any]) -> Script[None]:
        """Count the pages that the scan for due messages reads beyond one for each row that it finds."""
        explained = yield self.query(self._due_plan, namespace=params["namespace"], window=params["window"])
        answer = explained.rows[0][0]
        plan = (json.loads(answer) if isinstance(answer, str) else answer)[0]["Plan"]
        bounds.measured(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] - int(plan["Actual Rows"]))

    def _watch(self, bounds: Bounds, params: Mapping[str, Any], terms: ClaimTerms) -> Script[None]:
        """Read the open writers; once those that could add messages below a floor have ended, run a survey."""
        namespace, began = params["namespace"], bounds.clock()
        # Set before the first statement: neither a concurrent claim nor one after a failure must do the same at once.
        bounds.next_look = began + PAUSE
        is_survey_due = began >= bounds.next_survey
        if is_survey_due:
            bounds.next_survey = began + AFTER_FAILURE
        highest, writers = bounds.highest, bounds.writers
        # A lease shorter than the claim that granted it becomes visible late, so the bound is rebuilt now and then.
        leased_from = -inf if is_survey_due else bounds.leased_from
        looked = yield self.query(self._writers, namespace=namespace, leased_from=leased_from)
        leased_from, at, server = looked.rows[0][:3]
        if bounds.server not in {"", server}:
            bounds.forget()
            return
        bounds.leased_from, bounds.server = leased_from, server
        now = {row[3]: row[4] for row in looked.rows if row[3] is not None}
        bounds.watch(now, at)
        if writers is None or writers.have_ended(now):
            bounds.writers = Writers(highest, set(now))
            bounds.confirmed = writers.seq if writers else 0
            if writers and is_survey_due:
                yield from self._survey(bounds, namespace, terms, writers.seq)
                yield from self._measure(bounds, params)
        if is_survey_due:
            bounds.next_survey = bounds.clock() + SHARE * (bounds.clock() - began)

    def _survey(self, bounds: Bounds, namespace: str, terms: ClaimTerms, seq: int) -> Script[None]:
        """Find the keys with unsettled messages up to ``seq``; with too many of them the floor is lowered."""
        found = yield self.query(
            self._exceptions, namespace=namespace, floor=seq, skip_dead=terms.on_dead == "skip", most=EXCEPTIONS
        )
        rows = found.rows
        if len(rows) > EXCEPTIONS:
            seq, rows = rows[EXCEPTIONS][2] - 1, rows[:EXCEPTIONS]
        exceptions = {(row[0], row[1]): (row[2], row[3]) for row in rows}
        bounds.treat_dead_as(terms.on_dead)
        bounds.floor = Floor(seq, exceptions)
        bounds.lower(-inf)

    @cached_property
    def _claim_bounded(self) -> str:
        runs = self.runs
        for word, text in self._starts.items():
            runs = runs.replace(f"{{{word}}}", text)
        return self._bounded_keys.replace("{leased_from}", self._leased_from) + runs

    #: Words that make `runs` scan each key from its start.
    _starts: ClassVar[Mapping[str, str]] = {
        "with_start": ", keys.start",
        "from_start_of_keys": " AND seq >= keys.start",
        "from_start_of_heads": " AND seq >= heads.start",
    }
    _leased_from: ClassVar[str] = " AND locked_until >= to_timestamp(:leased_from::float8)"
    server: ClassVar[str] = "extract(epoch FROM pg_postmaster_start_time())::text"
    # Unlike a duration, the number of pages does not depend on what else the machine does.
    _due_plan: ClassVar[str] = """
        EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON)
        SELECT seq FROM {outbox}
        WHERE namespace = :namespace::text AND status = 'pending' AND {ordered} AND next_attempt_at <= {now}
        ORDER BY next_attempt_at, seq LIMIT :window::bigint
        """
    # An INSERT takes this lock before nextval() and keeps it to the end of its transaction, prepared ones included.
    _writers: ClassVar[str] = f"""
        SELECT mark.*, virtualtransaction, pid IS NULL
        FROM (
            SELECT extract(epoch FROM LEAST(now() - interval '{MARGIN} seconds', (
                       SELECT min(locked_until) FROM {{outbox}}
                       WHERE namespace = :namespace::text AND status = 'processing'
                         AND locked_until >= to_timestamp(:leased_from::float8))))::float8 AS leased_from,
                   extract(epoch FROM now())::float8 AS at,
                   {server} AS server) AS mark
        LEFT JOIN pg_locks ON locktype = 'relation' AND relation = '{{outbox}}'::regclass AND granted
            AND mode = 'RowExclusiveLock' AND pid IS DISTINCT FROM pg_backend_pid()
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        """
    _exceptions: ClassVar[str] = """
        SELECT topic, {key}, seq, waits
        FROM (
            SELECT DISTINCT ON (topic, {key}) topic, {key}, seq,
                   status = 'dead' OR (status = 'pending' AND next_attempt_at > now() + interval '1 second') AS waits
            FROM (
                SELECT topic, {key}, seq, status, next_attempt_at FROM {outbox}
                WHERE namespace = :namespace::text AND status = 'pending' AND {ordered} AND seq <= :floor::bigint
                UNION ALL
                SELECT topic, {key}, seq, status, next_attempt_at FROM {outbox}
                WHERE namespace = :namespace AND status = 'processing' AND {ordered} AND seq <= :floor
                UNION ALL
                SELECT topic, {key}, seq, status, next_attempt_at FROM {outbox}
                WHERE namespace = :namespace AND status = 'dead' AND {ordered} AND seq <= :floor AND NOT {skip_dead}
            ) AS unsettled
            ORDER BY topic, {key}, seq) AS first
        ORDER BY seq LIMIT :most::bigint + 1
        """
    _bounded_keys: ClassVar[str] = f"""
        WITH expired AS MATERIALIZED (
            SELECT topic, {{key}}, seq FROM {{outbox}}
            WHERE namespace = :namespace::text AND {{ordered}} AND {Dialect.is_expired}{{leased_from}}
            ORDER BY locked_until LIMIT :window::bigint
        ), due AS MATERIALIZED (
            SELECT topic, {{key}}, seq, next_attempt_at, row_number() OVER () AS turn
            FROM (
                SELECT topic, {{key}}, seq, next_attempt_at FROM {{outbox}}
                WHERE namespace = :namespace AND {{ordered}} AND {Dialect.is_due}
                  AND next_attempt_at >= to_timestamp(:due_from::float8)
                ORDER BY next_attempt_at, seq LIMIT :window) AS first
        ), known AS MATERIALIZED (
            SELECT * FROM unnest(:but_topics::text[], :but_keys::text[], :but_seqs::bigint[], :but_waits::boolean[])
                 AS t(topic, {{key}}, seq, waits)
        ), mark AS (
            SELECT :window IN ((SELECT count(*) FROM expired), (SELECT count(*) FROM due)) AS is_full,
                   -- Followers of a head that waits are claimed together with it, so they do not hold the bound.
                   extract(epoch FROM LEAST(now(), COALESCE(
                       (SELECT min(next_attempt_at) FROM due LEFT JOIN known USING (topic, {{key}})
                        WHERE waits IS NOT TRUE),
                       (SELECT max(next_attempt_at) FROM due HAVING count(*) = :window))))::float8
                       - {MARGIN} AS due_from,
                   {server} AS server
        ), keys AS MATERIALIZED (
            SELECT topic, {{key}}, min(turn) AS turn,
                   -- The scan of a key includes every due message found, even if the floor were wrong.
                   CASE WHEN (SELECT server FROM mark) = :server::text
                        THEN LEAST(COALESCE(min(known.seq), :floor::bigint + 1), min(either.seq))
                        ELSE 0 END AS start
            FROM (
                SELECT topic, {{key}}, seq, 0 AS turn FROM expired
                UNION ALL
                SELECT topic, {{key}}, seq, turn FROM due) AS either
            LEFT JOIN known USING (topic, {{key}})
            GROUP BY topic, {{key}}
        ), """


def _bound_params(bounds: Bounds) -> dict[str, Any]:
    floor = bounds.floor or Floor(0, {})
    keys = {**floor.exceptions, **{key: (floor.seq + 1, False) for key in bounds.starts if key not in floor.exceptions}}
    return {
        "leased_from": bounds.leased_from,
        "due_from": bounds.due_from,
        "server": bounds.server,
        "floor": floor.seq,
        "but_topics": [topic for topic, _ in keys],
        "but_keys": [key for _, key in keys],
        "but_seqs": [max(seq, bounds.starts.get(key, 0)) for key, (seq, _) in keys.items()],
        "but_waits": [waits for _, waits in keys.values()],
    }
