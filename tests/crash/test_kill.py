"""Dispatchers that die: nothing is lost, nothing appears from nowhere, no key is out of order."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from postroom import Outbox
from postroom.stores import PostgresStore, SQLiteStore
from postroom.testing.waiting import until

#: How long dispatchers are killed; a minute is what the promise is tested with.
SECONDS = float(os.environ.get("POSTROOM_KILL_SECONDS", "60"))
WORKER = Path(__file__).with_name("dispatching.py")


@dataclass
class Produced:
    """What the producers did, by their own account."""

    committed: dict[str, list[str]] = field(default_factory=dict)
    rolled_back: set[str] = field(default_factory=set)

    def ids(self) -> set[str]:
        return {identity for ids in self.committed.values() for identity in ids}


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

    def first(self, key: str) -> list[str]:
        """Return the messages of a key in the order of their first delivery."""
        return list(dict.fromkeys(identity for identity, its_key in self.lines if its_key == key))


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


async def produce(dsn: str, produced: Produced, keys: list[str], stop: asyncio.Event, seed: int) -> None:
    """Commit and roll back small transactions until told to stop; one producer owns its keys."""
    rng = random.Random(seed)
    outbox = Outbox()
    connection = await asyncpg.connect(dsn)
    try:
        while not stop.is_set():
            key = rng.choice([*keys, "-"])
            transaction = connection.transaction()
            await transaction.start()
            added = await outbox.add(
                connection, [{"n": n} for n in range(rng.randint(1, 8))], topic="t", key=None if key == "-" else key
            )
            ids = [str(one.id) for one in added]
            if rng.random() < 0.2:
                await transaction.rollback()
                produced.rolled_back.update(ids)
            else:
                await transaction.commit()
                produced.committed.setdefault(key, []).extend(ids)
            await asyncio.sleep(rng.uniform(0, 0.01))
    finally:
        await connection.close()


@pytest.mark.timeout(300)
async def test_two_dispatchers_killed_at_random_lose_nothing_and_keep_order(postgres_dsn: str, tmp_path: Path) -> None:
    """S2-32, S2-47, S2-49, S2-50, S4-20, G2, G3, G6: kill -9 for a minute under load, then every promise is checked."""
    store = PostgresStore(postgres_dsn)
    await store.apply_schema()
    await store.open()
    journal, produced, stop = tmp_path / "journal", Produced(), asyncio.Event()
    rng, kills, began = random.Random(), 0, time.monotonic()
    async with dispatchers(2, lambda: start(postgres_dsn, journal)) as running:
        producers = [
            asyncio.create_task(produce(postgres_dsn, produced, [f"{n}-{k}" for k in range(10)], stop, n))
            for n in range(2)
        ]
        while time.monotonic() - began < SECONDS:
            await asyncio.sleep(rng.uniform(0.3, 2.0))
            victim = rng.randrange(2)
            running[victim].kill()
            await running[victim].wait()
            kills += 1
            running[victim] = await start(postgres_dsn, journal)
        stop.set()
        await asyncio.gather(*producers)
        await until(
            lambda: _is_drained(store),
            "everything being delivered",
            within=timedelta(seconds=120),
            every=timedelta(seconds=0.2),
        )
        for process in running:
            process.send_signal(signal.SIGTERM)
        # One that was started a moment ago may not have set up its signal handler yet.
        assert {await process.wait() for process in running} <= {0, -signal.SIGTERM}
    received = Received.read(journal)
    duplicates = len(received.lines) - len(received.ids())
    print(f"{kills} kills, {len(produced.ids())} messages, {duplicates} duplicates")  # noqa: T201 -- the figure

    assert produced.ids() - received.ids() == set(), "lost"
    assert received.ids() - produced.ids() == set(), "phantom"
    assert received.ids() & produced.rolled_back == set(), "delivered though rolled back"
    for key in produced.committed.keys() - {"-"}:
        assert received.first(key) == produced.committed[key], f"key {key} is out of order"
    assert kills > SECONDS / 4
    assert len(produced.ids()) > 100
    await store.close()


async def _is_drained(store: PostgresStore | SQLiteStore) -> bool:
    stats = await store.stats()
    return stats.pending == 0 and stats.processing == 0


@pytest.mark.timeout(180)
async def test_a_message_that_kills_its_worker_ends_dead_and_takes_nobody_with_it(tmp_path: Path) -> None:
    """G9: crashes count as attempts; the neighbours of the poison are all delivered in spite of it."""
    path, journal = tmp_path / "outbox.sqlite3", tmp_path / "journal"
    store = SQLiteStore(path)
    await store.apply_schema()
    await store.open()
    outbox = Outbox()
    with closing(sqlite3.connect(path)) as connection, connection:
        neighbours = outbox.add(connection, [{"n": n} for n in range(15)], topic="t")
        outbox.add(connection, {"n": "poison"}, topic="t", dedupe_key="poison")
        neighbours += outbox.add(connection, [{"n": n} for n in range(15, 30)], topic="t")

    options = {"poison": "poison", "lease": 0.4, "max_attempts": 6}
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
