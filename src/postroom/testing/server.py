"""A throw-away server: with its own folder and port, and gone when the test run is gone.

It never runs as root. The rest of the machine is not touched: no user is created, no service
is started, and only own processes are signalled.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import stat
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Final, Self

from .clients import SqlClient
from .processes import Watchdog, is_gone, is_stopped, kill_tree, signal_tree
from .programs import Programs, ServerError, relocate

__all__ = ["LOOPBACK", "Server", "SqlServer", "free_port"]

LOOPBACK: Final = "127.0.0.1"
_NOBODY: Final = 65534
_INTERVAL: Final = timedelta(milliseconds=20)
_TAIL: Final = 40


class Server(ABC):
    """One throw-away server: ``start`` makes its folder, ``stop`` removes it again.

    Port and data outlive ``kill9`` and ``restart``. Every wait ends with a ``ServerError``
    that quotes the log once patience is over. ``folder`` holds the programs to run, and
    ``settings`` win over those that the server is given here.
    """

    programs: ClassVar[Programs]
    names: ClassVar[tuple[str, ...]]
    #: The signal on which the server ends in good order without waiting for its clients.
    farewell: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(
        self,
        *,
        folder: Path | None = None,
        settings: Mapping[str, str] | None = None,
        patience: timedelta = timedelta(seconds=60),
    ) -> None:
        self.port: int = 0
        self._folder = folder
        self._settings = dict(settings or {})
        self._patience = patience
        self._user = _NOBODY if os.geteuid() == 0 else None
        #: Where the data and the log are, from the first start until stopped.
        self.home: Path | None = None
        self._watchdog: Watchdog | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def dsn(self) -> str:
        """The address, which is known from the first start on."""

    @abstractmethod
    def answers(self) -> bool:
        """Tell whether the server answers a real question now."""

    @abstractmethod
    def _create(self, program: Path, home: Path) -> None:
        """Make the data that the server needs before it starts for the first time."""

    @abstractmethod
    def _command(self, program: Path, home: Path) -> Sequence[str | Path]:
        """Return the command line that runs the server."""

    @property
    def pid(self) -> int:
        """The main process, or 0 while the server does not run."""
        if self._process is None or self._process.poll() is not None:
            return 0
        return self._process.pid

    def start(self) -> Self:
        """Start the server, and return once it answers."""
        if self.pid:
            raise ServerError(f"{self.programs.title} is already running on port {self.port}")
        has_address = self.port != 0
        while True:
            try:
                self._start()
            except ServerError:
                # A port that was free when it was chosen may be another server's by the time this one asks for it.
                if has_address or not _is_listened_on(self.port):
                    raise
                self.port = 0
            else:
                return self

    def _start(self) -> None:
        program = self.programs.find(*self.names, folder=self._folder)
        try:
            home = self.home or self._move_in(program)
            self._spawn(self._command(self._reachable(program, home), home), home)
            self._wait(self._is_ready, "answer a query")
        except BaseException:
            # Nobody would stop a server whose start has failed; its log is in the error.
            self._discard()
            raise

    def stop(self) -> None:
        """End the server in good order and remove its folder; twice is harmless."""
        if self.pid:
            self._shut_down()
        self._discard()

    def restart(self) -> None:
        """End the server in good order and start it again on the same port and data."""
        self._shut_down()
        self.start()

    def kill9(self) -> None:
        """Kill the main process and its children at once, and return when they are gone."""
        self._bury(kill_tree(self._running()))

    def pause(self) -> None:
        """Hold the server still: connections stay open and nothing answers."""
        # The main process first: once it is held it starts no further children.
        os.kill(self._running(), signal.SIGSTOP)
        held = signal_tree(self._running(), signal.SIGSTOP)
        self._wait(lambda: all(map(is_stopped, held)), "pause")

    def resume(self) -> None:
        """Let a paused server go on."""
        signal_tree(self._running(), signal.SIGCONT)

    def logs(self) -> str:
        """Return what the server has written since its first start."""
        log = self.home / "log" if self.home else None
        return log.read_text(errors="replace") if log and log.exists() else ""

    def __enter__(self) -> Self:
        """Start the server."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop the server."""
        self.stop()

    def _running(self) -> int:
        if not self.pid:
            raise self._complaint("is not running")
        return self.pid

    def _move_in(self, program: Path) -> Path:
        self.port = self.port or free_port()
        self.home = home = Path(tempfile.mkdtemp(prefix="postroom-"))
        self._watchdog = Watchdog(home)
        if self._user is not None:
            os.chown(home, self._user, self._user)
        self._create(self._reachable(program, home), home)
        return home

    def _reachable(self, program: Path, home: Path) -> Path:
        """Return a path of the program that the user who runs it can enter.

        A virtual environment in root's home is closed to everybody else.
        """
        doors = [program.resolve(), *program.resolve().parents]
        if self._user is None or all(door.stat().st_mode & stat.S_IXOTH for door in doors):
            return program
        return relocate(program, home / "programs")

    def _spawn(self, command: Sequence[str | Path], home: Path) -> subprocess.Popen[bytes]:
        with (home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",  # the current folder may be closed to the user
                env=_environment(home),
                # An interrupt from the keyboard is for the tests, which then stop the server.
                start_new_session=True,
                user=self._user,
                group=self._user,
                extra_groups=None if self._user is None else [],
            )
        self._guard(self._process.pid)
        return self._process

    def _run(self, command: Sequence[str | Path], home: Path) -> None:
        process = self._spawn(command, home)
        self._wait(lambda: process.poll() is not None, f"run {command[0]}")
        if process.returncode:
            raise self._complaint(f"could not run {command[0]}")

    def _is_ready(self) -> bool:
        return bool(self._running()) and self.answers()

    def _shut_down(self) -> None:
        # A paused server would hear the farewell only after it is resumed.
        family = signal_tree(self._running(), signal.SIGCONT)
        os.kill(family[0], self.farewell)
        try:
            self._bury(family)
        except ServerError:
            self.kill9()

    def _bury(self, pids: Sequence[int]) -> None:
        self._wait(lambda: not self.pid and all(map(is_gone, pids)), "end")
        self._guard(0)

    def _guard(self, pid: int) -> None:
        if self._watchdog:
            self._watchdog.guard(pid)

    def _discard(self) -> None:
        if self.pid:
            self.kill9()
        if self._watchdog:
            self._watchdog.dismiss()  # which also removes the folder
        self.home = self._watchdog = self._process = None

    def _wait(self, is_met: Callable[[], bool], goal: str) -> None:
        deadline = time.monotonic() + self._patience.total_seconds()
        while not is_met():
            if time.monotonic() > deadline:
                raise self._complaint(f"did not {goal} within {self._patience}")
            time.sleep(_INTERVAL.total_seconds())

    def _complaint(self, what: str) -> ServerError:
        tail = "\n".join(self.logs().splitlines()[-_TAIL:]) or "(nothing)"
        return ServerError(f"{self.programs.title} {what}; its log ends with:\n{tail}")


class SqlServer(Server):
    """A server that keeps databases; each test can have one of its own."""

    @property
    @abstractmethod
    def client(self) -> SqlClient:
        """A client of this server."""

    @property
    def dsn(self) -> str:
        """The address, which is known from the first start on."""
        return self.client.dsn

    def answers(self) -> bool:
        """Tell whether the server runs a query now."""
        return self.client.answers()

    def create_database(self, name: str) -> str:
        """Create an empty database and return its DSN."""
        return self.client.create_database(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, disconnecting whoever still uses it."""
        self.client.drop_database(name)


def _environment(home: Path) -> Mapping[str, str]:
    # MariaDB begins by removing temporary tables, also those of another server in one folder.
    folders = {"HOME": str(home), "TMPDIR": str(home)}
    return {"PATH": f"{os.defpath}:/usr/sbin", "LC_ALL": "C", **folders}


def free_port() -> int:
    """Return a port that nobody listens on now."""
    # Below the range from which the system takes the ports of outgoing connections: while a
    # server is down, a client that tries again could otherwise be given the very port. And not
    # from `random`, which test runs seed alike in all their processes.
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def _is_listened_on(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0
