"""Where our dispatchers deliver to."""

from __future__ import annotations

from collections.abc import Sequence

from postroom import Delivered, Message, Outcome

from .contender import Arrivals

__all__ = ["Sink"]


class Sink:
    """A publisher that does nothing but take note."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._payloads = arrivals.payloads

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome]:
        self._payloads += [message.payload for message in messages]
        return [Delivered()] * len(messages)
