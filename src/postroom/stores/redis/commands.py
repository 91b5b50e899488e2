"""The commands that a transaction may hold: what each does to which keys is known before it is sent."""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from ...errors import CommandRefusedError

__all__ = ["MOST_WORDS", "READS", "STEERING", "Command", "keys_of", "name_of", "slot_of", "understood"]

#: What a script can hand on to one command.
MOST_WORDS: Final = 4000
#: Commands that only make sense with their answer.
READS: Final = frozenset(
    {
        *("BITCOUNT", "BITPOS", "DBSIZE", "DUMP", "EXISTS", "EXPIRETIME", "GEODIST", "GEOHASH"),
        *("GEOPOS", "GEOSEARCH", "GET", "GETBIT", "GETRANGE", "HEXISTS", "HGET", "HGETALL", "HKEYS"),
        *("HLEN", "HMGET", "HRANDFIELD", "HSCAN", "HSTRLEN", "HVALS", "KEYS", "LINDEX", "LLEN", "LPOS"),
        *("LRANGE", "MEMORY", "MGET", "OBJECT", "PEXPIRETIME", "PFCOUNT", "PTTL", "RANDOMKEY", "SCAN", "SCARD"),
        *("SDIFF", "SINTER", "SISMEMBER", "SMEMBERS", "SMISMEMBER", "SRANDMEMBER", "SSCAN", "STRLEN"),
        *("SUBSTR", "SUNION", "TIME", "TTL", "TYPE", "XINFO", "XLEN", "XPENDING", "XRANGE", "XREAD"),
        *("XREVRANGE", "ZCARD", "ZCOUNT", "ZDIFF", "ZINTER", "ZLEXCOUNT", "ZMSCORE", "ZRANDMEMBER"),
        *("ZRANGE", "ZRANGEBYLEX", "ZRANGEBYSCORE", "ZRANK", "ZREVRANGE", "ZREVRANGEBYSCORE"),
        *("ZREVRANK", "ZSCAN", "ZSCORE", "ZUNION"),
    }
)

#: Commands that steer the connection: inside MULTI they would end it, or have what follows done elsewhere.
STEERING: Final = frozenset(
    {
        *("ASKING", "AUTH", "CLIENT", "DISCARD", "EXEC", "HELLO", "MONITOR", "MULTI", "PSUBSCRIBE", "PSYNC"),
        *("PUNSUBSCRIBE", "QUIT", "READONLY", "READWRITE", "RESET", "SELECT", "SSUBSCRIBE", "SUBSCRIBE"),
        *("SUNSUBSCRIBE", "SYNC", "UNSUBSCRIBE", "UNWATCH", "WATCH"),
    }
)

_Words: TypeAlias = Sequence[bytes]

_SLOTS: Final = 16384
#: As the server reads it, which takes no zeros before a number.
_INTEGER: Final = re.compile(rb"0|-?[1-9]\d{0,18}")
_SCORE: Final = re.compile(rb"[+-]?(?:inf|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", re.IGNORECASE)
_BITS: Final = 63
#: In milliseconds or seconds, far enough for everybody and small enough for the server.
_LONGEST: Final = 10**13


class Command(NamedTuple):
    """A command with what it needs its key to hold; a plus says that it makes such a key where there is none."""

    words: tuple[bytes, ...]
    needs: str


class _Rule(NamedTuple):
    needs: str
    is_fit: Callable[[_Words], bool]
    rule: str


def understood(words: tuple[bytes, ...]) -> Command:
    """Return what is known of a command.

    Raises:
        CommandRefusedError: Nothing is known of it, or the server would not understand it.
    """
    name = words[0].decode(errors="replace").upper()
    if name_of(words[0]) in READS:
        raise CommandRefusedError(
            name_of(words[0]),
            "it reads, and nothing is sent before the commit, so no answer could come; read with your own client "
            "before you write, or use RedisTransactions(client, mode='multi') and read after watch()",
        )
    words = (name.encode(), *words[1:])
    if name in _SHORTHANDS and len(words) == _SHORTHANDS[name].count(b"%"):
        return understood(_spelled(words, _SHORTHANDS[name]))
    rule = _RULES.get(name)
    if rule is None:
        raise CommandRefusedError(
            name,
            "it is not known what it needs, so it could fail after others were applied; "
            f"use {', '.join(sorted(_RULES))} or RedisTransactions(client, mode='multi')",
        )
    if len(words) > MOST_WORDS:
        raise CommandRefusedError(name, f"it has {len(words)} words, and {MOST_WORDS} is the limit; use several")
    if not rule.is_fit(words[1:]):
        raise CommandRefusedError(name, f"the server would refuse it; it takes {rule.rule}")
    return Command(words, rule.needs)


def name_of(word: bytes) -> str:
    """Return what a command is called; the library writes the second word of some into the first."""
    return word.decode(errors="replace").upper().partition(" ")[0]


def keys_of(words: Sequence[bytes]) -> Sequence[bytes]:
    """Return the keys of a command; of one that is not known, what mostly is its key."""
    return words[1:] if words[0] in {b"DEL", b"UNLINK"} else words[1:2]


def slot_of(key: bytes) -> int:
    """Return where a key is in a cluster: what is between its first braces decides on it, if anything is."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    hashed = key[start + 1 : end] if start >= 0 and end > start + 1 else key
    return binascii.crc_hqx(hashed, 0) % _SLOTS


# -- what words may follow -----------------------------------------------------------------------------------------


def _is_integer(word: bytes) -> bool:
    return _INTEGER.fullmatch(word) is not None and -(2**_BITS) <= int(word) < 2**_BITS


def _is_time(word: bytes) -> bool:
    return _is_integer(word) and abs(int(word)) <= _LONGEST


def _is_score(word: bytes) -> bool:
    """Tell whether a word is a number that the server can hold: what is too large or too small for it, it refuses."""
    if _SCORE.fullmatch(word) is None:
        return False
    score = float(word)
    if math.isinf(score):
        return word.lower().endswith(b"inf")
    return score != 0 or re.match(rb"[^e]*[1-9]", word.lower()) is None


def _has(count: int) -> Callable[[_Words], bool]:
    def is_fit(words: _Words) -> bool:
        return len(words) == count

    return is_fit


def _has_values(words: _Words) -> bool:
    return len(words) > 1


def _has_pairs(words: _Words) -> bool:
    return len(words) > 1 and len(words) % 2 == 1


def _has_amount(words: _Words) -> bool:
    # One that cannot be negated cannot be subtracted.
    return _KEY_AND_VALUE(words) and _is_integer(words[1]) and int(words[1]) > -(2**_BITS)


def _has_time(words: _Words) -> bool:
    return _KEY_AND_VALUE(words) and _is_time(words[1])


def _has_field_and_amount(words: _Words) -> bool:
    return _KEY_FIELD_AND_VALUE(words) and _is_integer(words[2])


_KEY_AND_VALUE: Final = _has(2)
_KEY_FIELD_AND_VALUE: Final = _has(3)


def _sets(words: _Words) -> bool:
    options = list(words[2:])
    if options and options[0] in {b"NX", b"XX"}:
        del options[0]
    match options:
        case []:
            return len(words) > 1
        case [b"KEEPTTL"]:
            return True
        case [b"EX" | b"PX", time]:
            return _is_time(time) and int(time) > 0
        case _:
            return False


def _adds_scores(words: _Words) -> bool:
    rest = list(words[1:])
    if rest and rest[0] in {b"NX", b"XX"}:
        del rest[0]
    if rest and rest[0] == b"CH":
        del rest[0]
    return bool(rest) and len(rest) % 2 == 0 and all(map(_is_score, rest[::2]))


def _adds_entry(words: _Words) -> bool:
    rest = list(words[1:])
    if rest and rest[0] == b"MAXLEN":
        at = 2 if rest[1:2] in ([b"~"], [b"="]) else 1
        if not rest[at:] or not _is_integer(rest[at]) or int(rest[at]) < 0:
            return False
        del rest[: at + 1]
    return rest[:1] == [b"*"] and len(rest) > 1 and len(rest) % 2 == 1


_RULES: Final[Mapping[str, _Rule]] = {
    "APPEND": _Rule("string+", _KEY_AND_VALUE, "a key and a value"),
    "DECRBY": _Rule("string+", _has_amount, "a key and an integer"),
    "DEL": _Rule("", bool, "keys"),
    "EXPIRE": _Rule("", _has_time, "a key and whole seconds"),
    "EXPIREAT": _Rule("", _has_time, "a key and whole seconds"),
    "HDEL": _Rule("hash", _has_values, "a key and fields"),
    "HINCRBY": _Rule("hash+", _has_field_and_amount, "a key, a field and an integer"),
    "HSET": _Rule("hash+", _has_pairs, "a key, and fields and values in pairs"),
    "HSETNX": _Rule("hash+", _KEY_FIELD_AND_VALUE, "a key, a field and a value"),
    "INCRBY": _Rule("string+", _has_amount, "a key and an integer"),
    "LPUSH": _Rule("list+", _has_values, "a key and values"),
    "PERSIST": _Rule("", _has(1), "a key"),
    "PEXPIRE": _Rule("", _has_time, "a key and whole milliseconds"),
    "PEXPIREAT": _Rule("", _has_time, "a key and whole milliseconds"),
    "RPUSH": _Rule("list+", _has_values, "a key and values"),
    "SADD": _Rule("set+", _has_values, "a key and members"),
    "SET": _Rule("", _sets, "a key, a value, NX or XX, and EX or PX with a positive integer, or KEEPTTL"),
    "SREM": _Rule("set", _has_values, "a key and members"),
    "UNLINK": _Rule("", bool, "keys"),
    "XADD": _Rule("stream+", _adds_entry, "a key, MAXLEN with an integer, the id *, and fields and values in pairs"),
    "ZADD": _Rule("zset+", _adds_scores, "a key, NX or XX, CH, and scores and members in pairs"),
    "ZREM": _Rule("zset", _has_values, "a key and members"),
}

#: What some commands are called in full; % stands for their words, and a number for one of them.
_SHORTHANDS: Final[Mapping[str, bytes]] = {
    "SETNX": b"%SET %1 %2 NX",
    "SETEX": b"%SET %1 %3 EX %2",
    "PSETEX": b"%SET %1 %3 PX %2",
    "INCR": b"%INCRBY %1 1",
    "DECR": b"%DECRBY %1 1",
}


def _spelled(words: tuple[bytes, ...], pattern: bytes) -> tuple[bytes, ...]:
    name, *rest = pattern.split()
    return (name[1:], *(words[int(word[1:])] if word.startswith(b"%") else word for word in rest))
