"""What handlers return, on its way to a publisher."""

from __future__ import annotations

from collections.abc import Sequence

from .broker import OUTAGES, Publisher, attempts_of, describe, why_not
from .errors import ConfigurationError, PostroomError
from .message import Message
from .store import Dead, Delivered, Release, Retry

__all__ = ["OutputError", "send_outputs"]


class OutputError(PostroomError):
    """Something that a handler returned could not be delivered; ``outcome`` says what its publisher answered."""

    def __init__(self, outcome: Retry | Dead | Release, error: str) -> None:
        super().__init__(f"an output was not delivered: {error}")
        self.outcome = outcome


async def send_outputs(publisher: Publisher | None, message: Message, outputs: Sequence[Message]) -> None:
    """Have the outputs of a message delivered; it shares the fate of the first that is not.

    Raises:
        OutputError: One was not delivered.
        ConfigurationError: There is nobody who could.
    """
    if publisher is None:
        raise ConfigurationError(
            f"the handler of {message.type!r} returned messages, and nobody takes them; "
            "use transactional() or OutboxMiddleware, or pass publisher="
        )
    try:
        attempts = await attempts_of(publisher, outputs)
    except OUTAGES as error:
        raise OutputError(Release(), describe(error)) from error
    if len(attempts) != len(outputs):
        raise OutputError(Retry(""), f"the publisher was given {len(outputs)} and answered for {len(attempts)}")
    for called in attempts:
        if not isinstance(called.answer, Delivered):
            raise OutputError(called.answer or Retry(""), why_not(called)) from called.error
