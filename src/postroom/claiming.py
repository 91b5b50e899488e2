"""Claiming: the claims of a dispatcher that the store has not answered yet, and how much the next one takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from . import events
from .chunk import Chunk
from .custody import Custody
from .patience import persist
from .store import Claim, ClaimTerms, Store

__all__ = ["Claimed", "Claiming"]

#: How small a part of a batch is claimed while most of it has to wait, and how few messages at the least.
CLOGGED_SHARE = 16
CLOGGED_LEAST = 10
#: After how many small claims that could be sent there is no backlog any more.
MAX_FREE_RUNS = 5


class Claimed(NamedTuple):
    """What a claim brought, and whether nothing was held when it began."""

    claims: Sequence[Claim]
    began_idle: bool
    newest_first: bool


class Claiming:
    """Claims into custody, in smaller portions after a timeout or while most of what comes cannot be sent."""

    def __init__(
        self, store: Store, terms: ClaimTerms, custody: Custody, tell: events.Listener, batch: int, stop: asyncio.Event
    ) -> None:
        self._store = store
        self._terms = terms
        self._custody = custody
        self._tell = tell
        self._stop = stop
        self._batch = batch
        self._under_way: list[asyncio.Task[Claimed]] = []
        self._answered = asyncio.Event()
        self._size = Chunk(batch)
        #: Whether most of what was claimed last had to wait.
        self.is_clogged: bool = False
        #: How much is claimed then, by whether it begins with the newest.
        self._clogged_batch = {False: batch, True: batch}
        self._newest_first = False
        #: How many claims from the oldest on could be sent since the last that had to wait.
        self._free_runs = 0

    def __len__(self) -> int:
        """Return how many claims are under way."""
        return len(self._under_way)

    def begin(self, wanted: int, is_crowded: Callable[[int], bool]) -> bool:
        """Have one claim under way, or more unless it is crowded with those.

        Return whether one was begun that sees what was added last: behind a backlog only every other does.
        """
        sees_newest = False
        while len(self) < wanted and not (self and is_crowded(len(self))):
            self._newest_first = self.is_clogged and not self._newest_first
            claiming = asyncio.create_task(self._claim(self._newest_first))
            claiming.add_done_callback(lambda _: self._answered.set())
            self._under_way.append(claiming)
            sees_newest = sees_newest or self._newest_first or not self.is_clogged
        return sees_newest

    async def next(self) -> Claimed:
        """Wait for the first claim that is answered, be it one that was begun meanwhile."""
        while not (answered := [claiming for claiming in self._under_way if claiming.done()]):
            self._answered.clear()
            await self._answered.wait()
        self._under_way.remove(answered[0])
        return answered[0].result()

    async def end(self) -> None:
        """Wait until no claim is under way."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def is_full(self, claimed: Claimed) -> bool:
        """Tell whether a claim brought as much as it could."""
        return len(claimed.claims) == self._size.size

    def report(self, claimed: Claimed, sent: int) -> None:
        """Take note of how many messages of a claim may be sent.

        Behind a backlog that has to wait there may be messages that can be sent. So while most of what comes has to
        wait, every other claim begins with the newest, and all are small, to be done with soon.
        """
        newest_first, size = claimed.newest_first, len(claimed.claims)
        least = min(self._batch, CLOGGED_LEAST)
        if size > 2 * sent:
            self.is_clogged, self._free_runs = True, 0
            self._clogged_batch[newest_first] = least if newest_first else max(self._batch // CLOGGED_SHARE, least)
            return
        self._clogged_batch[newest_first] = min(self._clogged_batch[newest_first] * 2, self._batch)
        if not newest_first:
            # A few messages may be all that were due of one kind, while the backlog is of another.
            self._free_runs += 1
            self.is_clogged = self.is_clogged and size < least and self._free_runs < MAX_FREE_RUNS

    async def _claim(self, newest_first: bool) -> Claimed:  # noqa: FBT001 -- as below
        """Claim a batch into custody."""
        began_idle, granted = not self._custody, time.monotonic()
        call = partial(self._size.call, partial(self._claim_some, newest_first))
        claims = await persist("claim", call, self._tell, until=self._stop) or []
        if claims:
            self._custody.hold(claims, granted + self._terms.lease.total_seconds())
            self._tell(events.Claimed(len(claims)))
        return Claimed(claims, began_idle, newest_first)

    async def _claim_some(self, newest_first: bool, limit: int) -> list[Claim]:  # noqa: FBT001 -- for a partial
        if self.is_clogged:
            limit = min(limit, self._clogged_batch[newest_first])
        terms = self._terms
        if newest_first or self._size.size < self._batch:
            max_bytes = None if terms.max_bytes is None else self._size.share(terms.max_bytes)
            terms = replace(terms, newest_first=newest_first, max_bytes=max_bytes)
        return await self._store.claim(limit, terms)
