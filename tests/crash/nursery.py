"""A process from which workers are forked: they need not import everything anew, and are processes all the same.

Run as ``python -m tests.crash.nursery`` it answers requests, one line each: a worker to start, or one to wait for.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any, Final

from .worker import Orders, main

__all__ = ["Worker", "start", "whole_lines"]

ROOT: Final = Path(__file__).parents[2]
#: What workers import when they need it.
PRELOADED: Final = ("aiosqlite", "asyncmy", "asyncpg", "sqlalchemy.ext.asyncio", "postroom.stores.sql.drivers.mysql")


def whole_lines(journal: Path) -> list[str]:
    """Return what workers have written so far, without a line that one of them is just writing."""
    return [line for line in journal.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Worker:
    """A process that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self, patience: float) -> int:
        """Return its exit code, negative for the signal that ended it."""
        if self._code is None:
            self._code = _ask({"wait": self.pid, "patience": patience})
        assert self._code is not None, "a worker did not end"
        return self._code

    def stop(self, patience: float) -> int:
        """Ask it to stop, and return its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait(patience)

    def end(self) -> None:
        """Kill it if it is still there."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)  # nobody has waited for it, so the number is still its own
            self.wait(10)


def start(orders: Orders) -> Worker:
    """Start a worker."""
    pid = _ask({"start": orders.dumps()})
    assert pid is not None
    return Worker(pid)


def _ask(request: dict[str, Any]) -> int | None:
    nursery = _nursery()
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(json.dumps(request).encode() + b"\n")
    nursery.stdin.flush()
    answer: int | None = json.loads(nursery.stdout.readline())
    return answer


@functools.cache
def _nursery() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.crash.nursery"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close() -> None:
        process.communicate()

    atexit.register(close)
    return process


# -- in the nursery ------------------------------------------------------------------------------------------------


def _serve(requests: IO[str], answers: IO[str]) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    for line in requests:
        request = json.loads(line)
        answer = _fork(request["start"]) if "start" in request else _wait(request["wait"], request["patience"])
        print(json.dumps(answer), file=answers, flush=True)


def _fork(orders: str) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(2, 1)  # answers are for the nursery alone to give
            asyncio.run(main(Orders.loads(orders)))
            code = 0
        except BaseException:  # noqa: BLE001 -- told, and then it is the end
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def _wait(pid: int, patience: float) -> int | None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
