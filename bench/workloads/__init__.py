"""What is measured: each workload gives one or more rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from ..measure import Bench, Result
from . import adding, claiming, dispatching, draining, handling, latency, redis

__all__ = ["WORKLOADS", "Workload"]

Workload: TypeAlias = Callable[[Bench], Iterator[Result]]

#: By the beginning of the names of their results.
WORKLOADS: dict[str, Workload] = {
    "postgres.drain.": draining.loose,
    "postgres.drain_ordered.": draining.ordered,
    "sqlite.drain.": draining.sqlite,
    "mariadb.drain.": draining.mariadb,
    "redis.drain.": draining.redis,
    "redis_stream.drain.": draining.redis_stream,
    "postgres.add": adding.added,
    "postgres.commit_rate.": adding.committed,
    "postgres.latency.": latency.noticed,
    "postgres.claim.": claiming.flat,
    "postgres.held_snapshot.": claiming.held_snapshot,
    "postgres.held_snapshot_keyed.": claiming.held_snapshot_keyed,
    "dispatcher.rss_growth": dispatching.memory,
    "dispatcher.two_processes": dispatching.two_processes,
    "consume.postgres.": handling.consumed,
    "router.dispatch.": handling.dispatched,
    "redis.add": redis.added,
    "redis.claim.": redis.flat,
    "redis.bytes_per_message": redis.stored,
}
