"""Messages in Redis, or in a server that speaks like it."""

from __future__ import annotations

from .inbox import RedisInbox
from .store import RedisStore
from .stream import RedisStreamStore
from .transactions import RedisTransactions, current_pipeline

__all__ = ["RedisInbox", "RedisStore", "RedisStreamStore", "RedisTransactions", "current_pipeline"]
