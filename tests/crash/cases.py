"""What a case of the crash matrix says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from postroom.inbox import Mode

from ..worlds import DATABASES, SQL_SERVERS
from .worker import Arm

__all__ = [
    "ALL",
    "POSTGRES",
    "TRANSACTIONS",
    "WIRED",
    "Case",
    "Dispatching",
    "Producing",
    "Receiving",
    "Sequel",
    "State",
    "fails",
    "why_not",
]

NO_WIRE: Final = "SQLite has no wire: there is nothing to cut and no reply to lose"
POSTGRES: Final = ("postgres",)
#: Where a call is one transaction of several statements.
TRANSACTIONS: Final = ("mariadb", "sqlite")
WIRED: Final = SQL_SERVERS
ALL: Final = DATABASES

#: How a case goes on after the fault: another dispatcher takes over because the first is dead, because it has ended,
#: or while it stands still; or the first goes on alone.
Sequel: TypeAlias = Literal["dead", "ended", "stalled", "alone"]


@dataclass(frozen=True, slots=True)
class State:
    """A row of the outbox: what it is, its token and its attempts; None stands for whatever it may be."""

    status: str
    token: int | None
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatching:
    """What must be seen when a dispatcher is hit."""

    row: str
    arms: Sequence[Arm]
    sequel: Sequel
    stores: Sequence[str] = ALL
    #: Why the row does not exist for SQLite, where that is not plain from the row.
    why_not: str = ""
    #: What the messages are right after the crash, or while the dispatcher stands still.
    crash: State | None = None
    #: What the other dispatcher makes of them before the stalled one goes on; the same as ``final`` if None.
    meanwhile: State | None = None
    #: Whether the other dispatcher is publishing them when the stalled one goes on, and for as long as that settles.
    in_flight: bool = False
    final: State | None
    #: How often each message may be received.
    received: Sequence[int] = (1,)
    #: What becomes of the other messages where only the first is hit; None if all of them are.
    others: State | None = None
    #: What becomes of messages behind another one of their key, where that is something else.
    followers: State | None = None
    others_received: Sequence[int] = (1,)
    #: Of how many claims the first dispatcher says that they were lost: all, none, or any number.
    lost: Literal["all", "none", "any"] = "none"
    #: Events that the first dispatcher tells.
    tells: Sequence[str] = ()
    #: How the messages are before the case: waiting, delivered, or without attempts left.
    before: Literal["waiting", "delivered", "spent"] = "waiting"
    #: Which messages there are in PostgreSQL, where a claim brings such with keys or without.
    lanes: Sequence[str] = ("keyed", "loose")
    each: bool = False
    keep: bool = True
    max_attempts: int = 5
    on_dead: Literal["block", "skip"] = "block"
    # A dispatcher gives back what it holds when less than the publish timeout is left of its lease. Between the two is
    # how long a busy machine may stand still where nothing is to go wrong; a case may wait for the end of the lease.
    lease: float = 6
    publish_timeout: float = 2.5
    cleanup_interval: float = 60

    @property
    def name(self) -> str:
        notes = [note for note, is_so in self._notes if is_so]
        return _name("3.5", self.row, self.arms) + "".join(f", {note}" for note in notes)

    @property
    def _notes(self) -> Sequence[tuple[str, bool]]:
        return (
            ("in flight", self.in_flight),
            ("one by one", self.each),
            ("on the last attempt", self.max_attempts == 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Producing:
    """What must be seen when a producer is hit."""

    row: str
    arms: Sequence[Arm]
    stores: Sequence[str] = ALL
    #: Why the row does not exist for SQLite, where that is not plain from the row.
    why_not: str = ""
    #: Whether the transaction is stored in the end, business rows and messages alike; None if it may be.
    stored: bool | None
    #: What the caller hears; None if it is dead by then, and "something" for an error of its database library.
    heard: str | None
    #: What the caller finds when it looks after an unknown COMMIT.
    found: bool | None = None
    #: Whether the transaction is the first one of its process.
    is_cold: bool = False

    @property
    def name(self) -> str:
        return _name("3.1", self.row, self.arms) + (", cold" if self.is_cold else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiving:
    """What must be seen when a consumer is hit."""

    row: str
    arms: Sequence[Arm]
    #: Another consumer takes over because the first is dead, has ended, or stands still, or because it is shot while
    #: the other waits for it; or the first goes on alone.
    sequel: Literal["dead", "ended", "stalled", "shot", "alone"]
    stores: Sequence[str] = ALL
    #: Why the row does not exist for SQLite, where that is not plain from the row.
    why_not: str = ""
    #: Whether the transaction is stored right after the fault.
    stored: bool = False
    #: What the broker took note of, in this order; the last of it is the acknowledgement.
    told: Sequence[str] = ("Delivered",)
    #: Whether the broker heard nothing of the message, and is made to hand it out again.
    unheard: bool = False
    #: How often the handler ran in all, and how often a message was known and skipped.
    runs: int = 1
    duplicates: int = 0
    #: Why the first consumer says that it failed; None for any reason.
    errors: Sequence[str] | None = ()
    #: Whether the first consumer says that the broker did not take its acknowledgement.
    ack_fails: bool = False
    #: Whether the other consumer has to wait for the first one.
    waits: bool = False
    #: Whether it does not wait long.
    is_impatient: bool = False
    #: Whether the first connection must not be used for the next message.
    new_session: bool = False
    #: Whether no handler can handle the message.
    is_poison: bool = False
    #: Whether its handler returns nothing, so that COMMIT comes right after it.
    is_quiet: bool = False
    #: Whether the transaction of the message is the first one of its process.
    is_cold: bool = False
    #: How often the broker has it.
    entries: int = 1
    mode: Mode = "pessimistic"
    handle_timeout: float = 30

    @property
    def name(self) -> str:
        notes = (
            (self.sequel, True),
            ("the other waits", self.waits),
            ("marked last", self.mode == "optimistic"),
            ("quiet", self.is_quiet),
            ("cold", self.is_cold),
        )
        name = _name("3.10" if self.is_poison else "3.1", self.row, self.arms)
        return name + "".join(f", {note}" for note, is_so in notes if is_so)


Case: TypeAlias = Dispatching | Producing | Receiving


def why_not(case: Case, store: str) -> str:
    """Return why a case that other stores have cannot happen in this one, if that is so."""
    if store != "sqlite" or store in case.stores:
        return ""
    return NO_WIRE if any(arm.action in {"cut", "lose", "lose_request"} for arm in case.arms) else case.why_not


def _name(section: str, row: str, arms: Sequence[Arm]) -> str:
    steps = " then ".join(
        f"{arm.action}{f' {arm.what}' if arm.what else ''} at {arm.point}{f' {arm.nth}' if arm.nth > 1 else ''}"
        for arm in arms
    )
    return f"{section} {row.replace('→', '->')}: {steps}"


def fails(point: str, nth: int = 1, what: str = "StoreUnavailableError") -> Arm:
    """Have an error raised at a point."""
    return Arm(point, "fail", nth, what)
