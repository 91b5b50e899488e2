"""What is done alike to the table of every peer: to fill it, and to see whether it is empty."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg

__all__ = ["emptiness", "refill"]


async def refill(dsn: str, insert: str, *arguments: int, tables: tuple[str, ...]) -> None:
    """Empty tables and fill them with one statement, which leaves them as tidy as postroom's own are."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"TRUNCATE {', '.join(tables)}")
    await connection.execute(insert, *arguments)
    for table in tables:
        await connection.execute(f"VACUUM ANALYZE {table}")
    await connection.execute("CHECKPOINT")
    await connection.close()


@asynccontextmanager
async def emptiness(dsn: str, table: str) -> AsyncGenerator[Callable[[], Awaitable[bool]]]:
    """Give a question that is asked over a connection of its own: is nothing left in the table?"""
    connection = await asyncpg.connect(dsn)

    async def is_empty() -> bool:
        return bool(await connection.fetchval(f"SELECT NOT EXISTS (SELECT FROM {table})"))

    try:
        yield is_empty
    finally:
        await connection.close()
