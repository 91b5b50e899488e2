"""Redis 6.0 as far as clients can tell: a proxy before a newer server, which refuses what 6.0 does not know."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, Self
from urllib.parse import urlsplit

from .commands60 import refusal

__all__ = ["Redis60"]

VERSION: Final = "6.0.16"
#: Has the server itself give an answer that is not its own, so that it comes in its turn.
_SAY: Final = b"return redis.error_reply(ARGV[1])"
_TELL: Final = f"""
local told = redis.call('INFO', unpack(ARGV))
return (told:gsub('redis_version:[^\\r]*', 'redis_version:{VERSION}'):gsub('valkey_version:[^\\r]*\\r\\n', ''))
""".encode()
_GREETING: Final = re.compile(rb"\$7\r\nversion\r\n\$\d+\r\n[\d.]+\r\n")
_MONITORED: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')


class Redis60:
    """A proxy on a port of its own, whose clients think that the server is Redis 6.0.

    What scripts call does not come through here. It is looked at as the server tells it to a monitor, and what 6.0
    would have refused is found in ``slips``.

    Example::

        with Redis60(server.dsn) as old:
            redis.Redis.from_url(old.dsn).xautoclaim(…)  # an error
    """

    def __init__(self, dsn: str) -> None:
        url = urlsplit(dsn)
        self._upstream = (url.hostname or "127.0.0.1", url.port or 6379)
        self._path = url.path
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port: int = 0
        #: What was refused, and what scripts have called although 6.0 does not know it.
        self.refused: list[Sequence[bytes]] = []
        self.slips: list[Sequence[bytes]] = []

    @property
    def dsn(self) -> str:
        """The address of the proxy."""
        return f"redis://127.0.0.1:{self.port}{self._path}"

    def start(self) -> Self:
        """Begin to accept connections."""
        self._thread.start()
        self._run(self._open())
        return self

    def stop(self) -> None:
        """Close all connections."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        """Begin to accept connections."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Close all connections."""
        self.stop()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        done.result(timeout=30)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._welcome, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(*self._upstream)
        writer.write(_packed([b"MONITOR"]))
        await reader.readline()
        self._spawn(self._watch(reader, writer))

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Look at what scripts call."""
        with contextlib.closing(writer):
            while line := await _line(reader):
                if b" lua] " in line.partition(b'"')[0]:
                    words = _MONITORED.findall(line)
                    if words and refusal(words):
                        self.slips.append(words)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._upstream)
        link = _Link(self.refused.append)
        pumps = [self._spawn(_requests(link, reader, far_writer)), self._spawn(_replies(link, far_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (writer, far_writer):
                end.transport.abort()


class _Link:
    """What is known of one client's connection."""

    def __init__(self, note: Callable[[Sequence[bytes]], None]) -> None:
        self._note = note
        self._is_queueing = False
        self.is_greeting = False

    def passed(self, words: list[bytes]) -> list[bytes]:
        """Return what is sent to the server instead of a command."""
        name = words[0].upper()
        said = refusal(words)
        if said is not None:
            self._note(words)
            if self._is_queueing and said.startswith("ERR unknown"):
                return [words[0] + b"(6.0)"]  # so that the transaction is given up, as it is with a real one
            return [b"EVAL", _SAY, b"0", said.encode()]
        if name in {b"MULTI", b"EXEC", b"DISCARD"}:
            self._is_queueing = name == b"MULTI"
        self.is_greeting = self.is_greeting or name == b"HELLO"
        return [b"EVAL", _TELL, b"0", *words[1:]] if name == b"INFO" else words


async def _requests(link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while head := await source.readline():
            words = [await _word(source) for _ in range(int(head[1:]))]
            sink.write(_packed(link.passed(words)))
            await sink.drain()


async def _replies(link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65_536):
            if link.is_greeting:
                told = b"$7\r\nversion\r\n$%d\r\n%b\r\n" % (len(VERSION), VERSION.encode())
                data, found = _GREETING.subn(told, data, 1)
                link.is_greeting = not found
            sink.write(data)
            await sink.drain()


async def _word(source: asyncio.StreamReader) -> bytes:
    size = int((await source.readline())[1:])
    return (await source.readexactly(size + 2))[:-2]


async def _line(source: asyncio.StreamReader) -> bytes:
    """Return a line of whatever length, nothing at the end."""
    parts: list[bytes] = []
    while True:
        try:
            parts.append(await source.readuntil(b"\n"))
        except asyncio.LimitOverrunError as error:
            parts.append(await source.readexactly(error.consumed))
        except (asyncio.IncompleteReadError, OSError):
            return b""
        else:
            return b"".join(parts)


def _packed(words: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
