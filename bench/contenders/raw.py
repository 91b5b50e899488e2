"""Bare SQL on asyncpg, as the best hand-written loop for the same work: same table, same batch, two connections.

Each connection claims a batch with one statement, hands it to a publisher that does nothing, and deletes or marks it
with another. For order by key each connection has its own half of the keys and does one batch after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from ..contender import Arrivals, Drained
from .postroom import Postroom

__all__ = ["contender"]

_CLAIM = """
    WITH chosen AS MATERIALIZED (
        SELECT id FROM postroom_outbox
        WHERE namespace = 'default' AND status = 'pending' AND {which} AND next_attempt_at <= now()
        ORDER BY next_attempt_at, seq LIMIT $1 FOR UPDATE SKIP LOCKED
    )
    UPDATE postroom_outbox
    SET status = 'processing', attempts = attempts + 1, token = token + 1, locked_by = $2, locked_until = now() + $3
    WHERE id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING id, topic, type, key, payload, content_type, headers, created_at, attempts, seq
    """
_DELETE = "DELETE FROM postroom_outbox WHERE id = ANY ($1)"
_KEEP = """
    UPDATE postroom_outbox
    SET status = 'delivered', delivered_at = now(), locked_by = NULL, locked_until = NULL WHERE id = ANY ($1)
    """
_CONNECTIONS = 2


class Raw(Postroom):
    """Uses postroom's table and backlog, and nothing else of it."""

    async def drain(self, count: int, keys: int) -> Drained:
        arrivals = Arrivals(count, keys)
        began = time.perf_counter()
        connections = [await asyncpg.connect(self.dsn) for _ in range(_CONNECTIONS)]
        await asyncio.gather(*(self._loop(connection, half, arrivals) for half, connection in enumerate(connections)))
        seconds = time.perf_counter() - began
        for connection in connections:
            await connection.close()
        return arrivals.judged(seconds)

    async def _loop(self, connection: asyncpg.Connection[Any], half: int, arrivals: Arrivals) -> None:
        which = f"key IS NOT NULL AND hashtext(key) & 1 = {half}" if arrivals.keys else "key IS NULL"
        # As postroom does: on a table whose statistics are of an hour ago a plan without them is the better one.
        await connection.execute("SET enable_seqscan = off")
        await connection.execute("SET plan_cache_mode = force_custom_plan")
        claim = await connection.prepare(_CLAIM.format(which=which))
        settle = await connection.prepare(_KEEP if self.keep else _DELETE)
        worker, lease = uuid4(), timedelta(seconds=30)
        while rows := await claim.fetch(self.batch, worker, lease):
            if arrivals.keys:
                rows.sort(key=lambda row: row[9])
            arrivals.payloads += [row[4] for row in rows]
            ids: Sequence[UUID] = [row[0] for row in rows]
            await settle.fetch(ids)


def contender(dsn: str, **options: Any) -> Raw:  # noqa: ANN401 -- as for every contender
    """Return bare SQL at work on one database."""
    return Raw(dsn, **options)
