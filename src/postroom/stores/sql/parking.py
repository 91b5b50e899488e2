"""Parked messages as statements: which destinations have some, and how they become due again."""

from __future__ import annotations

from typing import ClassVar

from ...store import destination_name
from .statement import Script
from .wording import Wording

__all__ = ["Parking"]


class Parking(Wording):
    """The statements about messages that wait for a destination."""

    def parked(self, namespace: str, after: str, limit: int) -> Script[list[str]]:
        """Return destinations that have parked messages, stepping from one to the next in the index."""
        found = yield self.query(self._parked, namespace=namespace, after=after, limit=limit)
        return [row[0] for row in found.rows]

    _parked: ClassVar[str] = """
        WITH RECURSIVE names (destination, place) AS (
            SELECT destination, 1
            FROM (
                SELECT destination FROM {outbox}{by_parked}
                WHERE {is_parked} AND namespace = :namespace AND destination > :after
                ORDER BY destination LIMIT 1) AS first
            UNION ALL
            SELECT (
                SELECT destination FROM {outbox}{by_parked}
                WHERE {is_parked} AND namespace = :namespace AND destination > names.destination
                ORDER BY destination LIMIT 1), names.place + 1
            FROM names
            WHERE names.destination IS NOT NULL AND names.place < :limit)
        SELECT destination FROM names WHERE destination IS NOT NULL ORDER BY place
        """

    def unpark(self, namespace: str, destination: str, limit: int) -> Script[int]:
        """Make rows due that are parked for a destination, with the heads of their keys; return how many."""
        name = destination_name(destination)
        found = yield self.query(self._first_parked, namespace=namespace, destination=name, limit=limit)
        rows = [row[0] for row in found.rows]
        if not rows:
            return 0
        heads = yield self.query(self._heads_of, rows=rows)
        rows += {row[0] for row in heads.rows if row[0] is not None}.difference(rows)
        changed = yield self.sql(self._unpark, rows=rows, destination=name)
        return min(changed.count, limit)

    _first_parked: ClassVar[str] = """
        SELECT {row} FROM {outbox}{by_parked}
        WHERE {is_parked} AND namespace = :namespace AND destination = :destination
        ORDER BY next_attempt_at, seq LIMIT :limit{locking}
        """
    _heads_of: ClassVar[str] = """
        SELECT (
            SELECT {row} FROM {outbox} AS head{by_key}
            WHERE {unsettled} AND head.namespace = chosen.namespace
              AND head.topic = chosen.topic AND head.{key} = chosen.{key}
            ORDER BY head.seq LIMIT 1)
        FROM {outbox} AS chosen
        WHERE chosen.{row} IN :rows AND chosen.{key} IS NOT NULL
        """
    # States are named by what they are not, so that rows are found by what they were chosen by and by nothing else.
    _unpark: ClassVar[str] = """
        UPDATE {outbox}
        SET next_attempt_at = created_at, parked = NULL, updated_at = {now}
        WHERE {row} IN :rows AND parked = token AND destination = :destination
          AND status NOT IN ('processing', 'delivered', 'dead')
        """
