"""Looking at the messages that claims would bring next: nothing is locked, and nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .claiming import Claiming
from .counting import LOOKED_AT, Counting
from .statement import Row, Script
from .wording import Wording

__all__ = ["Peeking"]


class Peeking(Wording):
    """The statements of a peek."""

    def peek(self, namespace: str, limit: int, topic: str | None) -> Script[list[tuple[Row, float]]]:
        """Return rows in the order of a claim, each with how many seconds it has been due."""
        found = yield self.query(self._claimable, namespace=namespace)
        chosen = _in_turn([row for row in found.rows if topic in {None, row[1]}])[:limit]
        if not chosen:
            return []
        ages = {row[0]: float(row[6]) for row in chosen}
        # Payloads are read of these rows only.
        shown = yield self.query(self._shown, rows=[row[0] for row in chosen])
        return [(row, ages[row[0]]) for row in sorted(shown.rows, key=lambda row: row[12])]

    _shown: ClassVar[str] = f"SELECT {Claiming.columns} FROM {{outbox}} WHERE id IN :rows"
    _candidate: ClassVar[str] = "SELECT id, namespace, topic, {key}, seq, next_attempt_at"
    _is_pending: ClassVar[str] = "status = 'pending' AND next_attempt_at <= {now}"
    #: Rows that are due, and rows whose lease ran out, unless an earlier row of their key has to wait.
    _claimable: ClassVar[str] = f"""
        SELECT id, topic, {{key}}, seq, turn, since, {{age_since_due}}
        FROM (
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
                ORDER BY next_attempt_at, seq LIMIT {LOOKED_AT}) AS with_key) AS head
        WHERE {Counting.no_dead_before}
        AND (
            SELECT earlier.seq FROM {{outbox}} AS earlier{{by_key}}
            WHERE {{unsettled}} AND earlier.namespace = head.namespace
              AND earlier.topic = head.topic AND earlier.{{key}} = head.{{key}} AND earlier.seq < head.seq
              AND NOT (earlier.status = 'pending' AND earlier.next_attempt_at <= {{now}})
              AND NOT (earlier.status = 'processing' AND earlier.locked_until < {{now}})
            ORDER BY earlier.seq LIMIT 1) IS NULL
        """


def _in_turn(rows: Sequence[Row]) -> list[Row]:
    """Return rows as claims take them: expired leases before what is due, and the messages of a key in their order."""
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row[4], row[5], row[3])):
        lines.setdefault((row[3],) if row[2] is None else (row[1], row[2]), []).append(row)
    return [row for line in lines.values() for row in sorted(line, key=lambda row: row[3])]
