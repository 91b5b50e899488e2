"""Calls to a server that is Redis or speaks like it: with a deadline, and never repeated by the library."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import redis.exceptions

from ...checks import check_duration
from ...errors import ConfigurationError, StoreError, StoreTimeoutError
from .addresses import connect, hang_up, place
from .errors import is_of_lost_transport, translated
from .pipelines import refuse_if_it_repeats
from .scripts import Script, script

__all__ = ["Client", "connected"]

T = TypeVar("T")

# The library's own types name neither what a script answers nor both kinds of clients.
Foreign = Any


def connected(server: Foreign, *, timeout: timedelta) -> tuple[Foreign, bool]:
    """Return a client for a URL or for a client of the user's, and whether it was made here.

    Raises:
        ConfigurationError: The client repeats what it does not know the answer to, or turns bytes into texts.
    """
    if not isinstance(server, str):
        _check(server)
        return server, False
    return connect(server, timeout=timeout), True


def _check(client: Foreign) -> None:
    """Refuse a client that would do harm; both kinds of clients know how their connections are made."""
    pool: Foreign = getattr(client, "connection_pool", client)
    options: dict[str, Foreign] = pool.connection_kwargs
    refuse_if_it_repeats(client)
    if options.get("decode_responses"):
        raise ConfigurationError("the client has decode_responses=True, and payloads are bytes; make one without")


class Client:
    """A client of the library, whose errors are ours."""

    def __init__(self, server: Foreign, *, timeout: timedelta) -> None:
        check_duration("timeout", timeout)
        self._timeout = timeout.total_seconds()
        self.foreign: Foreign
        self.foreign, self._is_ours = connected(server, timeout=timeout)
        self._is_cluster = hasattr(self.foreign, "get_node_from_key")
        self.place: str = place(server)

    async def run(self, name: str, keys: Sequence[str], *arguments: Foreign) -> Foreign:
        """Run a script of the store's, by its name."""
        return await self.evaluate(script(name), keys, *arguments)

    async def evaluate(self, wanted: Script, keys: Sequence[Foreign], *arguments: Foreign) -> Foreign:
        """Run a script: by its digest, and by its text on a server that has not seen it."""
        await self._find()
        try:
            return await self.call(self.foreign.evalsha(wanted.digest, len(keys), *keys, *arguments), asks=True)
        except redis.exceptions.NoScriptError:
            return await self.call(self.foreign.eval(wanted.text, len(keys), *keys, *arguments))

    async def ask(self, key: str, *words: Foreign) -> Foreign:
        """Send a command to the server that has a key; a cluster would first ask some server which keys it has."""
        node = await self.node_of(key)
        target = {} if node is None else {"target_nodes": node}
        return await self.call(self.foreign.execute_command(*words, **target))

    async def node_of(self, key: str) -> Foreign:
        """Return the server of a cluster that has a key, as far as is known; None where there is no cluster.

        Raises:
            StoreUnavailableError: The cluster cannot be reached, or no server of it has the key.
        """
        if not self._is_cluster:
            return None
        await self._find()
        try:
            return self.foreign.get_node_from_key(key)
        except redis.exceptions.RedisClusterException as error:
            raise self.told(error) from error

    async def _find(self) -> None:
        """Let a cluster's client find the servers: commands that do it by themselves disturb each other."""
        if self._is_cluster:
            await self.call(self.foreign.initialize())

    async def call(self, answer: Awaitable[T], *, asks: bool = False) -> T:
        """Wait for an answer until the deadline.

        Raises:
            StoreError: There was none, or the server refused.
        """
        task = asyncio.current_task()
        asked = task.cancelling() if task is not None else 0
        try:
            return await self._answered(answer, asks=asks)
        finally:
            if task is not None and task.cancelling() > asked:
                # The library sends with `asyncio.wait_for`, which before Python 3.12 may swallow that it was cancelled;
                # also if it fails then, and somebody would try again.
                raise asyncio.CancelledError

    async def _answered(self, answer: Awaitable[T], *, asks: bool) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await answer
        except TimeoutError:
            raise StoreTimeoutError(f"{self.place} did not answer within {self._timeout:g} s") from None
        except redis.exceptions.NoScriptError as error:
            if asks:
                raise
            raise self.told(error) from error
        # A cluster that cannot be reached is told by an error that is none of the library's other ones.
        except (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError, EOFError) as error:
            raise self.told(error) from error
        except AttributeError as error:
            if not is_of_lost_transport(error):
                raise
            raise self.told(ConnectionResetError("connection lost")) from error

    def told(self, error: BaseException) -> StoreError:
        """Return our error for one of the library's."""
        return translated(error, self.place)

    async def close(self) -> None:
        """Close the connections, if the client was made here."""
        if self._is_ours:
            await hang_up(self.foreign)
