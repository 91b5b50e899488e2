"""Tables are brought up to date while they are in use, from every earlier version."""

from __future__ import annotations

import pytest

from tests.rooms import EARLIER, ROOMS, Room, applied, differences, earlier


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest) -> Room:
    kind, fixture = ROOMS[request.param]
    return kind(str(request.getfixturevalue(fixture)))


@pytest.mark.parametrize("version", EARLIER)
async def test_an_upgraded_schema_is_the_same_as_a_new_one(room: Room, version: str) -> None:
    """Whatever the database was created with."""
    earlier(room, version)

    first = await applied(room)
    second = await applied(room)

    assert (first, second) == (True, False)
    assert await differences(room) == []
