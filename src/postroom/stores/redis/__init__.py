"""Messages in Redis, or in a server that speaks like it."""

from __future__ import annotations

from importlib.util import find_spec

from ...errors import MissingExtraError

if find_spec("redis") is None:  # before any module of this package needs it
    raise MissingExtraError("redis", "redis")

from .composition import scripted
from .inbox import RedisInbox
from .store import Counters, RedisStore
from .stream import RedisStreamStore
from .transactions import RedisTransactions, current_pipeline

__all__ = [
    "Counters",
    "RedisInbox",
    "RedisStore",
    "RedisStreamStore",
    "RedisTransactions",
    "current_pipeline",
    "scripted",
]
