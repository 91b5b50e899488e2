"""Claims in flight: what a dispatcher holds, whose leases it renews, and whose outcomes it records."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeAlias

from . import events
from .chunk import Chunk
from .message import Message
from .patience import persist
from .store import Claim, Dead, Delivered, Release, Retry, Settlement, Store

__all__ = ["Custody"]

# One message may be held twice, if its lease ran out and it was claimed again; the token tells the two apart.
_Key: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class _Lease:
    #: When it ends at the latest, in seconds of this process's monotonic clock.
    expires: float


class Custody:
    """The claims of one dispatcher, from the claim to the recorded outcome."""

    def __init__(self, store: Store, lease: timedelta, tell: events.Listener, *, chunk: int) -> None:
        self._store = store
        self._lease = lease
        self._tell = tell
        self._settling = Chunk(chunk)
        self._extending = Chunk(chunk)
        #: What was claimed together has one lease, until it is renewed in several calls.
        self._held: dict[_Key, tuple[Claim, _Lease]] = {}
        #: Claims that are known to be somebody else's by now.
        self._lost: set[_Key] = set()
        self._unsettled: list[Settlement] = []
        #: The sum of the payloads of all claims that are held.
        self.size: int = 0
        self._arrived = asyncio.Event()
        #: Set whenever claims were settled.
        self.progress: asyncio.Event = asyncio.Event()
        #: Called with settlements that are in the store.
        self.recorded: Callable[[Sequence[Settlement]], None] = lambda _: None

    def __len__(self) -> int:
        """Return how many claims are held."""
        return len(self._held)

    def hold(self, claims: Iterable[Claim], expires: float) -> None:
        """Take claims into custody."""
        lease = _Lease(expires)
        for claim in claims:
            self._held[_key(claim.message)] = claim, lease
            self.size += len(claim.message.payload)

    def is_safe(self, message: Message) -> bool:
        """Tell whether a claim is surely still ours, so that its message may be sent."""
        held = self._held.get(_key(message))
        return held is None or not (_key(message) in self._lost or time.monotonic() > held[1].expires)

    def expires(self, claim: Claim) -> float:
        """Return when the lease of a claim ends at the latest, in seconds of this process's monotonic clock."""
        held = self._held.get(_key(claim.message))
        return math.inf if held is None else held[1].expires

    def without_outcome(self, claims: Iterable[Claim]) -> list[Claim]:
        """Return the claims that are held and have no outcome yet."""
        open_keys = self._held.keys() - {_key(settlement.claim.message) for settlement in self._unsettled}
        return [claim for claim in claims if _key(claim.message) in open_keys]

    def undecided(self, claims: Iterable[Claim]) -> list[Claim]:
        """Return the claims without an outcome that are not known to be lost."""
        return [claim for claim in self.without_outcome(claims) if _key(claim.message) not in self._lost]

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Have outcomes recorded, together with others that come at the same time."""
        if settlements:
            self._unsettled += settlements
            self._arrived.set()

    def release_undecided(self) -> int:
        """Give back every claim whose outcome is not known; return how many there were."""
        left = self.undecided([claim for claim, _ in self._held.values()])
        self.settle([Settlement(claim, Release()) for claim in left])
        return len(left)

    async def wait_until_settled(self) -> None:
        """Wait until every outcome is recorded."""
        while self._unsettled:
            self.progress.clear()
            await self.progress.wait()

    async def settle_forever(self) -> None:
        """Record outcomes as they arrive, many at once."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._unsettled:
                settled = await persist("settle", partial(self._settling.call, self._settle), self._tell)
                settlements, worth, lost = settled or ([], [], [])
                del self._unsettled[: len(settlements)]
                self._end(settlements, worth, lost)
                self.recorded(settlements)
                self.progress.set()

    async def _settle(self, limit: int) -> tuple[Sequence[Settlement], Sequence[Settlement], Sequence[Claim]]:
        settlements = self._unsettled[:limit]
        worth = self._worth_recording(settlements)
        return settlements, worth, await self._store.settle(worth)

    def _worth_recording(self, settlements: Sequence[Settlement]) -> Sequence[Settlement]:
        """Leave out lost claims: none is followed by a nack, but a confirmed delivery is always worth recording."""
        if not self._lost:
            return settlements
        return [s for s in settlements if _key(s.claim.message) not in self._lost or s.outcome == Delivered()]

    def _end(self, settlements: Sequence[Settlement], recorded: Sequence[Settlement], lost: Sequence[Claim]) -> None:
        if lost:
            refused = {_key(claim.message) for claim in lost}
            recorded = [s for s in recorded if _key(s.claim.message) not in refused]
            self._report_lost(claim for claim in lost if _key(claim.message) not in self._lost)
        self._record(recorded)
        for settlement in settlements:
            message = settlement.claim.message
            if self._held.pop(_key(message), None) is not None:
                self.size -= len(message.payload)
        self._lost &= self._held.keys()

    def _record(self, settlements: Sequence[Settlement]) -> None:
        delivered = released = 0
        for settlement in settlements:
            message = settlement.claim.message
            match settlement.outcome:
                case Delivered():
                    delivered += 1
                case Release():
                    released += 1
                case Retry(error, delay):
                    at = (message.id, message.topic, message.attempt)
                    self._tell(events.Retried(*at, delay or timedelta(0), error, message.key))
                case Dead(error):
                    self._tell(events.Died(message.id, message.topic, message.attempt, error, message.key))
        if delivered:
            self._tell(events.MessagesDelivered(delivered))
        if released:
            self._tell(events.MessagesReleased(released))

    def _report_lost(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            message = claim.message
            self._tell(events.LeaseLost(message.id, message.topic, message.token, message.key))

    async def renew_forever(self) -> None:
        """Renew leases at a third of their length, and notice when the event loop stood still."""
        third = self._lease.total_seconds() / 3
        while True:
            planned = time.monotonic() + third
            await asyncio.sleep(third)
            late = time.monotonic() - planned
            if late > third:
                self._tell(events.LoopStalled(timedelta(seconds=late)))
            await self._renew()

    async def _renew(self) -> None:
        asked = time.monotonic()
        lease = self._lease.total_seconds()
        # What is being settled is not renewed: the answer could come after the settlement and look like a loss.
        open_claims = self.undecided([claim for claim, _ in self._held.values()])
        aging = [(claim, self._held[_key(claim.message)][1]) for claim in open_claims]
        aging = [(claim, held) for claim, held in aging if held.expires - asked < lease * 0.7]
        is_split = False
        while aging:
            renewed = await persist("extend", partial(self._extending.call, partial(self._extend, aging)), self._tell)
            count, lost = renewed or (len(aging), [])
            is_split = is_split or count < len(aging)
            self._prolong(aging[:count], asked + lease, is_split=is_split)
            del aging[:count]
            # What was settled meanwhile is not lost, it is done.
            gone = self.undecided(lost)
            self._lost.update(_key(claim.message) for claim in gone)
            self._report_lost(gone)

    def _prolong(self, renewed: Sequence[tuple[Claim, _Lease]], expires: float, *, is_split: bool) -> None:
        if not is_split:
            for _, held in renewed:
                held.expires = expires
            return
        # Others that were claimed with these are not renewed yet, and must not look so.
        lease = _Lease(expires)
        for claim, _ in renewed:
            if _key(claim.message) in self._held:  # it may have been settled meanwhile
                self._held[_key(claim.message)] = claim, lease

    async def _extend(self, aging: Sequence[tuple[Claim, _Lease]], limit: int) -> tuple[int, Sequence[Claim]]:
        claims = [claim for claim, _ in aging[:limit]]
        return len(claims), await self._store.extend(claims, self._lease)


def _key(message: Message) -> _Key:
    return message.id.int, message.token
