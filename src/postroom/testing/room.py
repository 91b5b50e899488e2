"""The servers of one test run: started when first asked for, shared by all its processes."""

from __future__ import annotations

import json
import socket
import socketserver
import tempfile
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from .cluster import RedisCluster, RedisGroup, ValkeyCluster
from .programs import ServerError, ServerMissingError
from .servers import MariaDBServer, PostgresServer, RedisServer, Server, ValkeyServer

__all__ = ["ServerRoom", "ask"]

# A shared cluster must not take a busy machine for a dead server.
_CALM: Final = timedelta(seconds=5)
_KINDS: Final[Mapping[str, Callable[[], Server | RedisGroup]]] = {
    "postgres": PostgresServer,
    "mariadb": MariaDBServer,
    "redis": RedisServer,
    "redis-cluster": partial(RedisCluster, node_timeout=_CALM),
    "valkey": ValkeyServer,
    "valkey-cluster": partial(ValkeyCluster, node_timeout=_CALM),
}
# Longer than a server may take to start: the room itself has the better error to tell.
_PATIENCE: Final = timedelta(seconds=100)


class ServerRoom:
    """Keeps at most one server of each kind, and answers other processes at its door."""

    def __init__(self) -> None:
        self._servers: dict[str, Server | RedisGroup] = {}
        self._locks = {kind: threading.Lock() for kind in _KINDS}
        self._door: _Door | None = None

    @property
    def address(self) -> str:
        """Where other processes of this run can ask; opened when first needed."""
        if self._door is None:
            self._door = _Door(self)
        return self._door.address

    def dsn(self, kind: str) -> str:
        """Return the address of a server, starting it if nobody has asked before."""
        with self._locks[kind]:
            if kind not in self._servers:
                self._servers[kind] = _KINDS[kind]().start()
            return self._servers[kind].dsn

    def close(self) -> None:
        """Close the door and stop all servers."""
        if self._door:
            self._door.close()
        for kind, lock in self._locks.items():
            with lock:
                if server := self._servers.pop(kind, None):
                    server.stop()


def ask(address: str, kind: str) -> str:
    """Return the address of a server in the room of another process."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(_PATIENCE.total_seconds())
        link.connect(address)
        link.sendall(f"{kind}\n".encode())
        answer = json.loads(link.makefile().readline() or '{"error": "the test run has ended"}')
    if "missing" in answer:
        raise ServerMissingError(*answer["missing"])
    if "error" in answer:
        raise ServerError(answer["error"])
    return str(answer["dsn"])


class _Visit(socketserver.StreamRequestHandler):
    def __init__(self, room: ServerRoom, *rest: Any) -> None:  # noqa: ANN401 -- the library's own
        self._room = room
        super().__init__(*rest)  # which also handles the visit

    def handle(self) -> None:
        kind = self.rfile.readline().decode().strip()
        self.wfile.write(json.dumps(self._answer(kind)).encode())

    def _answer(self, kind: str) -> dict[str, object]:
        try:
            return {"dsn": self._room.dsn(kind)}
        except ServerMissingError as error:
            return {"missing": [error.title, error.program, error.advice]}
        except ServerError as error:
            return {"error": str(error)}


class _Door(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, room: ServerRoom) -> None:
        # The folder is open to its owner alone, and so is a socket in it.
        self._folder = tempfile.TemporaryDirectory(prefix="postroom-")
        self.address = str(Path(self._folder.name) / "door")
        super().__init__(self.address, partial(_Visit, room))
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        self._folder.cleanup()
