"""Where claims begin to look in PostgreSQL, while a snapshot that another transaction holds keeps settled rows alive.

A settled row stays in every index until no snapshot can see it. A claim that begins at the start of an index then reads
all messages of the last minutes before it comes to one that waits. `Bounds` remembers from where on it is enough to
look. docs/decisions/0011-held-snapshots.md says why nothing is passed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, ClassVar, Final

from ....store import ClaimTerms
from ..dialect import Dialect
from ..names import Names
from ..statement import Row, Script

__all__ = ["MARK", "Bounded", "Bounds", "Floor", "Writers"]

#: Where the columns of a claimed row end, and those about the claim itself begin.
MARK: Final = 13
#: A claim is slow beyond this many seconds, and so many more for each message that it brought.
SLOW, SLOW_EACH = 0.01, 0.0001
#: So many slow claims in a row are no coincidence.
SLOW_CLAIMS: Final = 3
#: Seconds between two looks at who writes.
PAUSE: Final = 1.0
#: By how many seconds what is seen may be later than what it was due at.
MARGIN: Final = 1.0
#: A survey reads everything, so it may take one part in so many of the time.
SHARE: Final = 20
#: A survey that takes less time than this has found nothing that had to be passed over.
QUICK: Final = 0.01
#: How many keys may begin below the floor.
EXCEPTIONS: Final = 500


@dataclass(frozen=True, slots=True)
class Floor:
    """That messages up to ``seq`` are settled, and will be, but for those of some keys that begin below it."""

    seq: int
    #: By topic and key: the number of the first message that is not settled, and whether that one waits for its time.
    exceptions: dict[tuple[str, str], tuple[int, bool]]
    #: Whether dead messages count as settled, which they do where they let later ones pass.
    skips_dead: bool

    def release(self, keys: Iterable[tuple[str, str]]) -> bool:
        """Take note that keys were claimed; tell whether one of them waited."""
        waited = {key: (seq, False) for key in keys for seq, waits in [self.exceptions.get(key, (0, False))] if waits}
        self.exceptions.update(waited)
        return bool(waited)


@dataclass(slots=True)
class Writers:
    """The transactions that may have drawn a number up to ``seq`` and not committed yet."""

    seq: int
    waiting: set[str]
    _is_handed_over: bool = False

    def have_ended(self, now: Mapping[str, bool]) -> bool:
        """Tell from the transactions of a later moment, and whether each is prepared, that all have ended."""
        self.waiting &= now.keys()
        if any(not now[transaction] for transaction in self.waiting):
            return False
        if not self._is_handed_over:
            # One that was prepared since goes on under another name in PostgreSQL 13; later none can be prepared.
            self.waiting |= {transaction for transaction, is_prepared in now.items() if is_prepared}
            self._is_handed_over = True
        return not self.waiting


@dataclass(slots=True)
class Bounds:
    """What one store knows of one namespace; with nothing known, claims look from the start of every index."""

    clock: Callable[[], float] = time.monotonic
    is_active: bool = False
    floor: Floor | None = None
    #: From when on due messages and leases are looked for, in seconds since 1970.
    due_from: float = -inf
    leased_from: float = -inf
    #: What tells this server from the one that takes its place after a failover, and may draw the same numbers again.
    server: str = ""
    #: The highest number that was claimed.
    highest: int = 0
    writers: Writers | None = None
    next_look: float = 0.0
    next_survey: float = 0.0
    #: When each transaction that writes was not seen yet, in seconds since 1970, and when they were looked for last.
    _since: dict[str, float] = field(default_factory=dict[str, float])
    _watched_at: float = -inf
    _slow_claims: int = 0
    _quick_surveys: int = 0

    def forget(self) -> None:
        """Know nothing, as after the start."""
        self.floor = self.writers = None
        self.due_from = self.leased_from = -inf
        self.server = ""
        self._since, self._watched_at = {}, -inf
        self.is_active, self._slow_claims, self._quick_surveys = False, 0, 0

    def claimed(self, rows: Sequence[Row], seconds: float) -> None:
        """Learn from a claim: what it brought, and whether it was so slow that bounds will pay."""
        self.highest = max([self.highest, *(row[12] for row in rows)])
        is_slow = seconds > SLOW + SLOW_EACH * len(rows)
        self._slow_claims = self._slow_claims + 1 if is_slow else 0
        self.is_active = self.is_active or self._slow_claims >= SLOW_CLAIMS
        if self.floor and self.floor.release({(row[1], row[3]) for row in rows}):
            self.due_from = -inf  # what waited behind this key has been due for long

    def watch(self, now: Mapping[str, bool], at: float) -> None:
        """Learn which transactions write at a moment; what has been written by one that ended is due since then."""
        ended = [since for transaction, since in self._since.items() if transaction not in now]
        self.due_from = min([self.due_from, *ended])
        self._since = {transaction: self._since.get(transaction, self._watched_at) for transaction in now}
        self._watched_at = at - MARGIN

    def surveyed(self, floor: Floor, seconds: float) -> None:
        """Learn from a survey; do without bounds if there was nothing to pass over."""
        self.floor, self.due_from = floor, -inf
        self._quick_surveys = self._quick_surveys + 1 if seconds < QUICK else 0
        if self._quick_surveys >= SLOW_CLAIMS:
            self.forget()


class Bounded(Dialect):
    """Claims that begin where something may be found."""

    #: Claims runs of ``keys``.
    runs: ClassVar[str]

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self.bounds: dict[str, Bounds] = {}
        # Without bounds these words are nothing.
        self.identifiers |= dict.fromkeys(self._starts, "") | {"leased_from": ""}

    def forget_bounds(self) -> None:
        """Look for due messages and leases from the start again, because some may be there that were passed already."""
        for bounds in self.bounds.values():
            bounds.due_from = bounds.leased_from = -inf

    def leased(self, text: str, namespace: str) -> tuple[str, dict[str, float]]:
        """Return a statement that looks for leases that ran out, with where to begin if that is known."""
        bounds = self._bounds(namespace)
        if not bounds.is_active:
            return text, {}
        return text.replace("{leased_from}", self._leased_from), {"leased_from": bounds.leased_from}

    def look(self, plain: str, params: Mapping[str, Any], terms: ClaimTerms) -> Script[Sequence[Row]]:
        """Claim what a look at the keys of due messages finds, with ``plain`` or from where bounds begin."""
        bounds = self._bounds(params["namespace"])
        if bounds.is_active and bounds.clock() >= bounds.next_look:
            yield from self._watch(bounds, params["namespace"], terms)
        is_bounded = bounds.is_active and not terms.newest_first
        began, due_from, server = bounds.clock(), bounds.due_from, bounds.server
        if is_bounded:
            seen = yield self.query(self._claim_bounded, **params, **_bound_params(bounds, terms))
        else:
            seen = yield self.query(plain, **params)
        bounds.claimed([row for row in seen.rows if row[0] is not None], bounds.clock() - began)
        if is_bounded and seen.rows[0][MARK + 2] != server:
            bounds.forget()
        elif is_bounded and bounds.due_from == due_from:  # otherwise it was set back meanwhile, for a reason
            bounds.due_from = seen.rows[0][MARK + 1]
        return seen.rows

    def _bounds(self, namespace: str) -> Bounds:
        return self.bounds.setdefault(namespace, Bounds())

    def _watch(self, bounds: Bounds, namespace: str, terms: ClaimTerms) -> Script[None]:
        """Look who writes; once all have ended that could bring messages below a floor, make a survey."""
        # Set before anything is asked: another claim may be under way, and one that fails must not be repeated at once.
        bounds.next_look = began = bounds.clock()
        bounds.next_look += PAUSE
        is_survey_due = began >= bounds.next_survey
        highest, writers = bounds.highest, bounds.writers
        # Once in a while leases are looked for from the start, in case that one was given late.
        leased_from = -inf if is_survey_due else bounds.leased_from
        looked = yield self.query(self._writers, namespace=namespace, leased_from=leased_from)
        bounds.leased_from, at, server = looked.rows[0][:3]
        if server != bounds.server:
            bounds.floor, bounds.writers, bounds.server, writers = None, None, server, None
        now = {row[3]: row[4] for row in looked.rows if row[3] is not None}
        bounds.watch(now, at)
        if writers is None or (writers.have_ended(now) and is_survey_due):
            bounds.writers = Writers(highest, set(now))
            if writers:
                yield from self._survey(bounds, namespace, terms, writers.seq)
        if is_survey_due:
            bounds.next_survey = bounds.clock() + SHARE * (bounds.clock() - began)

    def _survey(self, bounds: Bounds, namespace: str, terms: ClaimTerms, seq: int) -> Script[None]:
        """Find the keys that begin below a floor, which is lowered if there are too many."""
        skips_dead = terms.on_dead == "skip"
        began = bounds.clock()
        bounds.next_survey = began + SHARE * PAUSE  # in case that it fails
        found = yield self.query(
            self._exceptions, namespace=namespace, floor=seq, skip_dead=skips_dead, most=EXCEPTIONS
        )
        rows = found.rows
        if len(rows) > EXCEPTIONS:
            seq, rows = rows[EXCEPTIONS][2] - 1, rows[:EXCEPTIONS]
        exceptions = {(row[0], row[1]): (row[2], row[3]) for row in rows}
        bounds.surveyed(Floor(seq, exceptions, skips_dead), bounds.clock() - began)

    @cached_property
    def _claim_bounded(self) -> str:
        runs = self.runs
        for word, text in self._starts.items():
            runs = runs.replace(f"{{{word}}}", text)
        return self._bounded_keys.replace("{leased_from}", self._leased_from) + runs

    #: What makes `runs` begin at the start of each key.
    _starts: ClassVar[Mapping[str, str]] = {
        "with_start": ", keys.start",
        "from_start_of_keys": " AND seq >= keys.start",
        "from_start_of_heads": " AND seq >= heads.start",
    }
    _leased_from: ClassVar[str] = " AND locked_until >= to_timestamp(:leased_from::float8)"
    server: ClassVar[str] = "extract(epoch FROM pg_postmaster_start_time())::text"
    # A transaction holds this lock from before it draws a number until it has ended, also one that is prepared.
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
        ), exceptions AS MATERIALIZED (
            SELECT * FROM unnest(:but_topics::text[], :but_keys::text[], :but_seqs::bigint[], :but_waits::boolean[])
                 AS t(topic, {{key}}, seq, waits)
        ), mark AS (
            SELECT :window IN ((SELECT count(*) FROM expired), (SELECT count(*) FROM due)) AS is_full,
                   -- What waits behind a head that waits itself is found with that head, or by the next survey.
                   extract(epoch FROM LEAST(now(), COALESCE(
                       (SELECT min(next_attempt_at) FROM due LEFT JOIN exceptions USING (topic, {{key}})
                        WHERE waits IS NOT TRUE),
                       (SELECT max(next_attempt_at) FROM due HAVING count(*) = :window))))::float8
                       - {MARGIN} AS due_from,
                   {server} AS server
        ), keys AS MATERIALIZED (
            SELECT topic, {{key}}, min(turn) AS turn,
                   -- A message that was seen is always reached, whatever the floor says.
                   CASE WHEN (SELECT server FROM mark) = :server::text
                        THEN LEAST(COALESCE(min(exceptions.seq), :floor::bigint + 1), min(either.seq))
                        ELSE 0 END AS start
            FROM (
                SELECT topic, {{key}}, seq, 0 AS turn FROM expired
                UNION ALL
                SELECT topic, {{key}}, seq, turn FROM due) AS either
            LEFT JOIN exceptions USING (topic, {{key}})
            GROUP BY topic, {{key}}
        ), """


def _bound_params(bounds: Bounds, terms: ClaimTerms) -> dict[str, Any]:
    floor = bounds.floor
    if floor and floor.skips_dead and terms.on_dead != "skip":
        floor = None  # it knows nothing of dead messages, which hold back others here and may be pending again
    exceptions = floor.exceptions if floor else {}
    return {
        "leased_from": bounds.leased_from,
        "due_from": bounds.due_from,
        "server": bounds.server,
        "floor": floor.seq if floor else -1,
        "but_topics": [topic for topic, _ in exceptions],
        "but_keys": [key for _, key in exceptions],
        "but_seqs": [seq for seq, _ in exceptions.values()],
        "but_waits": [waits for _, waits in exceptions.values()],
    }
