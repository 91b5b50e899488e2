"""The simple brokers: in memory, on a stream, in a file."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import gc
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from postroom import Delivered, Delivery, Local, Message, Release
from postroom.brokers import FileBroker, LinesBroker, MemoryBroker, open_url
from postroom.errors import BrokerUnavailableError, ConfigurationError, StoreUnavailableError, UnknownURLError

MS = timedelta(milliseconds=1)


def order(number: int, *, topic: str = "orders", key: str | None = None) -> Message:
    return Message(topic=topic, type="order.placed", payload=b'{"number": %d}' % number, key=key)


async def taken(reader: AsyncIterator[Delivery]) -> Delivery:
    """Return the next delivery, which must come soon."""
    async with asyncio.timeout(10):
        return await anext(reader)


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    return [json.loads(delivery.message.payload)["number"] for delivery in deliveries]


def parsed(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# -- memory ------------------------------------------------------------------------------------------------------


async def test_the_memory_broker_keeps_what_it_confirmed_in_order() -> None:
    broker = MemoryBroker()
    messages = [order(number) for number in range(3)]

    outcomes = [*await broker.publish_batch(messages[:2]), *await broker.publish_batch(messages[2:])]

    assert outcomes == [Delivered()] * 3
    assert broker.received == messages


@pytest.mark.requirement("G11")
async def test_the_memory_broker_forgets_the_oldest_beyond_its_bound() -> None:
    """Memory has a limit, and what was dropped is still counted."""
    broker = MemoryBroker(keep=2)
    messages = [order(number) for number in range(5)]

    await broker.publish_batch(messages)

    assert broker.received == messages[3:]
    assert broker.confirmed == 5


def test_a_memory_broker_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="keep=0"):
        MemoryBroker(keep=0)


async def test_a_memory_broker_that_is_down_takes_nothing_until_it_is_up() -> None:
    broker = MemoryBroker()
    broker.down()

    with pytest.raises(BrokerUnavailableError):
        await broker.publish_batch([order(1)])
    refused = broker.received
    broker.up()
    await broker.publish_batch([order(2)])

    assert refused == []
    assert [message.payload for message in broker.received] == [b'{"number": 2}']


async def test_a_topic_can_be_down_alone() -> None:
    broker = MemoryBroker()
    broker.down("orders")

    while_down = await broker.publish_batch([order(1), order(2, topic="stock")])
    broker.up("orders")
    afterwards = await broker.publish_batch([order(1)])

    assert while_down == [Release(), Delivered()]
    assert afterwards == [Delivered()]
    assert [message.topic for message in broker.received] == ["stock", "orders"]


@pytest.mark.requirement("F-25")
async def test_each_group_gets_each_message_once_and_its_members_compete() -> None:
    """Two groups, one of them with two readers."""
    broker = MemoryBroker()
    lone, first, second = (broker.subscribe("orders", group=group) for group in ("lone", "pair", "pair"))
    await broker.publish_batch([order(number) for number in range(4)])

    async with lone, first, second:
        alone = [await taken(lone) for _ in range(4)]
        shared = [await taken(reader) for reader in (first, second, first, second)]
        for delivery in alone + shared:
            await delivery.ack()

    assert numbers(alone) == numbers(shared) == [0, 1, 2, 3]
    assert broker.backlog("lone") == broker.backlog("pair") == 0


async def test_a_group_reads_its_topics_only_and_what_comes_after_it_subscribed() -> None:
    broker = MemoryBroker()
    await broker.publish_batch([order(1)])
    async with broker.subscribe("orders", "stock", group="g") as reader:
        broker.subscribe("orders", group="g")
        await broker.publish_batch([order(2), order(3, topic="other"), order(4, topic="stock")])
        deliveries = [await taken(reader), await taken(reader)]

    assert numbers(deliveries) == [2, 4]
    assert broker.backlog("g") == 2


@pytest.mark.requirement("G5")
async def test_a_message_is_handed_out_with_everything_that_it_says() -> None:
    """Only its attempt is the broker's."""
    sent = Message(
        topic="orders",
        payload=b"{}",
        type="order.placed",
        key="42",
        namespace="shop",
        content_type="text/plain",
        headers={"a": "b"},
        tenant_id=UUID(int=1),
        dedupe_key="d",
        time=datetime(2026, 1, 1, tzinfo=UTC),
        attempt=7,
        token=9,
    )
    broker = MemoryBroker()
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([sent])
        got = (await taken(reader)).message

    assert got == sent
    assert (got.time, got.attempt, got.token) == (sent.time, 1, 9)


@pytest.mark.requirement("F-08", "F-19")
async def test_what_belongs_to_the_sender_does_not_travel() -> None:
    """In-process values die at the broker, also if that is in the same process."""
    broker, region = MemoryBroker(), Local[str]("region")
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([region.put(order(1), "eu")])

        assert region.of((await taken(reader)).message) is None
    assert region.of(broker.received[0]) is None


@pytest.mark.requirement("S1-32", "S1-36")
async def test_a_nacked_message_comes_again_after_its_delay_with_a_higher_attempt() -> None:
    """Others pass it meanwhile."""
    broker, loop = MemoryBroker(), asyncio.get_running_loop()
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([order(1), order(2)])
        began = loop.time()
        await (await taken(reader)).nack("not now", delay=200 * MS)
        other = await taken(reader)
        again = await taken(reader)

        assert loop.time() - began >= 0.2
        assert (numbers([other, again]), other.message.attempt, again.message.attempt) == ([2, 1], 1, 2)


@pytest.mark.requirement("G2")
async def test_what_comes_due_is_not_held_up_by_what_came_later() -> None:
    """A message that is tried again takes its old place, so a constant load cannot starve it."""
    broker = MemoryBroker()
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([order(number) for number in range(3)])
        await (await taken(reader)).nack(delay=1 * MS)
        await asyncio.sleep(0.005)

        assert numbers([await taken(reader), await taken(reader)]) == [0, 1]


@pytest.mark.requirement("S1-36")
async def test_a_nack_without_a_delay_waits_the_usual_time() -> None:
    """One that always fails leaves room for the others."""
    broker, loop = MemoryBroker(), asyncio.get_running_loop()
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([order(1), order(2)])
        began = loop.time()
        await (await taken(reader)).nack()

        assert numbers([await taken(reader), await taken(reader)]) == [2, 1]
        assert loop.time() - began >= 0.5  # at least half of the first second


@pytest.mark.requirement("G6")
async def test_what_is_nacked_for_no_time_goes_behind_the_others_and_before_those_of_its_key() -> None:
    """It neither keeps other messages waiting, nor is passed by later ones of its key."""
    broker = MemoryBroker()
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([order(1), order(2), order(3, key="a"), order(4, key="a"), order(5)])
        await (await taken(reader)).nack(delay=timedelta(0))
        held = [await taken(reader)]
        await (await taken(reader)).nack(delay=timedelta(0))
        held += [await taken(reader), await taken(reader)]
        keyed = await taken(reader)
        await keyed.ack()

        assert numbers([*held, keyed, await taken(reader)]) == [2, 5, 1, 3, 4]


async def test_a_short_wait_ends_before_a_long_one_that_began_earlier() -> None:
    broker = MemoryBroker()
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([order(number) for number in range(4)])
        held = [await taken(reader) for _ in range(4)]
        for delivery, delay in zip(held, (timedelta(hours=2), 1 * MS, timedelta(hours=1), 1 * MS), strict=True):
            await delivery.nack(delay=delay)

        assert sorted(numbers([await taken(reader), await taken(reader)])) == [1, 3]


@pytest.mark.requirement("S1-32")
async def test_readers_that_wait_are_told_of_everything_that_comes_due() -> None:
    """Each gets one, though neither asks again."""
    broker = MemoryBroker()
    async with broker.subscribe("orders", group="g") as one, broker.subscribe("orders", group="g") as two:
        await broker.publish_batch([order(1), order(2)])
        held = [await taken(one), await taken(one)]
        waiting = [asyncio.ensure_future(taken(reader)) for reader in (one, two)]
        await asyncio.sleep(0)
        await held[0].nack(delay=20 * MS)
        await held[1].nack(delay=5 * MS)

        assert sorted(numbers(await asyncio.gather(*waiting))) == [1, 2]


@pytest.mark.requirement("G6")
async def test_messages_of_a_key_wait_for_the_one_before() -> None:
    """Also while it waits to be tried again; other keys do not."""
    broker = MemoryBroker()
    async with broker.subscribe("orders", group="g") as reader, broker.subscribe("orders", group="g") as other:
        await broker.publish_batch([order(1, key="a"), order(2, key="a"), order(3, key="b")])
        first, beside = await taken(reader), await taken(other)
        assert numbers([first, beside]) == [1, 3]

        waiting = asyncio.ensure_future(taken(other))
        await asyncio.sleep(0)
        await first.nack(delay=10 * MS)
        again = await waiting
        assert numbers([again]) == [1]
        await again.ack()

        assert numbers([await taken(reader)]) == [2]


@pytest.mark.requirement("S1-37")
async def test_a_released_message_has_its_attempt_back() -> None:
    """As if it had never been handed out; it may be told to wait."""
    broker = MemoryBroker()
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([order(1), order(2)])
        await (await taken(reader)).release()
        again = await taken(reader)
        assert (numbers([again]), again.message.attempt) == ([1], 1)

        await again.settle(Release(200 * MS))
        later = [await taken(reader), await taken(reader)]
        assert numbers(later) == [2, 1]
        assert later[1].message.attempt == 1


@pytest.mark.requirement("G2", "G9")
async def test_a_rejected_message_is_kept_for_its_group() -> None:
    """It does not come again, and its key goes on."""
    broker = MemoryBroker(keep=2)
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([order(number, key="a") for number in range(4)])
        for _ in range(3):
            await (await taken(reader)).reject("no such customer")
        assert numbers([await taken(reader)]) == [3]

    assert [(message.payload, why) for message, why in broker.dead("g")] == [
        (b'{"number": 1}', "no such customer"),
        (b'{"number": 2}', "no such customer"),
    ]
    assert broker.dead("nobody") == []


@pytest.mark.requirement("G2")
async def test_leaving_gives_back_what_is_held_and_a_late_ack_says_so() -> None:
    """The next reader gets it, and whoever still holds it is told."""
    broker = MemoryBroker()
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([order(1, key="a"), order(2)])
        held = [await taken(reader), await taken(reader)]
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)

    with pytest.raises(StopAsyncIteration):
        await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(reader)
    async with broker.subscribe("orders", group="g") as other:
        again = [await taken(other), await taken(other)]
        with pytest.raises(StoreUnavailableError, match="will come again"):
            await held[0].ack()
        assert numbers(again) == [1, 2]
        assert [delivery.message.attempt for delivery in again] == [1, 1]
        await again[0].ack()
        await again[1].ack()

    assert broker.backlog("g") == 0


async def test_a_subscription_can_be_entered_again_and_knows_its_old_deliveries() -> None:
    broker = MemoryBroker()
    reader = broker.subscribe("orders", group="g")
    await broker.publish_batch([order(1)])
    async with reader:
        old = await taken(reader)
    async with reader:
        new = await taken(reader)
        with pytest.raises(StoreUnavailableError):
            await old.ack()
        await new.ack()

    assert broker.backlog("g") == 0


@pytest.mark.requirement("G11", "G13")
async def test_a_group_that_is_full_refuses_more_until_it_has_room() -> None:
    """Back-pressure reaches whoever publishes; no other group gets what one refuses."""
    broker = MemoryBroker(capacity=2)
    async with broker.subscribe("orders", group="g") as reader, broker.subscribe("orders", group="quick") as quick:
        outcomes = await broker.publish_batch([order(number) for number in range(3)])
        for _ in range(2):
            await (await taken(quick)).ack()
        assert outcomes == [Delivered(), Delivered(), Release()]

        held = await taken(reader)
        assert await broker.publish_batch([order(3)]) == [Release()]
        await held.ack()
        assert await broker.publish_batch([order(3)]) == [Delivered()]
        assert numbers([await taken(quick)]) == [3]
        assert broker.backlog("g") == 2


@pytest.mark.requirement("S1-30")
@pytest.mark.parametrize("keys", [None, "ab"])
async def test_cancelled_readers_lose_nothing(keys: str | None) -> None:
    """A time limit around reading takes no message with it, wherever it strikes."""
    broker, got = MemoryBroker(), list[Delivery]()
    async with broker.subscribe("orders", group="g") as one, broker.subscribe("orders", group="g") as two:
        for number in range(60):
            readings = [asyncio.ensure_future(taken(reader)) for reader in (one, two)]
            for _ in range(number % 4):
                await asyncio.sleep(0)
            await broker.publish_batch([order(number, key=keys and keys[number % 2])])
            for _ in range(number // 4 % 4):
                await asyncio.sleep(0)
            for reading in readings:
                reading.cancel()
            for result in await asyncio.gather(*readings, return_exceptions=True):
                if isinstance(result, Delivery):
                    got.append(result)
                    await result.ack()
        while broker.backlog("g"):
            got.append(await taken(one))
            await got[-1].ack()

    assert sorted(numbers(got)) == list(range(60))
    assert {delivery.message.attempt for delivery in got} == {1}


@pytest.mark.requirement("G2", "S1-30")
async def test_a_message_goes_to_another_when_the_reader_woken_for_it_is_cancelled() -> None:
    """Nobody sleeps beside a message that may be taken."""
    broker = MemoryBroker()
    async with broker.subscribe("orders", group="g") as one, broker.subscribe("orders", group="g") as two:
        cancelled, staying = (asyncio.ensure_future(taken(reader)) for reader in (one, two))
        await asyncio.sleep(0)
        await broker.publish_batch([order(1)])
        cancelled.cancel()

        assert numbers([await staying]) == [1]
        assert cancelled.cancelled()


@pytest.mark.requirement("S1-30")
async def test_leaving_ends_the_reading_of_an_empty_group() -> None:
    """Whoever waits is told that nothing will come."""
    async with MemoryBroker().subscribe("orders", group="g") as reader:
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)

    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, 10)


@pytest.mark.requirement("G2")
async def test_a_reader_that_leaves_wakes_another_for_the_message_it_was_woken_for() -> None:
    """Nobody sleeps beside a message that may be taken."""
    broker = MemoryBroker()
    one = broker.subscribe("orders", group="g")
    async with broker.subscribe("orders", group="g") as two:
        async with one:
            leaving = asyncio.ensure_future(anext(one))
            await asyncio.sleep(0)
            staying = asyncio.ensure_future(taken(two))
            await asyncio.sleep(0)
            await broker.publish_batch([order(1)])

        assert numbers([await staying]) == [1]
        with pytest.raises(StopAsyncIteration):
            await leaving


@pytest.mark.requirement("G11")
async def test_a_reader_that_waits_does_not_keep_the_loop_busy() -> None:
    """Neither for a message nor for a time."""
    broker, loop = MemoryBroker(), asyncio.get_running_loop()
    async with broker.subscribe("orders", group="g") as reader:
        await broker.publish_batch([order(1)])
        await (await taken(reader)).nack(delay=timedelta(hours=1))
        waiting = asyncio.ensure_future(anext(reader))
        for _ in range(3):
            await asyncio.sleep(0)

        steps, began = 0, loop.time()
        while loop.time() - began < 0.02:  # every turn of the loop is this task's, unless somebody else is busy
            steps += 1
            assert len(asyncio.all_tasks()) == 2
            await asyncio.sleep(0.005)
        assert steps <= 5
        waiting.cancel()


@pytest.mark.requirement("G11")
async def test_the_cost_of_a_message_does_not_grow_with_what_waits() -> None:
    """Ten times the backlog takes about ten times as long, with keys, without, and with many groups beside."""
    gc.disable()  # it would look at everything that other tests have left
    try:
        times = [min([await _cost(count) for _ in range(3)]) for count in (500, 5000)]
    finally:
        gc.enable()

    assert times[1] < times[0] * 5


async def _cost(count: int) -> float:
    """Return the seconds of processor time that a message takes, with ``count`` of them and as many groups."""
    broker = MemoryBroker()
    for other in range(count):
        broker.subscribe(f"topic {other}", group=f"group {other}")
    async with broker.subscribe("orders", group="g") as reader:
        began = time.process_time()
        orders = [order(number, key=None if number % 2 else f"{number % 9}") for number in range(count)]
        await broker.publish_batch(orders)
        for _ in range(count):
            await (await anext(reader)).ack()
        return (time.process_time() - began) / count


# -- lines -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G5", "S2-41")
async def test_a_line_is_a_cloud_event_with_everything_that_the_message_says() -> None:
    """The id that consumers are idempotent on travels with the message."""
    stream = io.BytesIO()
    message = Message(
        id=UUID("0199c0de-0000-7000-8000-000000000001"),
        topic="orders",
        type="order.placed",
        key="42",
        namespace="shop",
        payload=b'{"total": 1.5, "name": "\xc3\xa9"}',
        headers={"traceparent": "00-1-2-01"},
        tenant_id=UUID("00000000-0000-0000-0000-000000000007"),
        dedupe_key="order-42",
        time=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
        attempt=2,
        token=9,
    )

    outcomes = await LinesBroker(stream).publish_batch([message])

    assert outcomes == [Delivered()]
    assert parsed(stream.getvalue()) == [
        {
            "specversion": "1.0",
            "id": "0199c0de-0000-7000-8000-000000000001",
            "source": "postroom:shop",
            "type": "order.placed",
            "datacontenttype": "application/json",
            "subject": "42",
            "time": "2030-01-02T03:04:05+00:00",
            "topic": "orders",
            "tenantid": "00000000-0000-0000-0000-000000000007",
            "dedupekey": "order-42",
            "headers": {"traceparent": "00-1-2-01"},
            "postroomattempt": 2,
            "postroomtoken": 9,
            "data": {"total": 1.5, "name": "é"},
        }
    ]


@pytest.mark.requirement("S2-36")
@pytest.mark.parametrize(
    ("content_type", "payload"),
    [
        ("application/octet-stream", b"\x00\xff"),
        ("text/plain", b"{}"),
        ("application/json", b"{not json"),
        ("application/json", b"\xff\xfe"),
        ("application/json", b'{"x": NaN}'),
        ("application/json", b'{"x": 1e999}'),
        ("application/json", b"[" * 100_000 + b"]" * 100_000),
    ],
)
async def test_what_is_no_json_travels_as_the_bytes_that_it_is(content_type: str, payload: bytes) -> None:
    """A payload is never refused for what is in it."""
    stream = io.BytesIO()

    await LinesBroker(stream).publish_batch([Message(topic="t", type="t", payload=payload, content_type=content_type)])

    (event,) = parsed(stream.getvalue())
    assert base64.b64decode(event["data_base64"]) == payload
    assert "data" not in event


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.shop+json"])
async def test_every_kind_of_json_stands_in_the_line_as_json(content_type: str) -> None:
    stream = io.BytesIO()

    await LinesBroker(stream).publish_batch([Message(topic="t", type="t", payload=b"[1]", content_type=content_type)])

    assert parsed(stream.getvalue())[0]["data"] == [1]


async def test_a_message_with_line_breaks_and_control_characters_stays_one_line_of_ascii() -> None:
    stream = io.BytesIO()
    payload = json.dumps({"x": "a\nb\x1b\x9b\u2028"}, ensure_ascii=False).encode()

    await LinesBroker(stream).publish_batch([Message(topic="t", type="t", payload=payload)])

    assert stream.getvalue().isascii()
    assert stream.getvalue().count(b"\n") == 1
    assert b"\x1b" not in stream.getvalue()


async def test_nothing_is_confirmed_before_a_buffer_is_flushed() -> None:
    """A buffered line would be lost with the process."""
    reading, writing = os.pipe()
    with io.FileIO(reading) as reader, io.BufferedWriter(io.FileIO(writing, "w"), 1_000_000) as stream:
        await LinesBroker(stream).publish_batch([order(1)])

        os.set_blocking(reading, False)
        assert parsed(reader.read(65536) or b"")[0]["data"] == {"number": 1}


async def test_a_batch_larger_than_a_pipe_is_written_whole_while_the_loop_goes_on() -> None:
    reading, writing = os.pipe()
    with io.FileIO(reading) as reader, io.FileIO(writing, "w") as stream:
        publishing = asyncio.create_task(LinesBroker(stream).publish_batch([order(number) for number in range(2000)]))
        text = b""
        while text.count(b"\n") < 2000:
            text += await asyncio.to_thread(reader.read, 65536)
        await publishing

    assert [event["data"]["number"] for event in parsed(text)] == list(range(2000))


@pytest.mark.requirement("G13")
async def test_a_reader_that_has_gone_is_an_outage_and_is_remembered() -> None:
    """It costs no attempt."""
    reading, writing = os.pipe()
    os.close(reading)
    with io.FileIO(writing, "w") as stream:
        broker = LinesBroker(stream)

        with pytest.raises(BrokerUnavailableError):
            await broker.publish_batch([order(1)])

        assert broker.is_gone


class HalfFull(io.BytesIO):
    """A stream that has room for so much, until somebody makes room."""

    room = 0

    def write(self, data: Any, /) -> int:  # noqa: ANN401 -- as in io
        if not self.room:
            raise OSError(28, "No space left on device")
        size = super().write(bytes(data[: self.room]))
        self.room -= size
        return size


async def test_a_line_that_broke_off_does_not_spoil_the_next() -> None:
    stream = HalfFull()
    broker = LinesBroker(stream)
    stream.room = 20
    with pytest.raises(BrokerUnavailableError):
        await broker.publish_batch([order(1)])
    stream.room = 100_000

    await broker.publish_batch([order(1), order(2)])

    torn, *whole = stream.getvalue().splitlines()
    assert len(torn) == 20
    assert [json.loads(line)["data"]["number"] for line in whole] == [1, 2]


async def test_a_batch_given_up_before_its_turn_is_never_written() -> None:
    """A late line would come after newer ones of its key."""
    reading, writing = os.pipe()
    with io.FileIO(reading) as reader, io.FileIO(writing, "w") as stream:
        broker = LinesBroker(stream)
        large = Message(topic="t", type="t", payload=json.dumps("x" * 200_000).encode())
        stuck = asyncio.create_task(broker.publish_batch([large]))
        text = await asyncio.to_thread(reader.read, 1000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await broker.publish_batch([order(1)])

        while not text.endswith(b"\n"):
            text += await asyncio.to_thread(reader.read, 65536)
        await stuck
        await broker.publish_batch([order(2)])
        text += await asyncio.to_thread(reader.read, 65536)

    assert [event["data"] for event in parsed(text)][1:] == [{"number": 2}]


# -- file --------------------------------------------------------------------------------------------------------


async def test_the_file_broker_appends_batches_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    path.write_bytes(b'{"data": "before"}\n')
    broker = FileBroker(path)

    outcomes = [*await broker.publish_batch([order(1), order(2)]), *await broker.publish_batch([order(3)])]

    assert outcomes == [Delivered()] * 3
    assert [event["data"] for event in parsed(path.read_bytes())] == [
        "before",
        {"number": 1},
        {"number": 2},
        {"number": 3},
    ]


async def test_a_new_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    await FileBroker(tmp_path / "messages.jsonl").publish_batch([order(1)])

    assert (tmp_path / "messages.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.requirement("G2")
async def test_half_a_line_left_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    """What is confirmed after a crash can be read."""
    path = tmp_path / "messages.jsonl"
    path.write_bytes(b'{"whole": 1}\n{"hal')

    await FileBroker(path).publish_batch([order(1)])

    whole, half, line = path.read_bytes().splitlines()
    assert json.loads(whole) == {"whole": 1}
    assert half == b'{"hal'
    assert json.loads(line)["data"] == {"number": 1}


async def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    broker = FileBroker(path)
    await broker.publish_batch([order(1)])
    path.rename(tmp_path / "messages.1")

    await broker.publish_batch([order(2)])

    assert [event["data"]["number"] for event in parsed(path.read_bytes())] == [2]


FULL_DISK = """
import asyncio, json, resource, sys
from pathlib import Path
from postroom import Message
from postroom.brokers import FileBroker
from postroom.errors import BrokerUnavailableError

def order(number):
    return Message(topic="orders", type="order.placed", payload=b'{"number": %d}' % number)

async def main():
    broker = FileBroker(sys.argv[1])
    await broker.publish_batch([order(1)])
    size = Path(sys.argv[1]).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, resource.RLIM_INFINITY))
    try:
        await broker.publish_batch([order(2)])
    except BrokerUnavailableError as error:
        print(error)
    assert Path(sys.argv[1]).stat().st_size == size
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await broker.publish_batch([order(3)])

asyncio.run(main())
"""


@pytest.mark.requirement("G13")
def test_a_disk_without_room_is_an_outage_and_leaves_no_half_line(tmp_path: Path) -> None:
    """The limit on the file's size is the real one of the kernel, in a process of its own."""
    path = tmp_path / "messages.jsonl"

    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot write: " in done.stdout
    assert [event["data"]["number"] for event in parsed(path.read_bytes())] == [1, 3]


@pytest.mark.parametrize("path", ["missing/folder/messages.jsonl", "."])
async def test_a_path_that_cannot_be_written_is_an_outage(tmp_path: Path, path: str) -> None:
    with pytest.raises(BrokerUnavailableError, match="cannot write"):
        await FileBroker(tmp_path / path).publish_batch([order(1)])


async def test_what_cannot_be_made_durable_is_refused() -> None:
    with pytest.raises(BrokerUnavailableError, match="use stdout:"):
        await FileBroker("/dev/null").publish_batch([order(1)])


async def test_another_writer_of_the_file_is_waited_for_and_then_told_of(tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_SH)

        with pytest.raises(BrokerUnavailableError, match="another process"):
            await FileBroker(path, patience=timedelta(milliseconds=20)).publish_batch([order(1)])
        waiting = asyncio.create_task(FileBroker(path).publish_batch([order(2)]))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        fcntl.flock(other, fcntl.LOCK_UN)
        await waiting

    assert not done
    assert [event["data"]["number"] for event in parsed(path.read_bytes())] == [2]


# -- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:messages.jsonl", "messages.jsonl"),
        ("file:out/messages.jsonl", "out/messages.jsonl"),
        ("file:/var/out/messages.jsonl", "/var/out/messages.jsonl"),
        ("file:///var/out/messages.jsonl", "/var/out/messages.jsonl"),
    ],
)
def test_a_file_url_names_a_path(url: str, path: str) -> None:
    broker = open_url(url)

    assert isinstance(broker, FileBroker)
    assert broker.path == Path(path)


def test_each_simple_broker_has_a_url() -> None:
    assert isinstance(open_url("memory:"), MemoryBroker)
    assert isinstance(open_url("stdout:"), LinesBroker)


@pytest.mark.parametrize(
    "url", ["kafka://app:hunter2@host", "hunter2", "", "file:", "file://hunter2/x", "stdout:hunter2"]
)
def test_an_unknown_broker_url_is_refused_without_showing_a_secret(url: str) -> None:
    with pytest.raises(UnknownURLError, match="stdout:, file:") as raised:
        open_url(url)

    assert "hunter2" not in str(raised.value)
