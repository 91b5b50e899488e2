"""How a message is written into a stream: fields that other readers understand too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, cast
from uuid import UUID, uuid5

from ...errors import DecodeError
from ...message import JSON, Message, drafted
from .record import identity_of

__all__ = ["Fields", "Marshal", "Unmarshal", "arrival", "marshalled", "moment", "salvaged", "unmarshalled"]

#: The fields of an entry, as they come from the server.
Fields: TypeAlias = Mapping[bytes, bytes]
#: Turns a message into the fields of an entry.
Marshal: TypeAlias = Callable[[Message], Mapping[str, str | bytes]]
#: Turns the fields of an entry into a message; the same fields must always bring the same id.
Unmarshal: TypeAlias = Callable[[Fields], Message]

#: Names entries that do not say which message they hold.
_ENTRIES: Final = UUID("6e5a6d0c-0c1e-4d0b-9f1a-3f1d2c7b8a55")
_TEXTS: Final = ("content_type", "tenant_id", "dedupe_key")
#: The last moment that there is, in microseconds.
_LAST: Final = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp()) * 1_000_000
_LARGEST: Final = (1 << 128) - 1


class _Attributes(NamedTuple):
    """What most messages say nothing of."""

    content_type: str = JSON
    headers: Mapping[str, str] | None = None
    tenant_id: UUID | None = None
    dedupe_key: str | None = None


_USUAL: Final = _Attributes()


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


def moment(microseconds: int | bytes) -> datetime:
    """Return the moment that is so long after the epoch, or the last that there is.

    The ids of a stream never go back: after one of somebody else's that is far ahead, all that follow are.

    Raises:
        DecodeError: It is no number.
    """
    try:
        return datetime.fromtimestamp(min(max(int(microseconds), 0), _LAST) / 1_000_000, UTC)
    except ValueError:
        raise DecodeError("the entry says no time by which it came") from None


@lru_cache(maxsize=64)
def _arrival(milliseconds: str) -> datetime:
    return moment(int(milliseconds) * 1000)


def arrival(entry: str) -> datetime:
    """Return when an entry came, which its name begins with; those that came together share the moment."""
    return _arrival(entry.partition("-")[0])


def unmarshalled(fields: Fields, namespace: str, attempt: int, token: int, time: datetime) -> Message:
    """Return the message that `marshalled` wrote.

    Raises:
        DecodeError: The fields are not what was written; the message of the error never shows them.
    """
    try:
        told, key = fields.get(b"attributes"), fields.get(b"key")
        content_type, headers, tenant, dedupe_key = _USUAL if told is None else _attributes(told)
        return drafted(
            id=_identity(fields[b"id"]),
            topic=fields[b"topic"].decode(),
            payload=fields[b"data"],
            type=fields[b"type"].decode(),
            key=None if key is None else key.decode(),
            namespace=namespace,
            content_type=content_type,
            headers=headers or {},
            tenant_id=tenant,
            dedupe_key=dedupe_key,
            time=time,
            attempt=attempt,
            token=token,
        )
    except KeyError as error:
        raise DecodeError(f"the entry has no field {error.args[0].decode()}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DecodeError(f"the entry cannot be read ({type(error).__name__})") from None


def _attributes(text: bytes) -> _Attributes:
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
    tenant = attributes.get("tenant_id")
    return _Attributes(
        attributes.get("content_type") or JSON,
        cast("dict[str, str]", headers),
        None if tenant is None else UUID(tenant),
        attributes.get("dedupe_key"),
    )


def salvaged(fields: Fields, entry: str, *, namespace: str, attempt: int, token: int) -> Message:
    """Return what can be told of a message whose entry cannot be read."""
    return Message(
        topic=fields.get(b"topic", b"").decode(errors="replace"),
        key=fields[b"key"].decode(errors="replace") if b"key" in fields else None,
        payload=b"",
        id=_salvaged_identity(fields.get(b"id", b""), f"{namespace}/{entry}"),
        namespace=namespace,
        attempt=attempt,
        token=token,
    )


def _identity(text: bytes) -> UUID:
    number = int(text, 16)
    if 0 <= number <= _LARGEST:
        return identity_of(number)
    raise ValueError("it is no UUID")


def _salvaged_identity(text: bytes, otherwise: str) -> UUID:
    try:
        return _identity(text)
    except ValueError:
        return uuid5(_ENTRIES, otherwise)
