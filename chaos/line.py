"""The line to the broker: a subscriber over TCP, which connects again for as long as it is used."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

from postroom import Dead, Delivered, Delivery, Message, Outcome, Release, Retry
from postroom.errors import BrokerUnavailableError

from .history import History

__all__ = ["Line"]

#: How many seconds the broker has to answer.
_PATIENCE: Final = 2.0
_PAUSE: Final = 0.1
_WORDS: Final[dict[type, str]] = {Delivered: "delivered", Retry: "retry", Release: "release", Dead: "dead"}


class Line(AsyncIterator[Delivery]):
    """Asks for one message at a time; what was handed out before a connection broke may be settled on the next one."""

    #: As far as the broker is concerned, for ever.
    redelivery_horizon: timedelta | None = None

    def __init__(self, port: int, group: str, history: History) -> None:
        self._port = port
        self._group = group
        self._history = history
        self._writer: asyncio.StreamWriter | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_asking = False
        self._arrived: deque[Delivery] = deque()
        self._news = asyncio.Event()
        self._answers: dict[int, asyncio.Future[None]] = {}

    async def __aenter__(self) -> Self:
        """Begin to connect."""
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect; the broker hands out again what is not settled."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        """Be connected."""
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    self._say(subscribe=self._group)
                    if self._is_asking:
                        self._say(ask=1)
                    while line := await reader.readuntil():
                        self._hear(json.loads(line))
                finally:
                    self._writer.transport.abort()
                    self._writer = None
                    self._hang_up()
            await asyncio.sleep(_PAUSE)

    def _say(self, **line: object) -> None:
        if self._writer is None:
            raise BrokerUnavailableError("there is no connection to the broker")
        self._writer.write(json.dumps(line).encode() + b"\n")

    def _hear(self, said: dict[str, Any]) -> None:
        if "settled" in said:
            answer = self._answers.pop(said["settled"], None)
            if answer is not None and not answer.done():
                answer.set_result(None)
            return
        self._is_asking = False
        self._arrived.append(self._delivery(said["message"], said["handle"], said["attempt"]))
        self._news.set()

    def _hang_up(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BrokerUnavailableError("the connection to the broker broke"))
        self._answers.clear()

    def _delivery(self, told: dict[str, Any], handle: int, attempt: int) -> Delivery:
        message = Message(
            id=UUID(told["id"]),
            topic=told["topic"],
            type=told["event_type"],
            key=told["key"],
            payload=told["payload"].encode(),
            attempt=attempt,
            token=handle,
        )

        async def settle(outcome: Outcome) -> None:
            await self._settle(message, outcome)

        return Delivery(message, settle)

    async def _settle(self, message: Message, outcome: Outcome) -> None:
        handle, word = message.token, _WORDS[type(outcome)]
        told = {"consumer": self._group, "id": str(message.id), "handle": handle}
        if isinstance(outcome, Delivered | Dead):
            self._history.write("ack", "invoke", word=word, **told)
        if isinstance(outcome, Retry):
            self._history.write("nack", "invoke", error=outcome.error.partition(":")[0], **told)
        delay = outcome.delay if isinstance(outcome, Retry | Release) else None
        self._say(settle=handle, word=word, delay=delay.total_seconds() if delay else 0.0)
        answer = self._answers[handle] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(_PATIENCE):
            await answer

    async def __anext__(self) -> Delivery:
        """Wait for the next message."""
        if not (self._arrived or self._is_asking):
            self._is_asking = True
            if self._writer is not None:
                self._say(ask=1)
        while not self._arrived:
            self._news.clear()
            await self._news.wait()
        return self._arrived.popleft()
