"""What producers are sure to send, so that every run reaches what chance alone may not lead to."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from chaos.audit import truth_of
from chaos.desk import Rollback, SQLiteDesk
from chaos.history import Event, History, read
from chaos.producer import Producer
from chaos.worker import Setting
from postroom import Outbox
from postroom.errors import CommitUnknownError
from postroom.stores import SQLiteStore


class Unlucky(SQLiteDesk):
    """Fails to commit at first, and then does not know whether it has committed."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.faults: list[Exception] = [Rollback(), CommitUnknownError()]

    @contextlib.asynccontextmanager
    async def transaction(self, outbox: Outbox) -> AsyncIterator[sqlite3.Connection]:
        async with super().transaction(outbox) as connection:
            yield connection
            if self.faults:
                raise self.faults.pop(0)


@pytest.fixture
async def desk(sqlite_path: Path) -> AsyncIterator[Unlucky]:
    """A desk of a database with all tables."""
    store = SQLiteStore(sqlite_path)
    await store.apply_schema()
    await store.close()
    truth = truth_of("sqlite", f"sqlite:///{sqlite_path}")
    truth.install()
    truth.close()
    with contextlib.closing(sqlite3.connect(sqlite_path, isolation_level=None)) as connection:
        yield Unlucky(connection)


def added(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield for each transaction how it ended, and the kinds of its messages."""
    events: list[Event] = [event for event in read(folder) if event["op"] == "enqueue"]
    for begun, ended in zip(events[::2], events[1::2], strict=True):
        yield ended["type"], [message["kind"] for message in begun["messages"]]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("life", [0, 3])
async def test_a_producer_adds_what_no_consumer_gets_done_until_it_is_committed(
    desk: Unlucky, tmp_path: Path, seed: int, life: int
) -> None:
    """Whatever the dice say and however often it is killed: a run with a message has dead letters."""
    setting = Setting(name="p1", store="sqlite", url="", folder=str(tmp_path), port=0, seed=seed, life=life)
    producer = Producer(setting, desk, History(tmp_path, setting.name))

    for _ in range(4):
        await producer.work()

    fated, then = list(added(tmp_path))[:3], list(added(tmp_path))[3:]
    assert fated == [("fail", ["sour"]), ("info", ["sour"]), ("ok", ["sour"])]
    assert then
    assert [kinds for _, kinds in then] != [["sour"]]
