"""Turning events into bytes and back."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any, Final, Protocol, cast
from uuid import UUID

from .errors import DecodeError, EncodeError
from .message import JSON

__all__ = ["Codec", "JSONCodec", "type_name"]

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Codec(Protocol):
    """Encodes events for the outbox; decodes payloads for handlers."""

    content_type: str

    def encode(self, event: object) -> bytes:
        """Return the payload; raise `EncodeError` for what cannot be encoded."""
        ...

    def decode(self, payload: bytes) -> object:
        """Return the plain value; raise `DecodeError` for what is not of this codec."""
        ...


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
            raise EncodeError(event, str(error)) from error

    def _encode(self, event: object) -> bytes:
        if _is_model(event):
            return cast("_Model", event).model_dump_json().encode()
        if _is_struct(event):
            return cast("bytes", sys.modules["msgspec"].json.encode(event))
        return _ENCODER.encode(event).encode()

    def decode(self, payload: bytes) -> object:
        """Return dicts, lists, strings and numbers."""
        try:
            return cast("object", json.loads(payload, parse_constant=_refuse))
        except (ValueError, RecursionError) as error:
            raise DecodeError(
                f"the payload is not JSON ({type(error).__name__}); decode it with the codec that encoded it"
            ) from error


def type_name(event: object) -> str:
    """Return the message type of an event: ``OrderPlaced`` is ``order.placed``.

    Example:
        >>> from postroom import type_name
        >>> class OrderPlaced: ...
        >>> type_name(OrderPlaced())
        'order.placed'
    """
    return _CAMEL.sub(".", type(event).__name__).lower()


def _is_model(value: object) -> bool:
    return hasattr(value, "model_dump_json")


def _is_struct(value: object) -> bool:
    # If so, msgspec is loaded; the kernel itself imports no extra.
    return hasattr(type(value), "__struct_fields__")


def _refuse(constant: str) -> object:
    raise ValueError(constant)


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
