"""Everything in this folder runs on servers that know no more than Redis 6.0; no such server is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.testing.clients import RedisClient, ValkeyClient
from postroom.testing.redis60 import Redis60
from postroom.testing.servers import RedisServer, ServerMissingError, ValkeyServer
from tests.support.server_fixtures import skip_or_fail

HERE = Path(__file__).parent
#: What takes long for its amounts, or starts processes; others say the same of commands.
LONG = (
    "test_the_command_line_delivers_and_counts",
    "test_what_is_held_does_not_hide_what_was_left_behind_it",
    "test_more_than_a_page_of_pending_entries_is_taken_over_completely",
    "test_a_process_that_is_killed_in_its_handler_delays_the_message_by_its_lease",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that start servers of their own, or need none: nothing would be different here; and long ones."""
    for item in [*items]:
        fixtures = set(getattr(item, "fixturenames", ()))
        is_private = any(name.startswith("private_") for name in fixtures)
        is_served = "[redis" in item.name or not fixtures.isdisjoint({"redis_server", "valkey_server"})
        if HERE in item.path.parents and (is_private or not is_served or item.name.startswith(LONG)):
            items.remove(item)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisClient]:
    for old in before(RedisServer()):
        yield RedisClient(old.dsn)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyClient]:
    for old in before(ValkeyServer()):
        yield ValkeyClient(old.dsn)


def before(server: RedisServer) -> Iterator[Redis60]:
    """Start a server that nobody else uses, since it tells of everybody's scripts, and the proxy before it."""
    try:
        server.start()
    except ServerMissingError as error:
        skip_or_fail(error)
    try:
        with Redis60(server.dsn) as old:
            yield old
    finally:
        server.stop()
    assert old.slips == [], "scripts have called what Redis 6.0 does not know"
    # The library beneath introduces itself; a profile asks whether there is WAITAOF; HSAT is a slip that a test makes.
    assert {words[0].upper() for words in old.refused} <= {b"CLIENT", b"WAITAOF", b"HSAT"}
