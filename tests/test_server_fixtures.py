"""The fixtures of real servers share them between tests, and are loud when they cannot."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from postroom.testing.clients import MariaDBClient, PostgresClient, RedisClient, ValkeyClient
from postroom.testing.programs import MARIADB, POSTGRES
from postroom.testing.servers import MariaDBServer, PostgresServer, RedisServer, ValkeyServer

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]

THREE_TESTS = """
def test_with_a_database(mariadb_dsn):
    pass

def test_with_a_server(private_mariadb):
    pass

def test_without():
    pass
"""

RECORDING_TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(6))
def test_records(postgres_server, postgres_dsn, number):
    assert postgres_server.query("SELECT 1") == "1"
    line = f"{os.getpid()} {postgres_server.dsn} {postgres_dsn}"
    (pathlib.Path(os.environ["RECORDS"]) / str(number)).write_text(line)
"""

REDIS_TESTS = """
import os, pathlib, pytest
from postroom.testing.clients import RedisClient

@pytest.mark.parametrize("number", range(6))
def test_records(redis_url, valkey_url, number):
    for url in (redis_url, valkey_url):
        assert RedisClient(url).ask("DBSIZE") == 0
        RedisClient(url).ask("SET", "left", number)
    line = f"{os.getpid()} {redis_url} {valkey_url}"
    (pathlib.Path(os.environ["RECORDS"]) / str(number)).write_text(line)

def test_both(redis_like_url):
    assert RedisClient(redis_like_url).ask("DBSIZE") == 0
"""

CLUSTER_TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(6))
def test_records(valkey_cluster, number):
    assert "cluster_state:ok" in valkey_cluster.ask("CLUSTER", "INFO")
    (pathlib.Path(os.environ["RECORDS"]) / str(number)).write_text(f"{os.getpid()} {valkey_cluster.dsn}")
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A run of pytest that has no CI around it, and no plugins that it would only wait for."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist -p tests.support.server_fixtures")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return pytester


@pytest.fixture
def no_mariadb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARIADB.variable, str(tmp_path))


@pytest.mark.usefixtures("no_mariadb")
class TestMissingServer:
    @pytest.mark.parametrize("workers", ["0", "2"])
    def test_skips_and_says_so_loudly_on_a_laptop(self, run: pytest.Pytester, workers: str) -> None:
        run.makepyfile(THREE_TESTS)

        result = run.runpytest_subprocess("-n", workers)

        result.assert_outcomes(passed=1, skipped=2)
        result.stdout.fnmatch_lines(
            [
                "*!!! SERVERS MISSING !!!*",
                "MariaDB: 2 tests skipped. To run them install*mariadb-server-core*",
            ]
        )

    @pytest.mark.parametrize("workers", ["0", "2"])
    def test_fails_where_ci_is_set(self, run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
        """A build that skips what it cannot run is green for the wrong reason."""
        monkeypatch.setenv("CI", "true")
        run.makepyfile(THREE_TESTS)

        result = run.runpytest_subprocess("-n", workers)

        result.assert_outcomes(passed=1, errors=2)
        result.stdout.fnmatch_lines(["*MariaDB is missing: no mariadbd*mariadb-server-core*"])
        result.stdout.no_fnmatch_line("*SERVERS MISSING*")


class TestSharedServer:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_is_one_for_the_whole_run_with_a_database_for_each_test(
        self, run: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
    ) -> None:
        monkeypatch.setenv("RECORDS", str(tmp_path))
        run.makepyfile(RECORDING_TESTS)

        result = run.runpytest_subprocess("-n", str(workers), "--dist", "load")

        result.assert_outcomes(passed=6)
        records = [record.read_text().split() for record in tmp_path.iterdir()]
        processes, servers, databases = map(set, zip(*records, strict=True))
        assert (len(processes), len(servers), len(databases)) == (max(workers, 1), 1, 6)

    def test_is_gone_after_the_run(self, run: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RECORDS", str(tmp_path))
        run.makepyfile(RECORDING_TESTS)

        with tempfile.TemporaryDirectory() as temporary:
            Path(temporary).chmod(0o755)  # the server is not root, and has to enter
            monkeypatch.setenv("TMPDIR", temporary)
            run.runpytest_subprocess("-n", "2").assert_outcomes(passed=6)
            left = list(Path(temporary).glob("postroom-*"))

        _, dsn, _ = (tmp_path / "0").read_text().split()
        assert left == []
        assert not PostgresClient(dsn).answers()

    def test_that_cannot_start_fails_with_its_log(
        self, run: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is installed, so this is no reason to skip, on a laptop either."""
        for program in ("postgres", "initdb"):
            (tmp_path / program).write_text("#!/bin/sh\necho the disk is on fire; exit 1")
            (tmp_path / program).chmod(0o755)
        monkeypatch.setenv(POSTGRES.variable, str(tmp_path))
        run.makepyfile(RECORDING_TESTS)

        result = run.runpytest_subprocess("-n", "2")

        result.assert_outcomes(errors=6)
        result.stdout.fnmatch_lines(["*PostgreSQL could not run*", "*the disk is on fire*"])

    def test_can_be_one_that_runs_already(
        self,
        run: pytest.Pytester,
        postgres_server: PostgresClient,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("POSTROOM_TEST_POSTGRES_DSN", postgres_server.dsn)
        monkeypatch.setenv("RECORDS", str(tmp_path))
        run.makepyfile(RECORDING_TESTS)

        run.runpytest_subprocess().assert_outcomes(passed=6)

        used = [record.read_text().split()[1:] for record in tmp_path.iterdir()]
        names = [urlsplit(database).path[1:] for _, database in used]
        assert {server for server, _ in used} == {postgres_server.dsn}
        left = postgres_server.query("SELECT datname FROM pg_database").split()
        assert not set(names) & set(left)

    def test_can_be_a_cluster(self, run: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RECORDS", str(tmp_path))
        run.makepyfile(CLUSTER_TESTS)

        run.runpytest_subprocess("-n", "2", "--dist", "load").assert_outcomes(passed=6)

        processes, clusters = map(set, zip(*(record.read_text().split() for record in tmp_path.iterdir()), strict=True))
        assert (len(processes), len(clusters)) == (2, 1)
        assert not RedisClient(clusters.pop()).answers()

    def test_is_not_the_private_one(self, valkey_server: ValkeyClient, private_valkey: ValkeyServer) -> None:
        """A test that kills its server must not pull the rug from under the others."""
        private_valkey.kill9()

        assert valkey_server.answers()
        assert not private_valkey.answers()


def test_private_servers_are_of_the_kind_they_are_named_after(
    private_postgres: PostgresServer, private_mariadb: MariaDBServer
) -> None:
    assert private_postgres.client.query("SELECT version()").startswith("PostgreSQL")
    assert "MariaDB" in private_mariadb.client.query("SELECT version()")


def test_private_redis_servers_are_of_the_kind_they_are_named_after(
    private_redis: RedisServer, private_valkey: ValkeyServer
) -> None:
    assert "valkey" not in str(private_redis.client.ask("INFO", "server"))
    assert "valkey" in str(private_valkey.client.ask("INFO", "server"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_redis_database_is_empty_and_nobody_elses(
    run: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("RECORDS", str(tmp_path))
    run.makepyfile(REDIS_TESTS)

    run.runpytest_subprocess("-n", str(workers), "--dist", "load").assert_outcomes(passed=8)

    records = {tuple(record.read_text().split()) for record in tmp_path.iterdir()}
    processes, redises, valkeys = map(set, zip(*records, strict=True))
    assert [len(processes), len(redises), len(valkeys), len(records)] == [max(workers, 1)] * 4
    assert {urlsplit(url).path for url in redises} == {f"/{number + 1}" for number in range(max(workers, 1))}
    assert not redises & valkeys


def test_an_sqlite_path_leads_to_no_file_yet(sqlite_path: Path) -> None:
    assert not sqlite_path.exists()
    assert sqlite_path.parent.is_dir()


def test_a_mariadb_database_is_empty_and_ready(mariadb_dsn: str) -> None:
    assert MariaDBClient(mariadb_dsn).query("SHOW TABLES") == ""
