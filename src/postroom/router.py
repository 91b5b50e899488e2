"""The router: takes each message to the one handler of its type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

from .checks import check_methods, check_text
from .codec import Codec, JSONCodec, encoded, is_many, type_name
from .deadline import UNTIMED, clock
from .errors import (
    AlreadyStartedError,
    HandlerExistsError,
    HandlerRejectedError,
    InvalidMessageError,
    NoHandlerError,
    StorePermissionError,
)
from .handler import Call, Handler, bound, is_on_thread
from .message import Message, drafted, uuid7

__all__ = ["Match", "Router"]

H = TypeVar("H", bound=Handler)

#: Tells whether a handler takes a message.
Matcher: TypeAlias = Callable[[Message], bool]

NONE: Final[Sequence[Message]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Takes messages whose type and source are like patterns of SQL.

    ``%`` is any text, ``_`` one character, and a backslash makes the next character stand for itself.

    Example:
        >>> from postroom import Match, Message
        >>> Match(type="order.%")(Message(topic="orders", type="order.placed", payload=b"{}"))
        True
    """

    type: str = "%"
    source: str = "%"

    def __call__(self, message: Message) -> bool:
        """Tell whether a message is meant."""
        return _is_like(message.type, self.type) and _is_like(message.source, self.source)


def _is_like(text: str, like: str) -> bool:
    return like == "%" or _pattern(like).fullmatch(text) is not None


@lru_cache(maxsize=256)
def _pattern(like: str) -> re.Pattern[str]:
    """Return a pattern of SQL's LIKE as a regular expression; a backslash makes the next character plain."""
    parts = re.findall(r"\\.|.", like, re.DOTALL)
    wild = {"%": ".*", "_": "."}
    plainly = (wild.get(part) or re.escape(part.removeprefix("\\") or part) for part in parts)
    return re.compile("".join(plainly), re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Route:
    call: Call
    match: Matcher | None
    topic: str | None
    is_on_thread: bool


class Router:
    """Maps types of messages to handlers.

    A handler is a function of yours, async or plain. It gets the payload decoded to the type that its parameter is
    annotated with, and the `Message` itself, its `Delivery` or the `Transaction`, if it asks for one by annotation. It
    returns nothing, one event or message, or many of them, or yields them. A plain function runs on a thread.

    Example:
        >>> import asyncio
        >>> from dataclasses import dataclass
        >>> from postroom import Message, Router
        >>> @dataclass
        ... class OrderPlaced:
        ...     order_id: int
        >>> @dataclass
        ... class StockReserved:
        ...     order_id: int
        >>> router = Router()
        >>> @router.on("order.placed")
        ... async def reserve(order: OrderPlaced) -> StockReserved:
        ...     return StockReserved(order.order_id)
        >>> asyncio.run(router(Message(topic="orders", type="order.placed", payload=b'{"order_id":42}')))[0].type
        'stock.reserved'
    """

    def __init__(self, *, codec: Codec | None = None, topic: str | None = None, source: str | None = None) -> None:
        """Set up a router without handlers.

        Args:
            codec: Decodes payloads and encodes what handlers return; JSON by default.
            topic: Where returned events go; by default to a topic that is called like their type.
            source: Who says so, as the attribute ``source`` of CloudEvents.
        """
        check_methods("codec", codec, ("encode", "decode"), "a Codec or None", optional=True)
        check_text("topic", topic, optional=True)
        check_text("source", source, optional=True)
        self._codec: Codec = codec or JSONCodec()
        self._topic = topic
        self._headers = {} if source is None else {"ce-source": source}
        self._routes: dict[str, _Route] = {}
        self._is_started = False

    @property
    def types(self) -> tuple[str, ...]:
        """The types that have a handler."""
        return tuple(self._routes)

    def on(
        self, message_type: str | type, *, match: Matcher | None = None, topic: str | None = None
    ) -> Callable[[H], H]:
        """Make the decorated function the handler of a type, given by its name or by the class of its events.

        Args:
            message_type: Which messages it handles.
            match: Refuses some of them, such as `Match`.
            topic: Where the events that it returns go.

        Raises:
            HandlerExistsError: The type has a handler.
            AlreadyStartedError: Messages are being handled already.
            ConfigurationError: The handler asks for something that no message can become.
        """

        def register(handler: H) -> H:
            self.add(message_type, handler, match=match, topic=topic)
            return handler

        return register

    def add(
        self, message_type: str | type, handler: Handler, *, match: Matcher | None = None, topic: str | None = None
    ) -> None:
        """Make a function the handler of a type; see `on`."""
        name = message_type if isinstance(message_type, str) else type_name(message_type)
        if self._is_started:
            raise AlreadyStartedError(f"a handler of {name!r} was added to a router")
        if name in self._routes:
            raise HandlerExistsError(name)
        self._routes[name] = _Route(bound(handler, self._codec), match, topic, is_on_thread(handler))

    def start(self) -> None:
        """Take no more handlers."""
        self._is_started = True

    async def __call__(self, message: Message) -> Sequence[Message]:
        """Have a message handled, and return what its handler returned, as messages.

        Raises:
            NoHandlerError: Its type has no handler.
            HandlerRejectedError: The handler does not take it.
            DecodeError: The payload is not what the handler is annotated with.
        """
        route = self._routes.get(message.type)
        if route is None:
            raise NoHandlerError(message.type)
        if route.match is not None and not route.match(message):
            raise HandlerRejectedError(message.type)
        # What a handler hands on itself is on its own time, and must not start that anew.
        timing = None if route.is_on_thread or clock.get() is UNTIMED else clock.set(UNTIMED)
        try:
            returned = await route.call(message)
        except StorePermissionError as error:
            # Refused for a table of ours, it would be for every other handler as well.
            error.is_of_handler = error.table is None
            raise
        finally:
            if timing is not None:
                clock.reset(timing)
        if returned is None:
            return NONE
        return [self._message(output, route.topic or self._topic, message) for output in each(returned)]

    def _message(self, output: object, topic: str | None, cause: Message) -> Message:
        if isinstance(output, Message):
            return output
        payload, kind, content_type = encoded(self._codec, output, topic)
        if not (topic or kind):
            raise InvalidMessageError(
                f"the handler of {cause.type!r} returned a {type(output).__name__}, which has no type of its own; "
                "return a Message, or an object of a class, or pass topic= to the router"
            )
        return drafted(
            id=uuid7(),
            topic=topic or kind,
            payload=payload,
            type=kind or topic or "",
            key=None,
            namespace=cause.namespace,
            content_type=content_type,
            headers=self._headers,
            tenant_id=cause.tenant_id,
            dedupe_key=None,
        )


def each(returned: Any) -> Iterator[object]:  # noqa: ANN401 -- whatever a handler returns
    """Yield what a handler returned, be it one or many."""
    outputs: Iterable[object] = returned
    return iter(outputs if is_many(returned) or isinstance(returned, Iterator) else (outputs,))
