"""A backlog in postroom's own table, made by the database itself, which is far quicker than to add it."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import asyncmy
import asyncpg

from postroom.stores.sql.url import Place

from .contender import PAYLOAD, PAYLOAD_SQL

__all__ = ["fill", "mysql_options"]

_TAIL = '"}'
_HEAD = '{"n": '
_PAD = ', "pad": "'
_COLUMNS = "id, namespace, topic, type, {key}, payload, content_type, headers, next_attempt_at"

_POSTGRES = f"""
    INSERT INTO postroom_outbox ({_COLUMNS.format(key="key")})
    SELECT gen_random_uuid(), 'default', 'orders', 'orders',
           CASE WHEN $2 > 0 THEN 'customer-' || n % GREATEST($2, 1) END,
           convert_to({PAYLOAD_SQL}, 'UTF8'), 'application/json', '{{}}', now() - interval '1 second'
    FROM generate_series(1, $1::bigint) AS n
    """
_MARIADB = f"""
    INSERT INTO postroom_outbox ({_COLUMNS.format(key="`key`")}, created_at, updated_at)
    SELECT UNHEX(REPLACE(UUID(), '-', '')), 'default', 'orders', 'orders',
           IF(%s > 0, CONCAT('customer-', seq % GREATEST(%s, 1)), NULL),
           CONCAT(RPAD(CONCAT('{_HEAD}', seq, '{_PAD}'), {PAYLOAD - 2}, 'x'), '{_TAIL}'), 'application/json', '{{}}',
           UTC_TIMESTAMP(6) - INTERVAL 1 SECOND, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6)
    FROM seq_1_to_{{count}}
    """.replace("seq % G", "seq %% G")
_SQLITE = f"""
    WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)
    INSERT INTO postroom_outbox ({_COLUMNS.format(key="key")})
    SELECT lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-8'
                 || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))),
           'default', 'orders', 'orders', CASE WHEN :keys > 0 THEN 'customer-' || n % max(:keys, 1) END,
           CAST(substr('{_HEAD}' || n || '{_PAD}' || replace(hex(zeroblob({PAYLOAD})), '0', 'x'), 1, {PAYLOAD - 2})
                || '{_TAIL}' AS BLOB),
           'application/json', '{{}}', CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - 1000
    FROM numbers
    """


async def fill(dsn: str, count: int, keys: int) -> None:
    """Empty the table and have messages 1 to ``count`` waiting, with the key ``n % keys``, or none if that is 0."""
    if dsn.startswith("postgresql"):
        await _fill_postgres(dsn, count, keys)
    elif dsn.startswith("mysql"):
        await _fill_mariadb(dsn, count, keys)
    else:
        _fill_sqlite(dsn.removeprefix("sqlite:///"), count, keys)


async def _fill_postgres(dsn: str, count: int, keys: int) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("TRUNCATE postroom_outbox")
    await connection.execute(_POSTGRES, count, keys)
    await connection.execute("VACUUM ANALYZE postroom_outbox")
    await connection.execute("CHECKPOINT")
    await connection.close()


def mysql_options(dsn: str) -> dict[str, object]:
    """Return what asyncmy wants to know to connect."""
    place = Place.parse(dsn, schemes=("mysql",))
    return {"host": place.host, "port": place.port, "user": place.user, "password": "", "db": place.database}


async def _fill_mariadb(dsn: str, count: int, keys: int) -> None:
    connection = await asyncmy.connect(**mysql_options(dsn), autocommit=True)
    async with connection.cursor() as cursor:
        await cursor.execute("TRUNCATE TABLE postroom_outbox")
        await cursor.execute(_MARIADB.replace("{count}", str(count)), (keys, keys))
        await cursor.execute("ANALYZE TABLE postroom_outbox")
    connection.close()


def _fill_sqlite(path: str, count: int, keys: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        with connection:
            connection.execute("DELETE FROM postroom_outbox")
            connection.execute(_SQLITE, {"count": count, "keys": keys})
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
