"""Messages in Redis, or in a server that speaks like it."""

from __future__ import annotations

from ...errors import MissingExtraError

try:
    import redis as _redis  # noqa: F401 -- before any module of this package needs it
except ImportError as _error:
    raise MissingExtraError("redis", "redis") from _error

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
