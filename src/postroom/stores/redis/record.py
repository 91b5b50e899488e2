"""How a message is stored: what is not as it mostly is, as JSON, and then the payload as it came."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast
from uuid import UUID

from ...message import JSON, Message, drafted

__all__ = ["clipped", "packed", "unpacked"]

#: How much of an error is kept.
LONGEST_ERROR: Final = 4000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LENGTH: Final = 4


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
    told: Mapping[str, Any] = {}
    broken: str | None = None
    end = _LENGTH + int.from_bytes(body[:_LENGTH])
    try:
        told = _told(body[_LENGTH:end])
        headers = _headers(told)
        tenant = None if told.get("tenant_id") is None else UUID(told["tenant_id"])
        topic, kind = str(told["topic"]), str(told["type"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        broken = f"the stored entry cannot be read ({type(error).__name__})"
        headers, tenant = {}, None
        topic, kind = str(told.get("topic", "")), str(told.get("type", ""))
    message = drafted(
        id=identity,
        topic=topic,
        payload=body[end:],
        type=kind,
        key=told.get("key"),
        namespace=namespace,
        content_type=told.get("content_type") or JSON,
        headers=headers,
        tenant_id=tenant,
        dedupe_key=told.get("dedupe_key"),
        time=_EPOCH + timedelta(microseconds=arrived),
        attempt=attempt,
        token=token,
    )
    return message, broken


def _told(head: bytes) -> Mapping[str, Any]:
    told = json.loads(head)
    if not isinstance(told, dict):
        raise TypeError
    return cast("dict[str, Any]", told)


def _headers(told: Mapping[str, Any]) -> dict[str, str]:
    headers = told.get("headers", {})
    if not isinstance(headers, dict):
        raise TypeError
    return cast("dict[str, str]", headers)


def clipped(error: str) -> bytes:
    """Return as much of an error as is kept; what cannot be written must not keep the rest from being stored."""
    return error[:LONGEST_ERROR].encode(errors="replace")
