"""The store in memory: for tests, demos, and as the shortest reading of what a store does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Final
from uuid import UUID

from ..decisions import Question
from ..errors import ConfigurationError, NotInTransactionError
from ..inbox import Inbox
from ..message import DEFAULT_NAMESPACE, Message
from ..outbox import Added, Addition, Outbox
from ..store import Claim, ClaimTerms, Dead, Delivered, Features, Outcome, Release, Retry, Settlement, Stats
from ..writer import Writer

__all__ = ["MemoryRow", "MemoryStore", "MemoryTransaction", "writer_for"]

#: How often suspects are asked for first, so that a constant load cannot starve them.
SUSPECTS_EVERY: Final = 16
_NO_INBOX: Final = "a MemoryStore has no inbox, since its transactions hold nothing but messages; use a SQLiteStore"
_NO_TICKETS: Final = "a MemoryStore has no tickets; use a SQLiteStore"
_STATUS: Final = {Delivered: "delivered", Retry: "pending", Release: "pending", Dead: "dead"}


@dataclass(slots=True, eq=False)
class MemoryRow:
    """A stored message and what became of it so far."""

    message: Message
    due: datetime
    changed: datetime
    status: str = "pending"
    worker: UUID | None = None
    locked_until: datetime | None = None
    error: str | None = None

    def become(self, status: str, now: datetime) -> None:
        """Change the status, which also ends a lease."""
        self.status, self.changed, self.worker, self.locked_until = status, now, None, None

    def is_expired(self, now: datetime) -> bool:
        """Tell whether a lease ran out."""
        return self.locked_until is not None and self.locked_until < now


class MemoryStore:
    """Messages in a list, in order of arrival; they end with the process."""

    features: Features = Features(durable=False)

    def __init__(
        self,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        keep_delivered: timedelta = timedelta(days=7),
    ) -> None:
        self.namespace = namespace
        self.keep_delivered = keep_delivered
        self.rows: list[MemoryRow] = []
        self._clock = clock
        self._turn = 0

    @contextmanager
    def transaction(self) -> Generator[MemoryTransaction]:
        """Open a transaction for `Outbox.add`; leaving it with an error discards what was added."""
        transaction = MemoryTransaction(self)
        try:
            yield transaction
        except BaseException:
            transaction.is_open = False
            raise
        transaction.commit()

    async def open(self) -> bool:
        """Do nothing: it is open as long as it exists."""
        return False

    async def close(self) -> None:
        """Do nothing."""

    async def clock(self) -> datetime:
        """Return what the store's clock says."""
        return self._clock()

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        """Lease what is due, expired leases first, each key from its head on; or one suspect."""
        self._turn += 1
        now, lines = self._clock(), self._lines(terms)
        runs = [run for line in lines if (run := list(takewhile(lambda row: _is_ready(row, terms, now), line)))]
        runs.sort(key=lambda run: (run[0].status == "pending", run[0].locked_until or run[0].due))
        chosen = [row for run in runs for row in run][:limit]
        suspects = [line[0] for line in lines if _is_suspect(line[0], terms, now)]
        alone = bool(suspects) and limit > 0 and (not chosen or self._turn % SUSPECTS_EVERY == 0)
        if alone:
            chosen = [min(suspects, key=lambda row: row.locked_until or now)]
        return [_lease(row, terms, now, suspect=alone) for row in self._mine() if row in chosen]

    def _lines(self, terms: ClaimTerms) -> list[list[MemoryRow]]:
        """Return what has to go out one after the other: the messages of a key, or a single one without."""
        waiting = {"pending", "processing", "dead"} if terms.on_dead == "block" else {"pending", "processing"}
        lines: dict[object, list[MemoryRow]] = {}
        for row in self._mine():
            place = row.message.id if row.message.key is None else (row.message.topic, row.message.key)
            if row.status in waiting:
                lines.setdefault(place, []).append(row)
        return list(lines.values())

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        """Record what became of claims; return those that were lost."""
        return [settlement.claim for settlement in settlements if not self._settle(settlement)]

    def _settle(self, settlement: Settlement) -> bool:
        now, outcome, message = self._clock(), settlement.outcome, settlement.claim.message
        row, status = self._find(message.id), _STATUS[type(outcome)]
        if row is None:
            return isinstance(outcome, Delivered)  # only delivered messages are ever deleted
        if row.message.token != message.token:
            return False
        if row.status != "processing" and (row.status, status) != ("dead", "delivered"):
            return row.status == status  # it was settled before, in this way or in another
        self._record(row, outcome, now)
        return True

    def _record(self, row: MemoryRow, outcome: Outcome, now: datetime) -> None:
        row.become(_STATUS[type(outcome)], now)
        match outcome:
            case Delivered():
                row.error = None
                if not self.keep_delivered:
                    self.rows.remove(row)
            case Retry(error, delay):
                row.error, row.due = error, now + (delay or timedelta(0))
            case Dead(error):
                row.error = error
            case Release(delay):
                row.due = now + delay if delay else row.due
                row.message = replace(row.message, attempt=row.message.attempt - 1)

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        """Lease claims anew from now on; return those that were lost."""
        now, lost = self._clock(), list[Claim]()
        for claim in claims:
            row = self._find(claim.message.id)
            if row is None or row.status != "processing" or row.message.token != claim.message.token:
                lost.append(claim)
            else:
                row.locked_until, row.changed = now + lease, now
        return lost

    async def sweep(self, terms: ClaimTerms) -> int:
        """Make messages dead that have no attempt left."""
        now = self._clock()
        spent = [row for row in self._mine() if row.message.attempt >= terms.max_attempts]
        crashed = [row for row in spent if row.is_expired(now)]
        waiting = [row for row in spent if row.status == "pending" and row.due <= now]
        for row in crashed:
            row.error = "the lease ran out on the last attempt: the worker crashed or stalled"
        for row in crashed + waiting:
            row.error = row.error or "no attempts left"
            row.become("dead", now)
        return len(crashed + waiting)

    async def parked(self, *, after: str = "", limit: int = 100) -> list[str]:
        """Return destinations that have parked messages."""
        return []

    async def unpark(self, destination: str, limit: int) -> int:
        """Make messages due that are parked for a destination."""
        return 0

    async def purge(self, *, older_than: timedelta, limit: int = 1000) -> int:
        """Delete delivered messages past their retention."""
        latest = self._clock() - older_than
        old = [row for row in self._mine() if row.status == "delivered" and row.changed <= latest]
        oldest = sorted(old, key=lambda row: row.changed)[:limit]
        for row in oldest:
            self.rows.remove(row)
        return len(oldest)

    async def stats(self) -> Stats:
        """Tell how the namespace is doing."""
        now, rows = self._clock(), self._mine()
        states = [row.status for row in rows]
        ages = [now - row.due for row in rows if row.status == "pending" and row.due <= now]
        counts = {status: states.count(status) for status in ("pending", "processing", "delivered", "dead")}
        return Stats(**counts, oldest_due=max(ages, default=None))

    async def listen(self, wake: Callable[[], None]) -> None:
        """Return at once: nothing reaches memory from another process."""

    def _mine(self) -> list[MemoryRow]:
        return [row for row in self.rows if row.message.namespace == self.namespace]

    def _find(self, identity: UUID) -> MemoryRow | None:
        return next((row for row in self.rows if row.message.id == identity), None)

    def add(self, addition: Addition) -> Added:
        """Store one message, unless its id or its dedupe key is there; for transactions, which decide when."""
        message, now = addition.message, self._clock()
        there = next((row.message.id for row in self.rows if _is_same(row.message, message)), None)
        if there is not None:
            return Added(there, added=False)
        self.rows.append(MemoryRow(replace(message, time=now), addition.due_at or now + addition.delay, now))
        return Added(message.id, added=True)


def _is_ours(row: MemoryRow, terms: ClaimTerms) -> bool:
    return terms.tenant_id in {None, row.message.tenant_id} and row.message.topic not in terms.skip_topics


def _is_ready(row: MemoryRow, terms: ClaimTerms, now: datetime) -> bool:
    """Tell whether a message may be claimed together with others."""
    if row.status == "pending":
        return _is_ours(row, terms) and row.due <= now and row.message.attempt < terms.max_attempts
    return _is_ours(row, terms) and row.is_expired(now) and row.message.attempt < terms.suspect_after


def _is_suspect(row: MemoryRow, terms: ClaimTerms, now: datetime) -> bool:
    """Tell whether a message may have killed its worker often enough to be tried alone."""
    risky = terms.suspect_after <= row.message.attempt < terms.max_attempts
    return risky and row.is_expired(now) and _is_ours(row, terms)


def _lease(row: MemoryRow, terms: ClaimTerms, now: datetime, *, suspect: bool) -> Claim:
    row.status, row.changed, row.worker, row.locked_until = "processing", now, terms.worker, now + terms.lease
    row.message = replace(row.message, attempt=row.message.attempt + 1, token=row.message.token + 1)
    return Claim(row.message, suspect)


def _is_same(there: Message, new: Message) -> bool:
    place = (there.namespace, there.topic, there.dedupe_key)
    return there.id == new.id or (new.dedupe_key is not None and place == (new.namespace, new.topic, new.dedupe_key))


@dataclass(slots=True)
class MemoryTransaction:
    """Messages that wait for a commit."""

    store: MemoryStore
    waiting: list[Addition] = field(default_factory=list[Addition])
    wakes: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    is_open: bool = True

    def commit(self) -> None:
        """Store what was added, and wake who delivers it."""
        for addition in self.waiting:
            self.store.add(addition)
        for wake in self.wakes:
            wake()
        self.is_open = False

    def write(
        self, connection: MemoryTransaction, additions: Sequence[Addition], outbox: Outbox, *, outside_transaction: bool
    ) -> list[Added]:
        """Note messages down for the commit; outside of a transaction they are stored at once."""
        if not self.is_open and not outside_transaction:
            raise NotInTransactionError("use `with store.transaction() as transaction:`")
        trial = MemoryStore(namespace=self.store.namespace)
        trial.rows = list(self.store.rows)
        for addition in self.waiting:
            trial.add(addition)
        added = [trial.add(addition) for addition in additions]
        noted = self if self.is_open else MemoryTransaction(self.store)
        noted.waiting += additions
        noted.wakes += [outbox.wake] if outbox.wake is not None and outbox.wake not in noted.wakes else []
        if noted is not self:
            noted.commit()
        return added

    def admit(self, connection: MemoryTransaction, inbox: Inbox, message: Message) -> bool:
        """Refuse: nothing that a handler does would be undone together with a mark in memory."""
        raise ConfigurationError(_NO_INBOX)

    def has(self, connection: MemoryTransaction, inbox: Inbox, message: Message) -> bool:
        """Refuse like `admit`."""
        raise ConfigurationError(_NO_INBOX)

    def purge_inbox(self, connection: MemoryTransaction, inbox: Inbox, limit: int) -> int:
        """Refuse like `admit`."""
        raise ConfigurationError(_NO_INBOX)

    def bury(self, connection: MemoryTransaction, inbox: Inbox, message: Message, error: str) -> None:
        """Refuse like `admit`."""
        raise ConfigurationError(_NO_INBOX)

    def ask(self, connection: MemoryTransaction, outbox: Outbox, question: Question) -> object:
        """Refuse like `admit`."""
        raise ConfigurationError(_NO_TICKETS)


def writer_for(connection: object) -> Writer | None:
    """Return what writes through a connection, None if nothing does."""
    return connection if isinstance(connection, MemoryTransaction) else None
