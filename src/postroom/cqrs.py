"""Commands: a typed command in, typed events out, and the envelope of the events made for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .codec import Codec, JSONCodec, Naming, encoded, named
from .errors import ConfigurationError, InvalidMessageError
from .handler import Handler, bound, described, payload_class
from .message import Message
from .middleware.outbox import OutboxMiddleware
from .middleware.transaction import TransactionMiddleware
from .outbox import Outbox
from .router import each

__all__ = ["CommandHandler", "command_handler", "command_handler_with_outbox"]


class CommandHandler:
    """A handler of one command for a `Router`: ``router.add(handler.type, handler)``."""

    def __init__(
        self,
        handler: Handler,
        *,
        source: str,
        naming: Naming,
        topic: str | None,
        headers: Mapping[str, str],
        codec: Codec | None,
    ) -> None:
        self._codec: Codec = codec or JSONCodec()
        self._call = bound(handler, self._codec)
        self._naming: Naming = naming
        self._topic = topic
        self._headers = {**headers, "ce-source": source}
        #: The type of message that carries the command.
        self.type: str = named(_command(handler), naming)

    async def __call__(self, message: Message) -> Sequence[Message]:
        """Handle a command, and return its events as messages."""
        returned = await self._call(message)
        return () if returned is None else [self._event(event, message) for event in each(returned)]

    def _event(self, event: object, command: Message) -> Message:
        if isinstance(event, Message):
            return event
        payload, kind, content_type = encoded(self._codec, event, self._topic, self._naming)
        if not kind:
            raise InvalidMessageError(
                f"the handler of {self.type!r} returned a {type(event).__name__}, which has no type of its own; return "
                "an object of a class, or pass topic="
            )
        return Message(
            topic=self._topic or kind,
            type=kind,
            payload=payload,
            content_type=content_type,
            key=command.key,
            namespace=command.namespace,
            tenant_id=command.tenant_id,
            headers=self._headers,
            time=datetime.now(UTC),
        )


class _StoringCommandHandler(CommandHandler):
    """A command handler that opens its own transaction, and keeps its events in it."""

    def __init__(self, pool: object, outbox: Outbox, handler: Handler, **options: Any) -> None:  # noqa: ANN401 -- those of its base
        super().__init__(handler, codec=outbox.codec, **options)
        self._transaction = TransactionMiddleware(pool)
        self._outbox = OutboxMiddleware(outbox)

    async def __call__(self, message: Message) -> Sequence[Message]:
        """Handle a command; its events are in the outbox when this returns, and so nothing is handed on."""
        return await self._transaction(message, self._kept)

    async def _kept(self, message: Message) -> Sequence[Message]:
        return await self._outbox(message, super().__call__)


def command_handler(
    handler: Handler,
    *,
    source: str,
    naming: Naming = "dot",
    topic: str | None = None,
    headers: Mapping[str, str] | None = None,
    codec: Codec | None = None,
) -> CommandHandler:
    """Return a handler for a router, made of a function that takes a typed command and returns events.

    Each event gets an id, the type that ``naming`` makes of its class, the ``source``, the time and the key of its
    command, and ``headers``.

    Args:
        handler: Takes the command, by annotation.
        source: Who says so, as the attribute ``source`` of CloudEvents.
        naming: How types are made of classes: ``default``, ``dot``, ``kebab`` or ``snake``.
        topic: Where events go; by default to a topic that is called like their type.
        headers: What else stands on every event.
        codec: Decodes commands and encodes events.

    Example:
        >>> from dataclasses import dataclass
        >>> from postroom.cqrs import command_handler
        >>> @dataclass
        ... class PlaceOrder:
        ...     order_id: int
        >>> async def place(command: PlaceOrder) -> None: ...
        >>> command_handler(place, source="/orders", naming="kebab").type
        'place-order'
    """
    return CommandHandler(handler, source=source, naming=naming, topic=topic, headers=headers or {}, codec=codec)


def command_handler_with_outbox(  # noqa: PLR0913 -- one keyword for each choice a user has
    pool: object,
    outbox: Outbox,
    handler: Handler,
    *,
    source: str,
    naming: Naming = "dot",
    topic: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> CommandHandler:
    """Return a command handler that opens a transaction on ``pool``, and keeps the events in the outbox with it.

    The function gets the transaction by a parameter that is annotated with `Transaction`, and uses its ``connection``.
    Within a transaction of the same pool, such as that of `transactional`, it joins it.
    """
    return _StoringCommandHandler(
        pool, outbox, handler, source=source, naming=naming, topic=topic, headers=headers or {}
    )


def _command(handler: Handler) -> type:
    """Return the class of the command that a function takes."""
    command = payload_class(handler)
    if command is None:
        raise ConfigurationError(
            f"{described(handler)} does not say which command it takes; annotate its parameter with the class of the "
            "command"
        )
    return command
