"""A real PgBouncer between tests and a PostgreSQL server."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Final, Literal
from urllib.parse import urlsplit

from .clients import PostgresClient
from .programs import PGBOUNCER, Programs
from .server import LOOPBACK, Server

__all__ = ["PgBouncer"]

_VERSION: Final = re.compile(r"PgBouncer (\d+)\.(\d+)")
#: The first version that can rename prepared statements, which hides the mistakes that tests look for.
_RENAMES_STATEMENTS: Final = (1, 21)


class PgBouncer(Server):
    """PgBouncer with few server sessions, so that its clients really share them, and without prepared statements."""

    programs: ClassVar[Programs] = PGBOUNCER
    names: ClassVar[tuple[str, ...]] = ("pgbouncer",)
    # Newer versions wait for their clients after any other signal.
    farewell: ClassVar[signal.Signals] = signal.SIGQUIT

    def __init__(
        self,
        upstream: str,
        *,
        mode: Literal["session", "transaction"] = "transaction",
        pool_size: int = 3,
        settings: Mapping[str, str] | None = None,
        patience: timedelta = timedelta(seconds=60),
    ) -> None:
        """Set up a pooler in front of the server of the DSN ``upstream``, whose user needs no password."""
        super().__init__(settings=settings, patience=patience)
        self._upstream = urlsplit(upstream)
        self._mode = mode
        self._pool_size = pool_size

    @property
    def dsn(self) -> str:
        """The address of the upstream's database through the pooler."""
        return self.through(self._upstream.geturl())

    def through(self, dsn: str) -> str:
        """Return the DSN by which a database of the upstream is reached through the pooler."""
        url = urlsplit(dsn)
        login, at, _ = url.netloc.rpartition("@")
        return url._replace(netloc=f"{login}{at}{LOOPBACK}:{self.port}").geturl()

    def answers(self) -> bool:
        """Tell whether a query reaches the upstream now."""
        return PostgresClient(self.dsn).answers()

    def _create(self, program: Path, home: Path) -> None:
        settings = {
            "listen_addr": LOOPBACK,
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": str(home / "users.txt"),
            "pool_mode": self._mode,
            "default_pool_size": str(self._pool_size),
            "max_client_conn": "500",
            # A server that restarts is asked again soon.
            "server_login_retry": "0.1",
            **({"max_prepared_statements": "0"} if _version(program) >= _RENAMES_STATEMENTS else {}),
            **self._settings,
        }
        upstream = f"host={self._upstream.hostname} port={self._upstream.port or 5432}"
        lines = ["[databases]", f"* = {upstream}", "[pgbouncer]", *(f"{name} = {settings[name]}" for name in settings)]
        (home / "pgbouncer.ini").write_text("\n".join(lines) + "\n")
        (home / "users.txt").write_text(f'"{self._upstream.username}" ""\n')
        for file in ("pgbouncer.ini", "users.txt"):
            (home / file).chmod(0o644)  # it does not run as root, who may have written them

    def _command(self, program: Path, home: Path) -> Sequence[str | Path]:
        return [program, home / "pgbouncer.ini"]


def _version(program: Path) -> tuple[int, int]:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = _VERSION.search(said)
    return (int(found[1]), int(found[2])) if found else (0, 0)
