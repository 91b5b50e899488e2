"""The store in memory: for tests, demos, and as the shortest reading of what a store does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, takewhile
from typing import Final, TypeVar, Unpack

from ..checks import check_duration, check_function
from ..decisions import Question
from ..duplicates import log_duplicates
from ..errors import ConfigurationError, InvalidNameError, NotInTransactionError
from ..inbox import Inbox
from ..message import DEFAULT_NAMESPACE, Message, claimed, is_namespace
from ..outbox import Addition, AddResult, Answer, Outbox, OutboxSettings, check_settings
from ..store import (
    PARKED_FOR,
    Claim,
    ClaimTerms,
    Dead,
    Delivered,
    Features,
    Outcome,
    Peeked,
    Release,
    Retry,
    Settlement,
    Stats,
)
from ..writer import Writer
from .memory_table import MemoryRow, MemoryTable

__all__ = ["MemoryRow", "MemoryStore", "MemoryTransaction", "writer_for"]

T = TypeVar("T")

#: How often suspects are asked for first, so that a constant load cannot starve them.
SUSPECTS_EVERY: Final = 16
_NO_INBOX: Final = "a MemoryStore has no inbox, since its transactions hold nothing but messages; use a SQLiteStore"
_NO_TICKETS: Final = "a MemoryStore has no tickets; use a SQLiteStore"
_SOME_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)
_STATUS: Final = {Delivered: "delivered", Retry: "pending", Release: "pending", Dead: "dead"}


class MemoryStore:
    """Messages in a table in memory, in order of arrival; they end with the process."""

    features: Features = Features(durable=False)

    def __init__(
        self,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        keep_delivered: timedelta = timedelta(days=7),
        **outbox: Unpack[OutboxSettings],
    ) -> None:
        if not is_namespace(namespace):
            raise InvalidNameError("namespace", namespace, "1 to 100 printable characters")
        check_function("clock", clock, "no argument")
        check_duration("keep_delivered", keep_delivered, zero=True)
        check_settings(type(self).__name__, outbox, OutboxSettings)
        self.namespace = namespace
        self.keep_delivered = keep_delivered
        self.rows: MemoryTable = MemoryTable()
        self._clock = clock
        self._turn = 0
        self._outbox_settings = outbox

    def outbox(self, *, wake: Callable[[], object] | None = None) -> Outbox:
        """Return what adds messages to this store, with its settings; ``wake`` is called after the commit."""
        return Outbox(namespace=self.namespace, wake=wake, **self._outbox_settings)

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
        now = self._clock()
        chosen = self._chosen(limit, terms, now)
        suspects = [head for head in self._expired_heads(terms, now) if _is_suspect(head, terms, now)]
        alone = bool(suspects) and limit > 0 and (not chosen or self._turn % SUSPECTS_EVERY == 0)
        if alone:
            chosen = [suspects[0]]
        return [self._lease(row, terms, now, suspect=alone) for row in sorted(chosen, key=lambda row: row.number)]

    def _chosen(self, limit: int, terms: ClaimTerms, now: datetime) -> list[MemoryRow]:
        """Return what one claim takes: expired leases first, and no more than fits."""
        expired = self.rows.due(self.namespace, "processing", now)
        pending = self.rows.due(self.namespace, "pending", now, newest_first=terms.newest_first)
        chosen, size = list[MemoryRow](), 0
        for line in chain(expired, pending):
            for row in takewhile(lambda row: _is_ready(row, terms, now), _standing(line, terms)):
                size += len(row.message.payload)
                if len(chosen) == limit or (chosen and terms.max_bytes is not None and size > terms.max_bytes):
                    return chosen
                chosen.append(row)
        return chosen

    async def peek(self, limit: int, *, topic: str | None = None) -> list[Peeked]:
        """Return messages that claims would bring next; change nothing."""
        now = self._clock()
        lines = chain(*(self.rows.due(self.namespace, status, now) for status in ("processing", "pending")))
        due = (row for line in lines for row in takewhile(lambda row: _is_waiting(row, now), line))
        chosen = islice((row for row in due if topic in {None, row.message.topic}), max(limit, 0))
        return [Peeked(row.message, now - row.due) for row in sorted(chosen, key=lambda row: row.number)]

    def _expired_heads(self, terms: ClaimTerms, now: datetime) -> list[MemoryRow]:
        return [next(_standing(line, terms)) for line in self.rows.due(self.namespace, "processing", now)]

    def _lease(self, row: MemoryRow, terms: ClaimTerms, now: datetime, *, suspect: bool) -> Claim:
        row.status, row.changed, row.worker, row.locked_until = "processing", now, terms.worker, now + terms.lease
        row.message = claimed(row.message, attempt=row.message.attempt + 1, token=row.message.token + 1)
        self.rows.park(row, None)
        self.rows.update(row)
        return Claim(row.message, suspect)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        """Record what became of claims; return those that were lost."""
        # As in a database, messages that are parked at the same time wait in the order in which they were added.
        in_turn = sorted(settlements, key=self._place)
        return [settlement.claim for settlement in in_turn if not self._settle(settlement)]

    def _place(self, settlement: Settlement) -> int:
        row = self.rows.find(settlement.claim.message.id)
        return 0 if row is None else row.number

    def _settle(self, settlement: Settlement) -> bool:
        now, outcome, message = self._clock(), settlement.outcome, settlement.claim.message
        row, status = self.rows.find(message.id), _STATUS[type(outcome)]
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
            case Retry(error, delay):
                row.error, row.due = error, now + (delay or timedelta(0))
            case Dead(error):
                row.error = error
            case Release(delay, destination):
                row.due = now + (PARKED_FOR if destination else delay) if destination or delay else row.due
                row.message = claimed(row.message, attempt=row.message.attempt - 1, token=row.message.token)
                self.rows.park(row, destination)
        self.rows.update(row)
        if row.status == "delivered" and not self.keep_delivered:
            self.rows.remove(row)

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        """Lease claims anew from now on; return those that were lost."""
        now, lost = self._clock(), list[Claim]()
        for claim in claims:
            row = self.rows.find(claim.message.id)
            if row is None or row.status != "processing" or row.message.token != claim.message.token:
                lost.append(claim)
            else:
                row.locked_until, row.changed = now + lease, now
                self.rows.update(row)
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
            self.rows.park(row, None)
            row.become("dead", now)
            self.rows.update(row)
        return len(crashed + waiting)

    async def parked(self, *, after: str = "", limit: int = 100) -> list[str]:
        """Return destinations that have parked messages."""
        names = (name for namespace, name in self.rows.parked if namespace == self.namespace and name > after)
        return sorted(names)[:limit]

    async def unpark(self, destination: str, limit: int) -> int:
        """Make messages due that are parked for a destination."""
        waiting = list(self.rows.parked.get((self.namespace, destination), {}).values())[:limit]
        # A follower could not be claimed alone, so what is parked before it in its line comes along.
        lines = [ahead for row in waiting for ahead in self.rows.until(row)]
        for row in [row for row in lines if row.destination == destination]:
            self.rows.park(row, None)
            row.due = row.message.time or row.due
            self.rows.update(row)
        return len(waiting)

    async def purge(self, *, older_than: timedelta, limit: int = 1000) -> int:
        """Delete delivered messages past their retention."""
        now = self._clock()
        old = [row for row in self._mine() if row.status == "delivered" and now - row.changed >= older_than]
        oldest = sorted(old, key=lambda row: row.changed)[:limit]
        for row in oldest:
            self.rows.remove(row)
        return len(oldest)

    async def stats(self) -> Stats:
        """Tell how the namespace is doing."""
        now, states = self._clock(), [row.status for row in self._mine()]
        heads = [line[0] for line in self.rows.lines(self.namespace) if line[0].status == "pending"]
        waiting = [row.due if row.destination is None else row.message.time or row.due for row in heads]
        counts = {status: states.count(status) for status in ("pending", "processing", "delivered", "dead")}
        return Stats(**counts, oldest_due=max((now - since for since in waiting if since <= now), default=None))

    async def due_elsewhere(self) -> dict[str, int]:
        """Return other namespaces in which messages are due and no worker holds any, with how many."""
        now, others = self._clock(), [row for row in self.rows if row.message.namespace != self.namespace]
        served = {row.message.namespace for row in others if row.status == "processing" and not row.is_expired(now)}
        due = (row.message.namespace for row in others if row.status == "pending" and row.due <= now)
        return dict(Counter(namespace for namespace in due if namespace not in served))

    async def listen(self, wake: Callable[[], None]) -> None:
        """Return at once: nothing reaches memory from another process."""

    def _mine(self) -> list[MemoryRow]:
        return [row for row in self.rows if row.message.namespace == self.namespace]

    def add(self, addition: Addition) -> AddResult:
        """Store one message, unless its id or its dedupe key is there; for transactions, which decide when."""
        message, now = addition.message, self._clock()
        there = self.rows.same(message)
        if there is not None:
            return AddResult(there, is_new=False)
        self.rows.append(MemoryRow(replace(message, time=now), addition.due_at or now + addition.delay, now))
        return AddResult(message.id, is_new=True)


def _standing(line: Iterable[MemoryRow], terms: ClaimTerms) -> Iterator[MemoryRow]:
    """Return the rows of a line that hold back the later ones."""
    return (row for row in line if row.status != "dead" or terms.on_dead == "block")


def _is_ours(row: MemoryRow, terms: ClaimTerms) -> bool:
    return terms.tenant_id in {None, row.message.tenant_id}


def _is_ready(row: MemoryRow, terms: ClaimTerms, now: datetime) -> bool:
    """Tell whether a message may be claimed together with others."""
    if row.status == "pending":
        return _is_ours(row, terms) and row.due <= now and row.message.attempt < terms.max_attempts
    return _is_ours(row, terms) and row.is_expired(now) and row.message.attempt < terms.suspect_after


def _is_waiting(row: MemoryRow, now: datetime) -> bool:
    """Tell whether a message is due or was left behind, however many attempts it has had."""
    return row.is_expired(now) or (row.status == "pending" and row.due <= now)


def _is_suspect(row: MemoryRow, terms: ClaimTerms, now: datetime) -> bool:
    """Tell whether a message may have killed its worker often enough to be tried alone."""
    risky = terms.suspect_after <= row.message.attempt < terms.max_attempts
    return risky and row.is_expired(now) and _is_ours(row, terms)


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
        self,
        connection: MemoryTransaction,
        additions: Sequence[Addition],
        outbox: Outbox,
        answer: Answer[T],
        *,
        outside_transaction: bool,
    ) -> T:
        """Note messages down for the commit; outside of a transaction they are stored at once."""
        if not self.is_open and not outside_transaction:
            raise NotInTransactionError("use `with store.transaction() as transaction:`")
        trial, added = MemoryTable(), list[AddResult]()
        for addition in [*self.waiting, *additions]:
            there = self.store.rows.same(addition.message) or trial.same(addition.message)
            added.append(AddResult(there or addition.message.id, is_new=there is None))
            if there is None:
                trial.append(MemoryRow(addition.message, _SOME_TIME, _SOME_TIME))
        noted = self if self.is_open else MemoryTransaction(self.store)
        noted.waiting += additions
        noted.wakes += [outbox.wake] if outbox.wake is not None and outbox.wake not in noted.wakes else []
        if noted is not self:
            noted.commit()
        results = added[len(added) - len(additions) :]
        log_duplicates(additions, results)
        return answer(results)

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
