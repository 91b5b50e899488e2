"""The smallest clients that can tell a server that answers from a port that is merely open."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Final, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from ..errors import InvalidNameError
from .programs import MARIADB, POSTGRES, ServerError, ServerMissingError

__all__ = ["MariaDBClient", "PostgresClient", "RedisClient", "Reply", "SqlClient", "ValkeyClient"]

_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_PATIENCE: Final = timedelta(seconds=30)

#: What Redis answers with.
Reply: TypeAlias = "str | int | list[Reply] | None"


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
        return [POSTGRES.find_client("psql"), *options, "--command", sql, self.dsn]

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
class RedisClient:
    """Speaks to Redis, or to a server that speaks like it, each time over a socket of its own."""

    dsn: str

    def ask(self, *words: str | int, patience: timedelta = _PATIENCE) -> Reply:
        """Send a command to the database of the DSN and return what the server answers."""
        url = urlsplit(self.dsn)
        address = (url.hostname or "127.0.0.1", url.port or 6379)
        try:
            with socket.create_connection(address, patience.total_seconds()) as link, link.makefile("rb") as answers:
                commands = [*_greeting(url), words]
                link.sendall(b"".join(map(_command, commands)))
                return [_reply(answers) for _ in commands][-1]
        except OSError as error:
            raise ServerError(f"{address[0]}:{address[1]} did not answer {words[0]}: {error}") from error

    def answers(self) -> bool:
        """Tell whether the server answers a PING."""
        try:
            return self.ask("PING", patience=timedelta(seconds=5)) == "PONG"
        except ServerError:
            return False

    def database(self, number: int) -> str:
        """Return the URL of one of the numbered databases of the server."""
        return urlsplit(self.dsn)._replace(path=f"/{number}").geturl()


class ValkeyClient(RedisClient):
    """Speaks to Valkey."""

    __slots__ = ()


def _greeting(url: SplitResult) -> list[Sequence[str | int]]:
    login = [unquote(part) for part in (url.username, url.password) if part]
    # A connection begins with database 0; a server that is busy with a script would not even let it be chosen.
    number = url.path[1:].removeprefix("0")
    return [*([["AUTH", *login]] if login else []), *([["SELECT", number]] if number else [])]


def _command(words: Sequence[str | int]) -> bytes:
    parts = [str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _reply(answers: io.BufferedReader) -> Reply:
    line = answers.readline()
    kind, rest = line[:1], line[1:].strip().decode(errors="replace")
    match kind:
        case b"+":
            return rest
        case b":":
            return int(rest)
        case b"$":
            return None if rest == "-1" else answers.read(int(rest) + 2)[:-2].decode(errors="replace")
        case b"*":
            return [_reply(answers) for _ in range(int(rest))]
        case _:
            raise ServerError(f"the server said {rest!r}" if rest else "the server hung up")


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidNameError("database", name, "lower-case letters, digits and underscores")
    return name
