"""How namespaces are doing: counts up to a ceiling, the age of the oldest message, and what waits in others."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, Final

from ...store import Stats
from .statement import Script
from .wording import Wording

__all__ = ["LOOKED_AT", "Counting"]

#: Counts stop here, so that looking at a large table costs no more than looking at a small one.
CEILING: Final = 10_000
#: How many due messages with a key, and how many parked ones, are looked at for the oldest that waits.
LOOKED_AT: Final = 1000
#: How many keys are looked at if none of those messages could go out.
KEYS_LOOKED_AT: Final = 100
#: How many namespaces are looked at for messages that are due, and up to how many such messages of each are counted.
NAMESPACES_LOOKED_AT: Final = 20
DUE_CEILING: Final = 1000


class Counting(Wording):
    """The statements of `Store.stats` and `Store.due_elsewhere`."""

    def stats(self, namespace: str) -> Script[Stats]:
        """Count up to a ceiling, and find the oldest message that waits."""
        # One statement, so that a message which changes its state meanwhile is counted once, and once only.
        columns = [
            f"(SELECT count(*) FROM (SELECT 1 AS one FROM {{outbox}} WHERE namespace = :namespace AND {where} "
            f"LIMIT {CEILING}) AS counted_{number})"
            for number, (_, where) in enumerate(self._counted)
        ]
        counted = yield self.query("SELECT " + ",\n".join(columns), namespace=namespace)
        counts: dict[str, int] = {}
        for (status, _), count in zip(self._counted, counted.rows[0], strict=True):
            counts[status] = min(counts.get(status, 0) + count, CEILING)
        ages = yield from self._ages(namespace)
        return Stats(
            **counts,
            oldest_due=timedelta(seconds=max(*ages, 0.0)) if ages else None,
            ceiling=CEILING,
        )

    # Pending messages are counted by lane, since that is how they are indexed.
    _counted: ClassVar[tuple[tuple[str, str], ...]] = (
        ("pending", "status = 'pending' AND {loose}"),
        ("pending", "status = 'pending' AND {ordered}"),
        ("processing", "status = 'processing'"),
        ("delivered", "status = 'delivered'"),
        ("dead", "status = 'dead'"),
    )

    def _ages(self, namespace: str) -> Script[list[float]]:
        """Return for how many seconds the oldest message of each kind has been waiting."""
        found = yield self.query(self._oldest, namespace=namespace)
        ages = [float(row[0]) for row in found.rows if row[0] is not None]
        front = yield self.query(self._oldest_keyed, namespace=namespace)
        looked_at, age = front.rows[0]
        if age is not None:
            ages.append(float(age))
        elif looked_at == LOOKED_AT:
            # Followers that are held back fill the front; keys behind them may be waiting all the same.
            ages += yield from self._ages_of_keys(namespace)
        return ages

    def _ages_of_keys(self, namespace: str) -> Script[list[float]]:
        topic, key, ages = "", "", list[float]()
        for _ in range(KEYS_LOOKED_AT):
            found = yield self.query(self._next_head, namespace=namespace, topic=topic, key=key)
            if not found.rows:
                break
            topic, key, age = found.rows[0]
            ages += [] if age is None else [float(age)]
        return ages

    _oldest: ClassVar[str] = f"""
        SELECT {{age_since_due}} FROM (
            SELECT min(next_attempt_at) AS next_attempt_at FROM {{outbox}}
            WHERE namespace = :namespace AND status = 'pending' AND {{loose}} AND next_attempt_at <= {{now}}) AS due
        UNION ALL
        SELECT {{age_since_created}} FROM (
            SELECT min(created_at) AS created_at FROM (
                SELECT created_at FROM {{outbox}}{{by_parked}}
                WHERE {{is_parked}} AND namespace = :namespace AND destination IS NOT NULL
                ORDER BY destination, next_attempt_at, seq LIMIT {LOOKED_AT}) AS first) AS parked
        """
    #: That no dead message of its key came before a row.
    no_dead_before: ClassVar[str] = """(
            SELECT dead.seq FROM {outbox} AS dead{by_dead}
            WHERE dead.status = 'dead' AND dead.namespace = head.namespace AND dead.topic = head.topic
              AND dead.{key} = head.{key} AND dead.seq < head.seq
            ORDER BY dead.seq LIMIT 1) IS NULL
        """
    #: That a row is the first of its key, and that no dead one of its key came before it.
    is_head: ClassVar[str] = f"""
        head.seq = (
            SELECT earlier.seq FROM {{outbox}} AS earlier{{by_key}}
            WHERE {{unsettled}} AND earlier.namespace = head.namespace
              AND earlier.topic = head.topic AND earlier.{{key}} = head.{{key}}
            ORDER BY earlier.seq LIMIT 1)
        AND {no_dead_before}"""
    _oldest_keyed: ClassVar[str] = f"""
        WITH head AS (
            SELECT namespace, topic, {{key}}, seq, next_attempt_at FROM {{outbox}}{{by_due}}
            WHERE namespace = :namespace AND status = 'pending' AND {{ordered}} AND next_attempt_at <= {{now}}
            ORDER BY next_attempt_at, seq LIMIT {LOOKED_AT})
        SELECT (SELECT count(*) FROM head),
               (SELECT {{age_since_due}} FROM head WHERE {is_head} ORDER BY next_attempt_at, seq LIMIT 1)
        """
    _next_head: ClassVar[str] = f"""
        SELECT topic, {{key}},
               CASE WHEN status = 'pending' AND next_attempt_at <= {{now}} AND {is_head} THEN {{age_since_due}} END
        FROM (
            SELECT namespace, topic, {{key}}, seq, status, next_attempt_at FROM {{outbox}}{{by_key}}
            WHERE {{unsettled}} AND namespace = :namespace AND {{after_key}}
            ORDER BY topic, {{key}}, seq LIMIT 1) AS head
        """

    def due_elsewhere(self, namespace: str) -> Script[dict[str, int]]:
        """Step from one namespace to the next in the index, and count in each what is due."""
        found: dict[str, int] = {}
        after = ""
        for _ in range(NAMESPACES_LOOKED_AT):
            step = yield self.query(self._next_namespace, after=after)
            if not step.rows:
                break
            after = step.rows[0][0]
            if after != namespace:
                counted = yield self.query(self._due_there, namespace=after)
                is_served, *counts = counted.rows[0]
                found |= {after: sum(counts)} if any(counts) and not is_served else {}
        return found

    # By the indexes of what is pending: what has been delivered is not read, however much of it there is.
    _next_namespace: ClassVar[str] = """
        SELECT namespace FROM (
            SELECT namespace FROM {outbox}
            WHERE status = 'pending' AND {loose} AND namespace > :after
            ORDER BY namespace, next_attempt_at, seq LIMIT 1) AS first_loose
        UNION ALL
        SELECT namespace FROM (
            SELECT namespace FROM {outbox}
            WHERE status = 'pending' AND {ordered} AND namespace > :after
            ORDER BY namespace, next_attempt_at, seq LIMIT 1) AS first_ordered
        ORDER BY namespace LIMIT 1
        """
    _due_there: ClassVar[str] = f"""
        SELECT (
            SELECT count(*) FROM (
                SELECT 1 AS one FROM {{outbox}}{{by_lease}}
                WHERE status = 'processing' AND namespace = :namespace AND locked_until > {{now}}
                ORDER BY locked_until, seq LIMIT 1) AS held),
        (
            SELECT count(*) FROM (
                SELECT 1 AS one FROM {{outbox}}{{by_due}}
                WHERE status = 'pending' AND {{loose}} AND namespace = :namespace AND next_attempt_at <= {{now}}
                ORDER BY next_attempt_at, seq LIMIT {DUE_CEILING}) AS due_loose),
        (
            SELECT count(*) FROM (
                SELECT 1 AS one FROM {{outbox}}{{by_due}}
                WHERE status = 'pending' AND {{ordered}} AND namespace = :namespace AND next_attempt_at <= {{now}}
                ORDER BY next_attempt_at, seq LIMIT {DUE_CEILING}) AS due_ordered)
        """
