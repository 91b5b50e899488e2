"""The crew of a run: workers that die come back, whoever killed them, and one that cannot is heard of."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chaos.crew import Crew
from chaos.history import History, read
from chaos.worker import Setting
from postroom.testing.server import LOOPBACK, free_port
from postroom.testing.waiting import until

NAME = "receiver"


def pid_of(crew: Crew) -> int:
    process = crew._members[NAME].process  # noqa: SLF001 -- whoever kills it from outside looks it up
    assert process is not None
    return process.pid


def bound(squatter: socket.socket, port: int) -> bool:
    try:
        squatter.bind((LOOPBACK, port))
    except OSError:
        return False
    return True


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
async def crew(tmp_path: Path, port: int) -> AsyncIterator[Crew]:
    """One worker that needs no database, at work."""
    if sys.version_info < (3, 12):
        # What later versions use by themselves: who is dead is noticed between two steps of the loop, never within one.
        asyncio.get_event_loop_policy().set_child_watcher(watcher := asyncio.PidfdChildWatcher())
        watcher.attach_loop(asyncio.get_running_loop())
    crew = Crew(tmp_path, History(tmp_path, "crew"), None)
    crew.hire(Setting(name=NAME, store="sqlite", url="", folder=str(tmp_path), port=port, seed=1))
    await crew.assemble()
    yield crew
    await crew.abandon()


async def test_a_worker_that_has_just_died_by_itself_is_killed_without_harm(crew: Crew, tmp_path: Path) -> None:
    """Nobody has noticed yet that it is gone."""
    pid = pid_of(crew)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 -- the loop is not to notice

    async with asyncio.timeout(30):
        await crew.kill(NAME)

    assert pid_of(crew) != pid
    assert crew.failures == []
    assert [event["code"] for event in read(tmp_path) if event["op"] == "exit"] == [-signal.SIGKILL]


async def test_a_worker_that_cannot_start_again_is_heard_of(crew: Crew, port: int) -> None:
    """Whoever waits for it would wait for ever."""
    killing = asyncio.create_task(crew.kill(NAME, down=0.5))
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await until(lambda: bound(squatter, port), "the port of a dead worker")
        squatter.listen()

        async with asyncio.timeout(30):
            with pytest.raises(ChildProcessError, match="receiver cannot start"):
                await killing


#: Gives up in the very moment in which the connection stands.
GIVE_UP = """
import asyncio, asyncpg.connect_utils, gc

async def main():
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    _, port = server.sockets[0].getsockname()
    task = asyncio.create_task(asyncpg.connect(host="127.0.0.1", port=port, user="u", database="d"))
    asyncpg.connect_utils.TLSUpgradeProto.connection_made = lambda *_: task.cancel()
    await asyncio.wait({task})
    await asyncio.sleep(0)  # until the loss of the connection is told
    del asyncpg.connect_utils.TLSUpgradeProto.connection_made

asyncio.run(main())
gc.collect()
raise LookupError("of somebody else")
"""


async def test_what_a_library_leaves_behind_is_not_held_against_a_worker(tmp_path: Path) -> None:
    crew = Crew(tmp_path, History(tmp_path, "crew"), None)
    with (tmp_path / "d0.stderr").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", GIVE_UP, stderr=errors)
        await process.wait()

    assert "unexpected connection_lost() call" in (tmp_path / "d0.stderr").read_text()
    assert crew.errors(lambda line: "Error" in line) == ["d0: LookupError: of somebody else"]
