"""What a URL says of where messages are: on one server, in a cluster, or with whom Sentinel says."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from ...errors import ConfigurationError

__all__ = ["connect", "hang_up", "place"]

# The library's own types name neither all options nor both kinds of clients.
Foreign = Any

_CLUSTER: Final = "+cluster"
_SENTINEL: Final = "+sentinel"
_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379


class _Address(NamedTuple):
    """A URL, of which the library understands the part for one server."""

    scheme: str
    hosts: Sequence[tuple[str, int]]
    #: What follows the hosts: a database, or a service and perhaps a database.
    path: str
    #: For the library: one server, with user, password and options.
    plain: str


def connect(url: str, *, timeout: timedelta) -> Foreign:
    """Return a client for a URL, which repeats nothing by itself; no connection is made.

    Raises:
        ConfigurationError: The URL does not say where the servers are.
    """
    seconds = timeout.total_seconds()
    options: dict[str, Foreign] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": seconds,
        "socket_timeout": None,  # every call has a deadline of its own, and one that listens waits for long
        "decode_responses": False,
    }
    scheme = url.partition(":")[0]
    if scheme.endswith(_CLUSTER):
        # Only what the client itself has noticed makes it look for another server, so it waits for less than we do.
        brief = {"socket_connect_timeout": seconds / 2, "socket_timeout": seconds / 2}
        return _cluster(_read(url, _CLUSTER, _PORT), options | brief)
    if scheme.endswith(_SENTINEL):
        return _service(_read(url, _SENTINEL, _SENTINEL_PORT), options, seconds)
    return redis.asyncio.Redis.from_url(url, **options)  # pyright: ignore[reportUnknownMemberType] -- typed in part


def _read(url: str, kind: str, port: int) -> _Address:
    parts = urlsplit(url)
    scheme = parts.scheme.removesuffix(kind)
    login, at, hosts = parts.netloc.rpartition("@")
    return _Address(
        scheme=scheme,
        hosts=[_host(host, port) for host in hosts.split(",")],
        path=parts.path.strip("/"),
        plain=f"{scheme}://{login}{at}localhost?{parts.query}",
    )


def _host(written: str, port: int) -> tuple[str, int]:
    try:
        url = urlsplit(f"//{written}")
        return unquote(url.hostname or "localhost"), url.port or port
    except ValueError:
        raise ConfigurationError(f"{written!r} is no host and port; write host:port, several with commas") from None


def _wanted(address: _Address, options: dict[str, Foreign]) -> dict[str, Foreign]:
    """Return all options of connections: ours, and those of the URL, which win as they do with one server."""
    wanted: dict[str, Foreign] = {**options, **parse_url(address.plain)}
    del wanted["host"]
    if wanted.pop("connection_class", None) is SSLConnection:
        wanted["ssl"] = True
    return wanted


def _cluster(address: _Address, options: dict[str, Foreign]) -> Foreign:
    if address.path not in {"", "0"}:
        raise ConfigurationError(f"a cluster has one database, which is 0; leave out /{address.path}")
    nodes = [ClusterNode(host, port) for host, port in address.hosts]
    return redis.asyncio.RedisCluster(
        startup_nodes=nodes,
        # Slots of others may be down: whether ours are is told when they are asked.
        require_full_coverage=False,
        **_wanted(address, options),
    )


def _service(address: _Address, options: dict[str, Foreign], seconds: float) -> Foreign:
    service, _, database = address.path.partition("/")
    if not service or not (database or "0").isdigit():
        raise ConfigurationError("write redis+sentinel://host:port,host:port/service, and /1 after it for database 1")
    # A Sentinel that hangs must leave time for the others.
    brief = seconds / (len(address.hosts) + 1)
    asking = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": brief, "socket_timeout": brief}
    wanted = {**_wanted(address, options), "db": int(database or 0)}
    sentinel: Foreign = Sentinel(address.hosts, sentinel_kwargs=asking, **wanted)  # type: ignore[no-untyped-call]
    return sentinel.master_for(unquote(service))


def place(server: Foreign) -> str:
    """Return what errors call a server: its address without user and password, if it is known."""
    if not isinstance(server, str):
        return "redis"
    url = urlsplit(server)
    hosts = url.netloc.rpartition("@")[2] or "localhost"
    is_plain = "," not in hosts and ":" not in hosts.rpartition("]")[2]
    return f"{url.scheme}://{hosts}:{_PORT}" if is_plain else f"{url.scheme}://{hosts}"


async def hang_up(client: Foreign) -> None:
    """Close a client that was made here, and those that ask Sentinel for it."""
    await client.aclose()
    sentinel: Foreign = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for one in sentinel.sentinels if sentinel is not None else ():
        await one.aclose()
