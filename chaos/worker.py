"""The entry of every worker process: its clock and its library are set up before anything else is imported.

Run as ``python -m chaos.worker ROLE OPTIONS [--variant NAME]``, with the options as JSON.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

__all__ = ["Setting", "at_work", "main", "skew_clock"]

#: The clocks before anybody touched them.
_DATETIME: TypeAlias = dt.datetime
_TIME: Final = time.time
_TIME_NS: Final = time.time_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a worker process is told at its start."""

    name: str
    store: str
    url: str
    folder: str
    port: int
    seed: int
    #: Which life of this worker it is; a producer has keys of its own in each.
    life: int = 0
    #: How many seconds the wall clock of the process is wrong.
    skew: float = 0.0
    on_dead: str = "block"
    worker: str = ""

    @property
    def place(self) -> Path:
        """Where the histories are."""
        return Path(self.folder)

    def dump(self) -> str:
        """Return the setting as the process reads it."""
        return json.dumps(asdict(self))


def at_work() -> None:
    """Tell the crew that this process is ready to be hit."""
    print("at work", flush=True)


def skew_clock(seconds: float) -> None:
    """Make the wall clock of this process wrong, for all who ask Python for it; monotonic time stays right."""
    # Compiled modules look at the size of a date when they are imported, and complain of ours.
    for name in ("asyncpg", "asyncmy", "psycopg"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    shift = dt.timedelta(seconds=seconds)

    class Lenient(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, _DATETIME)  # those that C code makes are dates as well

    class Skewed(_DATETIME, metaclass=Lenient):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:  # noqa: ANN401 -- the type of the base's own
            return _DATETIME.now(tz) + shift

        @classmethod
        def utcnow(cls) -> Any:  # noqa: ANN401
            return _DATETIME.now(dt.UTC).replace(tzinfo=None) + shift

    time.time = lambda: _TIME() + seconds
    time.time_ns = lambda: _TIME_NS() + int(seconds * 1e9)
    dt.datetime = Skewed  # type: ignore[misc]


def _end_with_the_parent() -> None:
    """Die when the process that started us is gone, however it went."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> None:
    """Run a role until it ends."""
    role, text, *rest = arguments
    setting = Setting(**json.loads(text))
    _end_with_the_parent()
    if setting.skew:
        skew_clock(setting.skew)
    if rest[:1] == ["--variant"]:
        importlib.import_module("chaos.variants").apply(rest[1])
    importlib.import_module(f"chaos.{role}").main(setting)


if __name__ == "__main__":
    main(sys.argv[1:])
