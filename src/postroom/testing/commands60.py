"""What Redis 6.0 knows: its commands, and which of their options came later."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final

__all__ = ["COMMANDS", "SUBCOMMANDS", "refusal"]

#: All commands of 6.0, those that only servers send to each other as well.
COMMANDS: Final = frozenset(
    """
    ACL APPEND ASKING AUTH BGREWRITEAOF BGSAVE BITCOUNT BITFIELD BITFIELD_RO BITOP BITPOS BLPOP BRPOP BRPOPLPUSH
    BZPOPMAX BZPOPMIN CLIENT CLUSTER COMMAND CONFIG DBSIZE DEBUG DECR DECRBY DEL DISCARD DUMP ECHO EVAL EVALSHA EXEC
    EXISTS EXPIRE EXPIREAT FLUSHALL FLUSHDB GEOADD GEODIST GEOHASH GEOPOS GEORADIUS GEORADIUSBYMEMBER
    GEORADIUSBYMEMBER_RO GEORADIUS_RO GET GETBIT GETRANGE GETSET HDEL HELLO HEXISTS HGET HGETALL HINCRBY HINCRBYFLOAT
    HKEYS HLEN HMGET HMSET HSCAN HSET HSETNX HSTRLEN HVALS INCR INCRBY INCRBYFLOAT INFO KEYS LASTSAVE LATENCY LINDEX
    LINSERT LLEN LOLWUT LPOP LPOS LPUSH LPUSHX LRANGE LREM LSET LTRIM MEMORY MGET MIGRATE MODULE MONITOR MOVE MSET
    MSETNX MULTI OBJECT PERSIST PEXPIRE PEXPIREAT PFADD PFCOUNT PFDEBUG PFMERGE PFSELFTEST PING PSETEX PSUBSCRIBE PSYNC
    PTTL PUBLISH PUBSUB PUNSUBSCRIBE QUIT RANDOMKEY READONLY READWRITE RENAME RENAMENX REPLCONF REPLICAOF RESTORE
    RESTORE-ASKING ROLE RPOP RPOPLPUSH RPUSH RPUSHX SADD SAVE SCAN SCARD SCRIPT SDIFF SDIFFSTORE SELECT SET SETBIT
    SETEX SETNX SETRANGE SHUTDOWN SINTER SINTERSTORE SISMEMBER SLAVEOF SLOWLOG SMEMBERS SMOVE SORT SPOP SRANDMEMBER
    SREM SSCAN STRLEN SUBSCRIBE SUBSTR SUNION SUNIONSTORE SWAPDB SYNC TIME TOUCH TTL TYPE UNLINK UNSUBSCRIBE UNWATCH
    WAIT WATCH XACK XADD XCLAIM XDEL XGROUP XINFO XLEN XPENDING XRANGE XREAD XREADGROUP XREVRANGE XSETID XTRIM ZADD
    ZCARD ZCOUNT ZINCRBY ZINTERSTORE ZLEXCOUNT ZPOPMAX ZPOPMIN ZRANGE ZRANGEBYLEX ZRANGEBYSCORE ZRANK ZREM
    ZREMRANGEBYLEX ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREVRANGE ZREVRANGEBYLEX ZREVRANGEBYSCORE ZREVRANK ZSCAN ZSCORE
    ZUNIONSTORE
    """.split()  # noqa: SIM905 -- a list would take pages
)
#: What may follow the commands that are several.
SUBCOMMANDS: Final[Mapping[str, frozenset[str]]] = {
    name: frozenset(words.split())
    for name, words in {
        "ACL": "CAT DELUSER GENPASS GETUSER HELP LIST LOAD LOG SAVE SETUSER USERS WHOAMI",
        "CLIENT": "CACHING GETNAME GETREDIR HELP ID KILL LIST PAUSE REPLY SETNAME TRACKING UNBLOCK",
        "CLUSTER": "ADDSLOTS BUMPEPOCH COUNT-FAILURE-REPORTS COUNTKEYSINSLOT DELSLOTS FAILOVER FLUSHSLOTS FORGET "
        "GETKEYSINSLOT HELP INFO KEYSLOT MEET MYID NODES REPLICAS REPLICATE RESET SAVECONFIG SET-CONFIG-EPOCH SETSLOT "
        "SLAVES SLOTS",
        "COMMAND": "COUNT GETKEYS HELP INFO",
        "CONFIG": "GET HELP RESETSTAT REWRITE SET",
        "LATENCY": "DOCTOR GRAPH HELP HISTORY LATEST RESET",
        "MEMORY": "DOCTOR HELP MALLOC-STATS PURGE STATS USAGE",
        "MODULE": "HELP LIST LOAD UNLOAD",
        "OBJECT": "ENCODING FREQ IDLETIME REFCOUNT",
        "PUBSUB": "CHANNELS NUMPAT NUMSUB",
        "SCRIPT": "DEBUG EXISTS FLUSH HELP KILL LOAD",
        "SLOWLOG": "GET LEN RESET",
        "XGROUP": "CREATE DELCONSUMER DESTROY HELP SETID",
        "XINFO": "CONSUMERS GROUPS HELP STREAM",
    }.items()
}
#: Options that came later: after how many words they may stand, and what they are called.
_LATER: Final[Mapping[str, tuple[int, frozenset[str]]]] = {
    name: (after, frozenset(words.split()))
    for name, (after, words) in {
        "BITCOUNT": (4, "BYTE BIT"),
        "BITPOS": (5, "BYTE BIT"),
        "CLIENT": (2, "LADDR MAXAGE WRITE ALL"),
        "EXPIRE": (3, "NX XX GT LT"),
        "EXPIREAT": (3, "NX XX GT LT"),
        "FLUSHALL": (1, "SYNC"),
        "FLUSHDB": (1, "SYNC"),
        "GEOADD": (2, "NX XX CH"),
        "GEORADIUS": (6, "ANY"),
        "PEXPIRE": (3, "NX XX GT LT"),
        "PEXPIREAT": (3, "NX XX GT LT"),
        "SCRIPT": (2, "SYNC ASYNC"),
        "SET": (3, "GET EXAT PXAT IFEQ"),
        "SHUTDOWN": (1, "NOW FORCE ABORT SAFE FAILOVER"),
        "XADD": (2, "NOMKSTREAM MINID LIMIT"),
        "XGROUP": (5, "ENTRIESREAD"),
        "XPENDING": (3, "IDLE"),
        "XSETID": (3, "ENTRIESADDED MAXDELETEDID"),
        "XTRIM": (2, "MINID LIMIT"),
        "ZADD": (2, "GT LT"),
        "ZRANGE": (4, "BYSCORE BYLEX REV LIMIT"),
    }.items()
}
#: What may stand before the values of some commands, which may look like options themselves.
_LEADING: Final[Mapping[str, str]] = {
    "GEOADD": r"NX|XX|CH",
    "XADD": r"NOMKSTREAM|MAXLEN|MINID|LIMIT|~|=|\d+",
    "XPENDING": r"IDLE",
    "ZADD": r"NX|XX|CH|INCR|GT|LT",
}
#: How many words there may be; newer servers take more.
_MOST: Final[Mapping[str, int]] = {"CONFIG GET": 3, "CONFIG SET": 4, "INFO": 2, "LPOP": 2, "RPOP": 2}


def refusal(words: Sequence[bytes]) -> str | None:
    """Return with what Redis 6.0 refuses a command, None if it knows it.

    Example:
        >>> refusal([b"ZADD", b"board", b"GT", b"3", b"ann"])
        'ERR syntax error'
        >>> refusal([b"ZADD", b"board", b"3", b"GT"])
    """
    texts = [word.decode(errors="replace").upper() for word in words]
    name = texts[0]
    if name not in COMMANDS:
        return f"ERR unknown command `{name}`, with args beginning with: "
    if name in SUBCOMMANDS and len(texts) > 1 and texts[1] not in SUBCOMMANDS[name]:
        return f"ERR Unknown subcommand or wrong number of arguments for '{texts[1]}'. Try {name} HELP."
    if len(texts) > min(_MOST.get(name, len(texts)), _MOST.get(" ".join(texts[:2]), len(texts))):
        return f"ERR wrong number of arguments for '{name.lower()}' command"
    after, later = _LATER.get(name, (0, frozenset[str]()))
    options = texts[after:]
    if name in _LEADING:
        options = list(takewhile(re.compile(_LEADING[name]).fullmatch, options))
    return None if later.isdisjoint(options) else "ERR syntax error"
