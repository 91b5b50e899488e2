"""The databases, drivers and servers that the tests run on, and which tier of tests runs on which of them.

A parametrisation over databases, drivers or servers takes its list from here. Values wrapped in `proof` run in
`make prove` only: another value of the same list holds the same promise on code that is nearly the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

import pytest

__all__ = [
    "CHAOS_STORES",
    "DATABASES",
    "POSTGRES_DRIVERS",
    "PROOFS",
    "REDIS_CLUSTERS",
    "REDIS_PLACES",
    "REDIS_SERVERS",
    "REDIS_URLS",
    "SQL_SERVERS",
    "TIERS",
    "Tier",
    "is_proof",
    "is_quick",
    "proof",
]

#: Each tier runs everything that the one before it runs.
Tier: TypeAlias = Literal["quick", "test", "prove"]
TIERS: Final[Sequence[Tier]] = ("quick", "test", "prove")


def proof(*values: object, **options: Any) -> Any:  # noqa: ANN401 -- pytest does not export the class
    """Return a parameter whose tests run in `make prove` only."""
    return pytest.param(*values, marks=pytest.mark.prove, **options)


DATABASES: Final = ("sqlite", "postgres", "mariadb")
SQL_SERVERS: Final = ("postgres", "mariadb")
POSTGRES_DRIVERS: Final = ("asyncpg", "psycopg")

# Redis is what most users run. Valkey speaks the same protocol and runs the same scripts.
REDIS_SERVERS: Final = ("redis_server", proof("valkey_server"))
REDIS_URLS: Final = (pytest.param("redis_url", id="redis"), proof("valkey_url", id="valkey"))
REDIS_CLUSTERS: Final = (pytest.param("redis_cluster", id="redis"), proof("valkey_cluster", id="valkey"))
#: Fixtures of everything that a store in Redis may be kept in.
REDIS_PLACES: Final = ("redis_url", *map(proof, ("valkey_url", "redis_cluster_url", "valkey_cluster_url")))

#: One store of each family stands for the others, whose faults are the same.
CHAOS_STORES: Final = ("postgres", "redis", *map(proof, ("pgbouncer", "mariadb", "sqlite", "redis-stream")))

#: Names of database libraries whose connections have a setting that is not the default.
_SETTINGS: Final = r"-(begin|dict-rows|raw-cursor|client-cursor|deferred|immediate|bytes|mode|event)|scoped"
#: Parameters that run in `make prove` only, by the beginning of a test's id: what another parameter proves already.
_REPEATED: Final = {
    # Each runs a pytest, a crash or chaos of its own; one of each instrument shows that it can fail.
    "tests/test_variants.py::": r"^(?!no_token$|plain_insert_inbox$|settle_before_publish$)",
    # Drivers are cancelled in tests/test_drivers.py; what is above them is the same.
    "tests/test_cancelling": r"psycopg|asyncmy|sessionmaker",
    # Every await of it is cancelled in turn, which takes a minute with a server.
    "tests/test_cancelling.py::test_a_cancelled_change_of_the_schema_": r"asyncpg",
    "tests/test_cancelling.py::test_a_cancelled_check_of_the_schema_": r"asyncpg",
    # Two processes at once are as many as ten.
    "tests/test_schema.py::test_processes_that_apply_at_once_": r"-10$",
    "tests/test_end_to_end.py::": r"psycopg",
    "tests/test_end_to_end.py::test_a_ten_minute_outage_": r"mariadb",
    # How a connection may be set up is tested in tests/test_writers.py.
    "tests/test_inbox.py::": _SETTINGS,
    "tests/test_dead_letters.py::": _SETTINGS,
    "tests/test_decisions.py::": _SETTINGS,
    # Of the ways to reach the same adapter one is enough, and the sync drivers share their threads.
    "tests/test_transactions.py::": r"psycopg-sync|engine-psycopg|session-asyncpg|engine-sync|store-psycopg",
    # A link that is silent in one direction is silent; asyncpg and asyncmy stand for both kinds of protocol.
    "tests/test_drivers.py::test_a_silent_link_": r"psycopg|requests|replies",
    "tests/test_drivers.py::test_a_link_that_is_silent_": r"psycopg",
    "tests/test_drivers.py::test_many_calls_on_a_silent_link_": r"psycopg",
    "tests/test_drivers.py::test_calls_that_timed_out_": r"psycopg",
    # Every kind starts, crashes and ends by the same code.
    "tests/test_servers.py::TestEvery": r"MariaDB|Valkey",
    # One failover of each kind: a cluster's, and a Sentinel's.
    "tests/test_redis_cluster.py::test_a_server_is_killed_": r"RedisStreamStore",
    "tests/test_redis_sentinel.py::test_a_primary_is_killed_": r"RedisStore-",
}
#: What runs in `make prove` only, by the beginning of a test's id, whatever its parameters.
PROOFS: Final = (
    # The same tests as elsewhere, on servers that know no more than Redis 6.0.
    "tests/redis60/",
    # They test instruments: `make bench` does, and so do the checkers that `make check` runs.
    "tests/test_bench.py::test_a_consumer_and_the_loop_by_hand_",
    "tests/test_bench.py::test_both_contenders_",
    "tests/test_bench.py::test_every_contender_",
    # The scenarios of the other tests there, on a database with a server.
    "tests/test_idempotency.py::test_a_handler_on_a_pool_of_its_own_",
    # Each runs a pytest or a mutant of its own: the tool that judges tests, and the fixtures that start servers.
    "tests/test_mutation.py::test_a_map_is_made_",
    "tests/test_mutation.py::test_a_mutant_that_",
    "tests/test_mutation.py::test_a_test_that_is_no_longer_there_",
    "tests/test_mutation.py::test_an_entry_of_the_fixed_list_runs_",
    "tests/test_server_fixtures.py::",
    "tests/typing/test_typing.py::test_the_checkers_do_look_",
)
#: What starts many processes or foreign tools, or is about Redis. `make quick` leaves it out.
_SLOW: Final = (
    "tests/chaos/",
    "tests/crash/",
    "tests/typing/",
    "tests/test_bench.py",
    "tests/test_cancelling",
    "tests/test_demo.py",
    "tests/test_examples.py",
    "tests/test_mutation.py",
    "tests/test_plugin.py",
    "tests/test_redis_",
    "tests/test_server_fixtures.py",
    "tests/test_servers.py",
    "tests/test_variants.py",
)
#: What a fixture or a parameter is called that needs a server.
_SERVED: Final = re.compile(r"postgres|mariadb|mysql|redis|valkey|asyncpg|psycopg|asyncmy|private_", re.IGNORECASE)
#: The one server of `make quick`.
_QUICK_SERVED: Final = "tests/contracts/test_stores.py::TestPostgresStoreOverAsyncpg::"


def is_proof(item: pytest.Item) -> bool:
    """Return whether a test runs in `make prove` only."""
    if item.nodeid.startswith(PROOFS) or item.get_closest_marker("prove") is not None:
        return True
    parameters = _parameters(item)
    return bool(parameters) and any(
        item.nodeid.startswith(beginning) and re.search(pattern, parameters) for beginning, pattern in _REPEATED.items()
    )


def is_quick(item: pytest.Item) -> bool:
    """Return whether a test runs in `make quick`."""
    if is_proof(item) or item.nodeid.startswith(_SLOW):
        return False
    return item.nodeid.startswith(_QUICK_SERVED) or not any(map(_SERVED.search, _needs(item)))


def _needs(item: pytest.Item) -> Iterable[str]:
    """Return the names by which servers are known: of fixtures, and of parameters, which may name a fixture."""
    yield from getattr(item, "fixturenames", ())
    yield _parameters(item)


def _parameters(item: pytest.Item) -> str:
    """Return what stands in brackets after the name of a test."""
    callspec = getattr(item, "callspec", None)
    return callspec.id if callspec is not None else ""
