"""What keeps an outbox table in order while messages go through it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

from . import events
from .clock_watch import ClockWatch
from .errors import StoreError, StorePermissionError
from .patience import UPKEEP, persist
from .store import ClaimTerms, Store

__all__ = ["look_elsewhere", "purge_forever", "repair_forever", "sweep_forever"]

CHUNK = 1000
HOUR = timedelta(hours=1)
#: How many seconds a look at other namespaces may take.
PATIENCE = 5.0


async def sweep_forever(store: Store, terms: ClaimTerms, tell: events.Listener, *, every: timedelta) -> None:
    """Make messages dead that have no attempt left: those that crashed on their last one would wait for ever.

    After each sweep the store's clock is looked at, since messages wait for as long as it was put back.
    """
    watch = ClockWatch()
    await watch.look(store, tell)
    while True:
        await _rest(every)
        dead = await persist("sweep", partial(store.sweep, terms), tell, only=UPKEEP)
        if dead:
            tell(events.Swept(dead))
        await watch.look(store, tell)


async def purge_forever(store: Store, tell: events.Listener, *, every: timedelta) -> None:
    """Delete delivered messages past their retention, in chunks that leave the database to the claims in between."""
    purge = partial(store.purge, older_than=store.keep_delivered, limit=CHUNK)
    while True:
        await _rest(every)
        total, count = 0, CHUNK
        while count == CHUNK:
            count = await persist("purge", purge, tell, only=UPKEEP) or 0
            total += count
            await asyncio.sleep(0.01)
        if total:
            tell(events.Purged(total))


async def look_elsewhere(store: Store, tell: events.Listener) -> None:
    """Report if messages of other namespaces wait; errors of the store are reported by the claims that meet them."""
    with suppress(StoreError, StorePermissionError, TimeoutError):
        async with asyncio.timeout(PATIENCE):
            due = await store.due_elsewhere()
        if due:
            found = tuple(f"{count} in '{namespace}'" for namespace, count in sorted(due.items()))
            tell(events.DueElsewhere(store.namespace, found))


async def repair_forever(store: object, tell: events.Listener) -> None:
    """Have a store mended whose indexes can part from its messages; return at once if it has nothing to mend."""
    repair: Callable[[], Awaitable[int]] | None = getattr(store, "repair", None)
    while repair is not None:
        await _rest(HOUR)
        mended = await persist("repair", repair, tell, only=UPKEEP, deadline=None)
        if mended:
            tell(events.Repaired(mended))


async def _rest(length: timedelta) -> None:
    # Dispatchers that started together should not come together every time.
    await asyncio.sleep(length.total_seconds() * random.uniform(0.75, 1.0))
