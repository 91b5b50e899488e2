"""What the demo has proved, or has not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Self, TypeAlias
from uuid import UUID

__all__ = ["Order", "Verdict"]

#: A customer, and which of the customer's orders it is.
Order: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was committed, against what arrived and against what came of it."""

    committed: int
    delivered: int
    #: Committed, but never arrived.
    missing: int
    #: Arrived, but never committed.
    unknown: int
    #: Arrived again, which at-least-once delivery allows; absorbed is what the inbox knew again.
    repeated: int
    absorbed: int
    #: Effects that did not happen, and those that happened again or for no order.
    undone: int
    overdone: int
    rolled_back: int
    #: Rolled back, and yet arrived.
    phantoms: int
    #: Arrived, or was handled, after a later order of the same customer.
    out_of_order: int
    dead: int
    outage: timedelta
    #: Whether deliveries went on after the outage.
    recovered: bool

    @classmethod
    def count(  # noqa: PLR0913 -- one for each source
        cls,
        *,
        committed: Mapping[UUID, Order],
        rolled_back: Sequence[UUID],
        arrived: Sequence[tuple[UUID, str, int]],
        effects: Sequence[Sequence[Order]],
        repeated: int,
        absorbed: int,
        dead: int,
        outage: timedelta,
        recovered: bool,
    ) -> Self:
        """Compare what the shop has with what the broker got, and with what each service did, both in order."""
        arrivals, undone = {identity for identity, _, _ in arrived}, set(rolled_back)
        wanted, done = Counter(committed.values()), [Counter(effect) for effect in effects]
        in_turn = [arrival for arrival in arrived if arrival[0] in committed]
        return cls(
            committed=len(committed),
            delivered=len(arrivals),
            missing=len(committed.keys() - arrivals),
            unknown=len(arrivals - committed.keys()),
            repeated=repeated,
            absorbed=absorbed,
            undone=sum((wanted - effect).total() for effect in done),
            overdone=sum((effect - wanted).total() for effect in done),
            rolled_back=len(undone),
            phantoms=len(arrivals & undone),
            out_of_order=_overtaken(in_turn)
            + sum(_overtaken([(order, *order) for order in effect]) for effect in effects),
            dead=dead,
            outage=outage,
            recovered=recovered,
        )

    @property
    def ok(self) -> bool:
        """Whether every promise was kept, and there was something to keep it for."""
        wrong = (
            self.missing + self.unknown + self.phantoms + self.undone + self.overdone + self.out_of_order + self.dead
        )
        has_happened = self.committed > 0 and self.rolled_back > 0 and self.repeated > 0 and self.recovered
        return has_happened and self.absorbed >= self.repeated and wrong == 0

    def __str__(self) -> str:
        """Return the verdict in one line."""
        relation = "=" if self.missing + self.unknown == 0 else "!="
        parts = [
            f"committed {self.committed:,} {relation} delivered {self.delivered:,}",
            f"rolled back {self.rolled_back:,} -> {self.phantoms:,} delivered",
            f"{self.repeated:,} duplicates -> {self.absorbed:,} absorbed",
            self._effects(),
            "each customer in order" if not self.out_of_order else f"{self.out_of_order:,} out of order",
            f"outage {self.outage.total_seconds():.1f} s {'survived' if self.recovered else 'NOT survived'}",
            f"{self.dead:,} dead",
        ]
        return f"demo: {', '.join(parts)}  {'OK' if self.ok else 'FAILED'}"

    def _effects(self) -> str:
        if not self.undone + self.overdone:
            return "each order reserved and shipped once"
        return f"{self.undone:,} effects missing and {self.overdone:,} too many"

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for programs; the outage is in seconds."""
        return {**asdict(self), "outage": round(self.outage.total_seconds(), 3), "ok": self.ok}


def _overtaken(arrived: Sequence[tuple[UUID | Order, str, int]]) -> int:
    """Count those that came for the first time after a later one of the same customer."""
    seen: set[UUID | Order] = set()
    latest: dict[str, int] = {}
    overtaken = 0
    for identity, customer, number in arrived:
        if identity in seen:
            continue
        seen.add(identity)
        overtaken += number < latest.get(customer, 0)
        latest[customer] = max(number, latest.get(customer, 0))
    return overtaken
