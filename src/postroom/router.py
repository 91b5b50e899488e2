"""The router: calls the one handler of each type of message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NewType, TypeAlias, TypeVar, get_args, get_origin, overload

from . import events
from .checks import check_choice, check_function, check_methods, check_text
from .codec import Codec, JSONCodec, encoded, is_many, type_name
from .deadline import UNTIMED, clock
from .errors import (
    AlreadyStartedError,
    ConfigurationError,
    HandlerExistsError,
    HandlerRejectedError,
    HandlingError,
    InvalidMessageError,
    NoHandlerError,
    StorePermissionError,
)
from .handler import Call, Handler, bound, check_handler, described, event_class, is_on_thread, payload_class
from .message import Message, drafted, uuid7
from .reporting import Reporter

__all__ = ["Match", "Router"]

H = TypeVar("H", bound=Handler)

#: Tells whether a handler takes a message.
Matcher: TypeAlias = Callable[[Message], bool]
#: What happens to messages that no handler takes.
Unhandled: TypeAlias = Literal["fail", "ignore"]

NONE: Final[Sequence[Message]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Matches messages whose type and source both fit a glob.

    ``*`` stands for any text, ``?`` for one character, ``[ab]`` for one of several and ``[!ab]`` for any other; upper
    and lower case differ. To match one of these characters itself, put it in brackets: ``[*]``.

    Example:
        >>> from postroom import Match, Message
        >>> Match(type="order.*")(Message(topic="orders", type="order.placed", payload=b"{}"))
        True
    """

    type: str = "*"
    source: str = "*"

    def __post_init__(self) -> None:
        """Refuse what is no glob."""
        check_text("type", self.type)
        check_text("source", self.source)

    def __call__(self, message: Message) -> bool:
        """Tell whether a message fits both globs."""
        return fnmatchcase(message.type, self.type) and fnmatchcase(message.source, self.source)


@dataclass(frozen=True, slots=True)
class _Route:
    call: Call
    match: Matcher | None
    topic: str | None
    is_on_thread: bool


class Router:
    """Calls the one handler that is registered for the type of a message.

    A handler is a function, async or plain; a plain one runs on a thread. It is called with the payload, decoded to the
    type that its parameter is annotated with, and with the `Message` itself, its `Delivery` or the `Transaction` if a
    parameter is annotated so. It returns nothing, one event or message, or many of them, or yields them.

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
        >>> @router.on
        ... async def reserve(order: OrderPlaced) -> StockReserved:
        ...     return StockReserved(order.order_id)
        >>> asyncio.run(router(Message(topic="orders", type="order.placed", payload=b'{"order_id":42}')))[0].type
        'stock.reserved'
    """

    def __init__(
        self,
        *,
        codec: Codec | None = None,
        topic: str | None = None,
        source: str | None = None,
        unhandled: Unhandled = "fail",
    ) -> None:
        """Set up a router without handlers.

        Args:
            codec: Decodes payloads and encodes what handlers return; JSON by default.
            topic: The topic of the events that handlers return; by default it is named like their type.
            source: The attribute ``source`` of CloudEvents that these events get.
            unhandled: What happens to messages that no handler takes, because their type has none or its ``match``
                refuses them: ``fail`` redelivers them until their attempts are spent, ``ignore`` acknowledges them.
        """
        check_methods("codec", codec, ("encode", "decode"), "a Codec or None", optional=True)
        check_text("topic", topic, optional=True)
        check_text("source", source, optional=True)
        check_choice("unhandled", unhandled, get_args(Unhandled))
        self._unhandled: Unhandled = unhandled
        self._report = Reporter(None)
        self._codec: Codec = codec or JSONCodec()
        self._topic = topic
        self._headers = {} if source is None else {"ce-source": source}
        self._routes: dict[str, _Route] = {}
        self._is_started = False

    @property
    def types(self) -> tuple[str, ...]:
        """The types that have a handler."""
        return tuple(self._routes)

    @overload
    def on(
        self, message_type: str | type | None = None, *, match: Matcher | None = None, topic: str | None = None
    ) -> Callable[[H], H]: ...
    @overload
    def on(self, message_type: H, /) -> H: ...
    def on(
        self, message_type: str | type | H | None = None, *, match: Matcher | None = None, topic: str | None = None
    ) -> H | Callable[[H], H]:
        """Register the decorated function as the handler of a type of message.

        Without a type, and also without parentheses, the class that the payload is annotated with names it:
        ``@router.on`` above ``async def reserve(order: OrderPlaced)`` registers it for ``order.placed``.

        Args:
            message_type: The name of the type, or the class of its events.
            match: Refuses some of the messages, such as `Match`.
            topic: Where the events that the handler returns go.

        Raises:
            HandlerExistsError: The type has a handler.
            AlreadyStartedError: Messages are being handled already.
            ConfigurationError: The type is neither a name nor the class of an event; the payload is annotated with
                something that names no type; or the handler asks for something that no payload can become.
        """
        if not isinstance(message_type, str | type | None) and _is_handler(message_type):
            return self.on(match=match, topic=topic)(message_type)
        name = None if message_type is None else _name(message_type)

        def register(handler: H) -> H:
            self.add(_annotated(handler) if name is None else name, handler, match=match, topic=topic)
            return handler

        return register

    def add(
        self, message_type: str | type, handler: Handler, *, match: Matcher | None = None, topic: str | None = None
    ) -> None:
        """Register a function as the handler of a type of message, as `on` does."""
        name = _name(message_type)
        check_function("match", match, "a message", optional=True)
        check_text("topic", topic, optional=True)
        check_handler(handler)
        if self._is_started:
            raise AlreadyStartedError(f"a handler of {name!r} was added to a router")
        if name in self._routes:
            raise HandlerExistsError(name)
        self._routes[name] = _Route(bound(handler, self._codec), match, topic, is_on_thread(handler))

    def start(self) -> None:
        """Accept no more handlers; a consumer calls this when it starts."""
        self._is_started = True

    async def __call__(self, message: Message) -> Sequence[Message]:
        """Call the handler of a message, and return what it returned as messages.

        Raises:
            NoHandlerError: Its type has no handler.
            HandlerRejectedError: The ``match`` of its handler refuses it.
            DecodeError: The payload does not match the type that the handler is annotated with.
        """
        route = self._routes.get(message.type)
        if route is None:
            return self._leave(message, NoHandlerError(message.type))
        if route.match is not None and not route.match(message):
            return self._leave(message, HandlerRejectedError(message.type))
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

    def _leave(self, message: Message, reason: HandlingError) -> Sequence[Message]:
        """Fail or ignore a message that no handler takes."""
        if self._unhandled == "fail":
            raise reason
        self._report(events.Ignored(message.id, message.type, message.topic, message.key))
        return NONE

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


def _is_handler(value: object) -> bool:
    """Tell whether something may be a handler; what typing makes of types can be called too."""
    return callable(value) and get_origin(value) is None and not isinstance(value, NewType)


def _name(message_type: object) -> str:
    """Return the name of a type of message, given by itself or by the class of its events."""
    if isinstance(message_type, str):
        return message_type
    kind = event_class(message_type)
    if kind is None:
        raise ConfigurationError(
            f"{message_type!r} is not a type of message; pass the name of one, such as 'order.placed', or the class "
            "of its events"
        )
    return type_name(kind)


def _annotated(handler: Handler) -> type:
    """Return the class of events that a handler is annotated with."""
    kind = payload_class(handler)
    if kind is None:
        raise ConfigurationError(
            f"{described(handler)} does not say which type of message it takes: its payload is not annotated with a "
            'class of yours; write @router.on("order.placed"), with the name of the type, or annotate the payload'
        )
    return kind


def each(returned: Any) -> Iterator[object]:  # noqa: ANN401 -- whatever a handler returns
    """Yield what a handler returned, be it one or many."""
    outputs: Iterable[object] = returned
    return iter(outputs if is_many(returned) or isinstance(returned, Iterator) else (outputs,))
