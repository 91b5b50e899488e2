"""The smallest clients that can tell a server that answers from a port that is merely open."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import unquote, urlsplit

from ..errors import InvalidNameError
from .programs import MARIADB, POSTGRES, ServerError, ServerMissingError

__all__ = ["MariaDBClient", "PostgresClient", "SqlClient", "ValkeyClient"]

_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_PATIENCE: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class SqlClient(ABC):
    """Runs SQL on the server of a DSN through the client program that comes with the server."""

    creation: ClassVar[str]
    removal: ClassVar[str]

    dsn: str

    @abstractmethod
    def _command(self, sql: str) -> Sequence[str | Path]: ...

    @abstractmethod
    def _environment(self) -> Mapping[str, str]: ...

    def query(self, sql: str, *, patience: timedelta = _PATIENCE) -> str:
        """Run a statement and return what it prints, values alone."""
        try:
            done = subprocess.run(
                self._command(sql),
                # Settings of the surrounding user, such as PGOPTIONS, must not leak in.
                env={"PATH": os.defpath, "LC_ALL": "C.UTF-8", "HOME": "/", **self._environment()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                timeout=patience.total_seconds(),
            )
        except subprocess.CalledProcessError as error:
            raise ServerError(f"{self.dsn} refused {sql!r}: {error.stderr.strip()}") from error
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"{self.dsn} did not answer {sql!r} within {patience}") from error
        return done.stdout.strip()

    def answers(self) -> bool:
        """Tell whether the server runs a query."""
        try:
            return self.query("SELECT 1", patience=timedelta(seconds=5)) == "1"
        except ServerMissingError:  # the client is not there, so no server will ever answer
            raise
        except ServerError:
            return False

    def create_database(self, name: str) -> str:
        """Create an empty database and return its DSN."""
        self.query(self.creation.format(name=_checked(name)))
        return urlsplit(self.dsn)._replace(path=f"/{name}").geturl()

    def drop_database(self, name: str) -> None:
        """Drop a database, disconnecting whoever still uses it."""
        self.query(self.removal.format(name=_checked(name)))


@dataclass(frozen=True, slots=True)
class PostgresClient(SqlClient):
    """Speaks to PostgreSQL through psql."""

    # template1 may have visitors, which would block the copy.
    creation: ClassVar[str] = 'CREATE DATABASE "{name}" TEMPLATE template0'
    removal: ClassVar[str] = 'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'

    def _command(self, sql: str) -> Sequence[str | Path]:
        options = ["--no-psqlrc", "--no-password", "--tuples-only", "--no-align", "--quiet"]
        return [POSTGRES.find("psql"), *options, "--command", sql, self.dsn]

    def _environment(self) -> Mapping[str, str]:
        return {"PGCONNECT_TIMEOUT": "5"}


@dataclass(frozen=True, slots=True)
class MariaDBClient(SqlClient):
    """Speaks to MariaDB through its command-line client."""

    creation: ClassVar[str] = "CREATE DATABASE `{name}`"
    # A transaction that a test left open would make the removal wait for its locks.
    removal: ClassVar[str] = """
        BEGIN NOT ATOMIC
            DECLARE CONTINUE HANDLER FOR 1094 BEGIN END;
            FOR guest IN (
                SELECT id FROM information_schema.processlist WHERE db = '{name}'
            ) DO KILL guest.id; END FOR;
            DROP DATABASE IF EXISTS `{name}`;
        END
        """

    def _command(self, sql: str) -> Sequence[str | Path]:
        url = urlsplit(self.dsn)
        address = [f"--host={url.hostname}", f"--port={url.port or 3306}", "--protocol=tcp"]
        options = ["--connect-timeout=5", "--skip-column-names", "--batch", "--delimiter=//"]
        login = [f"--user={unquote(url.username or 'root')}", f"--database={url.path[1:]}"]
        client = MARIADB.find("mariadb", "mysql")
        return [client, "--no-defaults", *address, *options, *login, f"--execute={sql}"]

    def _environment(self) -> Mapping[str, str]:
        return {"MYSQL_PWD": unquote(urlsplit(self.dsn).password or "")}


@dataclass(frozen=True, slots=True)
class ValkeyClient:
    """Speaks to Valkey, or to Redis, over a socket of its own."""

    dsn: str

    def answers(self) -> bool:
        """Tell whether the server answers a PING."""
        url = urlsplit(self.dsn)
        address = (url.hostname or "127.0.0.1", url.port or 6379)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as link:
            link.sendall(b"PING\r\n")
            return link.makefile("rb").readline() == b"+PONG\r\n"
        return False


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidNameError("database", name, "lower-case letters, digits and underscores")
    return name
