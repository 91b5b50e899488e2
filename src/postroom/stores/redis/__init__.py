"""Messages in Redis, or in a server that speaks like it."""

from __future__ import annotations

from .store import RedisStore

__all__ = ["RedisStore"]
