"""SQLite's one writer: handlers that hold it for long leave room for others between them."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from postroom.stores import SQLiteStore
from postroom.testing.waiting import until


async def test_transactions_that_hold_the_writer_for_long_let_another_process_write_between_them(
    sqlite_path: Path,
) -> None:
    """A dispatcher that renews leases must not wait for a whole queue of handlers."""
    store = SQLiteStore(sqlite_path)
    await store.apply_schema()
    steps: list[str] = []

    async def hold() -> None:
        async with store.transactions().begin():
            steps.append("held")
            await asyncio.sleep(0.4)

    def write() -> None:
        with closing(sqlite3.connect(sqlite_path, timeout=60, isolation_level=None)) as other:
            other.execute("CREATE TABLE other (id int)")
        steps.append("written")

    holding = [asyncio.create_task(hold()) for _ in range(5)]
    await until(lambda: bool(steps), "the writer is held", within=timedelta(seconds=30))
    await asyncio.to_thread(write)
    await asyncio.gather(*holding)
    await store.close()

    assert "held" in steps[steps.index("written") + 1 :], steps
