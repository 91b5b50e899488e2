"""A message that kills whoever touches it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from postroom import Outbox
from postroom.stores import SQLiteStore

WORKER = Path(__file__).with_name("dispatching.py")


@dataclass(frozen=True)
class Received:
    """What the journal says was delivered, in order."""

    lines: list[tuple[str, str]]

    @classmethod
    def read(cls, journal: Path) -> Received:
        if not journal.exists():
            return cls([])
        fields = [line.split(" ") for line in journal.read_text().splitlines()]
        return cls([(line[0], line[1]) for line in fields])

    def ids(self) -> set[str]:
        return {identity for identity, _ in self.lines}


async def start(url: str, journal: Path, **options: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, str(WORKER), url, str(journal), json.dumps(options))


@asynccontextmanager
async def dispatchers(count: int, launch: Callable[[], object]) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    running: list[asyncio.subprocess.Process] = [await launch() for _ in range(count)]  # type: ignore[misc]
    try:
        yield running
    finally:
        for process in running:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _is_drained(store: SQLiteStore) -> bool:
    stats = await store.stats()
    return stats.pending == 0 and stats.processing == 0


@pytest.mark.requirement("G9")
@pytest.mark.timeout(180)
async def test_a_message_that_kills_its_worker_ends_dead_and_takes_nobody_with_it(tmp_path: Path) -> None:
    """Crashes count as attempts; the neighbours of the poison are all delivered in spite of it."""
    path, journal = tmp_path / "outbox.sqlite3", tmp_path / "journal"
    store = SQLiteStore(path)
    await store.apply_schema()
    await store.open()
    outbox = Outbox()
    with closing(sqlite3.connect(path)) as connection, connection:
        neighbours = outbox.add(connection, [{"n": n} for n in range(15)], topic="t")
        outbox.add(connection, {"n": "poison"}, topic="t", dedupe_key="poison")
        neighbours += outbox.add(connection, [{"n": n} for n in range(15, 30)], topic="t")

    options = {"poison": "poison", "lease": 1.5, "max_attempts": 6}
    deaths = 0
    while not await _is_drained(store):
        async with dispatchers(1, lambda: start(f"sqlite:///{path}", journal, **options)) as [process]:
            died = asyncio.create_task(process.wait())
            while not died.done() and not await _is_drained(store):
                await asyncio.wait({died}, timeout=0.05)
            deaths += died.done()
            died.cancel()
        assert deaths <= 6, "the poison has more attempts than its budget"
    stats = await store.stats()
    await store.close()

    assert (stats.delivered, stats.dead) == (30, 1)
    assert Received.read(journal).ids() == {str(one.id) for one in neighbours}
    assert deaths == 6
