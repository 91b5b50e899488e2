"""Every store that comes with postroom keeps the contract of stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from postroom.testing.contracts import StoreContract, StoreHarness

MakeHarness = Callable[[], Awaitable[StoreHarness]]


async def lent(make: MakeHarness) -> AsyncIterator[StoreHarness]:
    harness = await make()
    try:
        yield harness
    finally:
        await harness.close()


class TestMemoryStore(StoreContract):
    @pytest.fixture
    async def harness(self, make_memory: MakeHarness) -> AsyncIterator[StoreHarness]:
        async for harness in lent(make_memory):
            yield harness


class TestSQLiteStore(StoreContract):
    @pytest.fixture
    async def harness(self, make_sqlite: MakeHarness) -> AsyncIterator[StoreHarness]:
        async for harness in lent(make_sqlite):
            yield harness


class TestPostgresStoreOverAsyncpg(StoreContract):
    @pytest.fixture
    async def harness(self, make_asyncpg: MakeHarness) -> AsyncIterator[StoreHarness]:
        async for harness in lent(make_asyncpg):
            yield harness


class TestPostgresStoreOverPsycopg(StoreContract):
    @pytest.fixture
    async def harness(self, make_psycopg: MakeHarness) -> AsyncIterator[StoreHarness]:
        async for harness in lent(make_psycopg):
            yield harness


class TestPostgresStoreBehindPgBouncerOverAsyncpg(StoreContract):
    @pytest.fixture
    async def harness(self, make_pooled_asyncpg: MakeHarness) -> AsyncIterator[StoreHarness]:
        async for harness in lent(make_pooled_asyncpg):
            yield harness


@pytest.mark.prove
class TestPostgresStoreBehindPgBouncerOverPsycopg(StoreContract):
    @pytest.fixture
    async def harness(self, make_pooled_psycopg: MakeHarness) -> AsyncIterator[StoreHarness]:
        async for harness in lent(make_pooled_psycopg):
            yield harness


class TestMySQLStoreOnMariaDB(StoreContract):
    @pytest.fixture
    async def harness(self, make_mariadb: MakeHarness) -> AsyncIterator[StoreHarness]:
        async for harness in lent(make_mariadb):
            yield harness


@pytest.mark.requirement("S0-31")
class TestRedisStore(StoreContract):
    """On Redis and on Valkey, alone and in a cluster."""

    @pytest.fixture
    async def harness(self, make_in_redis: MakeHarness) -> AsyncIterator[StoreHarness]:
        async for harness in lent(make_in_redis):
            yield harness


@pytest.mark.requirement("S0-31")
class TestRedisStreamStore(StoreContract):
    """On Redis and on Valkey, alone and in a cluster."""

    @pytest.fixture
    async def harness(self, make_in_stream: MakeHarness) -> AsyncIterator[StoreHarness]:
        async for harness in lent(make_in_stream):
            yield harness
