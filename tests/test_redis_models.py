"""The protocol of the inbox in Redis, tried in every order: two consumers, crashes, lost replies, leases that end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias

import pytest

from postroom.errors import StoreError
from postroom.stores.redis.marks import Mark, drop
from postroom.stores.redis.scripts import alone, calling

from . import test_redis_transaction as transactions_of_redis
from .test_redis_transaction import Shop

shop = transactions_of_redis.shop

#: What a token is called until it has a name.
NEW: Final = 99
CRASHES, LOSSES, EXPIRIES, FAILURES = 3, 3, 3, 1

#: What stands of the message: nothing, or a word and whose it is.
Marked: TypeAlias = tuple[str, int] | None
Answer: TypeAlias = Literal["claimed", "busy", "done", "fenced", "dropped", "lost"]


class Step(NamedTuple):
    """What a server makes of a request: what stands there then, how often the effect happened, and the answer."""

    mark: Marked
    effects: int
    answer: Answer


@dataclass(frozen=True)
class Protocol:
    """What the scripts do, as functions; each may be replaced by one that is wrong."""

    claim: Callable[[Marked, int], Step]
    commit: Callable[[Marked, int], Step]
    drop: Callable[[Marked, int], Step]
    #: What becomes of a message that somebody else has.
    on_busy: Literal["nack", "ack"] = "nack"
    #: Which marks end by themselves soon.
    expires: tuple[str, ...] = ("p",)
    resends: bool = True


def claim(mark: Marked, token: int) -> Step:
    if mark is None:
        return Step(("p", token), 0, "claimed")
    if mark[0] == "done":
        return Step(mark, 0, "done")
    return Step(mark, 0, "claimed" if mark == ("p", token) else "busy")


def commit(mark: Marked, token: int) -> Step:
    if mark == ("done", token):
        return Step(mark, 0, "done")
    return Step(("done", token), 1, "done") if mark == ("p", token) else Step(mark, 0, "fenced")


def drop_mark(mark: Marked, token: int) -> Step:
    if mark == ("done", token):
        return Step(mark, 0, "done")
    return Step(None, 0, "dropped") if mark == ("p", token) else Step(mark, 0, "lost")


OURS: Final = Protocol(claim, commit, drop_mark)


def claim_by_setnx(mark: Marked, token: int) -> Step:
    return Step(("done", token), 0, "claimed") if mark is None else Step(mark, 0, "done")


def commit_by_exec(mark: Marked, token: int) -> Step:
    return Step(mark, 1, "done")


def delete(mark: Marked, token: int) -> Step:
    return Step(None, 0, "dropped")


SEED: Final = Protocol(claim_by_setnx, commit_by_exec, delete, expires=("done",), resends=False)


class Consumer(NamedTuple):
    """Where a consumer stands, and with which token."""

    at: Literal["idle", "working", "committing", "dropping", "acking"] = "idle"
    token: int = 0


class World(NamedTuple):
    """Everything that there is."""

    mark: Marked = None
    effects: int = 0
    is_acked: bool = False
    consumers: tuple[Consumer, ...] = (Consumer(), Consumer())
    #: Commits that were sent and have not arrived.
    sent: frozenset[int] = frozenset()
    crashes: int = CRASHES
    losses: int = LOSSES
    expiries: int = EXPIRIES
    failures: int = FAILURES


def moved(world: World, number: int, consumer: Consumer) -> World:
    consumers = list(world.consumers)
    consumers[number] = consumer
    return world._replace(consumers=tuple(consumers))


def served(world: World, step: Step) -> World:
    return world._replace(mark=step.mark, effects=world.effects + step.effects)


def named(world: World) -> World:
    """Return the same world with other names: which consumer is the first, and what tokens are called, is all one."""
    consumers = sorted(world.consumers, key=lambda consumer: (consumer.at, consumer.token))
    tokens = [consumer.token for consumer in consumers]
    tokens += [] if world.mark is None else [world.mark[1]]
    names = {token: name for name, token in enumerate(dict.fromkeys(filter(None, [*tokens, *sorted(world.sent)])), 1)}
    return world._replace(
        mark=world.mark and (world.mark[0], names[world.mark[1]]),
        consumers=tuple(Consumer(consumer.at, names.get(consumer.token, 0)) for consumer in consumers),
        sent=frozenset(names[token] for token in world.sent),
    )


def after(protocol: Protocol, world: World) -> Iterator[World]:
    """Return every world that may come next."""
    for number, consumer in enumerate(world.consumers):
        yield from _STEPS[consumer.at](protocol, world, number, consumer.token)
        if world.crashes and consumer.at != "idle":
            yield moved(world, number, Consumer())._replace(crashes=world.crashes - 1)
    for token in world.sent:
        yield from arriving(protocol, world, token)
    yield from expiring(protocol, world)


def expiring(protocol: Protocol, world: World) -> Iterator[World]:
    """A lease ends: at any time if nobody is left who would renew it, and a few times although somebody is."""
    if world.mark is None or world.mark[0] not in protocol.expires:
        return
    if world.expiries:
        yield world._replace(mark=None, expiries=world.expiries - 1)
    elif all(consumer.token != world.mark[1] for consumer in world.consumers):
        yield world._replace(mark=None)


def idle(protocol: Protocol, world: World, number: int, _: int) -> Iterator[World]:
    """The broker hands the message out, as long as nobody has acknowledged it, and the server is asked for it."""
    if world.is_acked:
        return
    step = protocol.claim(world.mark, NEW)
    world, token = served(world, step), NEW
    if step.answer == "claimed":
        yield moved(world, number, Consumer("working", token))
        if world.losses:
            yield moved(world, number, Consumer("dropping", token))._replace(losses=world.losses - 1)
    elif step.answer == "done" or protocol.on_busy == "ack":
        yield moved(world, number, Consumer("acking"))


def working(protocol: Protocol, world: World, number: int, token: int) -> Iterator[World]:
    """The handler ends, well or not."""
    yield moved(world, number, Consumer("committing", token))._replace(sent=world.sent | {token})
    if world.failures:
        yield moved(world, number, Consumer("dropping", token))._replace(failures=world.failures - 1)


def committing(protocol: Protocol, world: World, number: int, token: int) -> Iterator[World]:
    """Nobody answers, whether the commit has arrived or is still on its way: it is sent again, or asked about."""
    if world.losses:
        world = world._replace(losses=world.losses - 1)
        yield moved(world, number, Consumer("dropping", token))
        if protocol.resends:
            yield world._replace(sent=world.sent | {token})


def arriving(protocol: Protocol, world: World, token: int) -> Iterator[World]:
    """A commit reaches the server, and whoever waits for it hears of it, or not."""
    step = protocol.commit(world.mark, token)
    world = served(world, step)._replace(sent=world.sent - {token})
    waiting = [n for n, consumer in enumerate(world.consumers) if consumer == Consumer("committing", token)]
    if not waiting:
        yield world
        return
    [number] = waiting
    yield moved(world, number, Consumer("acking") if step.answer == "done" else Consumer())
    if world.losses:
        yield moved(world, number, Consumer("dropping", token))._replace(losses=world.losses - 1)


def dropping(protocol: Protocol, world: World, number: int, token: int) -> Iterator[World]:
    """The claim is given up, which tells what became of it."""
    step = protocol.drop(world.mark, token)
    yield moved(served(world, step), number, Consumer("acking") if step.answer == "done" else Consumer())
    if world.losses:
        lost = world._replace(losses=world.losses - 1)
        yield moved(served(lost, step), number, Consumer())  # the answer is lost
        yield moved(lost, number, Consumer())  # the request is lost


def acking(protocol: Protocol, world: World, number: int, _: int) -> Iterator[World]:
    yield moved(world, number, Consumer())._replace(is_acked=True)


_STEPS: Final = {
    "idle": idle,
    "working": working,
    "committing": committing,
    "dropping": dropping,
    "acking": acking,
}


class Explored(NamedTuple):
    """What came of all orders: how many worlds there are, and what is wrong with some of them."""

    worlds: int
    violations: frozenset[str]


def explored(protocol: Protocol, looking_for: str = "") -> Explored:
    """Go through every world that can be reached, or until one is wrong in the way that is looked for.

    An effect must not happen twice, no ack come before it, and from each world it must be possible to end well.
    """
    known, waiting, before = {World()}, [World()], dict[World, list[World]]()
    found: set[str] = set()
    while waiting and looking_for not in found:
        world = waiting.pop()
        if violation := wrong_with(world):
            found.add(violation)
            continue
        for coming in map(named, after(protocol, world)):
            before.setdefault(coming, []).append(world)
            if coming not in known:
                known.add(coming)
                waiting.append(coming)
    if not found and known - ending_well(known, before):
        found.add("stuck")
    return Explored(len(known), frozenset(found))


def wrong_with(world: World) -> str:
    """Say what must not be, nothing if all may be well."""
    if world.effects > 1:
        return "twice"
    return "lost" if world.is_acked and world.effects == 0 else ""


def ending_well(known: set[World], before: dict[World, list[World]]) -> set[World]:
    """Return the worlds from which it is possible to end well, by going back from the end."""
    good = {world for world in known if world.is_acked and world.effects == 1}
    waiting = list(good)
    while waiting:
        for earlier in before.get(waiting.pop(), ()):
            if earlier not in good:
                good.add(earlier)
                waiting.append(earlier)
    return good


@pytest.mark.requirement("S0-16", "S0-17", "S0-19", "S0-21", "S0-37")
def test_no_order_of_events_loses_an_effect_or_has_it_twice() -> None:
    """An ack comes after the one effect, and it always can."""
    result = explored(OURS)

    assert result.violations == frozenset()
    assert result.worlds > 10_000


@pytest.mark.requirement("S0-17")
@pytest.mark.parametrize("violation", ["lost", "twice"])
def test_the_protocol_of_the_seed_loses_messages_and_has_effects_twice(violation: str) -> None:
    """Found by the same search, so that it is known to find something."""
    assert violation in explored(SEED, violation).violations


def blind_commit(mark: Marked, token: int) -> Step:
    return Step(("done", token), 1, "done")


def commit_that_forgets_itself(mark: Marked, token: int) -> Step:
    return Step(None, 1, "done") if mark == ("p", token) else Step(mark, 0, "fenced")


def commit_once(mark: Marked, token: int) -> Step:
    return Step(("done", token), 1, "done") if mark == ("p", token) else Step(mark, 0, "done")


def drop_anything(mark: Marked, token: int) -> Step:
    return Step(None, 0, "dropped")


def claim_for_ever(mark: Marked, token: int) -> Step:
    return Step(("partial", token), 0, "claimed") if mark is None else Step(mark, 0, "busy")


@pytest.mark.requirement("S0-37")
@pytest.mark.parametrize(
    ("wrong", "violation"),
    [
        (replace(OURS, commit=blind_commit), "twice"),
        (replace(OURS, commit=commit_that_forgets_itself), "twice"),
        (replace(OURS, commit=commit_once), "lost"),
        (replace(OURS, drop=drop_anything), "twice"),
        (replace(OURS, on_busy="ack"), "lost"),
        (replace(OURS, claim=claim_for_ever), "stuck"),
    ],
    ids=["blind commit", "no mark left", "fenced is acked", "deletes others", "busy is acked", "no lease"],
)
def test_a_protocol_that_is_wrong_in_one_place_is_found_out(wrong: Protocol, violation: str) -> None:
    """The search notices each of these."""
    assert violation in explored(wrong, violation).violations


# -- the model is what the scripts do --------------------------------------------------------------------------

MINE, OTHER = 1, 2
MARKS: Final[tuple[Marked, ...]] = (None, ("p", MINE), ("p", OTHER), ("done", MINE), ("done", OTHER))


async def committed(shop: Shop, mark: Mark) -> list[bytes]:
    """Commit a transaction that counts something up."""
    arguments = [mark.token, mark.expected, 60_000, 1, 3, "string+", "INCRBY", shop.key("effect"), 1, 0]
    keys, script = [mark.key, shop.key("effect")], calling("commit", "enqueue")
    words: list[bytes] = await shop.transactions.client.evaluate(script, keys, *arguments)
    return words


async def on_server(shop: Shop, operation: str, before: Marked) -> Step:
    """Run a script on a real mark, and say what it did in the words of the model."""
    tokens = {MINE: "m" * 32, OTHER: "o" * 32}
    owners = {text: token for token, text in tokens.items()}
    mark = Mark(shop.key("mark"), kept=timedelta(minutes=1), is_claimed=True, token=tokens[MINE])
    await shop.client.delete(mark.key, shop.key("effect"))
    if before is not None:
        await shop.client.set(mark.key, f"{before[0]}:{tokens[before[1]]}", px=60_000)
    client = shop.transactions.client
    if operation == "claim":
        words = await client.evaluate(alone("admit"), [mark.key], mark.token, 60_000)
    elif operation == "drop":
        words = [(await drop(client, mark))[0].encode()]
    else:
        words = await committed(shop, mark)
    state = ((await shop.client.get(mark.key)) or b"").decode()
    word, _, token = state.partition(":")
    answers: dict[bytes, Answer] = {b"CLAIMED": "claimed", b"BUSY": "busy", b"DONE": "done", b"OK": "done"}
    answers |= {b"FENCED": "fenced", b"DROPPED": "dropped", b"LOST": "lost"}
    effects = int(await shop.client.get(shop.key("effect")) or 0)
    return Step((word, owners[token]) if state else None, effects, answers[words[0]])


@pytest.mark.requirement("S0-15", "S0-37")
@pytest.mark.parametrize("operation", ["claim", "commit", "drop"])
@pytest.mark.parametrize("before", MARKS, ids=str)
async def test_the_scripts_do_what_the_model_says(shop: Shop, operation: str, before: Marked) -> None:
    """The same mark before, and the same mark, effect and answer after."""
    model = {"claim": claim, "commit": commit, "drop": drop_mark}[operation]

    assert await on_server(shop, operation, before) == partial(model, before)(MINE)


@pytest.mark.requirement("S0-19")
@pytest.mark.parametrize("before", MARKS, ids=str)
async def test_a_lease_is_renewed_by_its_owner_alone(shop: Shop, before: Marked) -> None:
    """So that renewing changes nothing for anybody else, and is not in the model."""
    tokens = {MINE: "m" * 32, OTHER: "o" * 32}
    if before is not None:
        await shop.client.set(shop.key("mark"), f"{before[0]}:{tokens[before[1]]}", px=20_000)

    answer = await shop.transactions.client.evaluate(alone("renew_mark"), [shop.key("mark")], tokens[MINE], 60_000)

    assert answer == int(before == ("p", MINE))
    assert (await shop.client.pttl(shop.key("mark")) > 20_000) is (before == ("p", MINE))


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("is_claimed", [True, False])
async def test_a_commit_that_comes_after_it_was_given_up_is_refused(shop: Shop, *, is_claimed: bool) -> None:
    """With a message and without, so that an answer about what became of it stays true."""
    mark = Mark(shop.key("mark"), kept=timedelta(minutes=1), is_claimed=is_claimed)
    client = shop.transactions.client
    if is_claimed:
        await client.evaluate(alone("admit"), [mark.key], mark.token, 60_000)

    answers = [(await drop(client, mark))[0], *(await committed(shop, mark)), (await drop(client, mark))[0]]

    assert answers == ["DROPPED", b"FENCED", "LOST" if is_claimed else "DROPPED"]
    assert is_claimed or 0 < await shop.client.pttl(mark.key) <= 60_000  # what is void need not be known for ever
    assert await shop.client.get(shop.key("effect")) is None


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("is_claimed", [True, False])
async def test_a_commit_that_was_applied_is_not_given_up(shop: Shop, *, is_claimed: bool) -> None:
    """Whoever asks learns that it was, as often as it is asked or sent."""
    mark = Mark(shop.key("mark"), kept=timedelta(minutes=1), is_claimed=is_claimed)
    client = shop.transactions.client
    if is_claimed:
        await client.evaluate(alone("admit"), [mark.key], mark.token, 60_000)

    answers = [*(await committed(shop, mark)), (await drop(client, mark))[0], *(await committed(shop, mark))]

    assert answers == [b"OK", "DONE", b"OK"]
    assert await shop.client.get(shop.key("effect")) == b"1"


@pytest.mark.requirement("S0-30", "S0-36")
async def test_a_mark_that_somebody_has_made_something_else_is_left_alone(shop: Shop) -> None:
    """Whoever comes upon it is told, and changes nothing."""
    mark = Mark(shop.key("mark"), kept=timedelta(minutes=1), is_claimed=True)
    client = shop.transactions.client
    await shop.client.hset(mark.key, "a", "b")

    answers = [await drop(client, mark), await committed(shop, mark)]
    with pytest.raises(StoreError, match=r"WRONGTYPE .* is a hash, and should be a string"):
        await client.evaluate(alone("admit"), [mark.key], mark.token, 60_000)
    renewed = await client.evaluate(alone("renew_mark"), [mark.key], mark.token, 60_000)

    assert answers == [["LOST"], [b"BADTYPE", mark.key.encode(), b"a hash, and should be a string"]]
    assert renewed == 0
    assert await shop.keys() == {mark.key}
    assert await shop.client.hgetall(mark.key) == {b"a": b"b"}


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("is_mine", [True, False])
async def test_what_was_applied_in_part_is_told_as_often_as_it_is_asked(shop: Shop, *, is_mine: bool) -> None:
    """Also if the first answer was lost, or it would seem that nothing was; and to its owner alone."""
    mark = Mark(shop.key("mark"), kept=timedelta(minutes=1), is_claimed=True)
    await shop.client.set(mark.key, f"partial:{mark.token if is_mine else 'x' * 32} 1 of 2 applied")

    for _ in range(2):
        committing, dropping = await committed(shop, mark), await drop(shop.transactions.client, mark)

        assert committing == ([b"PARTIAL", b"1 of 2 applied"] if is_mine else [b"FENCED"])
        assert dropping == (["PARTIAL", "1 of 2 applied"] if is_mine else ["LOST"])
    assert (await shop.client.get(mark.key)).endswith(b" 1 of 2 applied")
    assert await shop.client.get(shop.key("effect")) is None
