"""Real servers to test against, from programs that are installed already."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from .clients import MariaDBClient, PostgresClient, RedisClient, ValkeyClient
from .programs import MARIADB, POSTGRES, REDIS, VALKEY, Programs, ServerError, ServerMissingError
from .server import LOOPBACK, Server, SqlServer

__all__ = [
    "MariaDBServer",
    "PostgresServer",
    "RedisServer",
    "Server",
    "ServerError",
    "ServerMissingError",
    "SqlServer",
    "ValkeyServer",
]

_SHUTDOWN_SETTINGS_SINCE: Final = 7


class PostgresServer(SqlServer):
    """PostgreSQL with durable commits, in a time zone that is not UTC so that mix-ups show."""

    programs: ClassVar[Programs] = POSTGRES
    names: ClassVar[tuple[str, ...]] = ("postgres",)
    farewell: ClassVar[signal.Signals] = signal.SIGINT

    @property
    def client(self) -> PostgresClient:
        """A client of this server."""
        return PostgresClient(f"postgresql://postgres@{LOOPBACK}:{self.port}/postgres")

    def _create(self, program: Path, home: Path) -> None:
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        initdb = program.with_name("initdb")
        self._run([initdb, f"--pgdata={home / 'data'}", *options, "--no-sync"], home)

    def _command(self, program: Path, home: Path) -> Sequence[str | Path]:
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            "unix_socket_directories": "",
            # Shared memory outside the folder would be left behind by a killed server.
            "dynamic_shared_memory_type": "mmap",
            "max_connections": "300",
            "shared_buffers": "32MB",
            "timezone": "Asia/Kathmandu",
            **self._settings,
        }
        pairs = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [program, "-D", home / "data", *pairs]


class MariaDBServer(SqlServer):
    """MariaDB with durable commits, in a time zone that is not UTC so that mix-ups show."""

    programs: ClassVar[Programs] = MARIADB
    names: ClassVar[tuple[str, ...]] = ("mariadbd", "mysqld")

    @property
    def client(self) -> MariaDBClient:
        """A client of this server."""
        return MariaDBClient(f"mysql://root@{LOOPBACK}:{self.port}/test")

    def _create(self, program: Path, home: Path) -> None:
        install = self.programs.find("mariadb-install-db", "mysql_install_db", folder=self._folder)
        # Root without a password, over TCP: the server listens on the loopback alone.
        login = "--auth-root-authentication-method=normal"
        self._run([install, *self._places(program, home), login, "--skip-name-resolve"], home)

    def _command(self, program: Path, home: Path) -> Sequence[str | Path]:
        settings = {
            "bind-address": LOOPBACK,
            "port": str(self.port),
            "socket": str(home / "socket"),
            "pid-file": str(home / "pid"),
            "max-connections": "300",
            "character-set-server": "utf8mb4",
            "default-time-zone": "+05:45",
            "innodb-buffer-pool-size": "64M",
            "innodb-flush-log-at-trx-commit": "1",
            # The kernel's queue may be closed to containers, and waits for a timeout then.
            "innodb-use-native-aio": "0",
            **self._settings,
        }
        flags = ["--skip-log-bin", "--skip-name-resolve"]
        pairs = [f"--{name}={value}" for name, value in settings.items()]
        return [program, *self._places(program, home), *flags, *pairs]

    def _places(self, program: Path, home: Path) -> list[str]:
        return ["--no-defaults", f"--basedir={program.parents[1]}", f"--datadir={home / 'data'}"]


class RedisServer(Server):
    """Redis that keeps its data over a crash, and evicts nothing."""

    programs: ClassVar[Programs] = REDIS
    # Debian calls the server so where its service is not installed; it goes by the name that it is run under.
    names: ClassVar[tuple[str, ...]] = ("redis-server", "redis-check-rdb")

    @property
    def client(self) -> RedisClient:
        """A client of this server."""
        return RedisClient(f"redis://{LOOPBACK}:{self.port}/0")

    @property
    def dsn(self) -> str:
        """The address, which is known from the first start on."""
        return self.client.dsn

    def answers(self) -> bool:
        """Tell whether the server answers a PING now."""
        return self.client.answers()

    def _create(self, program: Path, home: Path) -> None:
        """Do nothing: the server makes its own files."""

    def _command(self, program: Path, home: Path) -> Sequence[str | Path]:
        server = self._named(program, home)
        settings = {
            "bind": LOOPBACK,
            "port": str(self.port),
            "dir": str(home),
            "databases": "64",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            **self._since_7(server),
            **self._settings,
        }
        pairs = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return [server, *pairs]

    def _since_7(self, server: Path) -> Mapping[str, str]:
        """Return the settings that Redis 6 does not know."""
        said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
        major = re.search(r"v=(\d+)", said)
        if major is None or int(major[1]) < _SHUTDOWN_SETTINGS_SINCE:
            return {}
        # Otherwise it stays when it is told to end while it writes its first log, as a replica does.
        return {"shutdown-on-sigterm": "force"}

    def _named(self, program: Path, home: Path) -> Path:
        link = home / self.names[0]
        if program.name != link.name and not link.is_symlink():
            link.symlink_to(program.resolve())
        return link if link.is_symlink() else program


class ValkeyServer(RedisServer):
    """Valkey that keeps its data over a crash, and evicts nothing."""

    programs: ClassVar[Programs] = VALKEY
    names: ClassVar[tuple[str, ...]] = ("valkey-server",)

    @property
    def client(self) -> ValkeyClient:
        """A client of this server."""
        return ValkeyClient(f"redis://{LOOPBACK}:{self.port}/0")
