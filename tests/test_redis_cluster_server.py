"""Clusters and replicas for tests are real: slots are shared, and a replica takes the place of a primary that died."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from postroom.testing.clients import RedisClient
from postroom.testing.cluster import RedisCluster, RedisGroup, RedisReplicated, ValkeyCluster, ValkeyReplicated
from postroom.testing.processes import is_gone
from postroom.testing.programs import REDIS, VALKEY, ServerError, ServerMissingError
from postroom.testing.servers import RedisServer, ValkeyServer
from tests.support.server_fixtures import skip_or_fail

from .worlds import REDIS_CLUSTERS, proof

CLUSTERS = [RedisCluster, proof(ValkeyCluster)]
PAIRS = [RedisReplicated, proof(ValkeyReplicated)]
SLOTS = 16_384


def name(kind: type[RedisGroup]) -> str:
    return kind.__name__


def started(kind: type[RedisGroup]) -> Iterator[RedisGroup]:
    try:
        group = kind().start()
    except ServerMissingError as error:
        skip_or_fail(error)
    yield group
    group.stop()


@pytest.fixture(scope="module", params=CLUSTERS, ids=name)
def shared(request: pytest.FixtureRequest) -> Iterator[RedisGroup]:
    yield from started(request.param)


@pytest.fixture
def cluster(shared: RedisCluster) -> RedisCluster:
    """A cluster in which all six servers run, whatever was done to it."""
    for node in shared.nodes:
        if not node.pid:
            shared.start_node(node)
    shared.wait_until_whole()
    return shared


@pytest.fixture(params=PAIRS, ids=name)
def pair(request: pytest.FixtureRequest) -> Iterator[RedisGroup]:
    yield from started(request.param)


class TestCluster:
    @pytest.mark.requirement("S0-31")
    async def test_is_one_for_a_client_of_the_library(self, cluster: RedisCluster) -> None:
        """It finds all servers by the address of one, on the loopback."""
        client = redis.asyncio.RedisCluster.from_url(cluster.dsn, retry=Retry(NoBackoff(), 0))
        async with client:
            for number in range(30):
                await client.set(f"key-{number}", number)
            found = [int(cast("bytes", await client.get(f"key-{number}"))) for number in range(30)]
            nodes = client.get_nodes()

        assert found == list(range(30))
        assert {(node.host, node.port) for node in nodes} == {("127.0.0.1", node.port) for node in cluster.nodes}

    def test_has_every_key_at_one_of_three_primaries(self, cluster: RedisCluster) -> None:
        primaries = {cluster.primary_of(f"key-{number}").port for number in range(60)}

        assert len(primaries) == 3

    def test_has_a_replica_of_each_primary(self, cluster: RedisCluster) -> None:
        primaries = {cluster.primary_of(f"key-{number}") for number in range(60)}

        replicas = {cluster.replica_of(primary) for primary in primaries}

        assert primaries | replicas == set(cluster.nodes)
        assert not primaries & replicas

    def test_has_a_key_where_it_says(self, cluster: RedisCluster) -> None:
        primary = cluster.primary_of("{shop}")
        keys = [f"key-{number}" for number in range(60)]
        foreign = next(key for key in keys if cluster.primary_of(key) is not primary)

        assert primary.client.ask("SET", "{shop}:orders", "1") == "OK"
        with pytest.raises(ServerError, match="MOVED"):
            primary.client.ask("SET", foreign, "1")

    @pytest.mark.requirement("S0-31")
    def test_goes_on_without_a_primary_that_was_killed_and_takes_it_back_as_a_replica(
        self, cluster: RedisCluster
    ) -> None:
        """What replicas had confirmed is still there."""
        key = "{shop}:orders"
        old = cluster.primary_of(key)
        new = cluster.replica_of(old)
        assert replicated(old, key, "42") == 1

        cluster.kill_node(old)
        was_whole = cluster.is_whole()
        cluster.wait_until_whole()

        assert not was_whole
        assert (cluster.primary_of(key), new.client.ask("GET", key)) == (new, "42")
        assert set(cluster.living) == set(cluster.nodes) - {old}

        cluster.start_node(old)

        assert (cluster.primary_of(key), cluster.replica_of(new)) == (new, old)

    def test_is_not_whole_before_all_have_noticed_that_a_replica_died(self, cluster: RedisCluster) -> None:
        cluster.kill_node(cluster.replica_of(cluster.primary_of("{shop}")))

        assert not cluster.is_whole()
        cluster.wait_until_whole()

    def test_has_no_server_that_follows_a_replica(self, cluster: RedisCluster) -> None:
        replica = cluster.replica_of(cluster.primary_of("{shop}"))

        with pytest.raises(ServerError, match="no server of the cluster follows"):
            cluster.replica_of(replica)

    def test_is_not_started_twice(self, cluster: RedisCluster) -> None:
        with pytest.raises(ServerError, match="already running"):
            cluster.start()


def replicated(primary: RedisServer, key: str, value: str) -> int:
    """Write to a server, and return how many replicas have it; only the connection that wrote can ask."""
    with redis.Redis(port=primary.port, single_connection_client=True) as client:
        client.set(key, value)
        return cast("int", client.wait(1, 5000))


class TestPair:
    def test_has_a_replica_with_the_same_data(self, pair: RedisReplicated) -> None:
        assert pair.is_connected()
        assert replicated(pair.primary, "order", "42") == 1
        assert pair.replica.client.ask("GET", "order") == "42"
        with pytest.raises(ServerError, match="READONLY"):
            pair.replica.client.ask("SET", "order", "43")

    def test_comes_together_again_after_kills_and_says_so_if_it_does_not(self, pair: RedisReplicated) -> None:
        pair.replica.kill9()
        usual, pair._patience = pair._patience, timedelta(milliseconds=50)  # noqa: SLF001
        with pytest.raises(ServerError, match=r"Replicated did not connect its replica within 0:00:00\.05"):
            pair.wait_until_connected()
        pair._patience = usual  # noqa: SLF001

        pair.replica.start()
        pair.wait_until_connected()
        after_the_first = replicated(pair.primary, "order", "42")
        pair.primary.kill9()
        pair.primary.start()
        pair.wait_until_connected()

        assert (after_the_first, replicated(pair.primary, "order", "43")) == (1, 1)

    def test_is_not_confirmed_by_a_replica_that_is_paused(self, pair: RedisReplicated) -> None:
        pair.replica.pause()
        with redis.Redis(port=pair.primary.port, single_connection_client=True) as client:
            client.set("order", "42")
            while_paused = client.wait(1, 100)
            pair.replica.resume()
            afterwards = client.wait(1, 5000)

        assert (while_paused, afterwards) == (0, 1)

    def test_ends_at_once_although_its_replica_hangs(self, pair: RedisReplicated) -> None:
        """A primary in its end waits for its replicas, and a replica that writes its first log does not end at all."""
        everyone = [node.pid for node in pair.nodes]
        homes = [cast("Path", node.home) for node in pair.nodes]
        pair.replica.pause()
        began = time.monotonic()

        pair.stop()
        pair.stop()

        assert time.monotonic() - began < 8
        assert all(map(is_gone, everyone))
        assert not any(home.exists() for home in homes)


class TestGroup:
    @pytest.mark.parametrize(
        ("kind", "program"),
        [
            (RedisCluster, RedisServer),
            (RedisReplicated, RedisServer),
            (ValkeyCluster, ValkeyServer),
            (ValkeyReplicated, ValkeyServer),
        ],
    )
    def test_is_of_one_kind_and_says_what_is_missing(
        self, kind: type[RedisGroup], program: type[RedisServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for programs in (REDIS, VALKEY):
            monkeypatch.setenv(programs.variable, str(tmp_path))
        group = kind()

        with pytest.raises(ServerMissingError, match=f"{program.programs.title} is missing"):
            group.start()

        assert kind.kind is program
        assert group.nodes == ()

    def test_stops_all_servers_if_one_cannot_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        group = Half()

        with pytest.raises(ServerError, match="is not running"):
            group.start()

        assert group.first.pid == 0
        assert group.first.home is None

    def test_takes_other_ports_if_somebody_was_faster(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, Late(taken.getsockname()[1]) as group:
            assert group.is_connected()
            assert group.tries == 2


class Late(ValkeyReplicated):
    """A pair whose first port is taken when it is used."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._taken = port
        self.tries = 0

    def _prepared(self) -> Sequence[RedisServer]:
        primary, replica = super()._prepared()
        self.tries += 1
        if self.tries == 1:
            primary.port = self._taken
        return primary, replica


class Half(ValkeyReplicated):
    """A pair whose replica has a setting that no server knows."""

    def _prepared(self) -> Sequence[RedisServer]:
        self.first = ValkeyServer()
        return [self.first, ValkeyServer(settings={"appendfsync": "sometimes"})]


@pytest.mark.parametrize("fixture", REDIS_CLUSTERS)
def test_the_shared_cluster_serves_all_slots(request: pytest.FixtureRequest, fixture: str) -> None:
    client = cast("RedisClient", request.getfixturevalue(fixture))

    told = str(client.ask("CLUSTER", "INFO"))

    assert "cluster_state:ok" in told
    assert f"cluster_slots_ok:{SLOTS}" in told
    assert "cluster_known_nodes:6" in told


@pytest.mark.parametrize(
    ("fixture", "kind"),
    [
        ("private_redis_cluster", RedisCluster),
        ("private_redis_replicated", RedisReplicated),
        ("private_valkey_replicated", ValkeyReplicated),
    ],
)
def test_private_groups_are_of_the_kind_they_are_named_after(
    request: pytest.FixtureRequest, fixture: str, kind: type[RedisGroup]
) -> None:
    group = cast("RedisGroup", request.getfixturevalue(fixture))

    assert type(group) is kind
    assert all(node.answers() for node in group.nodes)
