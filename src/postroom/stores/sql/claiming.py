"""Claiming messages in steps within one transaction: look, lock, check, take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from ...errors import DecodeError
from ...message import Message, drafted
from ...store import ClaimTerms
from .statement import Row, Script
from .wording import Wording

__all__ = ["NO_BOUND", "RUN", "WINDOW", "Claiming", "Walk", "in_order"]


#: More bytes than any table holds.
NO_BOUND = 1 << 62
_OLDEST_FIRST = "ORDER BY next_attempt_at, seq"
_NEWEST_FIRST = "ORDER BY next_attempt_at DESC, seq DESC"
#: How many due rows are looked at for one that may be claimed in order.
WINDOW = 4
#: The least number of messages of one key that travel together when there are many keys.
RUN = 8


@dataclass(slots=True)
class Walk:
    """Where the walk from key to key has come to; the next one goes on from there, so that no key is left out."""

    topic: str = ""
    key: str = ""
    #: Whether the next claim begins with it, because the one before saw too little of what is due.
    is_due: bool = False


class Claiming(Wording):
    """The statements of a claim."""

    def claim_loose(self, namespace: str, limit: int, terms: ClaimTerms) -> Script[Sequence[Row]]:
        """Claim messages without a key."""
        params = self._eligibility(namespace, terms, limit)
        expired = yield self.query(self._expired, limit=limit, **params)
        found = list(expired.rows)
        if len(found) < limit:
            due = yield self.query(in_order(self._due, terms), limit=limit - len(found), **params)
            found.extend(due.rows)
        return (yield from self._take(self._fitting(found, terms), terms))

    def claim_keyed(self, namespace: str, limit: int, terms: ClaimTerms, walk: Walk) -> Script[Sequence[Row]]:
        """Claim runs of keys that begin with the head of their key."""
        window = WINDOW * limit
        was_due, walk.is_due = walk.is_due, False
        if was_due:
            walked = yield from self._walk_keys(namespace, window, walk)
            claimed = yield from self._claim_runs(list(walked), namespace, limit, terms)
            if claimed:
                return claimed
        params = self._eligibility(namespace, terms)
        expired = yield self.query(self._expired_keys, limit=window, **params)
        due = yield self.query(in_order(self._due_keys, terms), limit=window, **params)
        keys = list(dict.fromkeys((row[0], row[1]) for row in (*expired.rows, *due.rows)))
        claimed = yield from self._claim_runs(keys, namespace, limit, terms)
        # Followers of keys that wait may fill the whole window; behind them there may be keys that could go.
        is_clogged = len(claimed) < limit and window in {len(expired.rows), len(due.rows)}
        if is_clogged and not claimed and not was_due:
            walked = yield from self._walk_keys(namespace, window, walk)
            return (yield from self._claim_runs(list(walked), namespace, limit, terms))
        walk.is_due = is_clogged
        return claimed

    def _walk_keys(self, namespace: str, steps: int, walk: Walk) -> Script[dict[tuple[str, str], None]]:
        """Step from key to key, and from the last to the first, until one comes again."""
        keys: dict[tuple[str, str], None] = {}
        for _ in range(steps):
            found = yield self.query(self._next_key, namespace=namespace, topic=walk.topic, key=walk.key)
            if not found.rows and not walk.topic:
                break
            walk.topic, walk.key = found.rows[0] if found.rows else ("", "")
            if (walk.topic, walk.key) in keys:
                break
            if walk.topic:
                keys[walk.topic, walk.key] = None
        return keys

    def _claim_runs(
        self, keys: Sequence[tuple[str, str]], namespace: str, limit: int, terms: ClaimTerms
    ) -> Script[Sequence[Row]]:
        params = self._eligibility(namespace, terms, limit)
        planned: dict[Any, tuple[tuple[str, str], int]] = {}
        length = max(limit // max(len(keys), 1), min(RUN, limit))
        for key in keys:
            room = min(length, limit - len(planned))
            if room == 0:
                break
            run = yield self.query(self._run, topic=key[0], key=key[1], length=room, **params)
            for place, (identity, eligible) in enumerate(run.rows):
                if not eligible:
                    break
                planned[identity] = (key, place)
        if not planned:
            return []
        locked = yield self.query(self._lock, rows=list(planned), **params)
        return (yield from self._take(self._fitting(_unbroken(locked.rows, planned), terms), terms))

    def claim_suspect(self, namespace: str, terms: ClaimTerms) -> Script[Sequence[Row]]:
        """Claim one message that may have killed its worker, if it is the head of its key."""
        picked = yield self.query(self._suspect, **self._eligibility(namespace, terms))
        return (yield from self._take(picked.rows, terms))

    def _fitting(self, found: Sequence[Row], terms: ClaimTerms) -> Sequence[Row]:
        """Return the first rows whose sizes add up to no more than a claim may return; one at least."""
        if terms.max_bytes is None:
            return found
        sizes = accumulate(row[1] for row in found)
        return found[: max(sum(size <= terms.max_bytes for size in sizes), 1)]

    def _take(self, found: Sequence[Row], terms: ClaimTerms) -> Script[Sequence[Row]]:
        """Lease rows that were found, and return them as they are then."""
        raise NotImplementedError

    _lease: ClassVar[str] = """
        UPDATE {outbox}
        SET status = 'processing', attempts = attempts + 1, token = token + 1,
            locked_by = :worker, locked_until = {later}, updated_at = {now}
        WHERE {row} IN :rows
        """

    def _eligibility(self, namespace: str, terms: ClaimTerms, limit: int = 1) -> dict[str, Any]:
        return {
            "namespace": namespace,
            "max_attempts": terms.max_attempts,
            "suspect_after": terms.suspect_after,
            "tenant_id": None if terms.tenant_id is None else self.uuid(terms.tenant_id),
            "skip_dead": terms.on_dead == "skip",
            # So many rows of this size are half of what a claim may return.
            "small": NO_BOUND if terms.max_bytes is None else terms.max_bytes // (2 * max(limit, 1)),
        }

    def decode(self, row: Row, namespace: str) -> Message:
        """Return the message of a claimed row; raise `DecodeError` if it is damaged."""
        try:
            headers = {} if row[6] in {"{}", b"{}"} else _headers(row[6])
            return drafted(
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
        except (ValueError, TypeError, AttributeError) as error:
            raise DecodeError(f"the stored row cannot be decoded: {type(error).__name__}: {error}") from error

    #: What publishing needs of a claimed row.
    columns: ClassVar[str] = (
        "id, topic, type, {key}, payload, content_type, headers, tenant_id, dedupe_key, created_at, "
        "attempts, token, seq"
    )
    is_due: ClassVar[str] = (
        "status = 'pending' AND next_attempt_at <= {now} AND attempts < :max_attempts AND {of_tenant}"
    )
    is_expired: ClassVar[str] = (
        "status = 'processing' AND locked_until < {now} AND attempts < :suspect_after AND {of_tenant}"
    )
    _due: ClassVar[str] = f"""
        SELECT {{found}} FROM {{outbox}}{{by_due}}
        WHERE namespace = :namespace AND {{loose}} AND {is_due}
        ORDER BY next_attempt_at, seq LIMIT :limit{{locking}}
        """
    _expired: ClassVar[str] = f"""
        SELECT {{found}} FROM {{outbox}}{{by_lease}}
        WHERE namespace = :namespace AND {{loose}} AND {is_expired}
        ORDER BY locked_until, seq LIMIT :limit{{locking}}
        """
    _due_keys: ClassVar[str] = f"""
        SELECT topic, {{key}} FROM {{outbox}}{{by_due}}
        WHERE namespace = :namespace AND {{ordered}} AND {is_due}
        ORDER BY next_attempt_at, seq LIMIT :limit
        """
    _expired_keys: ClassVar[str] = f"""
        SELECT topic, {{key}} FROM {{outbox}}{{by_lease}}
        WHERE namespace = :namespace AND {{ordered}} AND {is_expired}
        ORDER BY locked_until, seq LIMIT :limit
        """
    #: That no dead message stands before ``head`` in its key, unless dead ones are passed over.
    not_blocked: ClassVar[str] = """
        ({skip_dead} OR NOT EXISTS (
            SELECT 1 FROM {outbox} AS dead{by_dead}
            WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
              AND dead.{key} = head.{key} AND dead.seq < head.seq))
        """
    _run: ClassVar[str] = f"""
        SELECT {{row}}, (({is_due}) OR ({is_expired})) AND {not_blocked} AS eligible
        FROM {{outbox}} AS head{{by_key}}
        WHERE {{unsettled}} AND namespace = :namespace AND topic = :topic AND {{key}} = :key
        ORDER BY seq LIMIT :length
        """
    _lock: ClassVar[str] = f"""
        SELECT {{found}} FROM {{outbox}}
        WHERE {{row}} IN :rows AND namespace = :namespace AND (({is_due}) OR ({is_expired})){{locking}}
        """
    suspect: ClassVar[str] = f"""
        WHERE namespace = :namespace AND status = 'processing' AND locked_until < {{now}}
          AND attempts >= :suspect_after AND attempts < :max_attempts AND {{of_tenant}}
          AND {not_blocked}
          AND NOT EXISTS (
            SELECT 1 FROM {{outbox}} AS earlier{{by_key}}
            WHERE {{unsettled}} AND earlier.namespace = head.namespace
              AND earlier.topic = head.topic AND earlier.{{key}} = head.{{key}} AND earlier.seq < head.seq)
        ORDER BY locked_until, seq LIMIT 1{{locking}}
        """
    _suspect: ClassVar[str] = f"SELECT {{found}} FROM {{outbox}} AS head{{by_lease}} {suspect}"
    _next_key: ClassVar[str] = """
        SELECT topic, {key} FROM {outbox}{by_key}
        WHERE {unsettled} AND namespace = :namespace AND {after_key}
        ORDER BY topic, {key} LIMIT 1
        """


def _unbroken(rows: Sequence[Row], planned: Mapping[Any, tuple[tuple[str, str], int]]) -> list[Row]:
    """Keep the rows whose whole run before them could be locked as well, in the order in which they were planned."""
    chosen: list[Row] = []
    expected: dict[tuple[str, str], int] = {}
    turns = {identity: turn for turn, identity in enumerate(planned)}
    for row in sorted(rows, key=lambda row: turns[row[0]]):
        key, place = planned[row[0]]
        if place == expected.get(key, 0):
            chosen.append(row)
            expected[key] = place + 1
    return chosen


def in_order(text: str, terms: ClaimTerms) -> str:
    """Return a statement that looks for due rows from the oldest on, turned round if the terms ask for the newest."""
    return text.replace(_OLDEST_FIRST, _NEWEST_FIRST) if terms.newest_first else text


def _headers(text: str | bytes) -> dict[str, str]:
    headers = json.loads(text)
    if not isinstance(headers, dict):
        raise TypeError("headers are not an object")
    return headers  # pyright: ignore[reportUnknownVariableType] -- written by add, checked there
