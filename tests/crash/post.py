"""The broker of the crash matrix: a file that outlives whoever reads from it, as a broker outlives its consumers."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID

from postroom import Dead, Delivered, Delivery, Message, Outcome, Release, Retry
from postroom.errors import BrokerUnavailableError

__all__ = ["Post", "Reader", "Told"]

TABLES = """
    CREATE TABLE entries (entry INTEGER PRIMARY KEY, id TEXT NOT NULL, payload BLOB NOT NULL,
                          state TEXT NOT NULL DEFAULT 'waiting', holder TEXT, token INTEGER NOT NULL DEFAULT 0,
                          attempts INTEGER NOT NULL DEFAULT 0, due REAL NOT NULL DEFAULT 0);
    CREATE TABLE told (number INTEGER PRIMARY KEY, entry INTEGER NOT NULL, who TEXT NOT NULL, outcome TEXT NOT NULL);
    """
TAKE = """
    UPDATE entries SET holder = ?, token = token + 1, attempts = attempts + 1
    WHERE entry = (SELECT entry FROM entries
                   WHERE state = 'waiting' AND holder IS NULL AND due <= ? ORDER BY entry LIMIT 1)
    RETURNING entry, token, attempts, id, payload
    """
SETTLE = """
    UPDATE entries SET holder = NULL, state = ?, attempts = attempts - ?, due = ?
    WHERE entry = ? AND token = ? AND holder = ?
    """


@dataclass(frozen=True, slots=True)
class Told:
    """What the broker was told of an entry, and took note of."""

    who: str
    outcome: str


class Post:
    """One queue. Whatever was handed out and not settled stays with its reader until somebody says it is gone."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=10)

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create the file."""
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(TABLES)
        return cls(path)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def put(self, identity: UUID, payload: bytes = b"{}") -> None:
        """Take a message; the same one twice is handed out twice."""
        self._connection.execute("INSERT INTO entries (id, payload) VALUES (?, ?)", (str(identity), payload))

    def give_back(self, who: str) -> None:
        """Hand out again what a reader holds: it is gone, or has been silent for too long."""
        self._connection.execute("UPDATE entries SET holder = NULL WHERE holder = ?", (who,))

    def states(self) -> list[str]:
        """Return of each entry whether it waits, is acked or is dead."""
        return [state for (state,) in self._connection.execute("SELECT state FROM entries ORDER BY entry")]

    def told(self) -> list[Told]:
        """Return what was recorded, in that order."""
        found = self._connection.execute("SELECT who, outcome FROM told ORDER BY number")
        return [Told(who, outcome) for who, outcome in found]

    def take(self, who: str) -> Delivery | None:
        """Hand out what has waited longest."""
        row = self._connection.execute(TAKE, (who, time.time())).fetchone()
        if row is None:
            return None
        entry, token, attempts, identity, payload = row
        message = Message(topic="t", type="crash", payload=payload, id=UUID(identity), attempt=attempts)
        return Delivery(message, partial(self._settle, who, entry, token))

    async def _settle(self, who: str, entry: int, token: int, outcome: Outcome) -> None:
        state, delay = "waiting", timedelta(0)
        match outcome:
            case Delivered():
                state = "acked"
            case Dead():
                state = "dead"
            case Retry(_, wait) | Release(wait):
                delay = wait or delay
        spared = 1 if isinstance(outcome, Release) else 0
        values = (state, spared, time.time() + delay.total_seconds(), entry, token, who)
        self._connection.execute("BEGIN IMMEDIATE")
        is_recorded = self._connection.execute(SETTLE, values).rowcount == 1
        if is_recorded:
            told = (entry, who, type(outcome).__name__)
            self._connection.execute("INSERT INTO told (entry, who, outcome) VALUES (?, ?, ?)", told)
        self._connection.execute("COMMIT")
        if not is_recorded:
            raise BrokerUnavailableError("the message went to somebody else meanwhile")


class Reader:
    """A subscriber of the post; when it is left, what it holds goes back."""

    redelivery_horizon: timedelta | None = timedelta(days=1)

    def __init__(self, path: Path, who: str, *, takes_after: str = "") -> None:
        """Set up a reader that takes nothing before there is a file called ``takes_after``."""
        self._path = path
        self._who = who
        self._takes_after = takes_after
        self._post: Post | None = None

    async def __aenter__(self) -> Self:
        self._post = Post(self._path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._post is not None
        self._post.give_back(self._who)
        self._post.close()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        assert self._post is not None
        while True:
            delivery = self._post.take(self._who) if self._may_take() else None
            if delivery is not None:
                yield delivery
            else:
                await asyncio.sleep(0.01)

    def _may_take(self) -> bool:
        return not self._takes_after or Path(self._takes_after).exists()
