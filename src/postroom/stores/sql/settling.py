"""Settling claims: what became of them is recorded while their token is current."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, cast

from ...broker import MAX_ERROR
from ...store import Claim, Dead, Delivered, Release, Retry, Settlement, destination_name
from .statement import Script, Statement
from .wording import Wording

__all__ = ["Settling", "is_current", "is_lost"]


class Settling(Wording):
    """The statements that end or prolong a claim."""

    def settle(self, settlements: Sequence[Settlement], *, keep_delivered: bool) -> Script[list[Claim]]:
        """Record outcomes whose token is current; return the claims that were lost."""
        if all(type(settlement.outcome) is Delivered for settlement in settlements):
            changed = 0
            for statement in self._settling(settlements, keep_delivered=keep_delivered):
                result = yield statement
                changed += result.count
            if changed == len(settlements):
                return []  # the usual case, in which nothing need be asked
        states = yield self.query(
            "SELECT id, token, status FROM {outbox} WHERE id IN :ids{waiting}",
            ids=[self.uuid(settlement.claim.message.id) for settlement in settlements],
        )
        known = {self.to_uuid(row[0]): (row[1], row[2]) for row in states.rows}
        current: list[Settlement] = []
        lost: list[Claim] = []
        for settlement in settlements:
            state = known.get(settlement.claim.message.id)
            if is_current(settlement, state):
                current.append(settlement)
            elif is_lost(settlement, state):
                lost.append(settlement.claim)
        yield from self._settling(current, keep_delivered=keep_delivered)
        return lost

    def _settling(self, settlements: Sequence[Settlement], *, keep_delivered: bool) -> Script[None]:
        """Yield one statement for each kind of outcome."""
        kinds: dict[type, list[Settlement]] = {}
        for settlement in settlements:
            kinds.setdefault(type(settlement.outcome), []).append(settlement)
        if delivered := kinds.get(Delivered):
            yield from self._delivering([s.claim for s in delivered], keep=keep_delivered)
        if retried := kinds.get(Retry):
            outcomes = [cast("Retry", s.outcome) for s in retried]
            storable = [Retry(_storable(outcome.error), outcome.delay) for outcome in outcomes]
            yield self._retry([(s.claim, outcome) for s, outcome in zip(retried, storable, strict=True)])
        if dead := kinds.get(Dead):
            yield self._bury([(s.claim, _storable(cast("Dead", s.outcome).error)) for s in dead])
        if released := [(s.claim, cast("Release", s.outcome)) for s in kinds.get(Release, [])]:
            yield from self._releasing(released)

    def _releasing(self, released: Sequence[tuple[Claim, Release]]) -> Iterator[Statement]:
        plain = [(claim, outcome.delay) for claim, outcome in released if not outcome.destination]
        parked = [(claim, destination_name(outcome.destination)) for claim, outcome in released if outcome.destination]
        if plain:
            yield self._release(plain)
        if parked:
            yield self._park(parked)

    _keep: ClassVar[str] = """
        UPDATE {outbox}
        SET status = 'delivered', delivered_at = {now}, updated_at = {now},
            locked_by = NULL, locked_until = NULL, last_error = NULL
        """
    _delete: ClassVar[str] = "DELETE FROM {outbox} "

    def _delivering(self, claims: Sequence[Claim], *, keep: bool) -> Iterator[Statement]:
        """Yield a statement for each token; nearly always that is one."""
        ids: dict[int, list[Any]] = {}
        for claim in claims:
            ids.setdefault(claim.message.token, []).append(self.uuid(claim.message.id))
        text = (self._keep if keep else self._delete) + "WHERE id IN :ids AND token = :token AND " + self.deliverable
        for token, of_token in ids.items():
            yield self.sql(text, ids=of_token, token=token)

    #: Also a message that the sweep has buried may yet be confirmed; pending or delivered it needs nothing any more.
    deliverable: ClassVar[str] = "status NOT IN ('pending', 'delivered')"

    def _retry(self, retried: Sequence[tuple[Claim, Retry]]) -> Statement:
        raise NotImplementedError

    def _bury(self, dead: Sequence[tuple[Claim, str]]) -> Statement:
        raise NotImplementedError

    def _release(self, released: Sequence[tuple[Claim, timedelta]]) -> Statement:
        raise NotImplementedError

    def _park(self, parked: Sequence[tuple[Claim, str]]) -> Statement:
        raise NotImplementedError

    def extend(self, claims: Sequence[Claim], lease: timedelta) -> Script[list[Claim]]:
        """Move the end of leases; return the claims that were lost."""
        states = yield self.query(
            "SELECT id, token, status FROM {outbox} WHERE id IN :ids{waiting}",
            ids=[self.uuid(claim.message.id) for claim in claims],
        )
        tokens = {self.to_uuid(row[0]): row[1] for row in states.rows if row[2] == "processing"}
        held = [claim for claim in claims if tokens.get(claim.message.id) == claim.message.token]
        lost = [claim for claim in claims if tokens.get(claim.message.id) != claim.message.token]
        if held:
            yield self.sql(
                "UPDATE {outbox} SET locked_until = {later}, updated_at = {now} WHERE id IN :ids",
                ids=[self.uuid(claim.message.id) for claim in held],
                duration=self.duration(lease),
            )
        return lost


def is_current(settlement: Settlement, state: tuple[int, str] | None) -> bool:
    """Tell whether a settlement may still be recorded.

    A message that the sweep buried may yet be confirmed by the worker that was only slow.
    """
    if state is None or state[0] != settlement.claim.message.token:
        return False
    return state[1] == "processing" or (state[1] == "dead" and isinstance(settlement.outcome, Delivered))


_SETTLED: Mapping[type, str] = {Delivered: "delivered", Retry: "pending", Release: "pending", Dead: "dead"}


def is_lost(settlement: Settlement, state: tuple[int, str] | None) -> bool:
    """Tell whether somebody else decided about a claim, rather than this settlement earlier."""
    if state is None:
        # Only delivered messages are ever deleted.
        return not isinstance(settlement.outcome, Delivered)
    return state != (settlement.claim.message.token, _SETTLED[type(settlement.outcome)])


def _storable(error: str) -> str:
    """Return an error that every database takes: one that it refused would keep a whole batch from being settled."""
    return error[:MAX_ERROR].replace("\x00", " ").encode(errors="replace").decode()
