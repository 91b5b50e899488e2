"""A dispatcher process: an ordinary `Dispatcher` whose store and publisher are written down."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Final, cast
from uuid import UUID

from postroom import Backoff, Dispatcher
from postroom.errors import StoreError
from postroom.events import BreakerOpened, Event, LeaseLost, MessagesDelivered, MessagesReleased
from postroom.store import Claim, ClaimTerms, OnDead, Peeked, Settlement, Stats, Store

from .history import History
from .stores import LEASE, delivering_store
from .wire import PUBLISH_TIMEOUT, NamingWire, Wire
from .worker import Setting, at_work

__all__ = ["MAX_ATTEMPTS", "Recorded", "main", "watch_vitals"]

MAX_ATTEMPTS: Final = 8
#: Whose publisher names destinations; to those of the others a topic is one.
_NAMING: Final = "d1"


class Recorded:
    """A store that writes down what was claimed and settled through it."""

    def __init__(self, store: Store, history: History) -> None:
        self.namespace = store.namespace
        self.features = store.features
        self.keep_delivered = store.keep_delivered
        self._store = store
        self._history = history
        self._calls = count()
        # A claim may bring what a stream itself gives back at once, since it is not for these terms.
        step = "_settle" if hasattr(store, "_settle") else "settle"
        self._settle: Callable[[Sequence[Settlement]], Awaitable[list[Claim]]] = getattr(store, step)
        setattr(store, step, self._settled)

    async def open(self) -> bool:
        return await self._store.open()

    async def close(self) -> None:
        await self._store.close()

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        try:
            claims = await self._store.claim(limit, terms)
        except StoreError as error:
            self._history.write("claim", "info", error=type(error).__name__)
            raise
        if claims:
            self._history.write("claim", "ok", claims=[_named(claim) for claim in claims])
        return claims

    async def peek(self, limit: int, *, topic: str | None = None) -> list[Peeked]:
        return await self._store.peek(limit, topic=topic)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        return await self._store.settle(settlements)

    async def _settled(self, settlements: Sequence[Settlement]) -> list[Claim]:
        call = next(self._calls)
        wanted = [(*_named(one.claim), type(one.outcome).__name__.lower()) for one in settlements]
        self._history.write("settle", "invoke", call=call, settlements=wanted)
        try:
            lost = await self._settle(settlements)
        except StoreError as error:
            self._history.write("settle", "info", call=call, error=type(error).__name__)
            raise
        self._history.write("settle", "ok", call=call, lost=[_named(claim) for claim in lost])
        return lost

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        lost = await self._store.extend(claims, lease)
        gone = {_named(claim) for claim in lost}
        kept = [_named(claim) for claim in claims if _named(claim) not in gone]
        self._history.write("extend", "ok", claims=kept, lost=sorted(gone))
        return lost

    async def sweep(self, terms: ClaimTerms) -> int:
        dead = await self._store.sweep(terms)
        if dead:
            self._history.write("sweep", "ok", count=dead)
        return dead

    async def parked(self, *, after: str = "", limit: int = 100) -> list[str]:
        return await self._store.parked(after=after, limit=limit)

    async def unpark(self, destination: str, limit: int) -> int:
        return await self._store.unpark(destination, limit)

    async def due_elsewhere(self) -> dict[str, int]:
        return await self._store.due_elsewhere()

    async def purge(self, *, older_than: timedelta, limit: int = 1000) -> int:
        return await self._store.purge(older_than=older_than, limit=limit)

    async def stats(self) -> Stats:
        return await self._store.stats()

    async def listen(self, wake: Callable[[], None]) -> None:
        await self._store.listen(wake)


class Tally:
    """Counts what the dispatcher tells, to be compared with what its store was told."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.counts: Counter[str] = Counter()

    def hear(self, event: Event) -> None:
        name = type(event).__name__
        self.counts[name] += event.count if isinstance(event, MessagesDelivered | MessagesReleased) else 1
        if isinstance(event, BreakerOpened | LeaseLost):
            self._history.write("event", "ok", name=name)


def _named(claim: Claim) -> tuple[str, int]:
    return str(claim.message.id), claim.message.token


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").glob("*"))  # none where there is no such folder


async def watch_vitals(history: History) -> None:
    """Write down now and then what could leak."""
    while True:
        tasks = len(asyncio.all_tasks())
        history.write("vitals", "ok", fds=_open_files(), threads=threading.active_count(), tasks=tasks)
        await asyncio.sleep(1)


async def _run(setting: Setting) -> None:
    history = History(setting.place, setting.name)
    tally = Tally(history)
    store = delivering_store(setting.store, setting.url)
    dispatcher = Dispatcher(
        Recorded(store, history),
        (NamingWire if setting.name == _NAMING else Wire)(setting, history),
        batch=50,
        lease=LEASE,
        publish_timeout=PUBLISH_TIMEOUT,
        poll_interval=LEASE / 20,
        sweep_interval=LEASE / 4,
        max_attempts=MAX_ATTEMPTS,
        backoff=Backoff(base=timedelta(milliseconds=50), max=timedelta(milliseconds=400)),
        outage_backoff=Backoff(base=timedelta(milliseconds=50), max=timedelta(milliseconds=400)),
        on_dead=cast("OnDead", setting.on_dead),
        shutdown_grace=timedelta(seconds=3),
        worker=UUID(setting.worker),
        listener=tally.hear,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, dispatcher.stop_soon)
    history.write("start", "ok", life=setting.life, skew=setting.skew)
    at_work()
    vitals = asyncio.create_task(watch_vitals(history))
    try:
        await dispatcher.run()
    finally:
        vitals.cancel()
    history.write("stop", "ok", life=setting.life, counts=tally.counts)


def main(setting: Setting) -> None:
    """Deliver until told to stop."""
    asyncio.run(_run(setting))
