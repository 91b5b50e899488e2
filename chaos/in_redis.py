"""What a Redis server itself says of a run: its keys at the end, and its log of all that has changed them."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote
from uuid import UUID

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from postroom.message import DEFAULT_NAMESPACE
from postroom.stores.redis.keys import Keys
from postroom.stores.redis.record import unpacked as message_of
from postroom.stores.redis.stream_keys import StreamKeys

from .audit import Change, Effect, Letter, Row, Truth
from .desk import BUSINESS_KEY, EFFECTS_KEY
from .log import Packed, commands, unpacked

__all__ = ["RedisTruth", "StreamTruth"]

_STATES: Final = {b"p": "pending", b"l": "processing", b"d": "delivered", b"x": "dead"}
_LANE, _SEQ = 16, 8
_MILLISECOND: Final = 1000
_WAITING: Final = b"~waiting"


class _InRedis(Truth):
    """What both stores have in common: what producers and handlers write, and the inbox."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._inbox = Keys("postroom_inbox", DEFAULT_NAMESPACE).prefix

    @cached_property
    def _client(self) -> Any:  # noqa: ANN401 -- the library's types say little of its answers
        return redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0), socket_timeout=10)

    def install(self) -> None:
        """Do nothing: the server itself keeps a log of all that happens."""

    def business(self) -> set[str]:
        return {member.decode() for member in self._client.smembers(BUSINESS_KEY)}

    def effects(self) -> list[Effect]:
        return [Effect(**json.loads(one)) for one in self._client.lrange(EFFECTS_KEY, 0, -1)]

    def marks(self) -> set[tuple[str, str]]:
        return {place for place, state in self._marked().items() if state.startswith(b"done:")}

    def _marked(self) -> dict[tuple[str, str], bytes]:
        found: dict[tuple[str, str], bytes] = {}
        for key in self._client.scan_iter(f"{self._inbox}:inbox:*", count=1000):
            consumer, _, identity = key.decode().removeprefix(f"{self._inbox}:inbox:").partition(":")
            found[unquote(consumer), identity] = self._client.get(key) or b""  # a claim may end meanwhile
        return found

    def letters(self) -> list[Letter]:
        """Return the dead letters."""
        stored: Mapping[bytes, bytes] = self._client.hgetall(f"{self._inbox}:dead")
        found: list[Letter] = []
        for field in stored:
            consumer, _, identity = field.decode().partition(":")
            if ":" not in identity:
                error, attempts = stored[field + b":error"].decode(), int(stored[field + b":attempts"])
                found.append(Letter(consumer=unquote(consumer), id=identity, attempts=attempts, error=error))
        return found

    def changes(self) -> list[Change]:
        settings = self._client.config_get("dir", "appenddirname")
        return list(self._changed(commands(Path(settings["dir"]) / settings["appenddirname"])))

    @abstractmethod
    def _changed(self, log: Iterator[list[bytes]]) -> Iterator[Change]:
        """Yield the changes of messages that a log tells of."""

    def sessions(self) -> list[str]:
        own = self._client.client_id()
        return [f"{one['addr']} {one['cmd']}" for one in self._client.client_list() if int(one["id"]) != own]

    def oddities(self) -> list[str]:
        """Return what should not be there: transactions that were applied in part."""
        return [f"{who}: {state.decode()}" for who, state in self._marked().items() if state.startswith(b"partial:")]

    def close(self) -> None:
        self._client.close()

    def version(self) -> str:
        told = self._client.info("server")
        if "valkey_version" in told:
            return f"Valkey {told['valkey_version']}"
        return f"Redis {told['redis_version']}"


class RedisTruth(_InRedis):
    """The store of scripts and sorted sets."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._keys = Keys("postroom_outbox", DEFAULT_NAMESPACE)

    def _key(self, name: str) -> str:
        return f"{self._keys.prefix}:{name}"

    def rows(self) -> list[Row]:
        bodies = self._client.hgetall(self._key("entries"))
        errors = self._client.hgetall(self._key("errors"))
        found = [
            self._row(identity, unpacked(state), bodies[identity], errors.get(identity))
            for identity, state in self._client.hgetall(self._key("states")).items()
        ]
        return sorted(found, key=lambda row: row.seq)

    @staticmethod
    def _row(identity: bytes, state: list[Any], body: bytes, error: bytes | None) -> Row:
        status, token, attempts, _, _, _, seq = state[:7]
        message, _ = message_of(
            UUID(bytes=identity), body, namespace=DEFAULT_NAMESPACE, attempt=attempts, token=token, arrived=seq
        )
        return Row(
            id=str(message.id),
            seq=seq,
            topic=message.topic,
            key=message.key,
            dedupe=message.dedupe_key,
            status=_STATES[status],
            attempts=attempts,
            token=token,
            error=None if error is None else error.decode(),
        )

    def _changed(self, log: Iterator[list[bytes]]) -> Iterator[Change]:
        before: dict[bytes, list[Any]] = {}
        for words in log:
            if words[0].upper() != b"HSET" or words[1].decode() != self._key("states"):
                continue
            for identity, packed in zip(words[2::2], words[3::2], strict=True):
                state: list[Any] = unpacked(packed)
                old = before.get(identity)
                before[identity] = state
                if old is not None:
                    yield Change(
                        id=str(UUID(bytes=identity)),
                        old_status=_STATES[old[0]],
                        new_status=_STATES[state[0]],
                        old_token=old[1],
                        new_token=state[1],
                        old_until=old[4] or None,
                        new_until=state[4] or None,
                        at=state[5],
                    )

    def unsettled(self) -> tuple[int, int]:
        names = ("states", "done", "dead", "lanes", "tombs")
        with self._client.pipeline(transaction=True) as asking:
            asking.hlen(self._key(names[0]))
            for name in names[1:3]:
                asking.zcard(self._key(name))
            for name in names[3:]:
                asking.zrange(self._key(name), 0, -1)
            every, done, dead, lanes, tombs = asking.execute()
        first: dict[bytes, bytes] = {}
        for tomb in tombs:  # in the order of their arrival
            first.setdefault(tomb[:_LANE], tomb[_LANE : _LANE + _SEQ])
        held = sum(one[:_LANE] in first and one[_LANE:] > first[one[:_LANE]] for one in lanes)
        return every - done - dead - held, done + dead


@dataclass(frozen=True, slots=True)
class _Held:
    """What the log has said of an entry so far."""

    id: str
    status: str = "pending"
    token: int = 0
    until: int | None = None
    at: int = 0

    def changed(self, new: _Held) -> Change:
        return Change(
            id=self.id,
            old_status=self.status,
            new_status=new.status,
            old_token=self.token,
            new_token=new.token,
            old_until=self.until,
            new_until=new.until,
            at=new.at,
        )


class StreamTruth(_InRedis):
    """The store in a stream."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._stream = StreamKeys("postroom_stream", DEFAULT_NAMESPACE).stream

    def _key(self, name: str) -> str:
        return f"{self._stream}:{name}"

    def rows(self) -> list[Row]:
        dead = self._client.xrange(self._key("dead"))
        errors = {fields[b"postroom:entry"]: (fields[b"id"], fields[b"postroom:error"]) for _, fields in dead}
        found = [
            _row(entry, "delivered", identity, attempts, token)
            for entry, (token, attempts, identity) in self._packed("receipts")
        ]
        for entry, (_, token, attempts, _) in self._packed("graves"):
            identity, error = errors[entry]
            found.append(replace(_row(entry, "dead", identity, attempts, token), error=error.decode()))
        notes = {entry: note[0] for entry, note in self._packed("notes")}
        for entry, fields in self._client.xrange(self._stream):
            held = self._client.xpending_range(self._stream, "outbox-publisher", entry, entry, 1)
            count = held[0]["times_delivered"] if held else 0
            status = "processing" if held and held[0]["consumer"] != _WAITING else "pending"
            found.append(_row(entry, status, fields[b"id"], count - notes.get(entry, 0), count))
        for entry, (_, *words) in self._packed("later"):
            found.append(_row(entry, "pending", dict(zip(words[::2], words[1::2], strict=True))[b"id"], 0, 0))
        return found

    def _packed(self, name: str) -> list[tuple[bytes, list[Any]]]:
        stored: Mapping[bytes, bytes] = self._client.hgetall(self._key(name))
        return [(entry, unpacked(packed)) for entry, packed in stored.items()]

    def _changed(self, log: Iterator[list[bytes]]) -> Iterator[Change]:
        return _Entries(self._stream).changes(log)

    def unsettled(self) -> tuple[int, int]:
        with self._client.pipeline(transaction=True) as asking:
            asking.xlen(self._stream).zcard(self._key("delayed")).xlen(self._key("dead")).zcard(self._key("done"))
            waiting, delayed, dead, done = asking.execute()
        return waiting + delayed, dead + done


class _Entries:
    """What a log says of the entries of a stream: who holds one is its consumer; how one ends is written beside it."""

    def __init__(self, stream: str) -> None:
        self._held: dict[bytes, _Held] = {}
        #: When entries were buried, and when they were delivered.
        self._graves: dict[bytes, int] = {}
        self._done: dict[bytes, int] = {}
        self._by_command: Mapping[tuple[bytes, str], Callable[[list[bytes]], Iterator[Change]]] = {
            (b"XADD", stream): self._add,
            (b"XCLAIM", stream): self._claim,
            (b"XACK", stream): self._end,
            (b"HSET", f"{stream}:graves"): self._bury,
            (b"ZADD", f"{stream}:done"): self._deliver,
        }

    def changes(self, log: Iterator[list[bytes]]) -> Iterator[Change]:
        for words in log:
            read = self._by_command.get((words[0].upper(), words[1].decode() if len(words) > 1 else ""))
            if read is not None:
                yield from read(words)

    def _become(self, entry: bytes, new: _Held) -> Iterator[Change]:
        yield self._held[entry].changed(new)
        self._held[entry] = new

    def _add(self, words: list[bytes]) -> Iterator[Change]:
        fields = dict(zip(words[3::2], words[4::2], strict=True))
        self._held[words[2]] = _Held(_uuid(fields[b"id"]))
        return iter(())

    def _claim(self, words: list[bytes]) -> Iterator[Change]:
        return self._become(words[5], _claimed(self._held[words[5]], words))

    def _bury(self, words: list[bytes]) -> Iterator[Change]:
        self._graves[words[2]] = _whole(unpacked(words[3])[3])
        return iter(())

    def _deliver(self, words: list[bytes]) -> Iterator[Change]:
        at, entry = int(words[2]), words[3]
        self._done[entry] = at
        if self._held[entry].status == "dead":
            yield from self._become(entry, replace(self._held[entry], status="delivered", until=None, at=at))

    def _end(self, words: list[bytes]) -> Iterator[Change]:
        for entry in words[3:]:
            is_dead = entry in self._graves
            status, at = ("dead", self._graves[entry]) if is_dead else ("delivered", self._done[entry])
            yield from self._become(entry, replace(self._held[entry], status=status, until=None, at=at))


def _claimed(old: _Held, words: list[bytes]) -> _Held:
    """Return what the log says of an entry that somebody has read, renewed or put back."""
    options = dict(zip(words[6::2], words[7::2], strict=False))
    at, count = int(options[b"TIME"]) * _MILLISECOND, int(options[b"RETRYCOUNT"])
    if words[3] == _WAITING:
        return replace(old, status="pending", token=count, until=None, at=at)
    lease = re.search(rb"\|(\d+)$", words[3])
    until = at + int(lease[1]) * _MILLISECOND if lease else None
    return replace(old, status="processing", token=count, until=until, at=at)


def _row(entry: bytes, status: str, identity: bytes, attempts: int, token: int) -> Row:
    """Return the row of a message whose topic and key nobody asks for: they promise nothing here."""
    return Row(
        id=_uuid(identity),
        seq=int.from_bytes(entry[:8]),
        topic="",
        key=None,
        dedupe=None,
        status=status,
        attempts=attempts,
        token=token,
    )


def _uuid(text: bytes) -> str:
    return str(UUID(text.decode()))


def _whole(value: Packed) -> int:
    assert isinstance(value, int)  # noqa: S101 -- a moment
    return value
