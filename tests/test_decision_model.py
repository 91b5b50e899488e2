"""Every interleaving of two deciders, a revoker, a renewer and a minter, with crashes, lost replies and purges.

What is explored is a model of the stores, which is held against the stores themselves below. The protocols that are
known to be wrong, that of the seed among them, are explored too: a search that finds nothing in them proves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from typing import Any, TypeAlias
from uuid import uuid4

import pytest

from postroom import Outbox
from postroom.decisions import Decisions

from . import test_writers as writers
from .test_decisions import Place, place_of
from .test_writers import awaited

databases = writers.databases

#: What an actor does next, and what it knows; it begins, and after a crash begins again, with ``START``.
Stage: TypeAlias = tuple[Any, ...]
START: Stage = ("start",)
DONE: Stage = ("done",)
#: When the ticket ends at first, and when it does once it is renewed; the clock goes one further.
FIRST, SECOND, LAST = 1, 2, 3


@dataclass(frozen=True)
class World:
    """A store with one ticket, the clock, and whoever uses the ticket."""

    now: int = 0
    #: When the ticket ends, while it is open.
    opens: int | None = None
    #: How it has ended, and at which end.
    ended: tuple[str, int] | None = None
    #: What the outbox holds now, and everything that was ever added to it.
    entries: frozenset[str] = frozenset()
    log: tuple[str, ...] = ()
    #: What some protocols note down beside the ticket.
    marker: bool = False
    stages: tuple[Stage, ...] = (START,) * 5
    crashes: int = 2
    losses: int = 2

    def add(self, event: str) -> World:
        if event in self.entries:
            return self
        return replace(self, entries=self.entries | {event}, log=(*self.log, event))


Step: TypeAlias = tuple[World, Stage]


class Protocol:
    """What the stores do: each call is one step, which looks at the ticket as it is."""

    #: How far the clocks of those who decide are ahead of the store's.
    ahead = 0

    def schedule(self, world: World, end: int) -> tuple[World, str]:
        if world.ended is not None:
            return world, world.ended[0]
        if world.opens not in {None, end}:
            return world, f"stale {world.opens}"
        return replace(world, opens=end), "scheduled"

    def renew(self, world: World, end: int) -> tuple[World, str]:
        if world.ended is not None:
            return world, world.ended[0]
        return (world, "stale") if world.opens is None else (replace(world, opens=end), "scheduled")

    def decide(self, world: World, end: int, *, is_revoked: bool = False) -> tuple[World, str]:
        if world.ended is not None and world.ended[0] == "revoked":
            return world, "revoked"
        if world.ended is not None:
            return world, "duplicate" if world.ended[1] == end else "stale"
        if world.opens != end:
            return world, "stale" if world.opens is None else f"stale {world.opens}"
        if end > world.now:
            return world, "not due"
        if is_revoked:
            return replace(world, opens=None, ended=("revoked", end)), "revoked"
        told = world.add(f"expired {end}")
        return replace(told, opens=None, ended=("expired", end)), "enqueued"

    def cancel(self, world: World) -> tuple[World, str]:
        if world.ended is not None:
            return world, world.ended[0]
        if world.opens is None:
            return world, "stale"
        return replace(world.add("revoked"), opens=None, ended=("revoked", world.opens)), "enqueued"

    def is_due(self, world: World) -> bool:
        return world.opens is not None and world.opens <= world.now + self.ahead

    # -- who calls it -------------------------------------------------------------------------------------------

    def decider(self, world: World, stage: Stage) -> Step:
        """Look for what is due; decide it; look again."""
        match stage:
            case ("decide", end):
                return self.decide(world, end)[0], START
            case _:
                return world, ("decide", world.opens) if self.is_due(world) else START

    def revoker(self, world: World, stage: Stage) -> Step:
        after, answer = self.cancel(world)
        return after, START if answer == "stale" and world.stages[4] != DONE else ("told", answer)

    def renewer(self, world: World, stage: Stage) -> Step:
        after, answer = self.renew(world, SECOND)
        return after, START if answer == "stale" and world.stages[4] != DONE else ("told", answer)

    def minter(self, world: World, stage: Stage) -> Step:
        return self.schedule(world, FIRST)[0], DONE

    def actors(self) -> tuple[Any, ...]:
        return (self.decider, self.decider, self.revoker, self.renewer, self.minter)

    def chance(self, world: World) -> Iterator[World]:
        """Yield what happens by itself: time passes, and events are delivered and purged."""
        if world.now < LAST:
            yield replace(world, now=world.now + 1)
        if world.entries:
            yield replace(world, entries=frozenset())
        # Tickets are kept for longer than anybody may repeat `schedule`.
        if world.ended is not None and world.stages[4] == DONE:
            yield replace(world, ended=None)


def _has_ended(stage: Stage) -> bool:
    return stage == DONE or stage[0] == "told"


def following(protocol: Protocol, world: World) -> Iterator[World]:
    """Yield every world that can come next."""
    yield from protocol.chance(world)
    for number, actor in enumerate(protocol.actors()):
        stage = world.stages[number]
        if _has_ended(stage):
            continue
        after, then = actor(world, stage)
        yield _staged(after, number, then)
        if world.losses:  # it was done, and the actor does not know: it asks again
            yield replace(after, losses=world.losses - 1)
        if world.crashes:  # before the call, and after it
            yield _staged(replace(world, crashes=world.crashes - 1), number, START)
            yield _staged(replace(after, crashes=world.crashes - 1), number, START)


def _staged(world: World, number: int, stage: Stage) -> World:
    stages = [*world.stages[:number], stage, *world.stages[number + 1 :]]
    # Which of the deciders is which makes no difference.
    return replace(world, stages=(*sorted(stages[:2], key=str), *stages[2:]))


def wrongs(before: World, after: World) -> Iterator[str]:
    """Yield what must never be, after a step."""
    kinds = {event.partition(" ")[0] for event in after.log}
    if len(kinds) > 1:
        yield "both"
    elif len(after.log) > 1:
        yield "twice"
    for event in after.log[len(before.log) :]:
        kind, _, end = event.partition(" ")
        if kind == "expired" and int(end) > before.now:
            yield "early"
        if kind == "expired" and before.opens not in {int(end), None}:
            yield "outdated"
    match after.stages[2]:
        case ("told", "enqueued") if "revoked" not in after.log:
            yield "untrue"
        case ("told", "expired") if "expired" not in kinds:
            yield "untrue"
        case _:
            pass


def finished(protocol: Protocol, world: World) -> World:
    """Return what the world comes to when nothing fails any more."""
    world = replace(world, now=LAST)
    for number in (4, *(0, 1) * 4):
        if not _has_ended(world.stages[number]):
            after, then = protocol.actors()[number](world, world.stages[number])
            world = _staged(after, number, then)
    return world


def explored(protocol: Protocol, wanted: str | None = None) -> tuple[int, set[str]]:
    """Return how many worlds there are, and everything that is wrong with any, or end when ``wanted`` is found.

    A world that went wrong is not followed any further.
    """
    start = World()
    seen, waiting, found = {start}, deque([start]), set[str]()
    while waiting and wanted not in found:
        world = waiting.popleft()
        if not world.log and not finished(protocol, world).log:
            found.add("lost")
        for after in following(protocol, world):
            wrong = set(wrongs(world, after))
            found |= wrong
            if not wrong and after not in seen:
                seen.add(after)
                waiting.append(after)
    return len(seen), found


@pytest.mark.requirement("S3-25", "S3-26", "S3-27")
def test_nobody_can_make_a_ticket_end_twice_or_never() -> None:
    """Whatever order things happen in, whoever dies and whichever answer gets lost."""
    count, found = explored(Protocol())

    assert found == set()
    assert count > 10_000


# -- what is known to be wrong -----------------------------------------------------------------------------------


class Seed(Protocol):
    """The seed's: whether a ticket was revoked is asked before the script that decides, and told to it."""

    def decide(self, world: World, end: int, *, is_revoked: bool = False) -> tuple[World, str]:
        if world.opens is None or world.opens > world.now:
            return world, "not due"
        return replace(world if is_revoked else world.add(f"expired {end}"), opens=None), ""

    def cancel(self, world: World) -> tuple[World, str]:
        return replace(world.add("revoked"), marker=True), "enqueued"

    def decider(self, world: World, stage: Stage) -> Step:
        match stage:
            case ("ask", end):
                return world, ("decide", end, world.marker)
            case ("decide", end, is_revoked):
                return self.decide(world, end, is_revoked=is_revoked)[0], START
            case _:
                return world, ("ask", world.opens) if self.is_due(world) else START


class OnlyTheRace(Protocol):
    """Right but for the one thing that the seed says it leaves open."""

    decider = Seed.decider

    def decide(self, world: World, end: int, *, is_revoked: bool = False) -> tuple[World, str]:
        if world.ended is not None and world.ended[0] == "revoked" and not is_revoked:
            return world.add(f"expired {end}"), "enqueued"
        return super().decide(world, end)

    def cancel(self, world: World) -> tuple[World, str]:
        after, answer = super().cancel(world)
        return replace(after, marker=after.ended is not None and after.ended[0] == "revoked"), answer


class AnyEnd(Protocol):
    """Does not ask whether the ticket still ends when the event says."""

    def decide(self, world: World, end: int, *, is_revoked: bool = False) -> tuple[World, str]:
        if world.opens is None:
            return super().decide(world, end)
        return replace(world.add(f"expired {end}"), opens=None, ended=("expired", end)), "enqueued"


class ForeignClock(Protocol):
    """Leaves it to the clock of whoever decides whether a ticket is due."""

    ahead = 1

    def decide(self, world: World, end: int, *, is_revoked: bool = False) -> tuple[World, str]:
        after, answer = super().decide(replace(world, now=LAST), end)
        return replace(after, now=world.now), answer


class NoMemory(Protocol):
    """Takes a ticket that has ended for one that was never known."""

    def decide(self, world: World, end: int, *, is_revoked: bool = False) -> tuple[World, str]:
        after, answer = super().decide(world, end)
        return replace(after, ended=None), answer


class HardRevocation(Protocol):
    """Revokes without looking whether the ticket has expired."""

    def cancel(self, world: World) -> tuple[World, str]:
        return replace(world.add("revoked"), opens=None, ended=("revoked", FIRST)), "enqueued"


class Reviving(Protocol):
    """Renews without looking whether the ticket has ended."""

    def renew(self, world: World, end: int) -> tuple[World, str]:
        return replace(world, opens=end, ended=None), "scheduled"


class ShortMarker(Protocol):
    """Keeps tickets that were revoked among those that are open, behind a marker that does not last."""

    def cancel(self, world: World) -> tuple[World, str]:
        if world.ended is not None or world.opens is None:
            return super().cancel(world)
        return (world, "revoked") if world.marker else (replace(world.add("revoked"), marker=True), "enqueued")

    def decide(self, world: World, end: int, *, is_revoked: bool = False) -> tuple[World, str]:
        if world.marker and world.opens == end:
            return replace(world, opens=None, ended=("revoked", end)), "revoked"
        return super().decide(world, end)

    def chance(self, world: World) -> Iterator[World]:
        yield from super().chance(world)
        if world.marker:
            yield replace(world, marker=False)


class TwoSteps(Protocol):
    """Stores the event in one step and ends the ticket in the next."""

    def decider(self, world: World, stage: Stage) -> Step:
        match stage:
            case ("decide", end):
                is_open = world.ended is None and world.opens == end <= world.now
                return (world.add(f"expired {end}"), ("end", end)) if is_open else (world, START)
            case ("end", end):
                return replace(world, opens=None, ended=world.ended or ("expired", end)), START
            case _:
                return super().decider(world, stage)


class TheOtherWayRound(Protocol):
    """Ends the ticket in one step and stores the event in the next."""

    def decider(self, world: World, stage: Stage) -> Step:
        match stage:
            case ("decide", end):
                is_open = world.ended is None and world.opens == end <= world.now
                ended = replace(world, opens=None, ended=("expired", end))
                return (ended, ("tell", end)) if is_open else (world, START)
            case ("tell", end):
                return world.add(f"expired {end}"), START
            case _:
                return super().decider(world, stage)


class NoLock(Protocol):
    """Reads the row of a ticket without locking it, and writes what follows from it later."""

    def decider(self, world: World, stage: Stage) -> Step:
        match stage:
            case ("decide", end):
                is_open = world.ended is None and world.opens == end <= world.now
                return world, ("write", end) if is_open else START
            case ("write", end):
                return replace(world.add(f"expired {end}"), opens=None, ended=("expired", end)), START
            case _:
                return super().decider(world, stage)


@pytest.mark.requirement("S3-27")
@pytest.mark.parametrize(
    ("protocol", "wrong"),
    [
        (Seed(), "both"),
        (Seed(), "outdated"),
        (Seed(), "twice"),
        (OnlyTheRace(), "both"),
        (AnyEnd(), "outdated"),
        (ForeignClock(), "early"),
        (NoMemory(), "twice"),
        (HardRevocation(), "both"),
        (Reviving(), "both"),
        (Reviving(), "twice"),
        (ShortMarker(), "both"),
        (TwoSteps(), "both"),
        (TwoSteps(), "twice"),
        (TheOtherWayRound(), "lost"),
        (NoLock(), "both"),
        (NoLock(), "outdated"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_wrong_with_a_protocol_is_found(protocol: Protocol, wrong: str) -> None:
    """The seed's emits both events, which is what the model is for."""
    _, found = explored(protocol, wrong)

    assert wrong in found


# -- the model and the stores ------------------------------------------------------------------------------------

ENDS = {FIRST: datetime(2026, 1, 1, tzinfo=UTC), LAST: datetime(2126, 1, 1, tzinfo=UTC)}
#: As in the model: of the two ends, one has passed.
NOW = SECOND
CALLS = [
    *(("schedule", end) for end in ENDS),
    *(("renew", end) for end in ENDS),
    *(("decide", end, is_revoked) for end, is_revoked in ((FIRST, False), (LAST, False), (FIRST, True))),
    ("cancel",),
]


def _expected(world: World, call: tuple[Any, ...]) -> tuple[World, str]:
    match call:
        case ("schedule", end):
            return Protocol().schedule(world, end)
        case ("renew", end):
            return Protocol().renew(world, end)
        case ("decide", end, is_revoked):
            return Protocol().decide(world, end, is_revoked=is_revoked)
        case _:
            return Protocol().cancel(world)


async def _told(decisions: Decisions, connection: Any, ticket: str, call: tuple[Any, ...]) -> str:  # noqa: ANN401
    match call:
        case ("schedule", end):
            answer = decisions.schedule(connection, ticket, ENDS[end])
        case ("renew", end):
            answer = decisions.renew(connection, ticket, ENDS[end])
        case ("decide", end, is_revoked):
            event = f"{ticket} expired {end}".encode()
            answer = decisions.decide(connection, ticket, ENDS[end], event, is_revoked=is_revoked, topic="tickets")
        case _:
            answer = decisions.cancel(connection, ticket, f"{ticket} revoked".encode(), topic="tickets")
    told = await awaited(answer)
    word = "not due" if type(told).__name__ == "NotDue" else type(told).__name__.lower()
    ends = {moment: end for end, moment in ENDS.items()}
    moment = getattr(told, "expires_at", None)
    return word if moment is None else f"{word} {ends[moment]}"


@pytest.fixture(params=[("asyncpg", 2), ("asyncmy", 2), ("sqlite3", 3), ("redis", 3)], ids=lambda param: param[0])
def place_and_depth(request: pytest.FixtureRequest) -> tuple[Place, int]:
    """Where tickets are kept, and how many calls in a row are made of each; some servers are slower than others."""
    name, depth = request.param
    return place_of(request, name), depth


@pytest.mark.requirement("S3-25")
async def test_the_stores_answer_as_the_model_does(place_and_depth: tuple[Place, int]) -> None:
    """To every sequence of a few calls, for a ticket that is known and for one that is not."""
    decisions = Decisions(Outbox(namespace=f"ns-{uuid4().hex}"))
    place, depth = place_and_depth
    differing, events, due = list[object](), list[str](), list[str]()
    known = [(CALLS[0], *calls) for calls in product(CALLS, repeat=depth)]
    async with place.opened() as connection:
        for number, calls in enumerate([*known, *product(CALLS, repeat=2)]):
            ticket, world = f"t{number}", World(now=NOW)
            for call in calls:
                world, expected = _expected(world, call)
                told = await _told(decisions, connection, ticket, call)
                if told != expected:
                    differing.append((calls, call, told, expected))
            events += [f"{ticket} {event}" for event in world.log]
            due += [ticket] * Protocol().is_due(world)
        found = await awaited(decisions.find_due(connection, limit=500))

    stored = [payload.decode() for _, _, payload in await place.events(decisions.outbox)]
    assert differing == []
    assert sorted(stored) == sorted(events)
    assert sorted(one.ticket for one in found) == sorted(due)
    assert 0 < len(due) < 500
