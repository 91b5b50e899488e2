"""What a user may pass as a publisher, and how it becomes one that takes batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, cast

from .broker import Each, Publisher, Send
from .errors import ConfigurationError
from .message import Message
from .threads import innermost, is_async

__all__ = ["AnyPublisher", "PublishesOne", "as_publisher"]

TAKES = (
    "it takes a function of one message or an object with publish(message), async or plain, "
    "or an object with async publish_batch(messages)"
)


class PublishesOne(Protocol):
    """Delivers one message, async or plain."""

    def publish(self, message: Message, /) -> object:
        """Deliver a message: to return is success, to raise is failure, to return an `Outcome` is to choose."""
        ...


#: Whatever may be passed as a publisher; of an object that has both methods, ``publish_batch`` is called.
AnyPublisher: TypeAlias = Publisher | PublishesOne | Send


def as_publisher(
    publisher: AnyPublisher,
    *,
    name: str = "publisher",
    concurrency: int = 100,
    timeout: timedelta | None = timedelta(seconds=10),
) -> Publisher:
    """Return a publisher of batches; one that delivers single messages is wrapped in `Each`.

    Raises:
        ConfigurationError: It is neither a publisher nor a function of one message.
    """
    given: object = publisher
    if given is None:
        raise ConfigurationError(f"{name} must not be None; {TAKES}")
    if inspect.isclass(given):
        raise ConfigurationError(f"{name} must not be the class {given.__qualname__}: pass an instance; {TAKES}")
    if hasattr(given, "publish_batch"):
        many = cast("Publisher", given)
        _check(many.publish_batch, f"{name}.publish_batch")
        if not is_async(many.publish_batch):
            raise ConfigurationError(f"{name}.publish_batch must be declared with async def; {TAKES}")
        return many
    if hasattr(given, "publish"):
        send, called = cast("PublishesOne", given).publish, f"{name}.publish"
    elif callable(given):
        send, called = given, name
    else:
        raise ConfigurationError(f"{name} must not be of type {type(given).__qualname__}; {TAKES}")
    _check(send, called)
    return Each(send, concurrency=concurrency, timeout=timeout)


def _check(function: Callable[..., Any], called: str) -> None:
    """Raise unless a function takes one argument and is not a generator."""
    if not callable(function):
        raise ConfigurationError(f"{called} must be a function, not of type {type(function).__qualname__}; {TAKES}")
    inner = innermost(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise ConfigurationError(f"{called} must not be a generator, which does nothing when it is called; {TAKES}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C do not tell
        return
    try:
        signature.bind(None)
    except TypeError:
        raise ConfigurationError(f"{called} must be callable with one argument; {TAKES}") from None
