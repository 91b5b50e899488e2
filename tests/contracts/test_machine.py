"""Every store agrees with the reference model, whatever is done to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from postroom.testing.contracts import StoreHarness
from postroom.testing.machine import check_store

MakeHarness = Callable[[], Awaitable[StoreHarness]]

# A nightly run asks for many more programs by an environment variable.
pytestmark = pytest.mark.timeout(3600)


@pytest.mark.requirement(
    "G2", "G3", "G4", "G6", "G9", "G10", "S2-27", "S2-28", "S2-32", "S2-39", "S2-40", "S2-45", "S2-46"
)
def test_the_memory_store_agrees_with_the_model(make_memory: MakeHarness) -> None:
    """And the programs are no idle ones."""
    wanted = {
        "claimed again",
        "delivered after death",
        "duplicate",
        "extended",
        "late settlement",
        "purged",
        "run of a key",
        "settlement known",
        "settlement lost",
        "settlement recorded",
        "suspect",
        "swept",
        "unparked",
    }
    seen: Counter[str] = Counter()
    for _ in range(10):  # chance may leave out a rare step for hundreds of programs
        seen += check_store(make_memory, examples=200)
        if all(seen[name] for name in wanted):
            break

    assert {name for name in wanted if not seen[name]} == set()


@pytest.mark.requirement(
    "G2", "G3", "G4", "G6", "G9", "G10", "S2-27", "S2-28", "S2-32", "S2-39", "S2-40", "S2-45", "S2-46"
)
def test_the_sqlite_store_agrees_with_the_model(make_sqlite: MakeHarness) -> None:
    """On SQLite."""
    assert check_store(make_sqlite, examples=30)["claimed"]


@pytest.mark.requirement(
    "G2", "G3", "G4", "G6", "G9", "G10", "S2-27", "S2-28", "S2-32", "S2-39", "S2-40", "S2-45", "S2-46"
)
def test_the_postgres_store_agrees_with_the_model(make_asyncpg: MakeHarness) -> None:
    """On PostgreSQL."""
    assert check_store(make_asyncpg, examples=20)["claimed"]


@pytest.mark.requirement(
    "G2", "G3", "G4", "G6", "G9", "G10", "S2-27", "S2-28", "S2-32", "S2-39", "S2-40", "S2-45", "S2-46"
)
def test_the_mysql_store_agrees_with_the_model(make_mariadb: MakeHarness) -> None:
    """On MariaDB."""
    assert check_store(make_mariadb, examples=10)["claimed"]


@pytest.mark.requirement(
    "G2", "G3", "G4", "G6", "G9", "G10", "S2-27", "S2-28", "S2-32", "S2-39", "S2-40", "S2-45", "S2-46"
)
def test_the_redis_store_agrees_with_the_model(make_valkey: MakeHarness) -> None:
    """On Valkey."""
    assert check_store(make_valkey, examples=50)["claimed"]
