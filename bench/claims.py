"""How long a claim of 100 messages takes, in stores that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from uuid import uuid4

from postroom import Release
from postroom.store import ClaimTerms, Settlement, Store

__all__ = ["claims_in_turns"]

LIMIT = 100


async def claims_in_turns(stores: Sequence[Store], count: int) -> list[float]:
    """Return the median of what a claim takes in each store; what it took is given back, so that nothing changes."""
    taken: list[list[float]] = [[] for _ in stores]
    terms = ClaimTerms(worker=uuid4())
    for store in stores:
        await store.open()
    for _ in range(count):
        for store, times in zip(stores, taken, strict=True):
            began = time.perf_counter()
            claims = await store.claim(LIMIT, terms)
            times.append(time.perf_counter() - began)
            if len(claims) != LIMIT:
                raise RuntimeError(f"{len(claims)} messages were claimed instead of {LIMIT}")
            await store.settle([Settlement(claim, Release()) for claim in claims])
    for store in stores:
        await store.close()
    # The first ones open connections and fill caches.
    return [statistics.median(times[count // 10 :]) for times in taken]
