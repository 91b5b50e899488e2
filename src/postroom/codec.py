"""Turning events into bytes and back."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Protocol, cast
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


class JSONCodec:
    """JSON for dicts, dataclasses, msgspec structs and pydantic models.

    Example:
        >>> from postroom import JSONCodec
        >>> JSONCodec().encode({"order_id": 42})
        b'{"order_id":42}'
    """

    content_type = JSON

    def encode(self, event: object) -> bytes:
        """Return compact UTF-8 JSON."""
        try:
            if hasattr(event, "model_dump_json"):
                return cast("str", event.model_dump_json()).encode()  # type: ignore[attr-defined]
            if hasattr(type(event), "__struct_fields__"):
                # The struct exists, so msgspec is loaded; the kernel itself imports no extra.
                return cast("bytes", sys.modules["msgspec"].json.encode(event))
            text = json.dumps(event, default=_plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            return text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EncodeError(event, str(error)) from error

    def decode(self, payload: bytes) -> object:
        """Return dicts, lists, strings and numbers."""
        try:
            return cast("object", json.loads(payload))
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"the payload is not JSON: {type(error).__name__}") from error


def type_name(event: object) -> str:
    """Return the message type of an event: ``OrderPlaced`` is ``order.placed``.

    Example:
        >>> from postroom import type_name
        >>> class OrderPlaced: ...
        >>> type_name(OrderPlaced())
        'order.placed'
    """
    return _CAMEL.sub(".", type(event).__name__).lower()


def _plain(value: object) -> Any:  # noqa: ANN401 -- json takes whatever this returns
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, UUID | Decimal):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(cast("set[object]", value))
    raise TypeError(f"a value of type {type(value).__qualname__} has no JSON form")
