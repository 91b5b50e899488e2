"""The port of every store: where messages wait, are claimed and are settled."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, Protocol, TypeAlias
from uuid import UUID

from .checks import check_methods
from .message import Message

__all__ = [
    "MAX_DESTINATION",
    "PARKED_FOR",
    "Claim",
    "ClaimTerms",
    "Dead",
    "Delivered",
    "Features",
    "OnDead",
    "Outcome",
    "Peeked",
    "Release",
    "Retry",
    "Settlement",
    "Stats",
    "Store",
    "as_store",
    "destination_name",
]

#: How long a parked message waits at the most: nothing waits for ever for a dispatcher that died before it recovered.
PARKED_FOR: Final = timedelta(hours=1)
#: How many characters the name of a destination may have.
MAX_DESTINATION: Final = 200

#: What a dead message does to the later ones of its key: hold them back, or let them pass.
OnDead: TypeAlias = Literal["block", "skip"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """The broker confirmed the message."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Delivery failed; try again after ``delay``, by default what the dispatcher's backoff says."""

    error: str
    delay: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """The message will not be tried again by itself."""

    error: str


@dataclass(frozen=True, slots=True)
class Release:
    """The message was not tried; its attempt is given back, and it is due when it was, or after ``delay``.

    With a ``destination`` the message is parked: it is not claimed again before `Store.unpark` is called for that
    destination, or `PARKED_FOR` has passed; the ``delay`` does not count then.
    """

    delay: timedelta = timedelta(0)
    #: The destination that is down; at most `MAX_DESTINATION` characters.
    destination: str | None = None


Outcome: TypeAlias = Delivered | Retry | Dead | Release


@dataclass(frozen=True, slots=True)
class Claim:
    """A message leased to one worker; ``message.token`` is its proof."""

    message: Message
    #: It may have killed its worker before, so it should be tried with nothing else at stake.
    suspect: bool = False
    #: Why the stored row cannot be read; the message can only be made dead.
    broken: str | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """What became of a claim."""

    claim: Claim
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerms:
    """What all claims of one dispatcher have in common."""

    worker: UUID
    lease: timedelta = timedelta(seconds=30)
    max_attempts: int = 10
    on_dead: OnDead = "block"
    #: Claim messages of this tenant only; None claims all.
    tenant_id: UUID | None = None
    #: The most bytes of payloads and headers that one claim returns; a single message may be larger. None: no limit.
    max_bytes: int | None = None
    #: Look for due messages from the newest on, to find those behind a backlog that cannot be delivered.
    newest_first: bool = False

    @property
    def suspect_after(self) -> int:
        """After how many attempts a message whose lease ran out is claimed alone.

        It may be the one that kills its worker; its neighbours must not pay with their attempts.
        """
        return min(3, max(self.max_attempts - 1, 1))


@dataclass(frozen=True, slots=True)
class Peeked:
    """A message that is due, as it is stored: ``message.attempt`` counts the attempts so far."""

    message: Message
    #: How long it has been due; for a message whose lease ran out, since it was due before that lease.
    due_for: timedelta
    #: Why the stored row cannot be read.
    broken: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """How a namespace is doing; counts stop at ``ceiling`` so that they stay cheap."""

    pending: int
    processing: int
    delivered: int
    dead: int
    #: How long the oldest message has been waiting that could go out now, or that is parked. Messages behind another of
    #: their key do not count. A store looks at a bounded number of messages, so behind many that cannot go out a later
    #: one may be missed.
    oldest_due: timedelta | None
    ceiling: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a store promises, so that one contract suite can test them all."""

    #: A message survives the death of every process.
    durable: bool = True
    #: `listen` reports hints of other processes.
    wakeups: bool = False
    #: `Outbox.add` refuses to write outside a transaction.
    requires_transaction: bool = True
    #: Messages of one key go out in their order; without it they may overtake each other.
    ordered: bool = True
    #: A message whose id or dedupe key is there is not added again.
    dedupes: bool = True
    #: A message can be parked for a destination; without it `Release` with a destination is a plain `Release`.
    parks: bool = True
    #: A claim brings messages with a key or messages without one, so it takes two claims to see all that was added.
    separates_keys: bool = False
    #: `due_elsewhere` finds messages of other namespaces; without it, it returns nothing.
    sees_namespaces: bool = True


class Store(Protocol):
    """Where the messages of one namespace live.

    Every method is atomic, may be called from several tasks at once, takes the time from the store's own clock,
    and raises only `postroom.errors.StoreError` and its kin. A call that is cancelled has happened or has not.
    """

    namespace: str
    features: Features
    #: How long delivered messages stay; zero deletes them when they are settled.
    keep_delivered: timedelta

    async def open(self) -> bool:
        """Connect, and check that the schema is there; tell whether the store was closed before.

        Who opened a store closes it: a dispatcher leaves a store open that was open when it began.
        """
        ...

    async def close(self) -> None:
        """Close all connections; the store can be opened again."""
        ...

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        """Lease up to ``limit`` messages, due first, to this caller alone.

        A claim may bring fewer than there are; an empty one means that nothing can be claimed now.
        Due are pending messages whose time has come and those whose lease ran out, while they have attempts left.
        The claim is durable when this returns: the attempt is counted and the token has risen.
        Of one key only the head is taken, with as many of its direct followers as fit, in order.
        """
        ...

    async def peek(self, limit: int, *, topic: str | None = None) -> list[Peeked]:
        """Return up to ``limit`` messages that claims would bring next, in the order of a claim; change nothing.

        With ``topic`` only messages of that topic are returned. Messages behind a dead one of their key are not. How
        many attempts a dispatcher allows is not known here, so messages that it would make dead are returned as well.
        A store looks at a bounded number of messages, so behind many that cannot be claimed later ones may be missed.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        """Record what became of claims; return those that were lost, about which nothing was recorded.

        A claim counts as long as its token is current, also after its lease ran out.
        Settling the same way twice is no loss, so a call whose answer got lost may be repeated.
        """
        ...

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        """Lease claims anew from now on; return those that were lost."""
        ...

    async def sweep(self, terms: ClaimTerms) -> int:
        """Make messages dead that have no attempt left; return how many."""
        ...

    async def parked(self, *, after: str = "", limit: int = 100) -> list[str]:
        """Return up to ``limit`` destinations that have parked messages, in ascending order, beginning after one."""
        ...

    async def unpark(self, destination: str, limit: int) -> int:
        """Make up to ``limit`` messages due that are parked for a destination, those parked first; return how many.

        They are due as of their creation, so that claims return them before newer messages. The head of a message's key
        becomes due with it if it is parked for the same destination, since the message could not be claimed otherwise.
        """
        ...

    async def purge(self, *, older_than: timedelta, limit: int = 1000) -> int:
        """Delete up to ``limit`` messages delivered longer ago; never any other. Return how many."""
        ...

    async def stats(self) -> Stats:
        """Tell how many messages are in each state, without reading the whole table."""
        ...

    async def due_elsewhere(self) -> dict[str, int]:
        """Return a few other namespaces in which messages are due and no worker holds any, with how many.

        A dispatcher that finds nothing asks once, in case messages were added to another namespace by mistake. What
        this reads is bounded, however many messages there are.
        """
        ...

    async def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at every hint of another process until cancelled; return at once if there are none."""
        ...


def as_store(store: object, *, needs: Sequence[str] = ("claim", "settle", "features"), kind: str = "a store") -> Any:  # noqa: ANN401 -- of the kind that the caller needs
    """Return a store that has what its caller needs, made of its URL if that was given.

    Raises:
        ConfigurationError: It is no store, or no store of that kind.
        UnknownURLError: No store has such a URL.
    """
    found = importlib.import_module("postroom.stores").store_from_url(store) if isinstance(store, str) else store
    check_methods("store", found, needs, f"{kind}, such as PostgresStore(dsn), or the URL of one")
    return found


def destination_name(text: str) -> str:
    """Return the name of a destination as every store takes it; one that a database refused would fail its batch."""
    return text[:MAX_DESTINATION].replace("\x00", " ").encode(errors="replace").decode()
