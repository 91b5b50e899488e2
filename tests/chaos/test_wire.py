"""The publisher that chaos uses: which messages it fails, and how."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos.history import History, read
from chaos.key_outages import KEY_CLASSES, KeyOutage, key_class
from chaos.wire import Wire
from chaos.worker import Setting
from postroom import Delivered, Message, Outcome, Release


class Recording(Wire):
    """A wire whose receiver takes everything."""

    sent: tuple[str | None, ...] = ()

    async def _exchange(
        self, messages: Sequence[Message], events: Sequence[dict[str, object]], began: float
    ) -> list[str]:
        self.sent = tuple(message.key for message in messages)
        return ["delivered"] * len(messages)


def wire(folder: Path) -> Recording:
    setting = Setting(name="d0", store="memory", url="", folder=str(folder), port=0, seed=1)
    return Recording(setting, History(folder, "d0"))


def message(key: str | None) -> Message:
    return Message(topic="orders", key=key, payload=json.dumps({"n": 1, "kind": "plain"}).encode())


def key_of(number: int) -> str:
    return next(key for key in map(str, range(1000)) if key_class(key) == number)


async def test_an_outage_refuses_its_class_of_keys_and_no_other(tmp_path: Path) -> None:
    one, other = key_of(0), key_of(1)
    KeyOutage(0).write(tmp_path)
    publisher = wire(tmp_path)

    outcomes: list[Outcome | None] = list(await publisher.publish_batch([message(one), message(other), message(None)]))

    assert outcomes == [Release(), Delivered(), Delivered()]
    assert publisher.sent == (other, None)
    words = [word for event in read(tmp_path) for _, _, word, _ in event["answers"]]
    assert sorted(words) == ["delivered", "delivered", "outage"]


async def test_an_outage_ends(tmp_path: Path) -> None:
    outage = KeyOutage(0)
    outage.write(tmp_path)

    outage.end(tmp_path)

    assert list(await wire(tmp_path).publish_batch([message(key_of(0))])) == [Delivered()]


@pytest.mark.parametrize("number", range(KEY_CLASSES))
def test_every_class_has_keys(number: int) -> None:
    assert key_class(key_of(number)) == number
