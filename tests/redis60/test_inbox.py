"""S0-04: what tests/test_redis_inbox.py says, on Redis 6.0."""

from __future__ import annotations

from tests.test_redis_inbox import *  # noqa: F403 -- the same tests, on another server
