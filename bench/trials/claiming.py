"""How long a claim of 100 messages takes, in tables of every shape."""

from __future__ import annotations

from typing import Any

import asyncpg

from ..claims import claims_in_turns
from ..contenders.postroom import Postroom

__all__ = ["contender"]

_INSERT = """
    INSERT INTO postroom_outbox (id, namespace, topic, type, key, payload, content_type, next_attempt_at, status,
                                 delivered_at)
    SELECT gen_random_uuid(), 'default', 'orders', 'orders', {key}, '\\x7b7d', 'application/json', now() + {wait},
           '{status}', {delivered_at}
    """


def _rows(*, key: str = "NULL", wait: str = "interval '0'", status: str = "pending", delivered_at: str = "NULL") -> str:
    return _INSERT.format(key=key, wait=wait, status=status, delivered_at=delivered_at)


#: What stands in the table besides the messages that are claimed; $1 is how many.
_BESIDES = {
    "pending": _rows(),
    "backed_off": _rows(wait="interval '1 hour'"),
    "history": _rows(status="delivered", delivered_at="now()"),
    "hot_key": _rows(key="'hot'"),
    "many_keys": _rows(key="'key-' || n"),
    # Its head waits for an hour, and all the others wait for it.
    "blocked_key": _rows(key="'blocked'", wait="CASE WHEN n = 1 THEN interval '1 hour' ELSE interval '0' END"),
}
_DUE = {"loose": _rows(), "keyed": _rows(key="'c-' || n % 100")}
_SERIES = "FROM generate_series(1, $1::bigint) AS n"


class Claiming(Postroom):
    """Claims and gives back, again and again, so that the table stays as it is."""

    async def shape(self, due: str, count: int, besides: str, more: int) -> None:
        """Make a table with so many due messages and so many others."""
        connection = await asyncpg.connect(self.dsn)
        await connection.execute("TRUNCATE postroom_outbox")
        if more:
            await connection.execute(_BESIDES[besides] + _SERIES, more)
        if count:
            await connection.execute(_DUE[due] + _SERIES, count)
        await connection.execute("VACUUM ANALYZE postroom_outbox")
        await connection.execute("CHECKPOINT")
        await connection.close()

    async def medians(self, other: str, count: int) -> list[float]:
        """Return the medians of what a claim takes here and in another database, in seconds."""
        return await claims_in_turns([self.store(), Claiming(other).store()], count)


def contender(dsn: str, **options: Any) -> Claiming:  # noqa: ANN401 -- as for every contender
    """Return claims at work on one database."""
    return Claiming(dsn, **options)
