"""Handlers: plain functions of the application, called with what their parameters ask for."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from .checks import check_function
from .codec import Codec, reader
from .deadline import Untimed, clock
from .decoding import is_plain
from .delivery import Delivery, current_delivery
from .errors import ConfigurationError
from .message import Message
from .threads import Ended, contained, innermost
from .transaction import Transaction, current_transaction, running_on

__all__ = ["Call", "Handler", "bound", "check_handler", "described", "event_class", "is_on_thread", "payload_class"]

#: What an application registers: async or plain, with any parameters that `bound` understands.
Handler: TypeAlias = Callable[..., Any]
#: Calls a handler for a message.
Call: TypeAlias = Callable[[Message], Awaitable[object]]

#: Parameters that are asked for by their type, beside the one that gets the payload.
_GIVEN: Final[Mapping[Any, Callable[[Message], Any]]] = {
    Message: lambda message: message,
    Delivery: lambda _: current_delivery(),
    Transaction: lambda _: current_transaction(),
    bytes: lambda message: message.payload,
}


def check_handler(handler: object) -> None:
    """Raise unless something can be called as a handler; a class can, if it makes an event and not a handler."""
    makes_handlers = inspect.isclass(handler) and any("__call__" in vars(base) for base in handler.__mro__)
    if makes_handlers or not inspect.isclass(handler):
        check_function("handler", handler, "a payload", may_be_async=True)


def bound(handler: Handler, codec: Codec) -> Call:
    """Return what calls a handler: its parameters are known now, so that a message costs no more than it must.

    Raises:
        ConfigurationError: A parameter asks for something that there is not.
    """
    call = _calling(handler, codec)
    function = innermost(handler)
    if inspect.iscoroutinefunction(function):
        return call
    if inspect.isasyncgenfunction(function):

        async def gather(message: Message) -> object:
            return [output async for output in call(message)]

        return gather

    async def on_thread(message: Message) -> object:
        what = f"the handler of {message.type!r}"
        returned = await _on_thread(partial(contained, partial(_complete, call, message), what))
        if isinstance(returned, Ended):
            raise returned.error
        # A decorator may be plain and what it decorates async.
        return await returned if inspect.isawaitable(returned) else returned

    return on_thread


def is_on_thread(handler: Handler) -> bool:
    """Tell whether a handler is a plain function, which runs on a thread."""
    function = innermost(handler)
    return not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function))


def event_class(kind: object) -> type | None:
    """Return a class that a type of message can be named after; None for a dict, a plain value, a union, a function."""
    return kind if isinstance(kind, type) and kind not in _GIVEN and not is_plain(kind) else None


def payload_class(handler: Handler) -> type | None:
    """Return the class of the events that a handler takes, None unless its annotations name one."""
    return event_class(_payload_type(handler))


def described(handler: Handler) -> str:
    """Return what a handler is called in an error."""
    return f"handler {getattr(handler, '__qualname__', repr(handler))}"


def _complete(call: Callable[[Message], Any], message: Message) -> Any:  # noqa: ANN401 -- whatever it returns
    """Call a plain handler to its end, which for a generator is its last output."""
    returned = call(message)
    outputs: Iterable[Any] = returned
    return list(outputs) if isinstance(returned, Iterator) else returned


async def _on_thread(function: Callable[[], object]) -> object:
    """Run a plain function where it may use the current transaction, with the context of its caller.

    A thread cannot be cancelled, and may be using the connection: whoever is cancelled waits for it, and then goes.
    """
    timing = clock.get()
    timing.wait()  # all threads may be busy
    work = asyncio.ensure_future(running_on()(copy_context().run, _begin, timing, function))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is None:
        return work.result()
    if not work.cancelled():
        work.exception()  # it was looked at, so asyncio need not complain
    raise cancelled


def _begin(timing: Untimed, function: Callable[[], object]) -> object:
    """Start the time of a handler that has its thread, and call it."""
    timing.run()
    return function()


def _calling(handler: Handler, codec: Codec) -> Callable[[Message], Any]:
    """Return what calls a handler with the arguments that it asks for."""
    _payload_type(handler)
    positional: list[Callable[[Message], Any]] = []
    by_name: dict[str, Callable[[Message], Any]] = {}
    for parameter, kind in zip(_parameters(handler), _kinds(handler).values(), strict=True):
        make = _GIVEN.get(kind) or _decoding(reader(codec, kind))
        if parameter.kind is parameter.KEYWORD_ONLY:
            by_name[parameter.name] = make
        else:
            positional.append(make)
    if len(positional) == 1 and not by_name:
        only = positional[0]
        return lambda message: handler(only(message))
    return lambda message: handler(
        *[make(message) for make in positional], **{name: make(message) for name, make in by_name.items()}
    )


def _payload_type(handler: Handler) -> Any:  # noqa: ANN401 -- a type, or what typing has beside types
    """Return what a handler wants the payload to be, None if it does not want it."""
    kinds = _kinds(handler)
    wanted = [name for name, kind in kinds.items() if kind not in _GIVEN]
    if len(wanted) > 1:
        raise ConfigurationError(
            f"{described(handler)} has {len(wanted)} parameters for one payload, {' and '.join(wanted)}; annotate the "
            "others with Message, Delivery or Transaction, or give them a default"
        )
    return kinds[wanted[0]] if wanted else None


def _decoding(read: Callable[[bytes], Any]) -> Callable[[Message], Any]:
    return lambda message: read(message.payload)


def _parameters(handler: Handler) -> list[inspect.Parameter]:
    """Return what a handler must be given."""
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (ValueError, TypeError, NameError) as error:
        raise ConfigurationError(f"the parameters of {described(handler)} cannot be read: {error}; wrap it") from error
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return [each for each in parameters if each.default is each.empty and each.kind not in variadic]


def _kinds(handler: Handler) -> dict[str, Any]:
    """Return the types of what a handler must be given; what has no annotation gets the plain value."""
    parameters = _parameters(handler)
    wanted = {each.name: object if each.annotation is each.empty else each.annotation for each in parameters}
    scope = getattr(inspect.unwrap(innermost(handler)), "__globals__", {})
    try:
        # Only these are read: the others may name what is imported for type checkers alone.
        return typing.get_type_hints(SimpleNamespace(__annotations__=wanted), scope)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise ConfigurationError(
            f"the annotations of {described(handler)} cannot be read: {error}; define or import what they name at the "
            "level of the module, and quote either a whole annotation or nothing of it"
        ) from error
