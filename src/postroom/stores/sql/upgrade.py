"""How tables are brought up to date while workers use them: one part at a time, and without holding anyone up."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import timedelta
from typing import Final

from ...errors import StoreContentionError
from .driver import Driver
from .schema import Change, Schema

__all__ = ["SCHEMA_TIMEOUT", "apply_schema"]

#: DDL may have to wait for other transactions.
SCHEMA_TIMEOUT: Final = timedelta(minutes=5)
#: An index on a table that is in use may take as long as reading the table, and as the longest transaction there is.
BUILD_TIMEOUT: Final = timedelta(hours=12)
#: How many seconds pass before a part that could not lock its table is tried again, so that others can work meanwhile.
PAUSE: Final = (0.5, 1.5)


async def apply_schema(schema: Schema, driver: Driver) -> bool:
    """Create the tables or bring them up to date; return whether there was anything to do."""
    due = await driver.run(schema.due(), timeout=SCHEMA_TIMEOUT)
    for change in due:
        await _make(schema, driver, change)
    is_mended = await driver.run(schema.mend(), timeout=SCHEMA_TIMEOUT)
    return is_mended or bool(due)


async def _make(schema: Schema, driver: Driver, change: Change) -> None:
    """Add one part; a table that is locked is let go soon, and tried again later."""
    deadline = time.monotonic() + SCHEMA_TIMEOUT.total_seconds()
    while True:
        try:
            return await driver.run(schema.make(change), atomic=change.is_atomic, timeout=BUILD_TIMEOUT)
        except StoreContentionError as error:
            if time.monotonic() > deadline:
                raise StoreContentionError(
                    f"{schema.part(change)} was not added to {schema.dialect.names.table}: other transactions have "
                    f"held a lock for {SCHEMA_TIMEOUT.total_seconds():.0f} s; end them, and run it again"
                ) from error
            await asyncio.sleep(random.uniform(*PAUSE))
