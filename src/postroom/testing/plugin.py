"""The pytest plugin for tests of applications: an outbox, the broker that it delivers to, and a clock.

A test suite opts in with ``pytest_plugins = ["postroom.testing.plugin"]`` in the ``conftest.py`` of its top folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .clock import VirtualClock
from .published import Published, SQLiteOutbox

__all__ = ["postroom_clock", "postroom_outbox", "postroom_published"]


@pytest.fixture
def postroom_outbox(tmp_path: Path) -> Iterator[SQLiteOutbox]:
    """An `Outbox` with a SQLite database that only this test uses.

    ``with postroom_outbox.connection as connection:`` is a transaction, for your statements and for
    ``postroom_outbox.add(connection, …)``. ``postroom_outbox.store`` is the store, ``postroom_outbox.path`` its file.
    """
    outbox = SQLiteOutbox(tmp_path / "postroom-outbox.sqlite3")
    try:
        yield outbox
    finally:
        outbox.close()


@pytest.fixture
def postroom_published(postroom_outbox: SQLiteOutbox) -> Published:
    """A broker in memory: ``await postroom_published.drain()`` delivers what the outbox holds and returns the messages.

    It is a `MemoryBroker`: a consumer may subscribe to it, and ``postroom_published.down()`` switches it off.
    """
    return Published(postroom_outbox.store)


@pytest.fixture
def postroom_clock() -> VirtualClock:
    """A clock that stands still until ``postroom_clock.advance(timedelta(…))``, for whatever takes a ``clock``."""
    return VirtualClock()
