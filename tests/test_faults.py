"""The proxy that makes a network fail, tried against an echo server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import TypeAlias

import pytest

from postroom.testing.faults import FaultProxy
from postroom.testing.waiting import until


class Echo:
    """Answers every line with the same line, and remembers it."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.heard.append(line)
                writer.write(line)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    yield echo
    server.close()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, line: bytes) -> bytes:
        self.writer.write(line + b"\n")
        return (await self.reader.readline()).strip()

    async def is_silent(self, line: bytes) -> bool:
        try:
            async with asyncio.timeout(0.1):
                await self.ask(line)
        except TimeoutError:
            return True
        return False


Connect: TypeAlias = Callable[[FaultProxy], Awaitable[Client]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    clients: list[Client] = []

    async def connected(proxy: FaultProxy) -> Client:
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", proxy.port)))
        return clients[-1]

    yield connected
    for client in clients:
        client.writer.transport.abort()
    await asyncio.sleep(0)


async def test_a_healthy_proxy_changes_nothing(connect: Connect, proxy: FaultProxy) -> None:
    client = await connect(proxy)

    assert await client.ask(b"hello") == b"hello"
    assert (proxy.accepted, proxy.open, proxy.dropped) == (1, 1, 0)

    client.writer.close()
    await until(lambda: proxy.open == 0, "the connection ends on both sides")


async def test_latency_holds_data_back_each_way(connect: Connect, proxy: FaultProxy) -> None:
    client = await connect(proxy)
    proxy.latency = timedelta(seconds=0.05)
    began = asyncio.get_running_loop().time()

    assert await client.ask(b"hello") == b"hello"

    assert asyncio.get_running_loop().time() - began >= 0.1


async def test_bandwidth_limits_how_much_passes_in_a_second(connect: Connect, proxy: FaultProxy) -> None:
    client = await connect(proxy)
    proxy.bandwidth = 100_000
    began = asyncio.get_running_loop().time()

    assert await client.ask(b"x" * 5_000) == b"x" * 5_000

    assert asyncio.get_running_loop().time() - began >= 0.1


async def test_a_black_hole_is_silent_until_it_is_healed(connect: Connect, proxy: FaultProxy, echo: Echo) -> None:
    client = await connect(proxy)
    proxy.black_hole()
    assert await client.is_silent(b"one")
    assert echo.heard == []

    proxy.heal()

    assert await client.reader.readline() == b"one\n"


async def test_a_black_hole_of_replies_lets_requests_through(connect: Connect, proxy: FaultProxy, echo: Echo) -> None:
    client = await connect(proxy)
    proxy.black_hole("replies")

    assert await client.is_silent(b"one")
    assert echo.heard == [b"one\n"]


async def test_a_cut_resets_all_connections(connect: Connect, proxy: FaultProxy) -> None:
    clients = [await connect(proxy) for _ in range(3)]
    for client in clients:
        await client.ask(b"hello")

    assert proxy.cut() == 3

    for client in clients:
        with pytest.raises(ConnectionResetError):
            await client.reader.read()
    assert await (await connect(proxy)).ask(b"again") == b"again"


async def test_a_refusing_proxy_can_accept_again_on_its_port(connect: Connect, proxy: FaultProxy) -> None:
    port = proxy.port
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await connect(proxy)

    await proxy.accept()

    assert proxy.port == port
    assert await (await connect(proxy)).ask(b"hello") == b"hello"


async def test_a_truncated_reply_ends_after_so_many_bytes(connect: Connect, proxy: FaultProxy) -> None:
    client = await connect(proxy)
    proxy.truncate(after=8)
    assert await client.ask(b"hello") == b"hello"

    client.writer.write(b"hello\n")
    # Either what came is read before the reset is noticed, or the reset comes first.
    try:
        rest = await client.reader.read()
    except ConnectionResetError:
        rest = b""

    assert rest in {b"", b"he"}
    assert client.reader.at_eof() or client.reader.exception() is not None


@pytest.mark.parametrize("pieces", [[b"COM", b"MIT 2\n"], [b"COMMIT 2\n"]])
async def test_only_the_reply_to_the_matching_request_is_lost(
    connect: Connect, proxy: FaultProxy, echo: Echo, pieces: list[bytes]
) -> None:
    client = await connect(proxy)
    proxy.drop_reply(b"COMMIT", nth=2)
    assert await client.ask(b"BEGIN") == b"BEGIN"
    assert await client.ask(b"COMMIT 1") == b"COMMIT 1"

    for piece in pieces:
        client.writer.write(piece)
        await client.writer.drain()
        await asyncio.sleep(0)
    with pytest.raises(ConnectionResetError):
        await client.reader.read()

    assert echo.heard == [b"BEGIN\n", b"COMMIT 1\n", b"COMMIT 2\n"]
    assert proxy.dropped == 1
    assert await (await connect(proxy)).ask(b"COMMIT 3") == b"COMMIT 3"


async def test_a_server_that_is_not_there_resets_the_client(connect: Connect, unused_tcp_port: int) -> None:
    async with FaultProxy("127.0.0.1", unused_tcp_port) as proxy:
        client = await connect(proxy)

        assert await client.reader.read() == b""
        assert proxy.accepted == 0
