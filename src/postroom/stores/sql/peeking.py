"""Looking at the messages that claims would bring next: nothing is locked, and nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from .claiming import Claiming
from .counting import LOOKED_AT
from .statement import Row, Script
from .wording import Wording

__all__ = ["Peeking"]


class Peeking(Wording):
    """The statements of a peek."""

    def peek(self, namespace: str, limit: int, topic: str | None) -> Script[list[tuple[Row, float]]]:
        """Return rows in the order of a claim, each with how many seconds it has been due."""
        found = yield self.query(self._due_or_expired, namespace=namespace)
        rows = [row for row in found.rows if topic in {None, row[1]}]
        stops: dict[tuple[str, str], int] = {}
        if any(row[2] is not None for row in rows):
            held = yield self.query(self._stops, namespace=namespace)
            stops = {(row[0], row[1]): min(filter(None, row[2:])) for row in held.rows if any(row[2:])}
        chosen = _in_turn([row for row in rows if row[3] < stops.get((row[1], row[2]), math.inf)])[:limit]
        if not chosen:
            return []
        ages = {row[0]: float(row[6]) for row in chosen}
        # Payloads are read of these rows only.
        shown = yield self.query(self._shown, rows=[row[0] for row in chosen])
        return [(row, ages[row[0]]) for row in sorted(shown.rows, key=lambda row: row[12])]

    _shown: ClassVar[str] = f"SELECT {Claiming.columns} FROM {{outbox}} WHERE id IN :rows"
    _candidate: ClassVar[str] = "SELECT id, namespace, topic, {key}, seq, next_attempt_at"
    _is_pending: ClassVar[str] = "status = 'pending' AND next_attempt_at <= {now}"
    _candidates: ClassVar[str] = f"""
            SELECT * FROM (
                {_candidate}, 0 AS turn, locked_until AS since FROM {{outbox}}{{by_lease}}
                WHERE namespace = :namespace AND status = 'processing' AND locked_until < {{now}}
                ORDER BY locked_until, seq LIMIT {LOOKED_AT}) AS expired
            UNION ALL
            SELECT * FROM (
                {_candidate}, 1 AS turn, next_attempt_at AS since FROM {{outbox}}{{by_due}}
                WHERE namespace = :namespace AND {{loose}} AND {_is_pending}
                ORDER BY next_attempt_at, seq LIMIT {LOOKED_AT}) AS without_key
            UNION ALL
            SELECT * FROM (
                {_candidate}, 1 AS turn, next_attempt_at AS since FROM {{outbox}}{{by_due}}
                WHERE namespace = :namespace AND {{ordered}} AND {_is_pending}
                ORDER BY next_attempt_at, seq LIMIT {LOOKED_AT}) AS with_key"""
    #: Rows that are due, and rows whose lease ran out.
    _due_or_expired: ClassVar[str] = f"""
        SELECT id, topic, {{key}}, seq, turn, since, {{age_since_due}}
        FROM ({_candidates}) AS head
        """
    #: Of each key, the first row that has to wait and the first dead one, which hold back all that follows. It is asked
    #: once for each key: a line can be long, and from each of its rows all before it would be read again.
    _stops: ClassVar[str] = f"""
        SELECT line.topic, line.{{key}}, (
            SELECT earlier.seq FROM {{outbox}} AS earlier{{by_key}}
            WHERE {{unsettled}} AND earlier.namespace = :namespace
              AND earlier.topic = line.topic AND earlier.{{key}} = line.{{key}} AND earlier.seq < line.last
              AND NOT (earlier.status = 'pending' AND earlier.next_attempt_at <= {{now}})
              AND NOT (earlier.status = 'processing' AND earlier.locked_until < {{now}})
            ORDER BY earlier.seq LIMIT 1), (
            SELECT dead.seq FROM {{outbox}} AS dead{{by_dead}}
            WHERE dead.status = 'dead' AND dead.namespace = :namespace
              AND dead.topic = line.topic AND dead.{{key}} = line.{{key}}
            ORDER BY dead.seq LIMIT 1)
        FROM (
            SELECT topic, {{key}}, max(seq) AS last FROM ({_candidates}) AS head
            WHERE {{key}} IS NOT NULL GROUP BY topic, {{key}}) AS line
        """


def _in_turn(rows: Sequence[Row]) -> list[Row]:
    """Return rows as claims take them: expired leases before what is due, and the messages of a key in their order."""
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row[4], row[5], row[3])):
        lines.setdefault((row[3],) if row[2] is None else (row[1], row[2]), []).append(row)
    return [row for line in lines.values() for row in sorted(line, key=lambda row: row[3])]
