"""A TCP proxy that makes a network fail on request: late, narrow, silent, cut, closed, or losing just one reply."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from datetime import timedelta
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

__all__ = ["Direction", "FaultProxy"]

#: Which way bytes flow: from the client to the server, or back.
Direction: TypeAlias = Literal["requests", "replies"]

_LOOPBACK: Final = "127.0.0.1"
_CHUNK: Final = 65_536
# To linger for no time at all is to send a reset instead of a farewell.
_RESET: Final = struct.pack("ii", 1, 0)


class FaultProxy:
    """Stands on a port of its own between clients and one server; faults are switched while it runs.

    Example:
        >>> async def lose_a_reply(server_port: int) -> None:
        ...     async with FaultProxy("127.0.0.1", server_port) as proxy:
        ...         proxy.drop_reply(b"COMMIT")
        ...         ...  # the client that uses proxy.port commits, and never hears of it
    """

    def __init__(self, host: str, port: int) -> None:
        #: The port that clients connect to, the same while the proxy lives.
        self.port: int = 0
        #: How long every piece of data is held back, each way.
        self.latency: timedelta = timedelta(0)
        #: How many bytes pass in a second, on each connection and each way; None sets no limit.
        self.bandwidth: int | None = None
        #: How many connections were made through here, and how many replies were dropped.
        self.accepted: int = 0
        self.dropped: int = 0
        self._upstream = (host, port)
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._flowing: dict[Direction, asyncio.Event] = {"requests": asyncio.Event(), "replies": asyncio.Event()}
        self._budget: int | None = None
        self._pattern: bytes = b""
        self._countdown: int = 0
        self.heal()

    async def __aenter__(self) -> Self:
        """Begin to accept connections."""
        await self.accept()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reset all connections and give up the port."""
        await self.refuse()
        self.cut()
        pumps = [pump for link in self._links for pump in link.pumps]
        if pumps:
            await asyncio.wait(pumps)

    @property
    def open(self) -> int:
        """How many connections there are now."""
        return len(self._links)

    async def accept(self) -> None:
        """Listen, on the same port as before."""
        if self._server is None:
            self._server = await asyncio.start_server(self._welcome, _LOOPBACK, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Stop listening: new connections are refused, those that exist go on."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def black_hole(self, *directions: Direction) -> None:
        """Let nothing through, both ways unless one is named; connections stay open and new ones are accepted."""
        for direction in directions or self._flowing:
            self._flowing[direction].clear()

    def heal(self) -> None:
        """Let everything through again, also what was held back; nothing is truncated or dropped any more."""
        self.latency, self.bandwidth, self._budget, self._countdown = timedelta(0), None, None, 0
        for flowing in self._flowing.values():
            flowing.set()

    def cut(self) -> int:
        """Reset all connections at once; return how many there were."""
        for link in self._links:
            link.reset()
        return len(self._links)

    def truncate(self, after: int) -> None:
        """Reset a connection as soon as that many further bytes of replies have gone through."""
        self._budget = after

    def drop_reply(self, pattern: bytes, nth: int = 1) -> None:
        """Withhold the reply to the ``nth`` request from now on that contains ``pattern``, and reset its connection.

        The server has received the request and answered it when this happens.
        """
        self._pattern, self._countdown = pattern, nth

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.transport.abort()
            return
        self.accepted += 1
        link = _Link(writer, far_writer)
        self._links.add(link)
        link.pumps = [
            asyncio.create_task(self._pump(link, "requests", reader, far_writer)),
            asyncio.create_task(self._pump(link, "replies", far_reader, writer)),
        ]
        try:
            await asyncio.wait(link.pumps)
        finally:
            self._links.discard(link)
            link.reset()

    async def _pump(
        self, link: _Link, direction: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        try:
            while data := await source.read(_CHUNK):
                if self.latency:
                    await asyncio.sleep(self.latency.total_seconds())
                if self.bandwidth:
                    await asyncio.sleep(len(data) / self.bandwidth)
                await self._flowing[direction].wait()
                passed = self._request(link, data) if direction == "requests" else self._reply(link, data)
                sink.write(passed)
                await sink.drain()
                if len(passed) < len(data):
                    link.reset()
            if sink.can_write_eof():
                sink.write_eof()
        except OSError:  # one end was reset, so the other is as well
            link.reset()

    def _request(self, link: _Link, data: bytes) -> bytes:
        if self._countdown:
            seen = link.tail + data
            self._countdown -= min(seen.count(self._pattern), self._countdown)
            link.is_doomed = link.is_doomed or self._countdown == 0
            # A pattern may lie across two pieces, but is counted once.
            rest = seen[seen.rfind(self._pattern) + len(self._pattern) :] if self._pattern in seen else seen
            link.tail = rest[-(len(self._pattern) - 1) :] if len(self._pattern) > 1 else b""
        return data

    def _reply(self, link: _Link, data: bytes) -> bytes:
        if link.is_doomed:
            self.dropped += 1
            return b""
        if self._budget is None:
            return data
        passed = data[: self._budget]
        self._budget -= len(passed)
        return passed


class _Link:
    """A client's connection together with the one to the server."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.tail = b""
        self.is_doomed = False
        self.pumps: list[asyncio.Task[None]] = []
        self._writers = (near, far)

    def reset(self) -> None:
        """Send a reset to both ends; what is held back is lost."""
        for pump in self.pumps:
            pump.cancel()
        for writer in self._writers:
            wire: socket.socket | None = writer.get_extra_info("socket")
            if wire is not None and not writer.transport.is_closing():
                with contextlib.suppress(OSError):
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
