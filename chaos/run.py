"""One run: faults under load, then peace until everything is settled, then the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from postroom.store import Store
from postroom.stores import SQLStore
from postroom.testing.faults import FaultProxy
from postroom.testing.pgbouncer import PgBouncer
from postroom.testing.programs import REDIS, VALKEY
from postroom.testing.servers import (
    MariaDBServer,
    PostgresServer,
    RedisServer,
    Server,
    ServerMissingError,
    SqlServer,
    ValkeyServer,
)

from .audit import Truth, truth_of
from .crew import Crew
from .dispatcher import MAX_ATTEMPTS
from .evidence import gather
from .groups import GROUPS, HANDLINGS, TOPICS
from .history import History, read
from .log import WHOLE_LOG
from .nemesis import SQLITE_FILE, Nemesis, plan
from .report import Verdict, judge, write
from .stores import delivering_store
from .worker import Setting

__all__ = ["Options", "run", "server_of"]

ServerT = TypeVar("ServerT", bound=Server)

_SERVERS: Final[dict[str, type[SqlServer]]] = {
    "postgres": PostgresServer,
    "pgbouncer": PostgresServer,
    "mariadb": MariaDBServer,
}
_CONSUMERS: Final = ("c0", "c1", "c2", "c3")
_WORKERS: Final = ("d0", "d1", "d2", "p0", "p1", *_CONSUMERS)
#: Those that use psycopg on PostgreSQL, where the others use asyncpg.
_PSYCOPG: Final = ("d1", "c2")
#: How many sessions PgBouncer shares among all workers; with few, those of paused workers starve the others.
_POOL_SIZE: Final = 10
#: How long nothing may move before what is left counts as stuck.
_PATIENCE: Final = 15.0
_LOOPBACK: Final = "127.0.0.1"
_ALARMS: Final = ("Traceback", "never retrieved", "never awaited", "Exception ignored", "Error:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is made of; with the same seed it meets the same faults."""

    store: str
    seconds: float
    seed: int
    folder: str
    variant: str | None = None

    @property
    def on_dead(self) -> str:
        """Both policies are exercised, by turns."""
        return "block" if self.seed % 2 else "skip"


async def run(options: Options) -> Verdict:
    """Run chaos and return the verdict; the folder holds all evidence."""
    folder = Path(options.folder)
    async with _database(options) as (url, servers):
        truth = truth_of(options.store, url)
        store = delivering_store(options.store, url)
        if isinstance(store, SQLStore):
            await store.apply_schema()
        await store.close()
        truth.install()
        history = History(folder, "nemesis")
        crew = Crew(folder, history, options.variant)
        try:
            undrained, complaints = await _phases(options, crew, truth, history, servers)
            if mended := await _mended(store):
                complaints.append(f"{mended} indexes did not agree with their messages")
        finally:
            await crew.abandon()
            for name, server in servers.items():
                (folder / f"{name}.log").write_text(server.logs())
        evidence = gather(
            read(folder),
            rows=truth.rows(),
            changes=truth.changes(),
            business=frozenset(truth.business()),
            effects=truth.effects(),
            marks=frozenset(truth.marks()),
            letters=truth.letters(),
            groups=tuple(GROUPS),
            topics=TOPICS,
            handlings=HANDLINGS,
            max_attempts=MAX_ATTEMPTS,
            on_dead=options.on_dead,
            ordered=store.features.ordered,
            dedupes=store.features.dedupes,
            complaints=complaints,
            undrained=undrained,
        )
        version = truth.version()
        truth.close()
    verdict = judge(evidence, store=options.store, seed=options.seed, seconds=options.seconds, version=version)
    write(folder, verdict, evidence)
    return verdict


async def _phases(
    options: Options, crew: Crew, truth: Truth, history: History, servers: Mapping[str, Server]
) -> tuple[int, list[str]]:
    """Have chaos, then heal and drain, then stop; return what was left, and complaints."""
    faults = plan(options.seed, options.seconds, options.store, _WORKERS)
    told = {**asdict(options), "on_dead": options.on_dead, "commit": _commit(), "python": sys.version.split()[0]}
    (Path(options.folder) / "options.json").write_text(json.dumps(told, indent=2) + "\n")
    (Path(options.folder) / "schedule.json").write_text(json.dumps([asdict(fault) for fault in faults]) + "\n")
    async with _proxies(servers, _port_of(options)) as proxies:
        for name in ("receiver", *_WORKERS):
            crew.hire(_setting(options, name, truth.url, proxies))
        nemesis = Nemesis(
            faults,
            crew,
            history,
            folder=Path(options.folder),
            proxies=proxies,
            servers=servers,
        )
        async with asyncio.timeout(120):
            await crew.assemble()
        async with asyncio.timeout(options.seconds + 120):
            await asyncio.gather(nemesis.rage(options.seconds), _progress(options, truth))
        await crew.dismiss("p")
        undrained = await _drain(options, truth)
        left = [f"a transaction was left open: {one}" for one in await _lasting(truth.idle_transactions)]
        await crew.dismiss("c")
        await crew.dismiss("d")
        if (pooler := servers.get("pooler")) is not None:
            await asyncio.to_thread(pooler.stop)  # it keeps sessions for clients that may come
        left += [f"a session was left: {one}" for one in await _lasting(truth.sessions)]
        left += truth.oddities()
    return undrained, [*crew.failures, *crew.errors(lambda line: any(alarm in line for alarm in _ALARMS)), *left]


async def _progress(options: Options, truth: Truth) -> None:
    """Say now and then how it goes; faults may end earlier than the time does."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < options.seconds:
        await asyncio.sleep(min(5.0, options.seconds - passed))
        try:
            waiting, done = await asyncio.to_thread(truth.unsettled)
            state = f"{done} messages settled, {waiting} waiting"
        except Exception:  # noqa: BLE001 -- whatever the driver says of a server that is down
            state = "the database is away"
        print(f"{time.monotonic() - began:5.0f} of {options.seconds:.0f} s: {state}", file=sys.stderr, flush=True)


async def _drain(options: Options, truth: Truth) -> int:
    """Wait until nothing waits any more, in the store or at the broker, or nothing moves; return how much is left."""
    left, moved = await _left(options, truth), time.monotonic()
    while left[0] and time.monotonic() - moved < _PATIENCE:
        await asyncio.sleep(0.25)
        now = await _left(options, truth)
        if now != left:
            left, moved = now, time.monotonic()
    return left[0]


async def _left(options: Options, truth: Truth) -> tuple[int, int]:
    """Return how much waits and how much is done; the broker first, since what it hands out leads to more messages."""
    try:
        reader, writer = await asyncio.open_connection(_LOOPBACK, _port_of(options))
        try:
            writer.write(b'{"count": true}\n')
            at_broker: list[int] = json.loads(await reader.readline() or b"[1, 0]")
        finally:
            writer.close()
    except OSError:
        at_broker = [1, 0]  # it is being started again, so that nobody knows
    in_store = await asyncio.to_thread(truth.unsettled)
    return at_broker[0] + in_store[0], at_broker[1] + in_store[1]


async def _lasting(ask: Callable[[], list[str]]) -> list[str]:
    """Return what there is when there should be nothing; a server needs a moment to notice that a client is gone."""
    deadline = time.monotonic() + _PATIENCE
    left = await asyncio.to_thread(ask)
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.25)
        left = await asyncio.to_thread(ask)
    return left


def _setting(options: Options, name: str, url: str, proxies: Mapping[str, FaultProxy]) -> Setting:
    network, link = proxies.get(f"{name} network"), proxies.get(f"{name} link")
    if network is not None:
        url = urlsplit(url)._replace(netloc=_netloc(url, network.port)).geturl()
    if url.startswith("postgresql:") and name in _PSYCOPG:
        url = url.replace("postgresql://", "postgresql+psycopg://")
    return Setting(
        name=name,
        store=options.store,
        url=url,
        folder=options.folder,
        port=_port_of(options) if link is None else link.port,
        seed=options.seed,
        on_dead=options.on_dead,
    )


_PORTS: Final[dict[str, int]] = {}


def _port_of(options: Options) -> int:
    """Return the receiver's port: free when first asked for, and below those of outgoing connections."""
    while options.folder not in _PORTS:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_LOOPBACK, port))
            _PORTS[options.folder] = port
    return _PORTS[options.folder]


def _netloc(url: str, port: int) -> str:
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    return f"{user}{at}{_LOOPBACK}:{port}"


@contextlib.asynccontextmanager
async def _database(options: Options) -> AsyncIterator[tuple[str, Mapping[str, Server]]]:
    """Yield the address of the database, and its servers by what faults call them."""
    if options.store == "sqlite":
        yield f"sqlite:///{options.folder}/{SQLITE_FILE}", {}
        return
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(_running(server_of(options.store)))
        servers = {"server": server}
        url = server.dsn
        if isinstance(server, SqlServer):
            url = await asyncio.to_thread(server.create_database, "chaos")
        if options.store == "pgbouncer":
            servers["pooler"] = await stack.enter_async_context(_running(PgBouncer(url, pool_size=_POOL_SIZE)))
        yield url, servers


@contextlib.asynccontextmanager
async def _running(server: ServerT) -> AsyncIterator[ServerT]:
    await asyncio.to_thread(server.start)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


def server_of(store: str) -> Server:
    """Return the server of a store, not yet started; for Redis that itself if it is there, or else Valkey.

    Raises:
        ServerMissingError: There is neither.
    """
    if store in _SERVERS:
        return _SERVERS[store]()
    try:
        REDIS.find(*RedisServer.names)
    except ServerMissingError:
        VALKEY.find(*ValkeyServer.names)
        return ValkeyServer(settings=WHOLE_LOG)
    return RedisServer(settings=WHOLE_LOG)


async def _mended(store: Store) -> int:
    """Return how much of a store had to be repaired, which should never be anything."""
    repair: Callable[[], Awaitable[int]] | None = getattr(store, "repair", None)
    if repair is None:
        return 0
    try:
        return await repair()
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def _proxies(servers: Mapping[str, Server], receiver: int) -> AsyncIterator[dict[str, FaultProxy]]:
    """Yield a proxy to the database for each worker that has a network, and one to the broker for each consumer."""
    ports = {f"{name} link": receiver for name in _CONSUMERS}
    if servers:
        server = servers.get("pooler", servers["server"])
        ports.update({f"{name} network": server.port for name in _WORKERS})
    async with contextlib.AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(FaultProxy(_LOOPBACK, port)) for name, port in ports.items()}


def _commit() -> str:
    """Return which version of the source this is, if git can tell."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607 -- whatever git there is
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()
