"""Healthy messages beside destinations that are down, on every store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from uuid import uuid4

import pytest

from postroom.store import Store
from postroom.stores import MemoryStore, open_url

from .scenario import Fault, measured

#: What the noise of a busy machine may add to either run, in seconds.
NOISE = 0.1


@pytest.fixture(params=["memory", "sqlite_path", "postgres_dsn", "mariadb_dsn", "redis_url"])
def make(request: pytest.FixtureRequest) -> Callable[[], Store]:
    """Return what makes a store on an empty database."""
    if request.param == "memory":
        return MemoryStore
    place = str(request.getfixturevalue(request.param))
    url = f"sqlite:///{place}" if request.param == "sqlite_path" else place
    return partial(open_url, url, namespace=f"isolation-{uuid4()}")


async def test_healthy_messages_pass_a_few_faulty_keys(make: Callable[[], Store]) -> None:
    figures = await measured(make, "keys", seconds=3)

    assert len(figures.latencies) == figures.added == 30


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["keys", "backlog", "many"])
async def test_a_fault_does_not_double_the_latency_of_the_others(make: Callable[[], Store], fault: Fault) -> None:
    """Every healthy message is delivered, p99 at most twice that without the fault, at most 20 probes a second."""
    usual = await measured(make, "none", seconds=30)
    faulty = await measured(make, fault, seconds=30)

    assert len(faulty.latencies) == faulty.added == 300
    assert faulty.quantile(0.99) <= 2 * usual.quantile(0.99) + NOISE
    assert faulty.most_probes <= 20
