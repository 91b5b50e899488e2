"""The store keeps its contract on Redis 6.0; that of the stream is among its own tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from postroom.testing.contracts import StoreContract, StoreHarness
from tests.contracts.in_redis import RedisHarness


@pytest.mark.requirement("S0-04")
class TestRedisStore(StoreContract):
    @pytest.fixture
    async def harness(self, redis_url: str) -> AsyncIterator[StoreHarness]:
        harness = RedisHarness(redis_url)
        await harness.start()
        yield harness
        await harness.close()
