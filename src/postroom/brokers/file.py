"""Messages appended to a file, as lines of JSON that survive the loss of power."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from ..checks import check_duration
from ..errors import BrokerUnavailableError
from ..message import Message
from ..store import Delivered, Outcome
from .lines import encode_line, write_aside

__all__ = ["FileBroker"]


class FileBroker:
    """Appends each message as one line to a file, and confirms a batch when the disk has it.

    The file is opened for every batch, so it may be moved away at any time. Several processes may share it.
    """

    def __init__(self, path: str | Path, *, patience: timedelta = timedelta(seconds=5)) -> None:
        """Set up a broker; nothing is opened.

        Args:
            path: Where the file is; it is made, readable for its owner only, if it is not there.
            patience: How long to wait for another process that is writing to the same file.
        """
        check_duration("patience", patience)
        self.path: Path = Path(path)
        self._patience = patience.total_seconds()
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        """Show where the lines go."""
        return f"FileBroker({str(self.path)!r})"

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        """Append a batch, and wait for the disk once."""
        data = b"".join(encode_line(message) for message in messages)
        await write_aside(lambda: self._append(data), self._turn)
        return [Delivered()] * len(messages)

    def _append(self, data: bytes) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise BrokerUnavailableError(f"{self.path} is not a file that can be made durable; use stdout:")
            self._lock(file)
            self._write(file, data)
        finally:
            os.close(file)

    def _write(self, file: int, data: bytes) -> None:
        size = os.fstat(file).st_size
        # A process that died in the middle of a line must not spoil the next one.
        is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        left = memoryview(b"\n" + data if is_torn else data)
        try:
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise
        if size == 0:
            self._sync_folder()

    def _sync_folder(self) -> None:
        """Make the name of a new file as durable as what is in it."""
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _lock(self, file: int) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BrokerUnavailableError(f"another process keeps {self.path} locked") from None
            time.sleep(0.005)
