"""Histories: what each process says it did, one file per process and one write per event."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

__all__ = ["Event", "History", "Stage", "read", "read_file"]

#: An event as it was written; the check of its fields is left to whoever needs them.
Event: TypeAlias = dict[str, Any]
#: As Jepsen has it: begun, surely done, surely not done, unknown.
Stage: TypeAlias = Literal["invoke", "ok", "fail", "info"]

_SUFFIX: Final = ".jsonl"


class History:
    """Appends events to the file of one process; what was written outlives the process."""

    def __init__(self, folder: Path, process: str) -> None:
        self._process = process
        self._file = os.open(folder / f"{process}{_SUFFIX}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, op: str, stage: Stage, **fields: object) -> None:
        """Append an event, stamped with a clock that all processes of one machine share."""
        event = {"t": time.monotonic_ns(), "proc": self._process, "op": op, "type": stage, **fields}
        os.write(self._file, json.dumps(event, separators=(",", ":")).encode() + b"\n")


def read(folder: Path) -> list[Event]:
    """Return the events of all processes in the order in which they happened."""
    events = [event for path in sorted(folder.glob(f"*{_SUFFIX}")) for event in read_file(path)]
    return sorted(events, key=lambda event: int(event["t"]))


def read_file(path: Path) -> Iterator[Event]:
    """Yield the events of one process, but for one that it was killed in the middle of."""
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
