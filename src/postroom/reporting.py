"""Where middlewares report what became of a message: to the listener of its consumer, and to one of their own."""

from __future__ import annotations

from . import events
from .delivery import Delivery, current

__all__ = ["Reporter"]


class Reporter:
    """Reports events of the message that is being handled, to each listener once.

    The consumer's listener hears all of them; one that is given here too, and is not the same, hears them as well.
    Outside of a consumer the one that is given here hears them, by default the log.
    """

    def __init__(self, listener: events.Listener | None) -> None:
        self._listener = listener
        self._tell = events.guarded(listener or events.log_event)

    def __call__(self, event: events.Event) -> None:
        """Report an event."""
        delivery = current.get()
        if delivery is None or delivery.tell is None:
            self._tell(event)
            return
        if _settles(event, delivery):
            delivery.is_reported = True
        delivery.tell(event)
        if self._listener is not None and self._listener != delivery.listener:
            self._tell(event)

    def alone(self, event: events.Event) -> None:
        """Report an event that the consumer reports by itself."""
        delivery = current.get()
        if delivery is None or delivery.tell is None or self._listener != delivery.listener:
            self._tell(event)


def _settles(event: events.Event, delivery: Delivery) -> bool:
    """Tell whether an event says what became of the message itself, and not of one that its handler hands on."""
    match event:
        case events.DuplicateSkipped() | events.DeadLettered() | events.Ignored():
            return event.message_id == delivery.message.id
        case _:
            return False
