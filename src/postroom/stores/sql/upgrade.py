"""How tables are brought up to date while workers use them: one part at a time, and without holding anyone up."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import timedelta
from typing import Final

from ...errors import StoreContentionError
from .pool import Pool
from .schema import Change, Schema

__all__ = ["SCHEMA_TIMEOUT", "apply_schema"]

#: DDL may have to wait for other transactions.
SCHEMA_TIMEOUT: Final = timedelta(minutes=5)
#: An index on a table that is in use may take as long as reading the table, and as the longest transaction there is.
BUILD_TIMEOUT: Final = timedelta(hours=12)
#: For how long a part is tried to be added to a table that other transactions do not let go of.
GIVE_UP_AFTER: Final = timedelta(minutes=5)
#: How long a statement waits for its table at first, and how long it may wait after many attempts. Meanwhile other
#: transactions wait behind it, and MySQL ends those that have read from the table and want to write to it.
FIRST_WAIT: Final = timedelta(milliseconds=10)
LONGEST_WAIT: Final = timedelta(seconds=2)
#: By how much the wait grows from one attempt to the next.
GROWTH: Final = 1.5
#: How much longer than it waited a statement lets others work before its next attempt.
REST: Final = 4


async def apply_schema(schema: Schema, pool: Pool) -> bool:
    """Create the tables or bring them up to date; return whether there was anything to do."""
    due = await pool.run(schema.due(), timeout=SCHEMA_TIMEOUT)
    wait = FIRST_WAIT
    for change in due:
        wait = await _make(schema, pool, change, wait)
    is_mended = await pool.run(schema.mend(), timeout=SCHEMA_TIMEOUT)
    return is_mended or bool(due)


async def _make(schema: Schema, pool: Pool, change: Change, wait: timedelta) -> timedelta:
    """Add one part, and return how long it waited for its table; an attempt that does not get it soon is repeated."""
    deadline = time.monotonic() + GIVE_UP_AFTER.total_seconds()
    while True:
        try:
            await pool.run(schema.make(change, wait=wait), atomic=change.is_atomic, timeout=BUILD_TIMEOUT)
        except StoreContentionError as error:
            if time.monotonic() > deadline:
                raise _blocked(schema, change) from error
        else:
            return wait
        await asyncio.sleep(REST * wait.total_seconds() + random.uniform(0.05, 0.15))
        wait = min(wait * GROWTH, LONGEST_WAIT)


def _blocked(schema: Schema, change: Change) -> StoreContentionError:
    return StoreContentionError(
        f"{schema.part(change)} was not added to {schema.dialect.names.table}: other transactions have used the table "
        f"for {GIVE_UP_AFTER.total_seconds():.0f} s without a break; end those that stay open, and run it again"
    )
