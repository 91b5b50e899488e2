"""`Outbox.transaction`: a transaction on a pool, and the wake-up after its commit."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Final

from ...errors import UnknownConnectionError
from .transactions import Block, transactions_for
from .transactions.wakeups import Wake, hint, hint_after_commit

__all__ = ["hint", "hint_after_commit", "transaction"]

# Pools and sessions of other libraries have no type that could be named without importing them.
Foreign = Any

_ACCEPTED: Final = (
    "asyncmy's Pool, asyncpg's Pool, SQLAlchemy's AsyncEngine or async_sessionmaker, psycopg's AsyncConnectionPool"
)


@contextlib.asynccontextmanager
async def transaction(pool: Foreign, wake: Wake | None) -> AsyncGenerator[Foreign]:
    """Open a transaction on a pool, yield what it holds, commit it and call ``wake``.

    Errors stay as the library says them.
    """
    transactions = transactions_for(pool)
    if not transactions.is_async:
        raise UnknownConnectionError(pool, _ACCEPTED)
    block = Block(transactions, translates=False)
    async with block as opened:
        if wake is not None and not block.is_telling:
            opened.after_commit(wake)
        yield opened.connection
