"""Several servers that belong together: a Redis Cluster, and a primary with its replica."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final, Self

from .clients import RedisClient
from .programs import ServerError
from .server import LOOPBACK, free_port
from .servers import RedisServer, ValkeyServer

__all__ = ["RedisCluster", "RedisGroup", "RedisReplicated", "ValkeyCluster", "ValkeyReplicated", "free_ports"]

_SLOTS: Final = 16_384
_PRIMARIES: Final = 3
_TRIES: Final = 4
_INTERVAL: Final = timedelta(milliseconds=20)
#: Otherwise a primary waits for seconds whether more replicas come, and in its end for those that hang.
_PROMPT: Final = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1", "shutdown-timeout": "0"}


class RedisGroup(ABC):
    """Servers that are started and stopped together, the first of which is the address of all."""

    #: What runs: every server of a group is of one kind.
    kind: ClassVar[type[RedisServer]] = RedisServer

    def __init__(
        self, *, settings: Mapping[str, str] | None = None, patience: timedelta = timedelta(seconds=60)
    ) -> None:
        self.nodes: Sequence[RedisServer] = ()
        self._settings = dict(settings or {})
        self._patience = patience

    @property
    def dsn(self) -> str:
        """The address of the first server, which is known from the first start on."""
        return self.nodes[0].dsn

    @abstractmethod
    def _prepared(self) -> Sequence[RedisServer]:
        """Return the servers, of which none runs yet."""

    @abstractmethod
    def _introduce(self) -> None:
        """Make the servers, which all run, know each other."""

    def start(self) -> Self:
        """Start all servers, and return once they work together."""
        if self.nodes:
            raise ServerError(f"the servers of {type(self).__name__} are already running")
        for _ in range(_TRIES):
            try:
                return self._start()
            except ServerError as error:
                # Somebody may take a port between the moment it is chosen and the one it is used.
                if "Address already in use" not in str(error):
                    raise
        return self._start()

    def _start(self) -> Self:
        self.nodes = self._prepared()
        try:
            for node in self.nodes:
                node.start()
            self._introduce()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all servers and remove their folders; twice is harmless."""
        for node in self.nodes:
            node.stop()
        self.nodes = ()

    def __enter__(self) -> Self:
        """Start all servers."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop all servers."""
        self.stop()

    def _server(self, port: int, settings: Mapping[str, str]) -> RedisServer:
        server = self.kind(settings={**settings, **self._settings}, patience=self._patience)
        server.port = port
        return server

    def _wait(self, is_met: Callable[[], bool], goal: str) -> None:
        deadline = time.monotonic() + self._patience.total_seconds()
        while not is_met():
            if time.monotonic() > deadline:
                raise ServerError(f"{type(self).__name__} did not {goal} within {self._patience}")
            time.sleep(_INTERVAL.total_seconds())


class RedisReplicated(RedisGroup):
    """A primary, and a replica that follows it again after a restart of either.

    Example::

        with RedisReplicated() as servers:
            servers.replica.pause()
            servers.primary.client.ask("WAIT", 1, 100)
    """

    @property
    def primary(self) -> RedisServer:
        """The server that is written to."""
        return self.nodes[0]

    @property
    def replica(self) -> RedisServer:
        """The server that follows."""
        return self.nodes[1]

    def is_connected(self) -> bool:
        """Tell whether the primary has a replica, which has all the data."""
        has_one = "state=online" in _text(self.primary.client, "INFO", "replication")
        return has_one and self.replica.answers() and _is_following(self.replica)

    def wait_until_connected(self) -> None:
        """Return once the replica follows."""
        self._wait(self.is_connected, "connect its replica")

    def _prepared(self) -> Sequence[RedisServer]:
        primary, replica = free_ports(2)
        following = {**_PROMPT, "replicaof": f"{LOOPBACK} {primary}"}
        return self._server(primary, _PROMPT), self._server(replica, following)

    def _introduce(self) -> None:
        self.wait_until_connected()


class ValkeyReplicated(RedisReplicated):
    """A primary with a replica that both are Valkey."""

    kind: ClassVar[type[RedisServer]] = ValkeyServer


class RedisCluster(RedisGroup):
    """Six servers: three primaries that share the slots, and a replica of each.

    A primary that does not answer for ``node_timeout`` is replaced by its replica.

    Example::

        with RedisCluster() as cluster:
            cluster.kill_node(cluster.primary_of("{shop}:orders"))
            cluster.wait_until_whole()
    """

    def __init__(
        self,
        *,
        node_timeout: timedelta = timedelta(seconds=2),
        settings: Mapping[str, str] | None = None,
        patience: timedelta = timedelta(seconds=60),
    ) -> None:
        super().__init__(settings=settings, patience=patience)
        self._node_timeout = node_timeout

    @property
    def living(self) -> list[RedisServer]:
        """The servers that run now."""
        return [node for node in self.nodes if node.pid]

    def primary_of(self, key: str) -> RedisServer:
        """Return the server that serves a key now, as the first that runs sees it."""
        client = self.living[0].client
        slot = client.ask("CLUSTER", "KEYSLOT", key)
        return self._first(client, lambda member: any(slot in part for part in member.slots), f"serves slot {slot}")

    def replica_of(self, primary: RedisServer) -> RedisServer:
        """Return the server that follows a primary."""
        identity = _myself(primary.client).identity
        return self._first(primary.client, lambda member: member.leader == identity, f"follows {primary.dsn}")

    def kill_node(self, node: RedisServer) -> None:
        """Kill a server at once; the others notice it by themselves."""
        node.kill9()

    def start_node(self, node: RedisServer) -> None:
        """Start a server again on its port and data, and return once all are together."""
        node.start()
        self.wait_until_whole()

    def is_whole(self) -> bool:
        """Tell whether the servers that run agree on who serves and who follows whom, and serve every slot."""
        views = {frozenset(member for member in _members(node.client) if member.is_well) for node in self.living}
        if len(views) != 1:
            return False
        view = views.pop()
        served = sum(len(part) for member in view for part in member.slots)
        ports = {node.port for node in self.living}
        is_complete = served == _SLOTS and {member.port for member in view} == ports
        return is_complete and all(_is_working(node) and _lists_all(node, ports) for node in self.living)

    def wait_until_whole(self) -> None:
        """Return once all slots are served again, by replicas where primaries were killed."""
        self._wait(self.is_whole, "serve all slots")

    def _prepared(self) -> Sequence[RedisServer]:
        ports = free_ports(4 * _PRIMARIES)
        return [self._node(*pair) for pair in zip(ports[::2], ports[1::2], strict=True)]

    def _node(self, port: int, bus: int) -> RedisServer:
        settings = {
            **_PROMPT,
            "cluster-enabled": "yes",
            # The usual one, 10000 above, is where the system takes ports of outgoing connections from.
            "cluster-port": str(bus),
            "cluster-announce-ip": LOOPBACK,
            "cluster-node-timeout": str(self._node_timeout // timedelta(milliseconds=1)),
            # However long it was cut off, a replica is better than nobody.
            "cluster-replica-validity-factor": "0",
            # A replica stays with its primary, so that a test knows who follows whom.
            "cluster-allow-replica-migration": "no",
        }
        return self._server(port, settings)

    def _introduce(self) -> None:
        primaries, replicas = self.nodes[:_PRIMARIES], self.nodes[_PRIMARIES:]
        # Slots and epochs first: then servers tell them with their very first words.
        for number, node in enumerate(primaries):
            first, last = (_SLOTS * turn // _PRIMARIES for turn in (number, number + 1))
            node.client.ask("CLUSTER", "ADDSLOTS", *range(first, last))
        for number, node in enumerate(self.nodes):
            node.client.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for other in map(_myself, (other.client for other in self.nodes[:number])):
                node.client.ask("CLUSTER", "MEET", LOOPBACK, other.port, other.bus)
        self._wait(self._know_each_other, "meet")
        for primary, replica in zip(primaries, replicas, strict=True):
            replica.client.ask("CLUSTER", "REPLICATE", _myself(primary.client).identity)
        self.wait_until_whole()

    def _know_each_other(self) -> bool:
        return all(len([one for one in _members(node.client) if one.is_well]) == len(self.nodes) for node in self.nodes)

    def _first(self, client: RedisClient, is_wanted: Callable[[_Member], bool], what: str) -> RedisServer:
        for member in _members(client):
            if member.is_well and is_wanted(member):
                return next(node for node in self.nodes if node.port == member.port)
        raise ServerError(f"no server of the cluster {what}")


class ValkeyCluster(RedisCluster):
    """Six servers that all are Valkey."""

    kind: ClassVar[type[RedisServer]] = ValkeyServer


@dataclass(frozen=True, slots=True)
class _Member:
    """What one server of a cluster knows about another, or about itself."""

    identity: str
    port: int
    bus: int
    leader: str
    slots: tuple[range, ...]
    is_well: bool = True


def _members(client: RedisClient) -> list[_Member]:
    return [_member(line.split()) for line in _text(client, "CLUSTER", "NODES").splitlines()]


def _member(words: Sequence[str]) -> _Member:
    identity, address, flags, leader, _, _, _, _, *slots = words
    port, _, bus = address.partition(",")[0].rpartition(":")[2].partition("@")
    # What stands in brackets is on its way to another server.
    ends = [slot.partition("-") for slot in slots if not slot.startswith("[")]
    served = tuple(range(int(first), int(last or first) + 1) for first, _, last in ends)
    is_well = {"fail", "fail?", "handshake", "noaddr"}.isdisjoint(flags.split(","))
    return _Member(identity, int(port), int(bus), leader, served, is_well)


def _myself(client: RedisClient) -> _Member:
    identity = _text(client, "CLUSTER", "MYID")
    return next(member for member in _members(client) if member.identity == identity)


def _is_working(node: RedisServer) -> bool:
    """Tell whether a server takes commands, and has all the data if it follows another."""
    return _is_following(node) and "cluster_state:ok" in _text(node.client, "CLUSTER", "INFO")


def _lists_all(node: RedisServer, ports: set[int]) -> bool:
    """Tell whether a server tells clients of all servers; of a replica, once it has heard how far that is."""
    return {int(port) for port in re.findall(r"\d+", _text(node.client, "CLUSTER", "SLOTS"))} >= ports


def _is_following(node: RedisServer) -> bool:
    """Tell whether a server has what its primary has; one that is a primary itself has all there is."""
    return "master_link_status:down" not in _text(node.client, "INFO", "replication")


def _text(client: RedisClient, *words: str) -> str:
    return str(client.ask(*words))


def free_ports(count: int) -> list[int]:
    """Return several ports that nobody listens on now."""
    ports = set[int]()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
