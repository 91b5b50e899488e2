"""The reference model: what a store should hold after a sequence of calls, written down as plainly as can be.

It shares nothing with any store but the words: where both are wrong, they are wrong independently.
"""

# ruff: noqa: S101 -- what is proved is said as tests say it

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from ..message import Message
from ..outbox import AddResult
from ..store import PARKED_FOR, Claim, ClaimTerms, Dead, Delivered, Outcome, Release, Retry
from .contracts.harness import StoredRow

__all__ = ["Model", "ModelRow"]

#: Real time passes as well while a program runs; it must stay far below the shortest time of the model, in minutes.
TOLERANCE = 5


@dataclass(slots=True, eq=False)
class ModelRow:
    """What is expected of one message; moments are minutes of the model's clock."""

    message: Message
    due: int
    created: int
    status: str = "pending"
    attempts: int = 0
    token: int = 0
    until: int | None = None
    delivered: int | None = None
    error: str | None = None
    #: For which destination it is parked, and after how many others.
    destination: str | None = None
    turn: int = 0

    @property
    def line(self) -> object:
        """What goes out in order: the messages of one key."""
        return self.message.id if self.message.key is None else (self.message.topic, self.message.key)

    def end(self, status: str) -> None:
        """Leave the claim."""
        self.status, self.until = status, None


@dataclass(slots=True)
class Model:
    """The messages of one namespace."""

    now: int = 0
    rows: list[ModelRow] = field(default_factory=list[ModelRow])
    #: How often messages were parked together.
    turns: int = 0

    def find(self, identity: UUID) -> ModelRow | None:
        """Return a message that is stored."""
        return next((row for row in self.rows if row.message.id == identity), None)

    def add(self, message: Message, delay: int) -> AddResult:
        """Add a message unless its dedupe key is taken."""
        if message.dedupe_key is not None:
            for row in self.rows:
                if (row.message.topic, row.message.dedupe_key) == (message.topic, message.dedupe_key):
                    return AddResult(row.message.id, is_new=False)
        self.rows.append(ModelRow(message, self.now + delay, self.now))
        return AddResult(message.id, is_new=True)

    # -- claim -------------------------------------------------------------------------------------------------

    def take(self, claims: Sequence[Claim], limit: int, terms: ClaimTerms, lease: int, *, complete: bool) -> None:
        """Check that a store was right to claim these messages and no others, and claim them here too."""
        assert len(claims) <= limit
        size = sum(len(claim.message.payload) for claim in claims)
        if terms.max_bytes is not None and claims[1:]:
            assert size <= terms.max_bytes, "too many bytes were claimed"
        taken = [self._expected(claim) for claim in claims]
        places = [self.rows.index(row) for row in taken]
        assert places == sorted(set(places)), "claims do not come in order of arrival"
        if any(claim.suspect for claim in claims):
            assert len(claims) == 1, "a suspect does not travel alone"
            assert self._is_suspect(taken[0], terms), "an ordinary message was called a suspect"
            assert self._heads(terms)[taken[0].line] is taken[0], "a suspect was claimed before its turn"
        else:
            self._check_runs(taken, terms)
            if complete and not claims:
                self._check_nothing_was_left(taken, terms)
        for row in taken:
            row.status, row.until, row.destination = "processing", self.now + lease, None
            row.attempts, row.token = row.attempts + 1, row.token + 1

    def _expected(self, claim: Claim) -> ModelRow:
        row = self.find(claim.message.id)
        assert row is not None, "a message was claimed that is not stored"
        assert claim.message == row.message, "a message was changed"
        assert (claim.message.attempt, claim.message.token) == (row.attempts + 1, row.token + 1)
        return row

    def _check_runs(self, taken: Sequence[ModelRow], terms: ClaimTerms) -> None:
        for row in taken:
            assert self._is_ready(row, terms), f"{row} was claimed although it may not be"
            before = [other for other in self._waiting(row.line, terms) if self._is_before(other, row)]
            assert all(other in taken for other in before), f"{row} has overtaken another message of its key"

    def _check_nothing_was_left(self, taken: Sequence[ModelRow], terms: ClaimTerms) -> None:
        heads = self._heads(terms).values()
        left = [row for row in heads if self._is_ready(row, terms) and row not in taken]
        assert left == [], f"{left} could have been claimed"
        if not taken:
            assert [row for row in heads if self._is_suspect(row, terms)] == [], "a suspect was left alone"

    def _is_before(self, one: ModelRow, other: ModelRow) -> bool:
        return self.rows.index(one) < self.rows.index(other)

    def _waiting(self, line: object, terms: ClaimTerms) -> list[ModelRow]:
        """Return what a line consists of: what is not settled, and what died if that blocks it."""
        blocking = {"pending", "processing", "dead"} if terms.on_dead == "block" else {"pending", "processing"}
        return [row for row in self.rows if row.line == line and row.status in blocking]

    def _heads(self, terms: ClaimTerms) -> dict[object, ModelRow]:
        return {row.line: self._waiting(row.line, terms)[0] for row in self.rows if self._waiting(row.line, terms)}

    def _is_wanted(self, row: ModelRow, terms: ClaimTerms) -> bool:
        return terms.tenant_id in {None, row.message.tenant_id}

    def _is_ready(self, row: ModelRow, terms: ClaimTerms) -> bool:
        if row.status == "pending":
            return row.due <= self.now and row.attempts < terms.max_attempts and self._is_wanted(row, terms)
        return self._is_expired(row) and row.attempts < self._risky(terms) and self._is_wanted(row, terms)

    def _is_suspect(self, row: ModelRow, terms: ClaimTerms) -> bool:
        tried = self._risky(terms) <= row.attempts < terms.max_attempts
        return self._is_expired(row) and tried and self._is_wanted(row, terms)

    def _is_expired(self, row: ModelRow) -> bool:
        return row.until is not None and row.until < self.now

    def _risky(self, terms: ClaimTerms) -> int:
        """Three leases that ran out make a suspect; with fewer attempts the last one is made alone."""
        return {1: 1, 2: 1, 3: 2}.get(terms.max_attempts, 3)

    # -- settle ------------------------------------------------------------------------------------------------

    def settle(self, claim: Claim, outcome: Outcome, *, keep: bool) -> str:
        """Record an outcome; tell whether it was ``recorded``, ``lost``, or ``known`` before."""
        row = self.find(claim.message.id)
        if row is None:
            return "known" if isinstance(outcome, Delivered) else "lost"
        target = {Delivered: "delivered", Retry: "pending", Release: "pending", Dead: "dead"}[type(outcome)]
        if row.token != claim.message.token:
            return "lost"
        if row.status == "processing" or (row.status == "dead" and target == "delivered"):
            self._record(row, outcome, keep=keep)
            return "recorded"
        return "known" if row.status == target else "lost"

    def _record(self, row: ModelRow, outcome: Outcome, *, keep: bool) -> None:
        match outcome:
            case Delivered():
                row.end("delivered")
                row.delivered, row.error = self.now, None
                if not keep:
                    self.rows.remove(row)
            case Retry(error, delay):
                row.end("pending")
                row.error, row.due = error, self.now + (int(delay.total_seconds()) // 60 if delay else 0)
            case Dead(error):
                row.end("dead")
                row.error = error
            case Release(delay, None):
                row.end("pending")
                row.attempts = row.attempts - 1
                row.due = self.now + int(delay.total_seconds()) // 60 if delay else row.due

            case Release(_, destination):
                row.end("pending")
                row.attempts, row.destination, row.turn = row.attempts - 1, destination, self.turns
                row.due = self.now + int(PARKED_FOR.total_seconds()) // 60

    def parked(self) -> list[str]:
        """Return the destinations that have parked messages."""
        return sorted({row.destination for row in self.rows if row.destination and row.status == "pending"})

    def unpark(self, destination: str, limit: int) -> int:
        """Make messages due in the order in which they were parked, with the heads of their keys; return how many."""
        waiting = [row for row in self.rows if (row.status, row.destination) == ("pending", destination)]
        chosen = sorted(waiting, key=lambda row: row.turn)[:limit]
        unsettled = {"pending", "processing"}
        for row in list(chosen):
            head = next(other for other in self.rows if other.line == row.line and other.status in unsettled)
            chosen += [head] if head in waiting and head not in chosen else []
        for row in chosen:
            row.due, row.destination = row.created, None
        return min(len(chosen), limit)

    def extend(self, claim: Claim, lease: int) -> bool:
        """Prolong a lease; tell whether the claim was still held."""
        row = self.find(claim.message.id)
        if row is None or (row.status, row.token) != ("processing", claim.message.token):
            return False
        row.until = self.now + lease
        return True

    # -- upkeep ------------------------------------------------------------------------------------------------

    def sweep(self, max_attempts: int) -> int:
        """Bury what has no attempt left; return how many."""
        spent = [
            row
            for row in self.rows
            if row.attempts >= max_attempts
            and (self._is_expired(row) or (row.status == "pending" and row.due <= self.now))
        ]
        for row in spent:
            row.end("dead")
        return len(spent)

    def purge(self, left: set[UUID], older_than: int, limit: int) -> int:
        """Delete what a store has deleted, after a check; return how many that must be."""
        old = [row for row in self.rows if row.delivered is not None and row.delivered <= self.now - older_than]
        gone = [row for row in self.rows if row.message.id not in left]
        assert all(row in old for row in gone), "a message was deleted that had to stay"
        # Which of those of the same minute go first is left to the store.
        stay = [row.delivered or 0 for row in old if row not in gone]
        assert max((row.delivered or 0 for row in gone), default=0) <= min(stay, default=self.now)
        self.rows = [row for row in self.rows if row not in gone]
        return min(limit, len(old))

    # -- comparison --------------------------------------------------------------------------------------------

    def check(self, stored: Sequence[StoredRow]) -> None:
        """Check that a store holds what it should, in order of arrival."""
        expected = [(row.message.id, row.status, row.attempts, row.token) for row in self.rows]
        assert [(row.id, row.status, row.attempts, row.token) for row in stored] == expected
        for real, row in zip(stored, self.rows, strict=True):
            held = (real.worker is not None, real.lease_left is not None)
            assert held == ((True, True) if row.status == "processing" else (False, False)), "the lock is wrong"
            if row.status == "pending":
                assert abs(real.due_in.total_seconds() / 60 - (row.due - self.now)) < TOLERANCE
            if row.until is not None and real.lease_left is not None:
                assert abs(real.lease_left.total_seconds() / 60 - (row.until - self.now)) < TOLERANCE
            assert row.status == "dead" or real.last_error == row.error
            assert row.status != "dead" or real.last_error
