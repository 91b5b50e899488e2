"""Bare SQL on asyncmy, as the best hand-written loop for the same work: same table, same batch, two connections."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

import asyncmy
from asyncmy import errors as asyncmy_errors

from ..backlog import mysql_options
from ..contender import Arrivals, Drained
from .postroom import Postroom

__all__ = ["contender"]

_SELECT = """
    SELECT id, topic, type, `key`, payload, content_type, headers, created_at, attempts, seq
    FROM postroom_outbox FORCE INDEX (postroom_outbox_ready)
    WHERE namespace = 'default' AND status = 'pending' AND ordered = 0 AND next_attempt_at <= UTC_TIMESTAMP(6)
    ORDER BY next_attempt_at, seq LIMIT %s FOR UPDATE SKIP LOCKED
    """
_TAKE = """
    UPDATE postroom_outbox
    SET status = 'processing', attempts = attempts + 1, token = token + 1, locked_by = %s,
        locked_until = UTC_TIMESTAMP(6) + INTERVAL 30 SECOND
    WHERE id IN ({marks})
    """
_DELETE = "DELETE FROM postroom_outbox WHERE id IN ({marks})"
_CONNECTIONS = 2
_DEADLOCK = 1213


class Raw(Postroom):
    """Uses postroom's table and backlog, and nothing else of it."""

    async def drain(self, count: int, keys: int) -> Drained:
        arrivals = Arrivals(count, keys)
        began = time.perf_counter()
        await asyncio.gather(*(self._loop(arrivals) for _ in range(_CONNECTIONS)))
        return arrivals.judged(time.perf_counter() - began)

    async def _loop(self, arrivals: Arrivals) -> None:
        connection = await asyncmy.connect(
            **mysql_options(self.dsn),
            autocommit=True,
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        )
        async with connection.cursor() as cursor:
            while True:
                try:
                    ids = await self._step(connection, cursor, arrivals)
                except asyncmy_errors.OperationalError as error:
                    if error.args[0] != _DEADLOCK:
                        raise
                    await connection.rollback()
                    continue
                if not ids:
                    break
        connection.close()

    async def _step(self, connection: Any, cursor: Any, arrivals: Arrivals) -> list[bytes]:  # noqa: ANN401 -- untyped
        await connection.begin()
        await cursor.execute(_SELECT, (self.batch,))
        rows = await cursor.fetchall()
        ids = [row[0] for row in rows]
        marks = ", ".join(["%s"] * len(ids))
        if ids:
            await cursor.execute(_TAKE.format(marks=marks), (uuid4().bytes, *ids))
        await connection.commit()
        if ids:
            arrivals.payloads += [row[4] for row in rows]
            await self._delete(cursor, marks, ids)
        return ids

    async def _delete(self, cursor: Any, marks: str, ids: list[bytes]) -> None:  # noqa: ANN401 -- untyped
        while True:
            try:
                await cursor.execute(_DELETE.format(marks=marks), ids)
            except asyncmy_errors.OperationalError as error:
                if error.args[0] != _DEADLOCK:
                    raise
            else:
                return


def contender(dsn: str, **options: Any) -> Raw:  # noqa: ANN401 -- as for every contender
    """Return bare SQL at work on one database."""
    return Raw(dsn, **options)
