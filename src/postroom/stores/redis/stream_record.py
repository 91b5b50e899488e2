"""How a message is written into a stream: fields that other readers understand too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias, cast
from uuid import UUID, uuid5

from ...errors import DecodeError
from ...message import JSON, Message, drafted

__all__ = ["Fields", "Marshal", "Unmarshal", "marshalled", "moment", "salvaged", "unmarshalled"]

#: The fields of an entry, as they come from the server.
Fields: TypeAlias = Mapping[bytes, bytes]
#: Turns a message into the fields of an entry.
Marshal: TypeAlias = Callable[[Message], Mapping[str, str | bytes]]
#: Turns the fields of an entry into a message; the same fields must always bring the same id.
Unmarshal: TypeAlias = Callable[[Fields], Message]

#: Names entries that do not say which message they hold.
_ENTRIES: Final = UUID("6e5a6d0c-0c1e-4d0b-9f1a-3f1d2c7b8a55")
_USUAL: Final[Mapping[str, Any]] = {}
_TEXTS: Final = ("content_type", "tenant_id", "dedupe_key")
_LAST: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def marshalled(message: Message) -> dict[str, str | bytes]:
    """Return the fields of a message: id, topic, type, source and data; key and attributes, as JSON, if it has any."""
    fields: dict[str, str | bytes] = {
        "id": message.id.hex,
        "topic": message.topic,
        "type": message.type,
        "source": message.source,
        "data": message.payload,
    }
    if message.key is not None:
        fields["key"] = message.key
    attributes = {
        "content_type": None if message.content_type == JSON else message.content_type,
        "headers": dict(message.headers) or None,
        "tenant_id": None if message.tenant_id is None else str(message.tenant_id),
        "dedupe_key": message.dedupe_key,
    }
    told = {name: value for name, value in attributes.items() if value is not None}
    if told:
        fields["attributes"] = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
    return fields


def moment(arrived: int) -> datetime:
    """Return the moment that is so many microseconds after the epoch, or the last that there is.

    The ids of a stream never go back: after one of somebody else's that is far ahead, all that follow are.
    """
    return datetime.fromtimestamp(min(max(arrived, 0) / 1_000_000, _LAST), UTC)


def unmarshalled(fields: Fields, namespace: str, attempt: int, token: int, arrived: int) -> Message:
    """Return the message that `marshalled` wrote; ``arrived`` is in microseconds.

    Raises:
        DecodeError: The fields are not what was written; the message of the error never shows them.
    """
    try:
        told = fields.get(b"attributes")
        attributes = _USUAL if told is None else _attributes(told)
        key, tenant = fields.get(b"key"), attributes.get("tenant_id")
        return drafted(
            id=UUID(int=int(fields[b"id"], 16)),
            topic=fields[b"topic"].decode(),
            payload=fields[b"data"],
            type=fields[b"type"].decode(),
            key=None if key is None else key.decode(),
            namespace=namespace,
            content_type=attributes.get("content_type") or JSON,
            headers=attributes.get("headers") or {},
            tenant_id=None if tenant is None else UUID(tenant),
            dedupe_key=attributes.get("dedupe_key"),
            time=moment(arrived),
            attempt=attempt,
            token=token,
        )
    except KeyError as error:
        raise DecodeError(f"the entry has no field {error.args[0].decode()}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DecodeError(f"the entry cannot be read ({type(error).__name__})") from None


def _attributes(text: bytes) -> Mapping[str, Any]:
    """Return what was said in JSON; whoever wrote it, all of it is texts."""
    told: object = json.loads(text)
    if not isinstance(told, dict):
        raise TypeError("it is no object")
    attributes = cast("dict[str, Any]", told)
    headers: object = attributes.get("headers") or {}
    if not isinstance(headers, dict):
        raise TypeError("its headers are none")
    texts = [attributes[name] for name in _TEXTS if attributes.get(name) is not None]
    if not all(isinstance(text, str) for text in [*texts, *cast("dict[str, Any]", headers).values()]):
        raise TypeError("its attributes are no texts")
    return attributes


def salvaged(fields: Fields, entry: str, *, namespace: str, attempt: int, token: int) -> Message:
    """Return what can be told of a message whose entry cannot be read."""
    return Message(
        topic=fields.get(b"topic", b"").decode(errors="replace"),
        key=fields[b"key"].decode(errors="replace") if b"key" in fields else None,
        payload=b"",
        id=_identity(fields.get(b"id", b""), f"{namespace}/{entry}"),
        namespace=namespace,
        attempt=attempt,
        token=token,
    )


def _identity(text: bytes, otherwise: str) -> UUID:
    try:
        return UUID(int=int(text, 16))
    except ValueError:
        return uuid5(_ENTRIES, otherwise)
