"""Claims in flight: what a dispatcher holds, whose leases it renews, and whose outcomes it records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeAlias
from uuid import UUID

from . import events
from .message import Message
from .patience import persist
from .store import Claim, Dead, Delivered, Release, Retry, Settlement, Store

__all__ = ["Custody"]

# One message may be held twice, if its lease ran out and it was claimed again; the token tells the two apart.
_Key: TypeAlias = tuple[UUID, int]


@dataclass(slots=True)
class _Held:
    claim: Claim
    #: When the lease ends at the latest, in seconds of this process's monotonic clock.
    expires: float
    is_lost: bool = False


class Custody:
    """The claims of one dispatcher, from the claim to the recorded outcome."""

    def __init__(self, store: Store, lease: timedelta, tell: events.Listener, *, chunk: int) -> None:
        self._store = store
        self._lease = lease
        self._tell = tell
        self._chunk = chunk
        self._held: dict[_Key, _Held] = {}
        self._unsettled: list[Settlement] = []
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
        for claim in claims:
            self._held[_key(claim.message)] = _Held(claim, expires)

    def is_lost(self, message: Message) -> bool:
        """Tell whether a claim is known to be somebody else's by now."""
        held = self._held.get(_key(message))
        return held is not None and held.is_lost

    def is_safe(self, message: Message) -> bool:
        """Tell whether a claim is surely still ours, so that its message may be sent."""
        held = self._held.get(_key(message))
        return held is None or not (held.is_lost or time.monotonic() > held.expires)

    def undecided(self, claims: Iterable[Claim]) -> list[Claim]:
        """Return the claims that are held and have no outcome yet."""
        decided = {_key(settlement.claim.message) for settlement in self._unsettled}
        held = [claim for claim in claims if _key(claim.message) in self._held]
        return [claim for claim in held if _key(claim.message) not in decided and not self.is_lost(claim.message)]

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Have outcomes recorded, together with others that come at the same time."""
        if settlements:
            self._unsettled += settlements
            self._arrived.set()

    def release_undecided(self) -> int:
        """Give back every claim whose outcome is not known; return how many there were."""
        left = self.undecided([held.claim for held in self._held.values()])
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
                settlements = self._unsettled[: self._chunk]
                known = {_key(s.claim.message) for s in settlements if self.is_lost(s.claim.message)}
                # A lost lease is never followed by a nack; a confirmed delivery is always worth recording.
                worth = [s for s in settlements if _key(s.claim.message) not in known or s.outcome == Delivered()]
                lost = await persist("settle", partial(self._store.settle, worth), self._tell)
                del self._unsettled[: len(settlements)]
                refused = {_key(claim.message) for claim in lost or ()}
                self._record([s for s in worth if _key(s.claim.message) not in refused])
                self._report_lost([s.claim for s in worth if _key(s.claim.message) in refused - known])
                for settlement in settlements:
                    self._held.pop(_key(settlement.claim.message), None)
                self.recorded(settlements)
                self.progress.set()

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
                    self._tell(events.Retried(message.id, message.topic, message.attempt, delay or timedelta(0), error))
                case Dead(error):
                    self._tell(events.Died(message.id, message.topic, message.attempt, error))
        if delivered:
            self._tell(events.MessagesDelivered(delivered))
        if released:
            self._tell(events.MessagesReleased(released))

    def _report_lost(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            self._tell(events.LeaseLost(claim.message.id, claim.message.topic, claim.message.token))

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
        open_claims = self.undecided([held.claim for held in self._held.values()])
        aging = {_key(claim.message): self._held[_key(claim.message)] for claim in open_claims}
        aging = {key: held for key, held in aging.items() if held.expires - asked < lease * 0.7}
        if not aging:
            return
        claims = [held.claim for held in aging.values()]
        lost = await persist("extend", partial(self._store.extend, claims, self._lease), self._tell)
        # What was settled meanwhile is not lost, it is done.
        gone = {_key(claim.message) for claim in self.undecided(lost or ())}
        for key, held in aging.items():
            held.expires = asked + lease
            held.is_lost = key in gone
        self._report_lost(held.claim for held in aging.values() if held.is_lost)


def _key(message: Message) -> _Key:
    return message.id, message.token
