"""The contract of stores on PostgreSQL with bounded scans, whose bounds move with every claim."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from postroom.stores.sql.dialects import postgres_bounds
from postroom.stores.sql.dialects.postgres import PostgreSQL
from postroom.testing.contracts import StoreContract, StoreHarness
from postroom.testing.machine import check_store

from .conftest import AsyncpgHarness, MakeHarness

pytestmark = [pytest.mark.prove, pytest.mark.timeout(3600)]


class BoundedHarness(AsyncpgHarness):
    """Moves times backwards, which no clock does, and therefore resets the bounds that are times."""

    async def advance(self, by: timedelta) -> None:
        await super().advance(by)
        for store in self._stores:
            dialect = store.schema.dialect
            assert isinstance(dialect, PostgreSQL)
            dialect.forget_bounds()


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every claim read the open writers, and run a survey as soon as they have ended."""
    for name, value in {"SLOW": -1.0, "SLOW_CLAIMS": 1, "PAGES": -1000, "PAUSE": 0.0, "DOUBT": 0.0, "SHARE": 0}.items():
        monkeypatch.setattr(postgres_bounds, name, value)


@pytest.fixture
def make_bounded(postgres_tables: str) -> MakeHarness:
    async def make() -> StoreHarness:
        harness = BoundedHarness(postgres_tables)
        await harness.start()
        return harness

    return make


class TestPostgresStoreWithBounds(StoreContract):
    @pytest.fixture
    async def harness(self, make_bounded: MakeHarness) -> AsyncIterator[StoreHarness]:
        harness = await make_bounded()
        try:
            yield harness
        finally:
            await harness.close()


def test_the_postgres_store_with_bounds_agrees_with_the_model(make_bounded: MakeHarness) -> None:
    assert check_store(make_bounded, examples=30)["claimed"]
