"""The store in a stream of Redis on bad days: crashed workers, lost groups, trimmed entries, restarted servers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry as Retries
from redis.backoff import NoBackoff

from postroom import Claim, ClaimTerms, Dead, Delivered, Dispatcher, Message, Outcome, Release, Retry, Settlement
from postroom.brokers import MemoryBroker
from postroom.errors import StoreError, StorePermissionError, StoreUnavailableError
from postroom.store import Peeked
from postroom.stores.redis import stream as stream_module
from postroom.stores.redis.stream import RedisStreamStore
from postroom.testing.cancelling import cuts
from postroom.testing.clients import ValkeyClient
from postroom.testing.faults import FaultProxy
from postroom.testing.servers import ValkeyServer
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
#: As many entries the scripts of the stream look at.
SCANNED = 2000
GROUP = "outbox-publisher"
# The library's own types name neither all commands nor what they answer.
Foreign = Any


def connected(url: str) -> Foreign:
    return redis.asyncio.Redis.from_url(url, retry=Retries(NoBackoff(), 0))


#: Moves back since when entries are held, and when somebody looks for them; one by one that would take its time.
AGE = """
for _, one in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 10000)) do
  local idle = one[3] + ARGV[2]
  redis.call('XCLAIM', KEYS[1], ARGV[1], one[2], 0, one[1], 'IDLE', idle, 'RETRYCOUNT', one[4], 'JUSTID')
end
for _, name in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  redis.call('ZINCRBY', KEYS[2], -ARGV[2] * 1000, name)
end
"""


class Place:
    """One stream, and as many stores on it as a test wants."""

    def __init__(self, client: Foreign) -> None:
        self.client = client
        self.table = f"test-{uuid4().hex}"

    def store(self, **options: Foreign) -> RedisStreamStore:
        return RedisStreamStore(self.client, table=self.table, **options)

    def key(self, name: str = "") -> str:
        return self.store().outbox().stream + name

    async def add(self, *numbers: int) -> None:
        messages = [Message(topic="orders", type="order.placed", payload=str(n).encode()) for n in numbers]
        await self.store().outbox().add(self.client, messages)

    async def entries(self) -> list[str]:
        return [entry.decode() for entry, _ in await self.client.xrange(self.key())]

    async def dead(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in await self.client.xrange(self.key(":dead"))]

    async def watched(self, peek: Awaitable[Sequence[Peeked]]) -> tuple[Sequence[Peeked], list[list[str]]]:
        """Return what a peek shows, and the commands on this stream; other tests may use the same server."""
        heard, mark = list[list[str]](), uuid4().hex
        async with self.client.monitor() as monitor:
            peeked = await peek
            await self.client.echo(mark)
            async for seen in monitor.listen():
                words = seen["command"].split()
                if words[-1] == mark:
                    break
                if self.table in seen["command"]:
                    heard.append(words)
        return peeked, heard

    async def age(self, by: timedelta) -> None:
        """Make all that is held look as if it had been held for so much longer."""
        await self.client.eval(AGE, 2, self.key(), self.key(":leases"), GROUP, by // MS)


@pytest.fixture
def place(client: Foreign) -> Place:
    return Place(client)


def terms(**changes: Foreign) -> ClaimTerms:
    chosen: dict[str, Foreign] = {"worker": uuid4(), "lease": timedelta(seconds=30), **changes}
    return ClaimTerms(**chosen)


def numbers(claims: Sequence[Claim]) -> list[int]:
    return [int(claim.message.payload) for claim in claims]


async def claim_all(store: RedisStreamStore, wanted: ClaimTerms, limit: int = 500) -> list[Claim]:
    found: list[Claim] = []
    while claims := await store.claim(limit, wanted):
        found += claims
    return found


def delivered(claims: Sequence[Claim]) -> list[Settlement]:
    return [Settlement(claim, Delivered()) for claim in claims]


# -- workers that do not come back -------------------------------------------------------------------------------


@pytest.mark.requirement("S0-52")
@pytest.mark.parametrize("limit", [7, 100, 500])
async def test_more_than_a_page_of_pending_entries_is_taken_over_completely(place: Place, limit: int) -> None:
    """Each once, whatever stands before it in the list."""
    await place.add(*range(1200))
    lost = await claim_all(place.store(), terms())
    await place.age(timedelta(minutes=1))
    store = place.store()

    found = await claim_all(store, terms(), limit)

    assert len(lost) == 1200
    assert sorted(numbers(found)) == list(range(1200))
    assert {(claim.message.attempt, claim.message.token) for claim in found} == {(2, 2)}
    assert await store.settle(delivered(found)) == []
    assert len(await place.store().settle([Settlement(claim, Retry("late")) for claim in lost])) == 1200


@pytest.mark.requirement("S0-52")
async def test_what_is_held_does_not_hide_what_was_left_behind_it(place: Place) -> None:
    """More entries whose lease holds than one look takes in stand before the one that ran out."""
    await place.add(*range(2600))
    wanted = terms()
    store = place.store()
    held = await claim_all(store, wanted)
    await place.age(timedelta(minutes=1))
    assert await store.extend(held[:-1], wanted.lease) == []
    other = place.store()

    found: list[Claim] = []
    for _ in range(3):
        found += await other.claim(10, terms())

    assert numbers(found) == [2599]


@pytest.mark.requirement("S0-52")
async def test_a_look_at_what_is_held_is_not_repeated_for_nothing(place: Place) -> None:
    """When nothing has run out, it is known until when nothing can; and a name that holds nothing is dropped."""
    await place.add(*range(300))
    held = await claim_all(place.store(), terms())
    leases = place.key(":leases")
    [name] = await place.client.zrange(leases, 0, -1)
    now: int = (await place.client.time())[0]

    await place.client.zadd(leases, {name: 1})
    await place.store().claim(10, terms())
    later: float = await place.client.zscore(leases, name)
    await place.store().settle(delivered(held))
    await place.client.zadd(leases, {name: 1})
    await place.store().claim(10, terms())

    assert later > (now + 20) * 1_000_000
    assert await place.client.zscore(leases, name) is None


@pytest.mark.requirement("S0-48")
async def test_a_lease_is_as_long_as_its_own_dispatcher_says(place: Place) -> None:
    """A short one runs out while a long one holds."""
    await place.add(1, 2)
    store = place.store()
    await store.claim(1, terms(lease=timedelta(seconds=10)))
    await store.claim(1, terms(lease=timedelta(minutes=10)))
    await place.age(timedelta(minutes=1))

    assert numbers(await place.store().claim(10, terms())) == [1]


@pytest.mark.requirement("G2", "S0-52")
async def test_a_lease_that_was_extended_by_another_time_runs_out_too(place: Place) -> None:
    """And is noticed without a sweep."""
    await place.add(1)
    store = place.store()
    claims = await store.claim(1, terms())
    await store.extend(claims, timedelta(minutes=5))
    await place.age(timedelta(minutes=4))
    early = await store.claim(1, terms())
    await place.age(timedelta(minutes=2))

    assert early == []
    assert numbers(await place.store().claim(1, terms())) == [1]


@pytest.mark.requirement("G4", "S0-52")
async def test_of_one_worker_only_what_ran_out_is_taken(place: Place) -> None:
    """What it claimed later it holds longer."""
    await place.add(1, 2)
    store, wanted = place.store(), terms()
    await store.claim(1, wanted)
    await place.age(timedelta(seconds=15))
    await store.claim(1, wanted)
    await place.age(timedelta(seconds=20))

    first = await place.store().claim(10, terms())
    await place.age(timedelta(seconds=11))
    second = await place.store().claim(10, terms())

    assert (numbers(first), numbers(second)) == ([1], [2])


@pytest.mark.requirement("G2", "G9")
async def test_the_turn_of_a_suspect_does_not_hide_what_others_left_behind(place: Place) -> None:
    """What could have been taken with it is taken next, and not a lease later."""
    first, second, store = place.store(), place.store(), place.store()
    await place.add(1)
    for _ in range(3):
        assert numbers(await first.claim(1, terms())) == [1]
        await place.age(timedelta(minutes=1))
    await place.add(2, 3)
    assert numbers(await second.claim(2, terms())) == [2, 3]
    await place.age(timedelta(minutes=1))
    for _ in range(15):
        await store.claim(0, terms())

    claims = [await store.claim(10, terms()) for _ in range(2)]

    assert [numbers(batch) for batch in claims] == [[1], [2, 3]]
    assert [claim.suspect for batch in claims for claim in batch] == [True, False, False]


@pytest.mark.requirement("G4")
async def test_what_was_given_back_cannot_be_leased_anew(place: Place) -> None:
    """Its token is the same until somebody claims it, and yet it is nobody's."""
    await place.add(1)
    store = place.store()
    claims = await store.claim(1, terms())
    await store.settle([Settlement(claims[0], Retry("no"))])

    assert await store.extend(claims, timedelta(minutes=1)) == claims
    assert numbers(await store.claim(1, terms())) == [1]


@pytest.mark.requirement("G2")
async def test_what_can_be_had_is_handed_out_although_new_entries_cannot_be_read(private_valkey: ValkeyServer) -> None:
    """What was claimed before the error would be held by nobody until its lease ends."""
    place = Place(connected(private_valkey.dsn))
    await place.add(1, 2)
    await place.store().settle([Settlement(claim, Retry("no")) for claim in await place.store().claim(1, terms())])
    await place.client.execute_command("ACL", "SETUSER", "clerk", "on", ">pw", "~*", "&*", "+@all", "-xreadgroup")
    clerk = connected(private_valkey.dsn.replace("redis://", "redis://clerk:pw@"))
    store = RedisStreamStore(clerk, table=place.table)

    assert numbers(await store.claim(10, terms())) == [1]
    with pytest.raises(StorePermissionError):
        await store.claim(10, terms())

    await clerk.aclose()
    await place.client.aclose()


@pytest.mark.requirement("G4")
async def test_who_lost_a_claim_cannot_raise_the_dead(place: Place) -> None:
    """A late confirmation counts for the last who held the message, not for those before."""
    await place.add(1)
    store = place.store()
    old = await store.claim(1, terms())
    await place.age(timedelta(minutes=1))
    new = await store.claim(1, terms())
    await store.settle([Settlement(new[0], Dead("no"))])

    assert await store.settle(delivered(old)) == old
    assert len(await place.dead()) == 1
    assert await store.settle(delivered(new)) == []
    assert await place.dead() == []


@pytest.mark.requirement("G2", "S0-52", "S0-54")
async def test_a_worker_that_was_killed_loses_nothing(place: Place, valkey_server: ValkeyClient) -> None:
    """After its lease another takes over, with the attempt counted."""
    await place.add(*range(20))
    program = """
import asyncio, sys
from datetime import timedelta
from uuid import uuid4
from postroom import ClaimTerms
from postroom.stores.redis.stream import RedisStreamStore
async def main():
    store = RedisStreamStore(sys.argv[1], table=sys.argv[2])
    claims = await store.claim(10, ClaimTerms(worker=uuid4(), lease=timedelta(milliseconds=200)))
    print(len(claims), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, valkey_server.dsn, place.table, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"10\n"
    worker.kill()
    await worker.wait()
    broker, store = MemoryBroker(), place.store()
    dispatcher = Dispatcher(store, broker, poll_interval=20 * MS)
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: broker.confirmed == 20, "everything was delivered")
    await dispatcher.stop()
    await running

    assert sorted(int(message.payload) for message in broker.received) == list(range(20))
    assert sorted(message.attempt for message in broker.received) == [1] * 10 + [2] * 10
    assert await place.client.xlen(place.key()) == 0


@pytest.mark.requirement("S0-56")
async def test_a_consumer_that_keeps_its_name_takes_up_at_once_what_it_held(place: Place) -> None:
    """Before it is lent to others and without waiting for the lease, and what came before is refused."""
    await place.add(*range(30))
    before = await place.store(consumer="till-1").claim(20, terms())
    others = await place.store(consumer="till-10").claim(5, terms())
    again = place.store(consumer="till-1")

    found = await again.claim(12, terms()) + await again.claim(8, terms())
    rest = await again.claim(10, terms())

    assert numbers(found) == list(range(20))
    assert {claim.message.token for claim in found} == {2}
    assert numbers(rest) == list(range(25, 30))
    assert await again.settle(delivered(before)) == before
    assert await again.settle(delivered(others)) == []


@pytest.mark.requirement("S0-56")
async def test_a_store_does_not_take_from_itself(place: Place) -> None:
    """Two first claims at the same time, and a store that was closed and opened again."""
    await place.add(*range(10))
    store = place.store(consumer="till-1")

    batches = await asyncio.gather(*[store.claim(3, terms()) for _ in range(3)])
    await store.close()
    await store.open()

    assert sorted(number for batch in batches for number in numbers(batch)) == list(range(9))
    assert numbers(await store.claim(10, terms())) == [9]


@pytest.mark.requirement("S0-52")
async def test_what_somebody_read_by_hand_is_taken_over_after_a_minute(place: Place) -> None:
    """Whatever its name says; a sweep comes upon it."""
    await place.add(1)
    store = place.store()
    await store.open()
    await place.client.xreadgroup(GROUP, "somebody", {place.key(): ">"})
    await store.sweep(terms())
    early = await store.claim(10, terms())
    await place.age(timedelta(seconds=61))

    assert early == []
    assert numbers(await store.claim(10, terms())) == [1]


@pytest.mark.requirement("S0-48", "S0-52")
@pytest.mark.parametrize("min_idle", [timedelta(seconds=30), timedelta(hours=1)])
async def test_what_somebody_read_by_hand_is_taken_over_after_the_idle_time_of_the_store(
    place: Place, min_idle: timedelta
) -> None:
    """Shorter or longer than a minute, and by claims and sweeps alike."""
    await place.add(1)
    store = place.store(min_idle=min_idle)
    await store.open()
    await place.client.xreadgroup(GROUP, "somebody", {place.key(): ">"})
    await store.sweep(terms())
    await place.age(min_idle - timedelta(seconds=5))
    early = await store.sweep(terms(max_attempts=1)), await store.claim(10, terms())
    await place.age(timedelta(seconds=6))

    assert early == (0, [])
    assert numbers(await store.claim(10, terms())) == [1]


@pytest.mark.requirement("G4", "S0-48")
async def test_an_idle_time_lengthens_a_lease_and_never_shortens_it(place: Place) -> None:
    """A message that is leased stays with its worker, whatever another store says."""
    await place.add(1)
    hasty, patient = place.store(min_idle=timedelta(seconds=1)), place.store(min_idle=timedelta(minutes=5))
    await place.store().claim(10, terms())
    await place.age(timedelta(seconds=29))
    early = await hasty.claim(10, terms())
    await place.age(timedelta(seconds=2))
    late = await patient.claim(10, terms()), await patient.sweep(terms(max_attempts=1))
    await place.age(timedelta(minutes=5))

    assert (early, late) == ([], ([], 0))
    assert numbers(await patient.claim(10, terms())) == [1]


@pytest.mark.requirement("S0-48")
async def test_a_peek_waits_for_the_idle_time_of_the_store_as_claims_do(place: Place) -> None:
    """What it shows, the next claim brings: of postroom's own workers, and of others."""
    await place.add(1, 2)
    await place.store().claim(1, terms())
    store = place.store(min_idle=timedelta(minutes=5))
    await store.open()
    await place.client.xreadgroup(GROUP, "somebody", {place.key(): ">"})
    await store.sweep(terms())
    await place.age(timedelta(minutes=4))
    early = await store.peek(10), await store.claim(10, terms())
    await place.age(timedelta(minutes=2))
    late = await store.peek(10)

    assert early == ([], [])
    assert sorted(int(one.message.payload) for one in late) == [1, 2]
    assert sorted(numbers(await store.claim(10, terms()))) == [1, 2]


async def test_a_peek_looks_at_a_bounded_number_of_entries_that_workers_left(place: Place) -> None:
    """However many workers are gone: the server does nothing else meanwhile."""
    await place.add(*range(2500))
    for _ in range(5):
        await place.store().claim(500, terms())
    await place.age(timedelta(minutes=1))

    peeked, heard = await place.watched(place.store(min_idle=timedelta(hours=1)).peek(10))

    looked_at = [int(words[5]) for words in heard if words[0] == "XPENDING" and words[-1] != words[5]]
    assert peeked == []
    assert looked_at == [SCANNED, 1500, 1000, 500]


async def test_a_peek_looks_at_a_bounded_number_of_entries_that_wait(place: Place) -> None:
    """However many topics they are of: the server does nothing else meanwhile."""
    topics, store = [f"topic-{number}" for number in range(30)], place.store()
    await store.outbox().add(place.client, [Message(topic=name, payload=b"1") for name in topics])
    claims = await store.claim(500, terms())
    await store.settle([Settlement(claim, Retry("no", timedelta(0))) for claim in claims])

    peeked, heard = await place.watched(store.peek(500))

    looked_at = [int(words[-1]) for words in heard if words[0] == "ZRANGEBYLEX"]
    assert len(peeked) == len(looked_at) == len(topics)
    assert len(topics) <= sum(looked_at) <= SCANNED + len(topics)


@pytest.mark.requirement("S0-48", "S0-52")
async def test_left_entries_are_looked_for_once_in_an_interval(place: Place) -> None:
    """New entries come all the same; the first claim looks at once."""
    await place.add(1)
    await place.store().claim(10, terms())
    await place.age(timedelta(minutes=1))
    rare, always = place.store(claim_interval=timedelta(hours=1)), place.store()
    first = await rare.claim(10, terms())
    await place.age(timedelta(minutes=1))
    await place.add(2)
    second, third = await rare.claim(10, terms()), await rare.claim(10, terms())

    assert (numbers(first), numbers(second), third) == ([1], [2], [])
    assert numbers(await always.claim(10, terms())) == [1]


@pytest.mark.requirement("S0-53", "S0-57")
async def test_what_waits_for_its_next_try_is_not_taken_for_left_behind(place: Place) -> None:
    """A sweep that comes upon it does not cut its backoff short."""
    await place.add(1)
    store = place.store()
    await store.settle([Settlement(claim, Retry("no", timedelta(hours=1))) for claim in await store.claim(1, terms())])
    await store.sweep(terms())
    await place.age(timedelta(minutes=30))

    assert await store.claim(10, terms()) == []


@pytest.mark.requirement("G11")
async def test_a_dead_message_leaves_nothing_but_its_letter(place: Place) -> None:
    """What was known of its tries is gone with it."""
    await place.add(1)
    store = place.store()
    for outcome in (Retry("no"), Release(), Dead("no")):
        assert await store.settle([Settlement(claim, outcome) for claim in await store.claim(1, terms())]) == []

    assert len(await place.dead()) == 1
    assert await place.client.exists(place.key(":notes"), place.key(":waiting")) == 0
    assert (await place.client.xpending(place.key(), GROUP))["pending"] == 0


@pytest.mark.requirement("S0-48")
async def test_names_are_forgotten_only_with_nothing_in_their_hands(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what they hold would be gone from the group with them."""
    monkeypatch.setattr(stream_module, "FORGET_NAMES", timedelta(0))
    await place.add(1, 2, 3)
    store, idle = place.store(consumer="busy"), place.store(consumer="idle")
    await store.claim(1, terms())
    await idle.settle(delivered(await idle.claim(1, terms())))
    await idle.settle([Settlement(claim, Retry("no", timedelta(hours=1))) for claim in await idle.claim(1, terms())])

    await store.sweep(terms())

    names = [one["name"].partition(b"|")[0] for one in await place.client.xinfo_consumers(place.key(), GROUP)]
    assert sorted(names) == [b"busy", b"~waiting"]
    assert (await place.client.xpending(place.key(), GROUP))["pending"] == 2


@pytest.mark.requirement("S0-48")
async def test_an_idle_consumer_is_known_for_a_while(place: Place) -> None:
    """A worker that only rests must not have to be made known to the group again and again."""
    await place.add(1)
    store = place.store(consumer="idle")
    await store.settle(delivered(await store.claim(1, terms())))

    await store.sweep(terms())

    names = [one["name"].partition(b"|")[0] for one in await place.client.xinfo_consumers(place.key(), GROUP)]
    assert names == [b"idle"]


# -- groups and entries that others remove -----------------------------------------------------------------------


@pytest.mark.requirement("G2", "G4", "S0-50")
@pytest.mark.parametrize("max_bytes", [None, 1_000_000])
async def test_a_group_that_was_destroyed_is_made_again_and_everything_comes_again(
    place: Place, max_bytes: int | None
) -> None:
    """Duplicates and no loss; who held something from the group before is refused."""
    await place.add(1, 2, 3)
    store = place.store()
    one, two = await store.claim(2, terms())
    await store.settle([Settlement(two, Retry("no", timedelta(hours=1)))])
    await place.client.xgroup_destroy(place.key(), GROUP)

    orphan = await store.settle(delivered([one]))
    again = await store.claim(10, terms(max_bytes=max_bytes))

    assert orphan == [one]
    assert numbers(again) == [1, 2, 3]
    assert await place.client.exists(place.key(":waiting"), place.key(":notes")) == 0
    assert [claim.message.attempt for claim in again] == [1, 1, 1]
    assert min(claim.message.token for claim in again) > two.message.token
    for outcome in (Delivered(), Retry("no"), Dead("no"), Release()):
        assert await store.settle([Settlement(one, outcome)]) == [one]
    assert await store.extend([one], timedelta(minutes=1)) == [one]
    assert await store.settle(delivered(again)) == []
    assert await place.client.xlen(place.key()) == 0


@pytest.mark.requirement("S0-50")
async def test_a_dispatcher_survives_that_everything_is_flushed(private_valkey: ValkeyServer) -> None:
    """It makes the group anew instead of failing for ever, and delivers what comes after."""
    client = connected(private_valkey.dsn)
    place, broker = Place(client), MemoryBroker()
    dispatcher = Dispatcher(place.store(), broker, poll_interval=20 * MS)
    running = asyncio.create_task(dispatcher.run())
    await place.add(1)
    await until(lambda: broker.confirmed == 1, "the first was delivered")

    await client.flushall()
    await client.script_flush()
    await place.add(2)
    await until(lambda: broker.confirmed == 2, "the second was delivered")

    await dispatcher.stop()
    await running
    await client.aclose()
    assert [message.payload for message in broker.received] == [b"1", b"2"]


@pytest.mark.requirement("G2")
@pytest.mark.parametrize("call", ["listen", "claim"])
async def test_a_call_that_is_cancelled_ends_wherever_that_strikes(place: Place, call: str) -> None:
    """Also while the library sends, which keeps a cancellation to itself: a dispatcher could not stop."""
    store = place.store()
    await store.open()

    async def work() -> None:
        while call == "claim":
            await store.claim(1, terms())
        await store.listen(lambda: None)

    for patience in range(60):
        working = asyncio.create_task(work())
        for _ in range(patience):
            await asyncio.sleep(0)
        working.cancel()
        done, _ = await asyncio.wait({working}, timeout=10)
        assert done, f"it went on after {patience} steps"
        assert working.cancelled()


@pytest.mark.requirement("G2", "G11")
@pytest.mark.parametrize("fault", ["waiting", "answered", "cut"])
async def test_claims_and_settlements_may_be_cut_off_anywhere(valkey_server: ValkeyClient, fault: Foreign) -> None:
    """Cancelled, or without their connections; what was not settled comes again, and no connection is kept."""
    async with FaultProxy("127.0.0.1", urlsplit(valkey_server.dsn).port or 6379) as proxy:
        client, shaky = connected(valkey_server.dsn), connected(f"redis://127.0.0.1:{proxy.port}/0?max_connections=2")
        place = Place(client)
        await place.store().open()
        is_settling = False

        async def work() -> None:
            nonlocal is_settling
            store = RedisStreamStore(shaky, table=place.table)
            claims = await store.claim(10, terms())
            await store.extend(claims, timedelta(minutes=1))
            is_settling = bool(claims)
            await store.settle(delivered(claims[:1]) + [Settlement(claim, Retry("no")) for claim in claims[1:]])

        for cut in cuts(fault=proxy.cut) if fault == "cut" else cuts(moment=fault):
            is_settling = False
            await place.add(1, 2)
            with suppress(StoreError):
                await cut.run(work())
            await place.age(timedelta(minutes=2))
            left = await claim_all(place.store(), terms())

            assert numbers(left) in ([1, 2], [2, 1], [2] if is_settling else []), cut
            assert await place.store().settle(delivered(left)) == []
        assert await place.client.xlen(place.key()) == 0
        for _ in range(3):  # what was kept would be missing
            with suppress(StoreUnavailableError):  # it was cut before, and is noticed now
                await work()
        await work()
        await client.aclose()
        await shaky.aclose()


@pytest.mark.requirement("G2", "G11")
async def test_a_server_without_memory_is_emptied_by_delivering(private_valkey: ValkeyServer) -> None:
    """What is there can be claimed and settled in every way, although nothing can be added."""
    place = Place(connected(private_valkey.dsn))
    await place.add(*range(6))
    await place.client.config_set("maxmemory", "1")
    store = place.store()

    with pytest.raises(redis.exceptions.OutOfMemoryError):
        await place.add(7)
    claims = await store.claim(10, terms())
    outcomes: list[Outcome] = [Delivered(), Retry("no"), Release(), Dead("no")]
    assert await store.extend(claims, timedelta(minutes=1)) == []
    for claim, outcome in zip(claims, outcomes, strict=False):
        assert await store.settle([Settlement(claim, outcome)]) == []

    assert await store.sweep(terms(max_attempts=1)) == 1
    assert numbers(await store.claim(10, terms())) == [2]
    assert (await store.stats()).dead == 2
    await place.client.aclose()


@pytest.mark.requirement("G2", "S0-54")
async def test_a_server_that_is_killed_and_started_again_forgets_nothing(private_valkey: ValkeyServer) -> None:
    """What was held is held again, and a token is as good as before."""
    place = Place(connected(private_valkey.dsn))
    await place.client.config_set("appendfsync", "always")
    await place.add(*range(6))
    store = place.store()
    held = await store.claim(3, terms())
    await store.settle([Settlement(held[2], Retry("no"))])

    private_valkey.kill9()
    await place.client.aclose()
    private_valkey.start()
    place.client = connected(private_valkey.dsn)
    store = place.store()

    assert await store.settle(delivered(held[:2])) == []
    assert sorted(numbers(await store.claim(10, terms()))) == [2, 3, 4, 5]
    await place.client.aclose()


@pytest.mark.requirement("S0-52")
@pytest.mark.parametrize("state", ["expired", "waiting"])
async def test_an_entry_that_was_deleted_while_it_was_held_is_told_as_dead(place: Place, state: str) -> None:
    """Its message is lost; that much is visible, and those beside it go on."""
    await place.add(1, 2, 3)
    store = place.store()
    claims = await store.claim(10, terms())
    if state == "waiting":
        await store.settle([Settlement(claim, Retry("no")) for claim in claims])
    await place.age(timedelta(minutes=1))
    await place.client.xdel(place.key(), (await place.entries())[1])

    again = await store.claim(10, terms())

    [letter] = await place.dead()
    assert sorted(numbers(again)) == [1, 3]
    assert b"deleted from the stream" in letter[b"postroom:error"]
    assert (await place.client.xpending(place.key(), GROUP))["pending"] == 2
    assert (await store.stats()).dead == 1
    assert await store.redrive() == 0


@pytest.mark.requirement("S0-52")
@pytest.mark.parametrize("outcome", [Retry("no"), Release(), Dead("no")])
async def test_a_deleted_entry_that_is_settled_is_told_as_dead(place: Place, outcome: Retry | Release | Dead) -> None:
    """Also by the one who holds it."""
    await place.add(1, 2)
    store = place.store()
    claims = await store.claim(10, terms())
    await place.client.xtrim(place.key(), maxlen=1, approximate=False)

    assert await store.settle([Settlement(claims[0], outcome)]) == []

    assert len(await place.dead()) == 1
    assert (await place.client.xpending(place.key(), GROUP))["pending"] == 1
    assert await store.claim(10, terms()) == []


@pytest.mark.requirement("S0-52")
async def test_a_deleted_entry_that_is_extended_is_told_as_dead_and_may_still_be_delivered(place: Place) -> None:
    """Its worker has the message, and does with it what it can."""
    await place.add(1)
    store = place.store()
    claims = await store.claim(10, terms())
    await place.client.xdel(place.key(), *await place.entries())

    assert await store.extend(claims, timedelta(minutes=1)) == []

    assert len(await place.dead()) == 1
    assert await store.settle(delivered(claims)) == []
    assert await place.dead() == []


@pytest.mark.requirement("S0-53")
async def test_a_delivered_entry_that_was_trimmed_is_simply_done(place: Place) -> None:
    """Its message went out."""
    await place.add(1)
    store = place.store()
    claims = await store.claim(10, terms())
    await place.client.delete(place.key())

    assert await store.settle(delivered(claims)) == []
    assert await place.dead() == []


@pytest.mark.requirement("G13", "S2-12")
async def test_messages_of_others_are_put_aside_once(place: Place) -> None:
    """What is not for these terms costs no attempt, and is not read again and again."""
    mine, its = uuid4(), uuid4()
    messages = [
        Message(
            topic="down" if n % 3 == 0 else "up", type="t", payload=str(n).encode(), tenant_id=mine if n % 2 else its
        )
        for n in range(600)
    ]
    store = place.store()
    await store.outbox().add(place.client, messages)
    choosy = terms(tenant_id=mine)

    found = await claim_all(store, choosy, 50)
    nothing = await store.claim(50, choosy)
    rest = await claim_all(store, terms())

    assert numbers(found) == [n for n in range(600) if n % 2]
    assert nothing == []
    assert sorted(numbers(found + rest)) == list(range(600))
    assert {(claim.message.attempt, claim.message.token) for claim in rest} == {(1, 2)}


@pytest.mark.requirement("G5")
async def test_one_message_that_was_added_twice_comes_twice(place: Place) -> None:
    """Under one id, by which its receiver tells; a stream does not."""
    message = Message(topic="orders", type="order.placed", payload=b"1")
    store = place.store()
    await store.outbox().add(place.client, [message, message])

    claims = await store.claim(10, terms())

    assert [claim.message.id for claim in claims] == [message.id] * 2
    assert await store.settle([Settlement(claims[0], Delivered())]) == []
    assert await place.client.xlen(place.key()) == 1
    assert await store.settle([Settlement(claims[1], Delivered())]) == []


# -- entries of somebody else's ----------------------------------------------------------------------------------


WRONG: dict[str, dict[str, str | bytes]] = {
    "no time": {"postroom:time": "soon"},
    "too deep": {"attributes": "[" * 100_000},
    "a number for a text": {"attributes": '{"content_type": 5}'},
    "an object for a text": {"attributes": '{"dedupe_key": {}}'},
    "a number for a tenant": {"attributes": '{"tenant_id": 5}'},
    "no text": {"attributes": '{"headers": {"a": null}}'},
    "no headers": {"attributes": '{"headers": "a"}'},
    "no utf-8": {"topic": b"\xff", "key": b"\xff"},
    "no id": {"id": "f" * 40},
}


@pytest.mark.requirement("S0-55")
@pytest.mark.parametrize("wrong", WRONG)
async def test_an_entry_that_is_wrong_in_any_way_holds_up_nobody(place: Place, wrong: str) -> None:
    """A claim that raised would take the messages beside it down with it, again and again."""
    await place.add(1)
    await place.client.xadd(place.key(), {"id": uuid4().hex, "topic": "t", "type": "t", "data": "x", **WRONG[wrong]})
    await place.add(2)

    claims = await place.store().claim(10, terms())

    assert [claim.broken is not None for claim in claims] == [False, True, False]


@pytest.mark.requirement("G9")
async def test_an_entry_with_thousands_of_fields_can_be_buried_and_tried_again(place: Place) -> None:
    """A script can hand on only so much; the rest is told to be missing, and nobody is held up by it."""
    fields = {"id": uuid4().hex, "topic": "t", "type": "t", "data": "1", **{f"f{n}": "v" for n in range(5000)}}
    await place.client.xadd(place.key(), fields)
    store = place.store()

    [claim] = await store.claim(10, terms())
    assert await store.settle([Settlement(claim, Dead("no"))]) == []
    [letter] = await place.dead()
    redriven = await store.redrive()

    assert letter[b"postroom:error"] == b"no (of its 5004 fields the first 3950 are kept)"
    assert redriven == 1
    assert numbers(await store.claim(10, terms())) == [1]


@pytest.mark.requirement("S0-52")
async def test_ids_that_are_far_ahead_hold_up_nothing(place: Place) -> None:
    """The ids of a stream never go back, whoever set the first; what is given back is due all the same."""
    await place.client.xadd(place.key(), {"some": "thing"}, id=f"{2**63}-0")
    await place.add(1)
    store = place.store()
    broken, claim = await store.claim(10, terms())
    await store.settle([Settlement(claim, Release())])

    [again] = await store.claim(10, terms())

    assert (broken.broken is not None, claim.broken) == (True, None)
    assert (numbers([again]), again.message.attempt) == ([1], 1)


@pytest.mark.requirement("S0-52")
async def test_a_clock_that_was_ahead_delays_nothing_that_is_given_back(place: Place) -> None:
    """An entry came while the clock was ahead by an hour."""
    seconds: int = (await place.client.time())[0]
    fields = {"id": uuid4().hex, "topic": "t", "type": "t", "data": "1"}
    await place.client.xadd(place.key(), fields, id=f"{(seconds + 3600) * 1000}-0")
    store = place.store()

    for _ in range(2):
        claims = await store.claim(10, terms())
        assert await store.settle([Settlement(claim, Release()) for claim in claims]) == []

        assert numbers(claims) == [1]


@pytest.mark.requirement("G11")
async def test_all_that_was_asked_for_is_purged_and_redriven(place: Place) -> None:
    """The cleanup goes on only as long as it gets what it asks for; what it leaves would add up."""
    store = place.store(keep_delivered=timedelta(days=1))
    await place.add(*range(1200))
    claims = await claim_all(store, terms())
    await store.settle(delivered(claims[:600]))
    await store.settle([Settlement(claim, Dead("no")) for claim in claims[600:]])
    await place.client.xadd(place.key(":dead"), {"postroom:error": "deleted"})

    purged = [await store.purge(older_than=timedelta(0), limit=limit) for limit in (550, 550)]
    redriven = [await store.redrive(limit=limit) for limit in (550, 550)]

    assert (purged, redriven) == ([550, 50], [550, 50])
    assert await place.client.exists(place.key(":done"), place.key(":receipts"), place.key(":graves")) == 0
    assert numbers(await claim_all(store, terms())) == list(range(600, 1200))
    assert await place.client.xlen(place.key(":dead")) == 0


@pytest.mark.requirement("S0-57")
async def test_what_is_tried_again_has_all_of_its_fields(place: Place) -> None:
    """Also those whose names resemble ours."""
    await place.client.xadd(
        place.key(), {"postroom:mine": "1", "id": uuid4().hex, "topic": "t", "type": "t", "data": "1"}
    )
    store = place.store()
    [claim] = await store.claim(10, terms())
    await store.settle([Settlement(claim, Dead("no"))])

    await store.redrive()

    [(_, fields)] = await place.client.xrange(place.key())
    assert fields.keys() == {b"postroom:mine", b"id", b"topic", b"type", b"data"}
