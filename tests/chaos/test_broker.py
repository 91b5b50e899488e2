"""The broker of chaos keeps its own promises: what it confirmed comes again until it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from chaos import broker as brokers
from chaos.broker import Broker
from chaos.history import History, read_file
from chaos.line import Line
from chaos.receiver import Receiver
from postroom import Delivery
from postroom.errors import BrokerUnavailableError
from postroom.message import uuid7
from postroom.testing.waiting import until


class Office:
    """A receiver with its broker, which can be started again on the same folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._life = -1
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self) -> None:
        self._life += 1
        history = History(self._folder, "receiver")
        self.broker = Broker(("stock", "billing"), ("orders",), life=self._life, seed=1, history=history)
        self.broker.remember(read_file(self._folder / "receiver.jsonl"))
        receiver = Receiver(1, history, self.broker)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._open.add(writer)
            await receiver.serve(reader, writer)

        self._server = await asyncio.start_server(serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._ticking = asyncio.create_task(self.broker.tick())

    async def stop(self) -> None:
        """Break off everything, as a kill does."""
        assert self._server is not None
        assert self._ticking is not None
        self._server.close()
        self._ticking.cancel()
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()
        await asyncio.sleep(0)

    async def publish(self, *numbers: int, key: str | None = None) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for number in numbers:
            message = {"id": str(uuid7()), "topic": "orders", "key": key, "token": 1, "attempt": 1, "n": number}
            message |= {"kind": "plain", "event_type": "orders", "payload": json.dumps({"n": number})}
            writer.write(json.dumps(message).encode() + b"\n")
            answer = await reader.readline()
            assert answer == b"delivered\n"
        writer.close()


@pytest.fixture
async def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Office]:
    """One that hands out nothing twice without a reason."""
    monkeypatch.setattr(brokers, "DUPLICATED", 0)
    monkeypatch.setattr("chaos.receiver._FLAKY", 0)
    office = Office(tmp_path)
    await office.start()
    yield office
    await office.stop()


@contextlib.asynccontextmanager
async def lined(office: Office, folder: Path, group: str = "stock") -> AsyncIterator[Line]:
    async with Line(office.port, group, History(folder, "c0")) as line:
        yield line


def number(delivery: Delivery) -> int:
    told: dict[str, Any] = json.loads(delivery.message.payload)
    return int(told["n"])


@pytest.mark.requirement("G2")
async def test_every_group_gets_every_message_until_it_acknowledges_it(office: Office, tmp_path: Path) -> None:
    """What the receiver has confirmed is kept for each group."""
    await office.publish(1, 2)

    for group in ("stock", "billing"):
        async with lined(office, tmp_path, group) as line:
            deliveries = [await anext(line), await anext(line)]
            assert sorted(number(one) for one in deliveries) == [1, 2]
            for one in deliveries:
                await one.ack()

    assert office.broker.counts == (0, 4)


async def test_what_fails_comes_again_with_a_higher_attempt_and_what_is_released_with_the_same(
    office: Office, tmp_path: Path
) -> None:
    """The port: a nack costs an attempt, a release none."""
    await office.publish(1)

    async with lined(office, tmp_path) as line:
        first = await anext(line)
        await first.release()
        second = await anext(line)
        await second.nack("no", delay=timedelta(milliseconds=10))
        third = await anext(line)

    assert [one.message.attempt for one in (first, second, third)] == [1, 1, 2]
    assert len({one.message.token for one in (first, second, third)}) == 3


async def test_what_nobody_settles_in_time_comes_again_to_somebody_else(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two consumers then hold one message; that one of them acknowledges it is enough, however late."""
    monkeypatch.setattr(brokers, "VISIBILITY", 0.1)
    await office.publish(1)

    async with lined(office, tmp_path) as slow, lined(office, tmp_path) as other:
        first = await anext(slow)
        second = await anext(other)
        assert first.message.id == second.message.id
        assert second.message.attempt == 2
        await first.ack()
        await second.nack()

    assert office.broker.counts[0] == 1  # that of the other group


async def test_some_messages_are_handed_out_twice_at_once(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least once: duplicates need no failure."""
    monkeypatch.setattr(brokers, "DUPLICATED", 1000)
    await office.publish(1)

    async with lined(office, tmp_path) as line, lined(office, tmp_path) as other:
        assert (await anext(line)).message.id == (await anext(other)).message.id


async def test_messages_of_a_key_follow_each_other(office: Office, tmp_path: Path) -> None:
    """The port: the next one of a key is handed out when the one before is done."""
    await office.publish(1, 2, key="k")
    await office.publish(3)

    async with lined(office, tmp_path) as line:
        first, loose = await anext(line), await anext(line)
        assert [number(first), number(loose)] == [1, 3]
        await first.ack()
        assert number(await anext(line)) == 2


async def test_a_message_of_a_key_that_is_done_is_not_missed_by_who_held_it_as_well(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever held it too long has nothing more to say, and the broker goes on."""
    monkeypatch.setattr(brokers, "DUPLICATED", 1000)
    await office.publish(1, key="k")
    async with lined(office, tmp_path) as line:
        async with lined(office, tmp_path) as other:
            first, _ = await anext(line), await anext(other)
            await first.ack()
        await office.publish(2, key="k")
        assert number(await anext(line)) == 2


@pytest.mark.requirement("G2")
async def test_a_broker_that_was_killed_knows_everything_that_it_confirmed(office: Office, tmp_path: Path) -> None:
    """Its history is written before anything is answered, and a new life begins with it."""
    await office.publish(1, 2)
    async with lined(office, tmp_path) as line:
        first, second = await anext(line), await anext(line)
        await first.ack()

        await office.stop()
        with pytest.raises((BrokerUnavailableError, TimeoutError)):
            await second.ack()
        await office.start()

        again = await anext(line)
        assert again.message.id == second.message.id
        assert again.message.attempt == 2
        assert again.message.token != second.message.token
        await again.ack()
    assert office.broker.counts == (2, 2)


async def test_what_a_lost_consumer_held_comes_again(office: Office, tmp_path: Path) -> None:
    """A consumer that dies need not be waited for."""
    await office.publish(1)
    async with lined(office, tmp_path) as line:
        lost = await anext(line)
    async with lined(office, tmp_path) as line:
        assert (await anext(line)).message.id == lost.message.id


async def test_every_acknowledgement_stands_in_the_history_before_it_is_sent(office: Office, tmp_path: Path) -> None:
    """C8 goes by what a consumer wanted to say, whether or not the broker heard it."""
    await office.publish(1)
    async with lined(office, tmp_path) as line:
        delivery = await anext(line)
        await office.stop()
        with contextlib.suppress(BrokerUnavailableError, TimeoutError):
            await delivery.ack()
        await office.start()
        await until(lambda: office.broker.counts[0] == 2, "both groups waiting for it")

    acks = [event for event in read_file(tmp_path / "c0.jsonl") if event["op"] == "ack"]
    assert [(ack["id"], ack["handle"]) for ack in acks] == [(str(delivery.message.id), delivery.message.token)]
