"""What the demo has proved, or has not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Self
from uuid import UUID

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was committed, against what arrived."""

    committed: int
    delivered: int
    #: Committed, but never arrived.
    missing: int
    #: Arrived, but never committed.
    unknown: int
    #: Arrived again, which at-least-once delivery allows.
    repeated: int
    rolled_back: int
    #: Rolled back, and yet arrived.
    phantoms: int
    #: Arrived after a later order of the same customer.
    out_of_order: int
    dead: int
    outage: timedelta
    #: Whether deliveries went on after the outage.
    recovered: bool

    @classmethod
    def count(
        cls,
        *,
        committed: Sequence[UUID],
        rolled_back: Sequence[UUID],
        arrived: Sequence[tuple[UUID, str, int]],
        dead: int,
        outage: timedelta,
        recovered: bool,
    ) -> Self:
        """Compare what the shop has with what the broker got, in order: id, customer and number of the order."""
        wanted, arrivals, undone = set(committed), {identity for identity, _, _ in arrived}, set(rolled_back)
        return cls(
            committed=len(wanted),
            delivered=len(arrivals),
            missing=len(wanted - arrivals),
            unknown=len(arrivals - wanted),
            repeated=len(arrived) - len(arrivals),
            rolled_back=len(undone),
            phantoms=len(arrivals & undone),
            out_of_order=_overtaken([arrival for arrival in arrived if arrival[0] in wanted]),
            dead=dead,
            outage=outage,
            recovered=recovered,
        )

    @property
    def ok(self) -> bool:
        """Whether every promise was kept, and there was something to keep it for."""
        wrong = self.missing + self.unknown + self.phantoms + self.out_of_order + self.dead
        return self.committed > 0 and self.rolled_back > 0 and self.recovered and wrong == 0

    def __str__(self) -> str:
        """Return the verdict in one line."""
        relation = "=" if self.missing + self.unknown == 0 else "!="
        parts = [
            f"committed {self.committed:,} {relation} delivered {self.delivered:,}",
            f"rolled back {self.rolled_back:,} -> {self.phantoms:,} delivered",
            "each customer in order" if not self.out_of_order else f"{self.out_of_order:,} out of order",
            f"outage {self.outage.total_seconds():.1f} s {'survived' if self.recovered else 'NOT survived'}",
            f"{self.dead:,} dead",
        ]
        return f"demo: {', '.join(parts)}  {'OK' if self.ok else 'FAILED'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for programs; the outage is in seconds."""
        return {**asdict(self), "outage": round(self.outage.total_seconds(), 3), "ok": self.ok}


def _overtaken(arrived: Sequence[tuple[UUID, str, int]]) -> int:
    """Count those that came for the first time after a later one of the same customer."""
    seen: set[UUID] = set()
    latest: dict[str, int] = {}
    overtaken = 0
    for identity, customer, number in arrived:
        if identity in seen:
            continue
        seen.add(identity)
        overtaken += number < latest.get(customer, 0)
        latest[customer] = max(number, latest.get(customer, 0))
    return overtaken
