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

#: How small a part of a batch is claimed while most of it has to wait.
CLOGGED_SHARE = 16
#: How few messages are claimed from the oldest on while others are added that can be sent, and from the newest on.
CLOGGED_LEAST = 10
NEWEST_LEAST = 4
#: For how many seconds after a message that can be sent others are expected.
FRESH = 1.0
#: After how many small claims that could be sent there is no backlog any more.
MAX_FREE_RUNS = 5
#: How many claims may begin with the newest before one begins with the oldest, however many messages are added.
MAX_NEWEST_RUNS = 8


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
        #: When a message was last added that may be sent, in seconds of the monotonic clock.
        self._fresh_at = -FRESH
        #: How many claims in a row began with the newest.
        self._newest_runs = 0
        #: How many claims from the oldest on could be sent since the last that had to wait.
        self._free_runs = 0

    def __len__(self) -> int:
        """Return how many claims are under way."""
        return len(self._under_way)

    @property
    def complete(self) -> int:
        """How many claims at the same time see everything that was added, with a key or without, behind a backlog."""
        return 2 if self.is_clogged and self._store.features.separates_keys else 1

    def begin(self, wanted: int, is_crowded: Callable[[int], bool], *, is_hinted: bool = False) -> bool:
        """Have one claim under way, or more unless it is crowded with those.

        Return whether one was begun that sees what was added last: behind a backlog every other does, and those that
        follow a hint.
        """
        sees_newest = False
        if is_hinted:
            self._fresh_at = time.monotonic()
        while len(self) < wanted and not (self and is_crowded(len(self))):
            is_newest_turn = self._newest_runs < (MAX_NEWEST_RUNS if is_hinted else 1)
            newest_first = self.is_clogged and is_newest_turn
            self._newest_runs = self._newest_runs + 1 if newest_first else 0
            claiming = asyncio.create_task(self._claim(newest_first))
            claiming.add_done_callback(lambda _: self._answered.set())
            self._under_way.append(claiming)
            sees_newest = sees_newest or newest_first or not self.is_clogged
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
        if newest_first and sent:
            self._fresh_at = time.monotonic()
        if size > 2 * sent:
            self.is_clogged, self._free_runs = True, 0
            is_quiet = time.monotonic() - self._fresh_at > FRESH
            oldest = max(self._batch // CLOGGED_SHARE, least) if is_quiet else least
            self._clogged_batch[newest_first] = min(self._batch, NEWEST_LEAST) if newest_first else oldest
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
