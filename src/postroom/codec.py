"""Turning events into bytes and back."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeGuard, cast
from uuid import UUID

from .decoding import decoded, decoder
from .errors import EncodeError
from .message import JSON

__all__ = ["Codec", "JSONCodec", "Naming", "encoded", "is_many", "named", "reader", "type_name"]

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


#: How types are named after classes; ``default`` leaves the name of the class as it is.
Naming: TypeAlias = Literal["default", "dot", "kebab", "snake"]
_SEPARATORS: Final[Mapping[Naming, str | None]] = {"default": None, "dot": ".", "kebab": "-", "snake": "_"}


class Codec(Protocol):
    """Encodes events for the outbox; decodes payloads for handlers."""

    content_type: str

    def encode(self, event: object) -> bytes:
        """Return the payload; raise `EncodeError` for what cannot be encoded."""
        ...

    def decode(self, payload: bytes, kind: Any = object, /) -> Any:  # noqa: ANN401 -- what was asked for
        """Return an object of type ``kind``, or the plain value; raise `DecodeError` for what is not of this codec."""
        ...


_RAW: Final = (bytes, bytearray, memoryview)
_BARE: Final = (str, int, float)


def encoded(codec: Codec, event: object, topic: str | None, naming: Naming = "dot") -> tuple[bytes, str, str]:
    """Return the payload of an event, its type and its content type; without a class of its own it is its topic's."""
    if isinstance(event, (dict, Mapping)):  # the dict is only quicker
        return codec.encode(cast("object", event)), topic or "", codec.content_type
    if isinstance(event, _RAW):
        return bytes(cast("bytes", event)), topic or "", "application/octet-stream"
    if event is None or isinstance(event, _BARE):
        raise EncodeError(event, "a bare value is no event")
    return codec.encode(event), named(event, naming), codec.content_type


def is_many(events: object) -> TypeGuard[Sequence[object]]:
    """Tell whether a list or a tuple holds many events; a named tuple is one event that happens to be a tuple."""
    return isinstance(events, list | tuple) and not hasattr(cast("object", events), "_fields")


def reader(codec: Codec, kind: Any) -> Callable[[bytes], Any]:  # noqa: ANN401
    """Return what decodes payloads to a type, with as much as possible found out before the first of them.

    Raises:
        ConfigurationError: The codec of this library knows nothing of such a type.
    """
    if isinstance(codec, JSONCodec) and type(codec).decode is JSONCodec.decode:
        return decoder(kind)
    return lambda payload: codec.decode(payload, kind)


class _Model(Protocol):
    """A model of pydantic, which the kernel does not import."""

    def model_dump_json(self) -> str: ...
    def model_dump(self, *, mode: str) -> Any: ...  # noqa: ANN401 -- plain values


class JSONCodec:
    """JSON for dicts, dataclasses, msgspec structs and pydantic models.

    Moments become ISO 8601, UUIDs and decimals text, members of an enumeration their value. A struct or a model is
    written as its own library writes it.

    Example:
        >>> from postroom import JSONCodec
        >>> JSONCodec().encode({"order_id": 42})
        b'{"order_id":42}'
    """

    content_type = JSON

    def encode(self, event: object) -> bytes:
        """Return compact UTF-8 JSON."""
        kind: type = type(event)
        try:
            # A plain dict, the most common event, need not be asked what it is.
            return _ENCODER.encode(event).encode() if kind is dict else self._encode(event)
        except (TypeError, ValueError, RecursionError) as error:
            problem = str(error)
        # Raised out here, so that no other error hangs on to it: one of Unicode holds the whole payload.
        raise EncodeError(event, problem)

    def _encode(self, event: object) -> bytes:
        if _is_model(event):
            return cast("_Model", event).model_dump_json().encode()
        if _is_struct(event):
            return cast("bytes", sys.modules["msgspec"].json.encode(event))
        return _ENCODER.encode(event).encode()

    def decode(self, payload: bytes, kind: Any = object, /) -> Any:  # noqa: ANN401 -- what was asked for
        """Return an object of type ``kind``; without one dicts, lists, strings and numbers."""
        return decoded(payload, kind)


def type_name(event: object) -> str:
    """Return the message type of an event, or of its class: ``OrderPlaced`` is ``order.placed``.

    Example:
        >>> from postroom import type_name
        >>> class OrderPlaced: ...
        >>> type_name(OrderPlaced())
        'order.placed'
    """
    return named(event, "dot")


def named(event: object, naming: Naming) -> str:
    """Return what an event, or its class, is called: OrderPlaced, order.placed, order-placed or order_placed."""
    kind: type = event if isinstance(event, type) else type(event)
    separator = _SEPARATORS[naming]
    return kind.__name__ if separator is None else _CAMEL.sub(separator, kind.__name__).lower()


def _is_model(value: object) -> bool:
    return hasattr(value, "model_dump_json")


def _is_struct(value: object) -> bool:
    # If so, msgspec is loaded; the kernel itself imports no extra.
    return hasattr(type(value), "__struct_fields__")


def _plain(value: object) -> Any:  # noqa: ANN401 -- json takes whatever this returns
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if _is_model(value):
        return cast("_Model", value).model_dump(mode="json")
    if _is_struct(value):
        return sys.modules["msgspec"].to_builtins(value)
    for kinds, convert in _FORMS:
        if isinstance(value, kinds):
            return convert(value)
    raise TypeError(f"a value of type {type(value).__qualname__} has no JSON form")


_FORMS: Final[Sequence[tuple[tuple[type, ...], Callable[[Any], object]]]] = (
    ((date, time), lambda value: value.isoformat()),  # a datetime is a date
    ((UUID, Decimal), str),
    ((Enum,), lambda value: value.value),
    ((set, frozenset), list),
)
# json.dumps would make one for every event. What contains itself ends with a RecursionError.
_ENCODER: Final = json.JSONEncoder(
    default=_plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False
)
