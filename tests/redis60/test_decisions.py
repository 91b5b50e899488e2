"""S0-04: what tests/test_decisions.py says of Redis, on Redis 6.0."""

from __future__ import annotations

from tests.test_decisions import *  # noqa: F403 -- the same tests, on another server
