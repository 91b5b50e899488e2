"""What tests/test_redis_inbox.py says, on Redis 6.0."""

from __future__ import annotations

import pytest

from tests.test_redis_inbox import *  # noqa: F403 -- the same tests, on another server

pytestmark = pytest.mark.requirement("S0-04")
