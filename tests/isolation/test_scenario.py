"""Healthy messages beside destinations that are down, on every store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from uuid import uuid4

import pytest

from postroom.store import Store
from postroom.stores import MemoryStore, store_from_url

from .scenario import Fault, measured

#: A healthy message that waits until a call that hangs is given up would not be delivered.
NEVER = timedelta(hours=1)


@pytest.fixture(params=["memory", "sqlite_path", "postgres_dsn", "mariadb_dsn", "redis_url"])
def make(request: pytest.FixtureRequest) -> Callable[[], Store]:
    """Return what makes a store on an empty database."""
    if request.param == "memory":
        return MemoryStore
    place = str(request.getfixturevalue(request.param))
    url = f"sqlite:///{place}" if request.param == "sqlite_path" else place
    return partial(store_from_url, url, namespace=f"isolation-{uuid4()}")


async def test_healthy_messages_pass_a_few_faulty_keys(make: Callable[[], Store]) -> None:
    figures = await measured(make, "keys", seconds=3, publish_timeout=NEVER)

    assert len(figures.latencies) == figures.added == 30


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["keys", "backlog", "many"])
async def test_healthy_messages_pass_what_is_down(make: Callable[[], Store], fault: Fault) -> None:
    """Every healthy message is delivered; ``make isolation`` measures how late on a machine that is otherwise idle."""
    figures = await measured(make, fault, seconds=10, publish_timeout=NEVER)

    assert len(figures.latencies) == figures.added == 100
    # 20 a second; a slow store may let those of one second begin with those of the next.
    assert figures.most_probes(within=5) <= 5 * 20
