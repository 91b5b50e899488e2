"""How a message is stored: what is not as it mostly is, as JSON, and then the payload as it came."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast
from uuid import UUID, SafeUUID

from ...message import JSON, Message, drafted

__all__ = ["clipped", "identity_of", "packed", "unpacked"]

#: How much of an error is kept.
LONGEST_ERROR: Final = 4000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LENGTH: Final = 4
_new: Final = UUID.__new__
# What `UUID` itself forbids: to set the attributes of an object that is there.
_set_number: Final = UUID.__dict__["int"].__set__
_set_safety: Final = UUID.__dict__["is_safe"].__set__
_UNKNOWN: Final = SafeUUID.unknown


def packed(message: Message) -> bytes:
    """Return the bytes that are stored of a message."""
    parts: dict[str, object] = {
        "topic": message.topic,
        "type": message.type,
        "key": message.key,
        "content_type": None if message.content_type == JSON else message.content_type,
        "headers": dict(message.headers) or None,
        "tenant_id": None if message.tenant_id is None else str(message.tenant_id),
        "dedupe_key": message.dedupe_key,
    }
    told = {name: value for name, value in parts.items() if value is not None}
    head = json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()
    return len(head).to_bytes(_LENGTH) + head + message.payload


def unpacked(
    identity: UUID, body: bytes, *, namespace: str, attempt: int, token: int, arrived: int
) -> tuple[Message, str | None]:
    """Return a stored message, and why it cannot be read if it cannot; ``arrived`` is in microseconds.

    What is broken still says where it belongs, as far as that can be read, and nothing shows what is stored.
    """
    broken: str | None = None
    end = _LENGTH + int.from_bytes(body[:_LENGTH])
    try:
        head = _head(body[_LENGTH:end])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        broken = f"the stored entry cannot be read ({type(error).__name__})"
        head = _salvaged(body[_LENGTH:end])
    message = drafted(
        id=identity,
        topic=head.topic,
        payload=body[end:],
        type=head.type,
        key=head.key,
        namespace=namespace,
        content_type=head.content_type,
        headers=head.headers.copy(),
        tenant_id=head.tenant_id,
        dedupe_key=head.dedupe_key,
        time=_EPOCH + timedelta(microseconds=arrived),
        attempt=attempt,
        token=token,
    )
    return message, broken


def identity_of(number: int) -> UUID:
    """Return a UUID like `UUID(int=number)` does, in half of the time; the number is known to be one of 128 bits."""
    identity = _new(UUID)
    _set_number(identity, number)
    _set_safety(identity, _UNKNOWN)
    return identity


class _Head(NamedTuple):
    """What stands before a payload."""

    topic: str
    type: str
    key: str | None
    content_type: str
    headers: dict[str, str]
    tenant_id: UUID | None
    dedupe_key: str | None


@lru_cache(maxsize=256)
def _head(text: bytes) -> _Head:
    """Return what a head says; most messages of a topic have the same one."""
    told = _told(text)
    headers = told.get("headers", {})
    if not isinstance(headers, dict):
        raise TypeError
    tenant = None if told.get("tenant_id") is None else UUID(told["tenant_id"])
    return _said(told, str(told["topic"]), str(told["type"]), cast("dict[str, str]", headers), tenant)


def _salvaged(text: bytes) -> _Head:
    """Return what can be read of a head that is broken."""
    told: Mapping[str, Any] = {}
    with suppress(ValueError, TypeError, RecursionError):
        told = _told(text)
    return _said(told, str(told.get("topic", "")), str(told.get("type", "")), {}, None)


def _said(told: Mapping[str, Any], topic: str, kind: str, headers: dict[str, str], tenant: UUID | None) -> _Head:
    return _Head(
        topic, kind, told.get("key"), told.get("content_type") or JSON, headers, tenant, told.get("dedupe_key")
    )


def _told(text: bytes) -> Mapping[str, Any]:
    told = json.loads(text)
    if not isinstance(told, dict):
        raise TypeError
    return cast("dict[str, Any]", told)


def clipped(error: str) -> bytes:
    """Return as much of an error as is kept; what cannot be written must not keep the rest from being stored."""
    return error[:LONGEST_ERROR].encode(errors="replace")
