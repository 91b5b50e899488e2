"""The destination of a message: where its publisher takes it, which may be down while others work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, Protocol, runtime_checkable
from uuid import UUID

from .events import Listener, NamingFailed, log_event
from .message import Message
from .store import MAX_DESTINATION
from .text import describe

__all__ = ["NamesDestinations", "Naming"]

#: Stands between a destination and the key of a message, or its id where it has no key.
OF_KEY: Final = "\x1f"
OF_MESSAGE: Final = "\x1e"
#: Stands between the tenant of a dispatcher and a destination.
OF_TENANT: Final = "\x1d"


@runtime_checkable
class NamesDestinations(Protocol):
    """A publisher that knows where it takes each message, such as to the address of a webhook."""

    def destination(self, message: Message) -> str:
        """Return the name of a message's destination; messages of the same name wait for each other's recovery."""
        ...


class Naming:
    """Names the destination of a message, and the part of it that the message belongs to.

    A part is what fails by itself: the messages of one key, or a single message without a key.
    """

    def __init__(
        self,
        destination: Callable[[Message], str] | None = None,
        tenant_id: UUID | None = None,
        tell: Listener = log_event,
    ) -> None:
        """Name destinations, those of a dispatcher for one tenant apart from those of all others."""
        self._named = destination
        self._prefix = "" if tenant_id is None else f"{tenant_id.hex}{OF_TENANT}"
        self._tell = tell

    def destination(self, message: Message) -> str:
        """Return the destination of a message, by default its topic; a function that fails is reported."""
        whole = self._whole(message)
        return _shortened(self._prefix + whole) if self._prefix else whole

    def destinations(self, messages: Sequence[Message]) -> list[str]:
        """Return the destination of each message, for many at once at next to no cost where that is the topic."""
        if self._named is None and not self._prefix:
            topics = [message.topic for message in messages]
            if max(map(len, set(topics)), default=0) <= MAX_DESTINATION:
                return topics
        return list(map(self.destination, messages))

    def is_ours(self, name: str) -> bool:
        """Tell whether messages that wait for a name may be claimed by this dispatcher."""
        return name.startswith(self._prefix)

    def _whole(self, message: Message) -> str:
        if self._named is None:
            return message.topic if len(message.topic) <= MAX_DESTINATION else _shortened(message.topic)
        try:
            return _checked(self._named(message))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 -- whatever a function of the user raises is reported
            self._tell(NamingFailed(message.id, message.topic, describe(error), message.key, error))
            return _shortened(message.topic)

    def part(self, message: Message, destination: str | None = None) -> str:
        """Return the part of its destination that a message belongs to."""
        whole = self.destination(message) if destination is None else destination
        own = f"{OF_MESSAGE}{message.id}" if message.key is None else f"{OF_KEY}{message.key}"
        return _shortened(whole + own)


def readable(name: str) -> str:
    """Return the name of a destination or a part of one as logs show it."""
    name = name.rpartition(OF_TENANT)[2]
    for mark, kind in ((OF_KEY, "key"), (OF_MESSAGE, "message")):
        destination, is_part, part = name.partition(mark)
        if is_part:
            return f"{destination} ({kind} {part})"
    return name


def _checked(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"destination() must return a text that is not empty, not {type(name).__name__}")
    printable = "".join(c if c.isprintable() else "?" for c in name)
    return _shortened(name) if printable == name else _digested(printable, name)


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_DESTINATION else _digested(name, name)


def _digested(shown: str, name: str) -> str:
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{shown[: MAX_DESTINATION - len(digest) - 1]}~{digest}"
