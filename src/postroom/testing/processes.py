"""A process with its descendants: looked up, signalled, and ended when their starter is gone.

Run as a script this file is the watchdog itself, so it imports only the standard library.
Descendants are read from ``/proc``; where there is none, only the process itself is reached.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

__all__ = ["Watchdog", "descendants", "is_gone", "is_stopped", "kill_tree", "signal_tree", "watch"]

_PROC = Path("/proc")


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended, even if nobody has collected it yet."""
    return _stat(pid)[0] in {"X", "Z"}


def is_stopped(pid: int) -> bool:
    """Tell whether a process is held by SIGSTOP or has ended, as far as can be seen."""
    return _stat(pid)[0] in {"T", "X", "Z", "?"}


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on."""
    parents = {int(entry.name): _stat(int(entry.name))[1] for entry in _PROC.glob("[0-9]*")}
    found = [pid]
    for ancestor in found:
        found.extend(child for child, parent in parents.items() if parent == ancestor)
    return found[1:]


def signal_tree(pid: int, number: signal.Signals) -> list[int]:
    """Send a signal to a process and its descendants; return whom it was sent to."""
    everyone = [pid, *descendants(pid)]
    for one in everyone:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)
    return everyone


def kill_tree(pid: int) -> list[int]:
    """Kill a process and its descendants without letting it notice; return who was killed."""
    # A process that cannot run cannot start another child while its children are looked up.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    return signal_tree(pid, signal.SIGKILL)


class Watchdog:
    """Kills a process and removes its folder as soon as the process that made us is gone.

    It waits at the end of a pipe, which the kernel closes however we end. A death signal
    would not do: it comes when the *thread* ends that started the process.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            text=True,
            # An interrupt from the keyboard goes to the whole group, and must not end the watch.
            start_new_session=True,
        )

    def guard(self, pid: int) -> None:
        """Watch over this process from now on; 0 means over the folder alone."""
        pipe = self._process.stdin
        if pipe is not None:
            pipe.write(f"{pid}\n")
            pipe.flush()

    def dismiss(self) -> None:
        """End the watch, and with it whatever is still guarded."""
        self._process.communicate()


def watch(reports: Iterable[str], folder: str) -> None:
    """Read which process to guard until nobody is left to say, then kill it and clear its folder."""
    guarded = 0
    for report in reports:
        guarded = int(report)
    killed = kill_tree(guarded) if guarded else []
    deadline = time.monotonic() + timedelta(seconds=10).total_seconds()
    while not all(map(is_gone, killed)) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _stat(pid: int) -> tuple[str, int]:
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return _stat_without_proc(pid)
    # The name of the program comes first, in brackets, and may itself hold brackets.
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return state.decode(), int(parent)


def _stat_without_proc(pid: int) -> tuple[str, int]:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X", 0
    except PermissionError:  # it lives, and belongs to somebody else
        pass
    return "?", 0


if __name__ == "__main__":
    watch(sys.stdin, sys.argv[1])
