"""The demo: it proves what it says, and would tell if it were not so."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from rich.console import Console

from postroom import Delivered, Message, Outcome
from postroom.brokers import MemoryBroker
from postroom.cli import services
from postroom.cli.demo import conclude, play
from postroom.cli.shop import Shop, StumblingBroker
from postroom.cli.verdict import Order, Verdict

ROOT = Path(__file__).parent.parent
OK_LINE = (
    r"demo: committed (?P<committed>[\d,]+) = delivered (?P=committed), rolled back (?!0)[\d,]+ -> 0 delivered, "
    r"(?!0)[\d,]+ duplicates -> (?!0)[\d,]+ absorbed, each order reserved and shipped once, "
    r"each customer in order, outage [\d.]+ s survived, 0 dead  OK"
)


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "postroom.cli", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def judge(folder: Path, broker: MemoryBroker, *, seconds: float = 1.5) -> tuple[Verdict, Shop]:
    shop = Shop(folder, seconds=seconds, broker=broker)
    if isinstance(broker, HauntedBroker):
        broker.ghosts = shop.rolled_back
    return asyncio.run(play(shop, Console(quiet=True))), shop


@pytest.mark.requirement("G1", "G2", "G3", "G6", "G7", "G13", "S2-01", "S4-20")
def test_the_demo_survives_an_outage_and_ends_with_a_verdict_in_one_line() -> None:
    """What was committed arrives in order and has its effect once."""
    done = demo("--seconds", "4")

    *progress, verdict = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(OK_LINE, verdict)
    assert len(progress) >= 2
    assert all(re.match(r"time \d+s  placed [\d,]+ \(\d+/s\)  delivered ", line) for line in progress)
    assert any("broker DOWN" in line for line in progress)


def test_the_verdict_as_json_is_the_only_output() -> None:
    done = demo("--seconds", "1", "--json")

    verdict = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert verdict["ok"] is True
    assert verdict["committed"] == verdict["delivered"] > 0
    assert verdict["rolled_back"] > 0
    assert verdict["absorbed"] >= verdict["repeated"] > 0
    assert verdict["undone"] == verdict["overdone"] == 0
    assert verdict["outage"] >= 0.33


class ForgetfulBroker(StumblingBroker):
    """Confirms every message and loses one of them."""

    topic = "orders"
    has_forgotten = False

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        place = next((place for place, message in enumerate(messages) if message.topic == self.topic), None)
        if self.has_forgotten or self.confirmed < 10 or place is None:
            return await super().publish_batch(messages)
        outcomes = [*await super().publish_batch([*messages[:place], *messages[place + 1 :]])]
        self.has_forgotten = True
        outcomes.insert(place, Delivered())
        return outcomes


class HauntedBroker(StumblingBroker):
    """Delivers one message of a transaction that was rolled back."""

    ghosts: Sequence[UUID] = ()
    has_haunted = False

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        outcomes = await super().publish_batch(messages)
        orders = [message for message in messages if message.topic == "orders"]
        if orders and self.ghosts and not self.has_haunted:
            self.has_haunted = True
            await MemoryBroker.publish_batch(self, [replace(orders[0], id=self.ghosts[0])])
        return outcomes


class ReversingBroker(StumblingBroker):
    """Takes the messages of a batch from its end."""

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        return (await super().publish_batch(messages[::-1]))[::-1]


class RepeatingBroker(MemoryBroker):
    """Takes every message twice, as at-least-once delivery allows."""

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        await super().publish_batch(messages)
        return await super().publish_batch(messages)


class ForgottenStockBroker(ForgetfulBroker):
    """Loses what the stock room told."""

    topic = "stock"


class ForkedTongueBroker(StumblingBroker):
    """Takes one message twice, under two ids: no receiver can know it again."""

    has_lied = False

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        outcomes = await super().publish_batch(messages)
        stock = [message for message in messages if message.topic == "stock"]
        if stock and not self.has_lied:
            self.has_lied = True
            await MemoryBroker.publish_batch(self, [replace(stock[0], id=uuid4())])
        return outcomes


def test_a_message_that_the_broker_lost_changes_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo would notice a loss: that makes its success worth something."""
    verdict, _ = judge(tmp_path, ForgetfulBroker())

    assert (verdict.missing, verdict.phantoms, verdict.out_of_order) == (1, 0, 0)
    assert (verdict.undone, verdict.overdone) == (2, 0)
    assert conclude(verdict, as_json=False) == 1
    assert re.match(r"demo: committed [\d,]+ != delivered .* FAILED\n", capsys.readouterr().out)


def test_a_message_that_was_rolled_back_and_yet_arrived_changes_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo would notice a phantom."""
    verdict, shop = judge(tmp_path, HauntedBroker())

    assert shop.rolled_back
    assert (verdict.missing, verdict.phantoms, verdict.unknown) == (0, 1, 1)
    assert conclude(verdict, as_json=False) == 1
    assert "-> 1 delivered" in capsys.readouterr().out


@pytest.mark.requirement("G7")
def test_an_effect_that_did_not_happen_changes_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every order arrived, and one of them was not shipped."""
    verdict, _ = judge(tmp_path, ForgottenStockBroker())

    assert (verdict.missing, verdict.undone, verdict.overdone) == (0, 1, 0)
    assert conclude(verdict, as_json=False) == 1
    assert "1 effects missing and 0 too many" in capsys.readouterr().out


@pytest.mark.requirement("G7")
def test_an_effect_that_happened_twice_changes_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A message that the inbox cannot know again has its effect again, and the demo sees it."""
    verdict, _ = judge(tmp_path, ForkedTongueBroker())

    assert (verdict.missing, verdict.undone, verdict.overdone) == (0, 0, 1)
    assert conclude(verdict, as_json=False) == 1
    assert "0 effects missing and 1 too many" in capsys.readouterr().out


def test_orders_of_one_customer_in_the_wrong_order_change_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo would notice that order was lost."""
    # The outage must be long enough that one customer orders twice in it, however slow the machine is.
    verdict, _ = judge(tmp_path, ReversingBroker(), seconds=6)

    assert verdict.missing == verdict.unknown == 0
    assert verdict.out_of_order > 0
    assert conclude(verdict, as_json=False) == 1
    assert " out of order" in capsys.readouterr().out


@pytest.mark.requirement("G7", "S1-15", "S2-03")
def test_messages_that_all_arrive_twice_are_absorbed(tmp_path: Path) -> None:
    """Delivery is at-least-once, and the effect happens once."""
    verdict, _ = judge(tmp_path, RepeatingBroker())

    assert verdict.absorbed == verdict.repeated == 2 * verdict.committed
    assert verdict.ok
    assert conclude(verdict, as_json=True) == 0


GOOD = Verdict(
    committed=5,
    delivered=5,
    missing=0,
    unknown=0,
    repeated=2,
    absorbed=2,
    undone=0,
    overdone=0,
    rolled_back=1,
    phantoms=0,
    out_of_order=0,
    dead=0,
    outage=timedelta(seconds=1),
    recovered=True,
)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, missing=1, delivered=4),
        replace(GOOD, unknown=1, delivered=6),
        replace(GOOD, phantoms=1),
        replace(GOOD, out_of_order=1),
        replace(GOOD, dead=1),
        replace(GOOD, undone=1),
        replace(GOOD, overdone=1),
        replace(GOOD, absorbed=1),
        replace(GOOD, absorbed=0, repeated=0),
        replace(GOOD, recovered=False),
        replace(GOOD, committed=0, delivered=0),
        replace(GOOD, rolled_back=0),
    ],
)
def test_each_broken_promise_alone_spoils_the_verdict(bad: Verdict) -> None:
    assert GOOD.ok
    assert not bad.ok
    assert str(bad).endswith("FAILED")
    assert bad.as_dict()["ok"] is False


def test_a_repeated_arrival_does_not_count_as_overtaken() -> None:
    first, second, third = uuid4(), uuid4(), uuid4()
    arrived = [(first, "a", 1), (second, "a", 2), (first, "a", 1), (third, "b", 1)]

    verdict = counted({first: ("a", 1), second: ("a", 2), third: ("b", 1)}, arrived, [])

    assert (verdict.out_of_order, verdict.missing) == (0, 0)


def test_effects_are_counted_for_each_service_and_in_order() -> None:
    first, second, third = uuid4(), uuid4(), uuid4()
    committed = {first: ("a", 1), second: ("a", 2), third: ("b", 1)}
    arrived = [(identity, *order) for identity, order in committed.items()]
    complete = [("a", 1), ("b", 1), ("a", 2)]

    verdicts = [
        counted(committed, arrived, [complete, effect])
        for effect in (
            complete,
            [("a", 1), ("a", 2)],
            [*complete, ("a", 2)],
            [*complete, ("c", 1)],
            [("a", 2), ("a", 1), ("b", 1)],
        )
    ]

    assert [(verdict.undone, verdict.overdone, verdict.out_of_order) for verdict in verdicts] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (0, 1, 0),
        (0, 0, 1),
    ]


def counted(
    committed: Mapping[UUID, Order], arrived: Sequence[tuple[UUID, str, int]], effects: Sequence[Sequence[Order]]
) -> Verdict:
    return Verdict.count(
        committed=committed,
        rolled_back=[],
        arrived=arrived,
        effects=effects,
        repeated=1,
        absorbed=1,
        dead=0,
        outage=timedelta(0),
        recovered=True,
    )


@pytest.mark.requirement("G1", "S2-21")
def test_the_example_runs() -> None:
    """The refused order has no message."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "shop.py"], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "order 2 refused: a price cannot be negative",
        'order.placed {"order_id":1,"cents":990}',
        'order.placed {"order_id":3,"cents":450}',
    ]


@pytest.mark.parametrize(("chance", "attempt", "fails"), [(0.004, 1, True), (0.006, 1, False), (0.004, 2, False)])
async def test_one_message_in_two_hundred_stumbles_at_its_first_attempt(
    monkeypatch: pytest.MonkeyPatch, chance: float, attempt: int, *, fails: bool
) -> None:
    """So that each demo shows what a rollback undoes, and no message dies of it."""
    monkeypatch.setattr(random, "random", lambda: chance)
    message = replace(Message(topic="stock", payload=b"{}"), attempt=attempt)

    with pytest.raises(RuntimeError, match="fell off") if fails else nullcontext():
        services._stumble(message)  # noqa: SLF001
