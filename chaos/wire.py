"""The publisher of a dispatcher process: sends batches to the receiver, and fails in the ways that publishers do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from postroom import Dead, Delivered, Message, Outcome, Release, Retry
from postroom.errors import BrokerUnavailableError

from .history import History
from .key_outages import KeyOutage, key_class
from .worker import Setting

__all__ = ["PUBLISH_TIMEOUT", "REFUSAL", "NamingWire", "Panic", "Wire"]

#: Stands in the settlement of a refused message, where the fault proxy can find it.
REFUSAL: Final = "chaos-refusal"
PUBLISH_TIMEOUT: Final = timedelta(seconds=0.6)
#: Of a thousand publishes, how many end in an exception that is no `Exception`.
_PANICS: Final = 4
_OUTCOMES: Final[dict[str, Outcome]] = {
    "delivered": Delivered(),
    "refused": Retry(REFUSAL),
    "rejected": Dead("chaos-rejection"),
}


class Panic(BaseException):
    """Raised as a library written in another language raises: past every ``except Exception``."""


class Wire:
    """Sends batches to the receiver and records what it heard of each message."""

    def __init__(self, setting: Setting, history: History) -> None:
        self._port = setting.port
        self._folder = setting.place
        self._rng = random.Random(f"{setting.seed} {setting.name}.{setting.life} wire")
        self._history = history

    def named(self, message: Message) -> str:
        """Return the destination as the dispatcher knows it."""
        return message.topic

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        """Send what the outages of keys leave, and answer for every message."""
        events = [json.loads(message.payload) for message in messages]
        if any(event["kind"] == "killer" for event in events):
            self._history.write("fault", "ok", kind="killed by a message", victim="dispatcher", length=0.0)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        outage = KeyOutage.read(self._folder)
        is_hit = [outage is not None and outage.hits(message.key) for message in messages]
        if outage is not None and outage.hangs and any(is_hit):
            try:
                await asyncio.Event().wait()
            finally:  # the dispatcher has given up
                self._record(messages, ["unanswered"] * len(messages), began)
        reached = [index for index, hit in enumerate(is_hit) if not hit]
        sent = [messages[index] for index in reached]
        words = await self._send(sent, [events[index] for index in reached], began)
        refused = [message for message, hit in zip(messages, is_hit, strict=True) if hit]
        self._record(refused, ["outage"] * len(refused), began)
        answers = dict(zip(reached, words, strict=True))
        return [Release() if hit else _OUTCOMES.get(answers[index]) for index, hit in enumerate(is_hit)]

    async def _send(self, messages: Sequence[Message], events: Sequence[dict[str, Any]], began: float) -> list[str]:
        if not messages:
            return []
        is_panicking = self._rng.randrange(1000) < _PANICS
        if is_panicking and self._rng.random() < 0.5:  # noqa: PLR2004 -- heads or tails
            self._panic(messages, began)
        words = await self._exchange(messages, events, began)
        if is_panicking:
            self._panic(messages, began)
        self._record(messages, words, began)
        return words

    def _panic(self, messages: Sequence[Message], began: float) -> None:
        self._record(messages, ["panic"] * len(messages), began)
        self._history.write("fault", "ok", kind="publisher panics", victim="publisher", length=0.0)
        panic = Panic("chaos-panic")
        raise self._rng.choice([panic, GeneratorExit("chaos-panic"), BaseExceptionGroup("chaos-panic", [panic])])

    async def _exchange(self, messages: Sequence[Message], events: Sequence[dict[str, Any]], began: float) -> list[str]:
        """Send every message and return a word for each, "unanswered" where none came in time."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            self._record(messages, ["outage"] * len(messages), began)
            raise BrokerUnavailableError(str(error)) from error
        words: list[str] = []
        try:
            # Before the dispatcher gives up: what was confirmed until then counts.
            with contextlib.suppress(OSError):
                async with asyncio.timeout(PUBLISH_TIMEOUT.total_seconds() * 0.8):
                    writer.writelines(_lines(messages, events))
                    while len(words) < len(messages) and (word := await reader.readline()):
                        words.append(word.decode().strip())
        finally:
            writer.transport.abort()
        return words + ["unanswered"] * (len(messages) - len(words))

    def _record(self, messages: Sequence[Message], words: Sequence[str], began: float) -> None:
        answers = [(str(m.id), m.token, word, self.named(m)) for m, word in zip(messages, words, strict=True)]
        took = int((time.monotonic() - began) * 1e9)
        self._history.write("publish", "ok", answers=answers, took=took)


class NamingWire(Wire):
    """Names the endpoint of a key as the destination of its messages, as a webhook publisher does."""

    def destination(self, message: Message) -> str:
        """Return the topic and the class of the key."""
        return f"{message.topic}/{key_class(message.key)}"

    named = destination


def _lines(messages: Sequence[Message], events: Sequence[dict[str, Any]]) -> list[bytes]:
    # The padding of large messages is left out: what is put to the test is the way from the store to the publisher.
    kept = [{name: value for name, value in event.items() if name != "padding"} for event in events]
    lines = [
        {
            "id": str(m.id),
            "topic": m.topic,
            "key": m.key,
            "token": m.token,
            "attempt": m.attempt,
            "event_type": m.type,
            "payload": json.dumps(event),
            **event,
        }
        for m, event in zip(messages, kept, strict=True)
    ]
    return [json.dumps(line).encode() + b"\n" for line in lines]
