"""Fixtures that give a test of this project a real database or a real server of its own.

Nothing happens until a test asks for a fixture. A run has one server of each kind, also when
pytest-xdist spreads it over several processes: the controller keeps the servers, and its
workers ask it. A server that cannot be had skips the tests that need it and says so loudly;
where the environment variable ``CI`` is set they fail instead.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar
from uuid import uuid4

import pytest

from postroom.testing.clients import MariaDBClient, PostgresClient, RedisClient, SqlClient, ValkeyClient
from postroom.testing.cluster import RedisCluster, RedisGroup, RedisReplicated, ValkeyCluster, ValkeyReplicated
from postroom.testing.pgbouncer import PgBouncer
from postroom.testing.programs import ServerMissingError
from postroom.testing.room import ServerRoom, ask
from postroom.testing.sentinel import RedisSentinel, ValkeySentinel
from postroom.testing.servers import MariaDBServer, PostgresServer, RedisServer, Server, ValkeyServer
from tests.worlds import REDIS_URLS

__all__ = [
    "mariadb_dsn",
    "mariadb_server",
    "mysqldb",
    "postgres_dsn",
    "postgres_server",
    "private_mariadb",
    "private_pgbouncer",
    "private_postgres",
    "private_redis",
    "private_redis_cluster",
    "private_redis_replicated",
    "private_redis_sentinel",
    "private_valkey",
    "private_valkey_cluster",
    "private_valkey_replicated",
    "private_valkey_sentinel",
    "pytest_configure_node",
    "pytest_terminal_summary",
    "pytest_unconfigure",
    "redis_cluster",
    "redis_like_url",
    "redis_server",
    "redis_url",
    "run_private",
    "skip_or_fail",
    "sqlite_path",
    "valkey_cluster",
    "valkey_server",
    "valkey_url",
]

_OVERRIDES: Final[Mapping[str, str]] = {
    "postgres": "POSTROOM_TEST_POSTGRES_DSN",
    "mariadb": "POSTROOM_TEST_MARIADB_DSN",
    "redis": "POSTROOM_TEST_REDIS_URL",
    "redis-cluster": "POSTROOM_TEST_REDIS_CLUSTER_URL",
    "valkey": "POSTROOM_TEST_VALKEY_URL",
    "valkey-cluster": "POSTROOM_TEST_VALKEY_CLUSTER_URL",
}
_MISSING: Final = "SERVER MISSING: "
_ADDRESS: Final = "postroom_server_room"
_ROOM: Final = pytest.StashKey[ServerRoom]()
_ServerT = TypeVar("_ServerT", bound=Server | RedisGroup)


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> PostgresClient:
    """A client of the PostgreSQL server of this test run."""
    return PostgresClient(_dsn(pytestconfig, "postgres"))


@pytest.fixture(scope="session")
def mariadb_server(pytestconfig: pytest.Config) -> MariaDBClient:
    """A client of the MariaDB server of this test run."""
    return MariaDBClient(_dsn(pytestconfig, "mariadb"))


@pytest.fixture(scope="session")
def redis_server(pytestconfig: pytest.Config) -> RedisClient:
    """A client of the Redis server of this test run."""
    return RedisClient(_dsn(pytestconfig, "redis"))


@pytest.fixture(scope="session")
def redis_cluster(pytestconfig: pytest.Config) -> RedisClient:
    """A client of one server of the Redis Cluster of this test run; its keys are everybody's."""
    return RedisClient(_dsn(pytestconfig, "redis-cluster"))


@pytest.fixture(scope="session")
def valkey_server(pytestconfig: pytest.Config) -> ValkeyClient:
    """A client of the Valkey server of this test run."""
    return ValkeyClient(_dsn(pytestconfig, "valkey"))


@pytest.fixture(scope="session")
def valkey_cluster(pytestconfig: pytest.Config) -> ValkeyClient:
    """A client of one server of the Valkey cluster of this test run; its keys are everybody's."""
    return ValkeyClient(_dsn(pytestconfig, "valkey-cluster"))


@pytest.fixture
def postgres_dsn(postgres_server: PostgresClient) -> Iterator[str]:
    """The DSN of an empty PostgreSQL database that is this test's own."""
    yield from _fresh_database(postgres_server)


@pytest.fixture
def mariadb_dsn(mariadb_server: MariaDBClient) -> Iterator[str]:
    """The DSN of an empty MariaDB database that is this test's own."""
    yield from _fresh_database(mariadb_server)


@pytest.fixture
def redis_url(pytestconfig: pytest.Config, redis_server: RedisClient) -> str:
    """The URL of an empty Redis database that is this test's own; only channels and scripts are everybody's."""
    return _emptied(pytestconfig, redis_server)


@pytest.fixture
def valkey_url(pytestconfig: pytest.Config, valkey_server: ValkeyClient) -> str:
    """The URL of an empty Valkey database that is this test's own; only channels and scripts are everybody's."""
    return _emptied(pytestconfig, valkey_server)


@pytest.fixture(params=REDIS_URLS)
def redis_like_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database that is this test's own, on each server that speaks like Redis."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def private_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server that is this test's own, to be killed, paused and restarted."""
    yield from run_private(PostgresServer())


@pytest.fixture
def private_mariadb() -> Iterator[MariaDBServer]:
    """A MariaDB server that is this test's own, to be killed, paused and restarted."""
    yield from run_private(MariaDBServer())


@pytest.fixture
def private_pgbouncer(postgres_server: PostgresClient) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode that is this test's own, in front of the PostgreSQL server of this run."""
    yield from run_private(PgBouncer(postgres_server.dsn))


@pytest.fixture
def private_redis() -> Iterator[RedisServer]:
    """A Redis server that is this test's own, to be killed, paused and restarted."""
    yield from run_private(RedisServer())


@pytest.fixture
def private_redis_cluster() -> Iterator[RedisCluster]:
    """Six Redis servers that are this test's own, three of them replicas, to be killed, paused and restarted."""
    yield from run_private(RedisCluster())


@pytest.fixture
def private_redis_replicated() -> Iterator[RedisReplicated]:
    """A Redis server with a replica, which are this test's own, to be killed, paused and restarted."""
    yield from run_private(RedisReplicated())


@pytest.fixture
def private_redis_sentinel() -> Iterator[RedisSentinel]:
    """A Redis server with a replica and a Sentinel, which are this test's own, to be killed, paused and restarted."""
    yield from run_private(RedisSentinel())


@pytest.fixture
def private_valkey() -> Iterator[ValkeyServer]:
    """A Valkey server that is this test's own, to be killed, paused and restarted."""
    yield from run_private(ValkeyServer())


@pytest.fixture
def private_valkey_cluster() -> Iterator[ValkeyCluster]:
    """Six Valkey servers that are this test's own, three of them replicas, to be killed, paused and restarted."""
    yield from run_private(ValkeyCluster())


@pytest.fixture
def private_valkey_replicated() -> Iterator[ValkeyReplicated]:
    """A Valkey server with a replica, which are this test's own, to be killed, paused and restarted."""
    yield from run_private(ValkeyReplicated())


@pytest.fixture
def private_valkey_sentinel() -> Iterator[ValkeySentinel]:
    """A Valkey server with a replica and a Sentinel, which are this test's own, to be killed, paused and restarted."""
    yield from run_private(ValkeySentinel())


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Path:
    """The path of a SQLite database that does not exist yet."""
    return tmp_path / "postroom.sqlite3"


def skip_or_fail(error: ServerMissingError) -> NoReturn:
    """Skip a test whose server is missing, or fail it where ``CI`` is set."""
    if os.environ.get("CI"):
        pytest.fail(str(error), pytrace=False)
    pytest.skip(f"{_MISSING}{error.title}: {error.advice}")


def mysqldb() -> Any:  # noqa: ANN401 -- the module; its stubs would have it there always
    """Import mysqlclient, which set-up builds where it can, or skip the test."""
    try:
        return importlib.import_module("MySQLdb")
    except ImportError:
        advice = "install libmariadb-dev, pkg-config and gcc, and then mysqlclient with pip"
        skip_or_fail(ServerMissingError("mysqlclient", "MySQLdb", advice))


def run_private(server: _ServerT) -> Iterator[_ServerT]:
    """Start a server for one test, and stop it afterwards."""
    try:
        server.start()
    except ServerMissingError as error:
        skip_or_fail(error)
    try:
        yield server
    finally:
        server.stop()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # noqa: ANN401 -- xdist may not be installed
    """Tell a worker of pytest-xdist where the servers are."""
    node.workerinput[_ADDRESS] = _room(node.config).address


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the servers of this run."""
    if room := config.stash.get(_ROOM, None):
        room.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which servers were missing, and how many tests were not run because of it."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    missing = Counter(why.partition(_MISSING)[2] for why in reasons if _MISSING in why)
    if missing:
        terminalreporter.section("SERVERS MISSING", sep="!", red=True, bold=True)
    for what, count in sorted(missing.items()):
        title, _, advice = what.partition(": ")
        tests = "1 test" if count == 1 else f"{count} tests"
        terminalreporter.line(f"{title}: {tests} skipped. To run them {advice}", red=True)


def _room(config: pytest.Config) -> ServerRoom:
    return config.stash.setdefault(_ROOM, ServerRoom())


def _dsn(config: pytest.Config, kind: str) -> str:
    if override := os.environ.get(_OVERRIDES[kind]):
        return override
    address = getattr(config, "workerinput", {}).get(_ADDRESS)
    try:
        return ask(address, kind) if address else _room(config).dsn(kind)
    except ServerMissingError as error:
        skip_or_fail(error)


def _emptied(config: pytest.Config, server: RedisClient) -> str:
    # Tests of one process run one after another, so a database for each process will do; the first is nobody's.
    worker = re.search(r"\d+$", getattr(config, "workerinput", {}).get("workerid", ""))
    url = server.database(1 + int(worker.group() if worker else 0))
    RedisClient(url).ask("FLUSHDB")
    return url


def _fresh_database(server: SqlClient) -> Iterator[str]:
    name = f"test_{uuid4().hex}"
    try:
        yield server.create_database(name)
    finally:
        server.drop_database(name)
