"""A primary, its replica, and a Sentinel that puts the replica in the place of a primary that is gone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

from .cluster import RedisReplicated, free_ports
from .programs import ServerError
from .server import LOOPBACK
from .servers import RedisServer, ValkeyServer

__all__ = ["RedisSentinel", "ValkeySentinel"]


class _RedisWatcher(RedisServer):
    """The same program as the server, run as Sentinel; what it watches it is told when it runs."""

    def _command(self, program: Path, home: Path) -> Sequence[str | Path]:
        settings = home / "sentinel.conf"
        if not settings.exists():
            settings.write_text(f"bind {LOOPBACK}\nport {self.port}\ndir {home}\n")
            if self._user is not None:  # it writes down there what it finds out
                os.chown(settings, self._user, self._user)
        return [self._named(program, home), settings, "--sentinel"]


class _ValkeyWatcher(_RedisWatcher, ValkeyServer):
    """Valkey as Sentinel."""


class RedisSentinel(RedisReplicated):
    """A primary with a replica, and a Sentinel that watches both.

    A primary that does not answer for ``down_after`` is replaced by its replica.

    Example::

        with RedisSentinel() as servers:
            servers.primary.kill9()
            servers.wait_until_serving(servers.replica)
    """

    watcher: ClassVar[type[RedisServer]] = _RedisWatcher
    #: What Sentinel calls the primary, whichever it is.
    service: ClassVar[str] = "postroom"

    def __init__(
        self,
        *,
        down_after: timedelta = timedelta(seconds=2),
        settings: Mapping[str, str] | None = None,
        patience: timedelta = timedelta(seconds=60),
    ) -> None:
        super().__init__(settings=settings, patience=patience)
        self._down_after = down_after

    @property
    def sentinel(self) -> RedisServer:
        """The Sentinel."""
        return self.nodes[2]

    @property
    def url(self) -> str:
        """What a store takes as its URL."""
        return f"redis+sentinel://{LOOPBACK}:{self.sentinel.port}/{self.service}"

    def wait_until_serving(self, node: RedisServer) -> None:
        """Return once Sentinel says that a server is the primary, and the server does too."""
        self._wait(lambda: self._is_serving(node), f"make {node.dsn} the primary")

    def fail_over(self) -> None:
        """Have the replica take over although the primary is well, and return once it has."""
        self._wait(self._has_agreed, "find a replica that is good enough")
        self.wait_until_serving(self.replica)

    def _has_agreed(self) -> bool:
        try:
            return self.sentinel.client.ask("SENTINEL", "FAILOVER", self.service) == "OK"
        except ServerError as error:
            # It has not heard of the replica for a while, or is at it already.
            if "NOGOODSLAVE" in str(error) or "INPROG" in str(error):
                return False
            raise

    def _is_serving(self, node: RedisServer) -> bool:
        told = self.sentinel.client.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return told == [LOOPBACK, str(node.port)] and "role:master" in str(node.client.ask("INFO", "replication"))

    def _prepared(self) -> Sequence[RedisServer]:
        sentinel = self.watcher(patience=self._patience)
        (sentinel.port,) = free_ports(1)
        return *super()._prepared(), sentinel

    def _introduce(self) -> None:
        super()._introduce()
        ask = self.sentinel.client.ask
        ask("SENTINEL", "MONITOR", self.service, LOOPBACK, self.primary.port, 1)
        down_after = self._down_after // timedelta(milliseconds=1)
        ask("SENTINEL", "SET", self.service, "down-after-milliseconds", down_after, "failover-timeout", 3 * down_after)
        self._wait(self._has_found_replica, "find the replica")

    def _has_found_replica(self) -> bool:
        found = self.sentinel.client.ask("SENTINEL", "REPLICAS", self.service)
        return isinstance(found, list) and any(
            isinstance(one, list) and str(self.replica.port) in one and "slave" in one for one in found
        )


class ValkeySentinel(RedisSentinel):
    """The same with servers that all are Valkey."""

    kind: ClassVar[type[RedisServer]] = ValkeyServer
    watcher: ClassVar[type[RedisServer]] = _ValkeyWatcher
