"""Bare SQL on sqlite3, as the best hand-written loop for the same work: same table, same batch, same durability.

There is one connection, since SQLite has one writer at a time.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import Any
from uuid import uuid4

from ..contender import Arrivals, Drained
from .postroom import Postroom

__all__ = ["contender"]

_NOW = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
_CLAIM = f"""
    UPDATE postroom_outbox
    SET status = 'processing', attempts = attempts + 1, token = token + 1, locked_by = ?, locked_until = {_NOW} + 30000
    WHERE seq IN (
        SELECT seq FROM postroom_outbox
        WHERE namespace = 'default' AND status = 'pending' AND key IS NULL AND next_attempt_at <= {_NOW}
        ORDER BY next_attempt_at, seq LIMIT ?)
    RETURNING id, topic, type, key, payload, content_type, headers, created_at, attempts, seq
    """


class Raw(Postroom):
    """Uses postroom's table and backlog, and nothing else of it."""

    async def drain(self, count: int, keys: int) -> Drained:
        arrivals = Arrivals(count, keys)
        began = time.perf_counter()
        with closing(sqlite3.connect(self.dsn.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            worker = str(uuid4())
            while rows := connection.execute(_CLAIM, (worker, self.batch)).fetchall():
                arrivals.payloads += [row[4] for row in rows]
                marks = ", ".join("?" * len(rows))
                connection.execute(f"DELETE FROM postroom_outbox WHERE seq IN ({marks})", [row[9] for row in rows])
        return arrivals.judged(time.perf_counter() - began)


def contender(dsn: str, **options: Any) -> Raw:  # noqa: ANN401 -- as for every contender
    """Return bare SQL at work on one file."""
    return Raw(dsn, **options)
