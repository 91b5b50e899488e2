"""The broker in memory: for tests, trials and the demo."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..errors import BrokerUnavailableError, ConfigurationError
from ..message import Message
from ..store import Delivered, Outcome, Release

__all__ = ["MemoryBroker"]


class MemoryBroker:
    """Confirms messages at once, remembers the latest ``keep`` of them, and can be switched off.

    Example:
        >>> import asyncio
        >>> from postroom import Message
        >>> from postroom.brokers import MemoryBroker
        >>> broker = MemoryBroker()
        >>> asyncio.run(broker.publish([Message(topic="orders", payload=b"{}")]))
        [Delivered()]
        >>> [message.topic for message in broker.received]
        ['orders']
    """

    def __init__(self, *, keep: int = 100_000) -> None:
        if keep < 1:
            raise ConfigurationError(f"keep={keep} must be at least 1")
        self._received: deque[Message] = deque(maxlen=keep)
        self._down: set[str | None] = set()
        #: How many messages were ever confirmed, also those that are no longer remembered.
        self.confirmed: int = 0

    @property
    def received(self) -> list[Message]:
        """The latest confirmed messages, in the order in which they were confirmed."""
        return list(self._received)

    def down(self, topic: str | None = None) -> None:
        """Refuse all messages, or those of one topic, until it is up again."""
        self._down.add(topic)

    def up(self, topic: str | None = None) -> None:
        """Take messages again; without a topic, those of every topic."""
        if topic is None:
            self._down.clear()
        self._down.discard(topic)

    async def publish(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        """Confirm a batch, except what goes to a topic that is down."""
        if None in self._down:
            raise BrokerUnavailableError("the broker in memory is switched off; call up()")
        outcomes: list[Outcome | None] = []
        for message in messages:
            if message.topic in self._down:
                outcomes.append(Release())
            else:
                self._received.append(message)
                self.confirmed += 1
                outcomes.append(Delivered())
        return outcomes
