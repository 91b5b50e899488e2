"""A store opens only on a server that keeps what the profile promises, and nothing is confirmed that is not so."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

import pytest
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from postroom.errors import ConfigurationError, ReadOnlyStoreError, StoreAuthenticationError, StoreUnavailableError
from postroom.stores.redis.client import Client
from postroom.stores.redis.profile import Checked, Profile, check_profile, confirm
from postroom.testing.clients import RedisClient
from postroom.testing.cluster import RedisCluster, RedisReplicated, ValkeyReplicated
from postroom.testing.programs import ServerMissingError
from postroom.testing.servers import RedisServer, ValkeyServer
from postroom.testing.waiting import until
from tests.support.server_fixtures import skip_or_fail

from .worlds import REDIS_CLUSTERS, proof

PREFIX = "postroom_outbox:{shop}"
SHORT = timedelta(milliseconds=200)
#: What a disk may take that has much else to do.
LONG = timedelta(seconds=9)
USUAL = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no_appendfsync_on_rewrite": "no",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
    "min_replicas_to_write": "0",
}
PROFILES: list[Profile] = ["durable", "replicated", "volatile"]

Connect = Callable[..., Client]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connects to a server, and closes the connections after the test."""
    clients: list[Client] = []

    def connect(server: Any, timeout: timedelta = timedelta(seconds=10)) -> Client:  # noqa: ANN401
        clients.append(Client(server, timeout=timeout))
        return clients[-1]

    yield connect
    for client in clients:
        await client.foreign.aclose()


@pytest.fixture(scope="module", params=[RedisReplicated, proof(ValkeyReplicated)], ids=["redis", "valkey"])
def started(request: pytest.FixtureRequest) -> Iterator[RedisReplicated]:
    try:
        with cast("type[RedisReplicated]", request.param)() as pair:
            yield pair
    except ServerMissingError as error:
        skip_or_fail(error)


@pytest.fixture
def pair(started: RedisReplicated) -> RedisReplicated:
    """A primary and its replica as they were in the beginning, whatever was done to them."""
    for server in started.nodes:
        if server.pid:
            server.resume()
        else:
            server.start()
        configure(server, **USUAL)
    started.replica.client.ask("REPLICAOF", "127.0.0.1", started.primary.port)
    started.primary.client.ask("ACL", "DELUSER", "guest")
    started.primary.client.ask("FLUSHALL")
    started.wait_until_connected()
    return started


@pytest.fixture
def server(pair: RedisReplicated) -> RedisServer:
    return pair.primary


def configure(server: RedisServer, **settings: str) -> None:
    for name, value in settings.items():
        server.client.ask("CONFIG", "SET", name.replace("_", "-"), value)


def login(server: RedisServer, *rules: str) -> str:
    """Return the URL of a user who may do everything but what rules forbid."""
    server.client.ask("ACL", "SETUSER", "guest", "on", ">secret", "~*", "&*", "+@all", *rules)
    return server.dsn.replace("://", "://guest:secret@")


def is_waiting(server: RedisServer) -> bool:
    """Tell whether a server has let somebody wait for a second; one that counts only what he has written does not."""
    return bool(re.search(r"idle=[1-9].* cmd=wait ", str(server.client.ask("CLIENT", "LIST"))))


async def check(client: Client, profile: Profile, **options: int) -> Checked:
    return await check_profile(client, profile, prefix=PREFIX, **options)


async def refusal(client: Client, profile: Profile) -> str:
    with pytest.raises(ConfigurationError) as caught:
        await check(client, profile)
    return str(caught.value)


class TestDurable:
    @pytest.mark.requirement("S3-29")
    async def test_accepts_a_server_that_writes_at_once_and_evicts_nothing(
        self, server: RedisServer, connect: Connect
    ) -> None:
        """Its answer to a commit says enough, so nothing is waited for."""
        checked = await check(connect(server.dsn), "durable")

        assert (checked.profile, checked.waits, checked.unseen) == ("durable", (), ())
        assert checked.run

    @pytest.mark.requirement("S3-29")
    async def test_refuses_a_server_without_a_log(self, server: RedisServer, connect: Connect) -> None:
        """All messages would be lost with the server."""
        configure(server, appendonly="no")

        said = await refusal(connect(server.dsn), "durable")

        assert "appendonly is no and must be yes" in said
        assert 'profile="volatile"' in said

    @pytest.mark.requirement("S3-29")
    async def test_refuses_one_that_writes_every_second_and_cannot_be_waited_for(
        self, private_redis: RedisServer, connect: Connect
    ) -> None:
        """A kill of the server alone would lose what was answered to."""
        configure(private_redis, appendfsync="everysec")

        said = await refusal(connect(private_redis.dsn), "durable")

        assert "appendfsync is everysec and must be always, or everysec on a server that has WAITAOF" in said
        assert 'profile="volatile"' in said

    async def test_waits_for_one_that_writes_every_second(self, private_valkey: ValkeyServer, connect: Connect) -> None:
        configure(private_valkey, appendfsync="everysec")
        client = connect(private_valkey.dsn)

        checked = await check(client, "durable")
        await client.foreign.set("order", "42")
        await confirm(client, checked, prefix=PREFIX, patience=LONG)
        private_valkey.kill9()
        private_valkey.start()

        assert checked.waits == ("WAITAOF",)
        assert private_valkey.client.ask("GET", "order") == "42"

    async def test_refuses_one_that_leaves_writing_to_the_system(self, server: RedisServer, connect: Connect) -> None:
        """It never tells when something is on the disk, so waiting for it would be in vain."""
        configure(server, appendfsync="no")

        assert "appendfsync is no and must be always" in await refusal(connect(server.dsn), "durable")

    async def test_refuses_one_that_writes_at_once_except_during_a_rewrite(
        self, private_redis: RedisServer, connect: Connect
    ) -> None:
        configure(private_redis, no_appendfsync_on_rewrite="yes")

        said = await refusal(connect(private_redis.dsn), "durable")

        assert "no-appendfsync-on-rewrite is yes and must be no" in said

    async def test_waits_for_one_that_writes_at_once_except_during_a_rewrite(
        self, private_valkey: ValkeyServer, connect: Connect
    ) -> None:
        configure(private_valkey, no_appendfsync_on_rewrite="yes")

        assert (await check(connect(private_valkey.dsn), "durable")).waits == ("WAITAOF",)

    async def test_tells_everything_that_is_wrong_at_once(self, server: RedisServer, connect: Connect) -> None:
        configure(server, appendonly="no", maxmemory="100mb", maxmemory_policy="allkeys-lru")

        said = await refusal(connect(server.dsn), "durable")

        assert "appendonly is no" in said
        assert "maxmemory-policy is allkeys-lru" in said
        assert f"127.0.0.1:{server.port}" in said


@pytest.mark.parametrize("profile", PROFILES)
class TestEveryProfile:
    @pytest.mark.requirement("S3-29")
    @pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
    async def test_refuses_a_server_that_evicts(
        self, server: RedisServer, connect: Connect, profile: Profile, policy: str
    ) -> None:
        """Messages would vanish when memory is full."""
        configure(server, maxmemory="100mb", maxmemory_policy=policy)

        said = await refusal(connect(server.dsn), profile)

        assert f"maxmemory-policy is {policy} and must be noeviction" in said
        assert "maxmemory to 0" in said

    async def test_does_not_take_a_wrong_password_for_a_command_that_is_forbidden(
        self, private_valkey: ValkeyServer, connect: Connect, profile: Profile
    ) -> None:
        client = connect(login(private_valkey).replace("secret", "guess"))

        with pytest.raises(StoreAuthenticationError):
            await check(client, profile)

    async def test_does_not_take_a_server_that_is_down_for_one_that_will_not_tell(
        self, private_valkey: ValkeyServer, connect: Connect, profile: Profile
    ) -> None:
        private_valkey.kill9()

        with pytest.raises(StoreUnavailableError):
            await check(connect(private_valkey.dsn), profile)


async def test_a_replica_is_refused_whatever_the_profile(pair: RedisReplicated, connect: Connect) -> None:
    client = connect(pair.replica.dsn)

    for profile in PROFILES:
        with pytest.raises(ReadOnlyStoreError, match="is a replica; connect to the primary"):
            await check(client, profile)


async def test_an_eviction_policy_that_never_comes_into_play_is_accepted(
    pair: RedisReplicated, connect: Connect
) -> None:
    configure(pair.primary, maxmemory="0", maxmemory_policy="allkeys-lru")
    client = connect(pair.dsn)

    checked = [await check(client, profile) for profile in PROFILES]

    assert [one.profile for one in checked] == PROFILES


class TestVolatile:
    async def test_accepts_a_server_that_keeps_nothing(self, server: RedisServer, connect: Connect) -> None:
        configure(server, appendonly="no")
        client = connect(server.dsn)

        checked = await check(client, "volatile")
        await confirm(client, checked, prefix=PREFIX)

        assert (checked.waits, checked.unseen) == ((), ())
        assert server.client.ask("DBSIZE") == 0


class TestReplicated:
    @pytest.mark.requirement("S3-29")
    async def test_refuses_a_server_without_a_replica(self, redis_like_url: str, connect: Connect) -> None:
        """A promise of a second copy needs a second server."""
        said = await refusal(connect(redis_like_url), "replicated")

        assert "connected replicas is 0 and must be at least 1" in said
        assert 'profile="durable"' in said

    async def test_does_not_count_a_replica_that_is_still_being_sent_the_data(
        self, private_valkey: ValkeyServer, connect: Connect
    ) -> None:
        configure(private_valkey, repl_diskless_sync_delay="60")
        with socket.create_connection(("127.0.0.1", private_valkey.port)) as newcomer:
            newcomer.sendall(b"REPLCONF capa eof\r\n")
            newcomer.recv(100)
            newcomer.sendall(b"PSYNC ? -1\r\n")
            await until(lambda: "slave0:" in str(private_valkey.client.ask("INFO", "replication")), "it to be known")

            assert "connected replicas is 0" in await refusal(connect(private_valkey.dsn), "replicated")

    async def test_refuses_fewer_replicas_than_asked_for(self, pair: RedisReplicated, connect: Connect) -> None:
        with pytest.raises(ConfigurationError, match="connected replicas is 1 and must be at least 2"):
            await check(connect(pair.dsn), "replicated", replicas=2)

    @pytest.mark.requirement("S3-29")
    async def test_refuses_a_server_without_a_log(self, server: RedisServer, connect: Connect) -> None:
        """Started again without its data it would have its replicas forget theirs."""
        configure(server, appendonly="no")

        assert "appendonly is no and must be yes" in await refusal(connect(server.dsn), "replicated")

    async def test_waits_for_the_disk_as_well_where_that_is_not_written_at_once(
        self, private_valkey_replicated: RedisReplicated, connect: Connect
    ) -> None:
        """Both have to say that they have it; the disk of a replica need not."""
        pair = private_valkey_replicated
        configure(pair.primary, appendfsync="everysec")
        client = connect(pair.dsn)

        checked = await check(client, "replicated")
        await confirm(client, checked, prefix=PREFIX, patience=LONG)
        configure(pair.primary, appendfsync="no")

        assert checked.waits == ("WAITAOF", "WAIT")
        with pytest.raises(StoreUnavailableError, match="0 of 1 disks confirmed in time"):
            await confirm(client, checked, prefix=PREFIX, patience=SHORT)

    async def test_is_confirmed_once_the_replica_has_everything(self, pair: RedisReplicated, connect: Connect) -> None:
        client = connect(pair.dsn)
        checked = await check(client, "replicated")

        await client.foreign.set("order", "42")
        await confirm(client, checked, prefix=PREFIX)
        pair.primary.kill9()

        assert (checked.waits, checked.replicas) == (("WAIT",), 1)
        assert pair.replica.client.ask("GET", "order") == "42"

    async def test_is_not_confirmed_while_the_replica_hangs(self, pair: RedisReplicated, connect: Connect) -> None:
        """Also not over a connection that has written nothing, to which Valkey says that all is well."""
        client = connect(pair.dsn)
        async with client.foreign.client() as other:  # so that the pool has to make another connection
            await other.ping()
            checked = await check(client, "replicated")
            pair.replica.pause()
            await other.set("order", "42")

            with pytest.raises(
                StoreUnavailableError, match=r"0 of 1 replicas confirmed in time .* may have been stored"
            ):
                await confirm(client, checked, prefix=PREFIX, patience=SHORT)

        pair.replica.resume()
        await confirm(client, checked, prefix=PREFIX)

    async def test_is_not_confirmed_where_the_server_refuses_to_write_without_replicas(
        self, pair: RedisReplicated, connect: Connect
    ) -> None:
        client = connect(pair.dsn)
        checked = await check(client, "replicated")
        configure(pair.primary, min_replicas_to_write="1")
        pair.replica.kill9()
        await until(lambda: "connected_slaves:0" in str(pair.primary.client.ask("INFO", "replication")), "the loss")

        with pytest.raises(StoreUnavailableError, match=r"NOREPLICAS.*may have been stored"):
            await confirm(client, checked, prefix=PREFIX, patience=SHORT)

    async def test_is_satisfied_by_a_setting_where_waiting_is_forbidden(
        self, pair: RedisReplicated, connect: Connect
    ) -> None:
        client = connect(login(pair.primary, "-wait"))

        said = await refusal(client, "replicated")
        configure(pair.primary, min_replicas_to_write="1")
        checked = await check(client, "replicated")

        assert "min-replicas-to-write is 0 and must be at least 1 (set it, or let the user run WAIT" in said
        assert checked.waits == ()


class TestServerThatDoesNotTell:
    async def test_is_not_one_that_is_busy(self, server: RedisServer, connect: Connect) -> None:
        """A server that answers to nothing for a while may still be set up in a wrong way."""
        configure(server, busy_reply_threshold="1")
        client, other = connect(server.dsn), connect(server.dsn)
        script = asyncio.create_task(other.foreign.eval("while true do end", 0))
        await until(lambda: not server.answers(), "the script to keep the server busy")

        try:
            with pytest.raises(StoreUnavailableError, match="BUSY"):
                await check(client, "durable")
        finally:
            server.client.ask("SCRIPT", "KILL")

        with pytest.raises(redis.exceptions.ResponseError, match="killed"):
            await script

    @pytest.mark.requirement("S3-29")
    async def test_is_judged_by_what_info_says(
        self, server: RedisServer, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Managed services forbid CONFIG; what is wrong all the same is refused."""
        configure(server, appendonly="no", maxmemory="100mb", maxmemory_policy="allkeys-lru")
        client = connect(login(server, "-config"))

        said = await refusal(client, "durable")

        assert "appendonly is no" in said
        assert "maxmemory-policy is allkeys-lru" in said

    @pytest.mark.requirement("S3-29")
    async def test_is_taken_on_trust_with_a_warning(
        self, private_redis: RedisServer, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        """When writing happens is nowhere in INFO."""
        checked = await check(connect(login(private_redis, "-config")), "durable")

        [record] = [record for record in caplog.records if record.name == "postroom"]
        assert record.levelno == logging.WARNING
        assert "CONFIG GET" in record.getMessage()
        assert record.getMessage().endswith("unchecked: appendfsync")
        assert record.__dict__["postroom_unseen"] == checked.unseen == ("appendfsync",)
        assert not any("secret" in str(value) for value in record.__dict__.values())

    async def test_is_waited_for_where_that_is_possible(self, private_valkey: ValkeyServer, connect: Connect) -> None:
        """Then nothing has to be taken on trust."""
        client = connect(login(private_valkey, "-config"))

        checked = await check(client, "durable")
        await confirm(client, checked, prefix=PREFIX)

        assert (checked.waits, checked.unseen) == (("WAITAOF",), ())

    async def test_shows_whether_it_has_a_log_even_if_nothing_may_be_asked(
        self, private_valkey: ValkeyServer, connect: Connect
    ) -> None:
        client = connect(login(private_valkey, "-config", "-info"))

        checked = await check(client, "durable")
        await confirm(client, checked, prefix=PREFIX)
        configure(private_valkey, appendonly="no")

        assert checked.unseen == ("role", "maxmemory-policy", "run")
        assert "appendonly is no" in await refusal(client, "durable")

    async def test_shows_how_many_replicas_it_has_even_if_nothing_may_be_asked(
        self, pair: RedisReplicated, connect: Connect
    ) -> None:
        client = connect(login(pair.primary, "-config", "-info"))

        checked = await check(client, "replicated")

        assert {"role", "maxmemory-policy", "run"} <= set(checked.unseen)
        assert "connected replicas" not in checked.unseen
        with pytest.raises(ConfigurationError, match="connected replicas is 1"):
            await check(client, "replicated", replicas=2)

    async def test_has_a_slow_replica_counted_even_if_nothing_may_be_asked(
        self, pair: RedisReplicated, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A disk that is slow is no reason to refuse to start."""
        monkeypatch.setattr("postroom.stores.redis.profile.PATIENCE", LONG)
        client = connect(login(pair.primary, "-config", "-info"))
        pair.replica.pause()
        pair.primary.client.ask("SET", "order", "42")

        checking = asyncio.create_task(check(client, "replicated"))
        await until(lambda: checking.done() or is_waiting(pair.primary), "a second of waiting")
        pair.replica.resume()

        assert "WAIT" in (await checking).waits

    async def test_is_warned_about_with_every_profile(
        self, private_valkey: ValkeyServer, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        await check(connect(login(private_valkey, "-config")), "volatile")

        assert [record.levelname for record in caplog.records if record.name == "postroom"] == ["WARNING"]


class TestConfirmation:
    async def test_is_refused_to_a_server_that_was_started_again(
        self, private_valkey: ValkeyServer, connect: Connect
    ) -> None:
        """Between the commit and the question it may have lost what it is asked about."""
        configure(private_valkey, appendfsync="everysec")
        client = connect(private_valkey.dsn)
        checked = await check(client, "durable")
        private_valkey.restart()

        with pytest.raises(StoreUnavailableError, match="was started again; it may have been stored"):
            await confirm(connect(private_valkey.dsn), checked, prefix=PREFIX)

    async def test_is_refused_to_a_replica_that_took_over(self, pair: RedisReplicated, connect: Connect) -> None:
        """It may never have got what the old primary answered to."""
        checked = await check(connect(pair.dsn), "replicated")
        pair.primary.kill9()
        pair.replica.client.ask("REPLICAOF", "NO", "ONE")

        with pytest.raises(StoreUnavailableError, match="another server"):
            await confirm(connect(pair.replica.dsn), checked, prefix=PREFIX, patience=SHORT)

    @pytest.mark.requirement("S0-36")
    async def test_that_does_not_come_in_time_leaves_it_open(
        self, private_valkey: ValkeyServer, connect: Connect
    ) -> None:
        """A server that hangs is an error with a deadline, never an ack."""
        configure(private_valkey, appendfsync="everysec")
        client = connect(private_valkey.dsn)
        checked = await check(client, "durable")
        client._timeout = 0.5  # noqa: SLF001 -- what comes before may take longer
        private_valkey.pause()

        with pytest.raises(StoreUnavailableError, match=r"did not answer within 0\.5 s; it may have been stored"):
            await confirm(client, checked, prefix=PREFIX)

    async def test_that_is_lost_on_the_way_leaves_it_open(self, private_valkey: ValkeyServer, connect: Connect) -> None:
        configure(private_valkey, appendfsync="everysec")
        client = connect(private_valkey.dsn)
        checked = await check(client, "durable")
        private_valkey.kill9()

        with pytest.raises(StoreUnavailableError, match="it may have been stored"):
            await confirm(client, checked, prefix=PREFIX)

    async def test_leaves_nothing_behind_for_long(self, private_valkey: ValkeyServer, connect: Connect) -> None:
        configure(private_valkey, appendfsync="everysec")
        client = connect(private_valkey.dsn)
        await confirm(client, await check(client, "durable"), prefix=PREFIX, patience=LONG)

        [left] = cast("list[str]", private_valkey.client.ask("KEYS", "*"))

        assert left.startswith(PREFIX)
        assert 0 < cast("int", private_valkey.client.ask("PTTL", left)) <= 60_000


class TestInACluster:
    @pytest.mark.requirement("S0-31")
    @pytest.mark.parametrize("kind", REDIS_CLUSTERS)
    async def test_the_server_that_has_the_keys_is_asked(
        self, request: pytest.FixtureRequest, kind: str, connect: Connect
    ) -> None:
        """Another one may be set up in another way."""
        client = connect(clustered(request.getfixturevalue(kind)))
        runs = set[str]()
        for namespace in ("a", "b", "c", "d", "e", "f", "g"):
            prefix = f"{uuid4()}:{{{namespace}}}"

            checked = await check_profile(client, "replicated", prefix=prefix)
            await confirm(client, checked, prefix=prefix)

            runs.add(checked.run)
        assert len(runs) == 3

    async def test_is_not_confirmed_while_the_replica_of_the_keys_hangs(
        self, private_valkey_cluster: RedisCluster, connect: Connect
    ) -> None:
        primary = private_valkey_cluster.primary_of(PREFIX)
        client = connect(clustered(private_valkey_cluster.nodes[0]))
        checked = await check(client, "replicated")
        private_valkey_cluster.replica_of(primary).pause()

        with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
            await confirm(client, checked, prefix=PREFIX, patience=SHORT)

    async def test_is_not_confirmed_by_a_server_that_has_given_the_keys_away(
        self, private_redis_cluster: RedisCluster, connect: Connect
    ) -> None:
        """The library would send what is written to the new one, and have the old one wait for nothing."""
        old = private_redis_cluster.primary_of(PREFIX)
        client = connect(clustered(old))
        checked = await check(client, "replicated")
        slot = cast("int", old.client.ask("CLUSTER", "KEYSLOT", PREFIX))
        new = next(node for key in "abcdefgh" if (node := private_redis_cluster.primary_of(key)) is not old)
        identity = cast("str", new.client.ask("CLUSTER", "MYID"))
        for node in (new, old):
            node.client.ask("CLUSTER", "SETSLOT", slot, "NODE", identity)

        with pytest.raises(StoreUnavailableError, match=r"Moved.* may have been stored"):
            await confirm(client, checked, prefix=PREFIX)


def clustered(server: RedisServer | RedisClient) -> Any:  # noqa: ANN401 -- the library's own
    return redis.asyncio.RedisCluster.from_url(server.dsn, retry=Retry(NoBackoff(), 0))


class TestArguments:
    async def test_a_profile_that_nobody_knows_is_refused(self, valkey_url: str, connect: Connect) -> None:
        with pytest.raises(ConfigurationError, match="profile='safe' is unknown; pass one of durable, replicated, vol"):
            await check(connect(valkey_url), cast("Profile", "safe"))

    async def test_no_replicas_at_all_are_refused(self, valkey_url: str, connect: Connect) -> None:
        with pytest.raises(ConfigurationError, match="replicas=0 must be an int of at least 1"):
            await check(connect(valkey_url), "replicated", replicas=0)
