"""Connections of a store's own to PostgreSQL: how their sessions are set, directly and behind a pooler."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from datetime import timedelta
from functools import partial
from typing import Final, TypeVar

from ....errors import ConfigurationError, PoolerError, StoreTimeoutError
from ..driver import Foreign, Steps, finish_async, steps_of
from ..pool import Connector
from ..sessions import Pooler, begin_call, call_settings, handler_settings, name_session, set_session
from ..statement import Result, Script, Statement
from ..url import Place

__all__ = ["PostgresConnector"]

T = TypeVar("T")

#: How many seconds a second session may take to be had; a pooler whose sessions are all in use has none for long.
_EXAMINATION: Final = 5.0
#: Which of two connections is asked for its server process, in turn. Irregular, since a pooler may deal out its server
#: sessions in turn, or always the one that came back last.
_TURNS: Final = (0, 1, 1, 0, 0, 1, 0, 0, 1, 1)
#: What cannot run in a transaction, or would be left behind on a session that other clients are given.
_NEEDS_SESSION: Final = re.compile(r"\bCONCURRENTLY\b|\bpg_(try_)?advisory_(un)?lock\(|\bset_config\([^)]*\bfalse\)")
_IDENTITY: Final = Statement("SELECT pg_backend_pid(), pg_postmaster_start_time()", {}, returns=True)


class PostgresConnector(Connector):
    """Opens connections to PostgreSQL.

    Connected directly, or to a pooler that keeps a session for each client, the store's own sessions are set once. With
    ``pooler="transaction"`` every statement is a transaction that sets itself, and no statement is prepared by name.
    Sessions that handlers are given are named and never set; only their transactions are.
    """

    def __init__(self, place: Place, *, timeout: timedelta | None = None, pooler: Pooler | None = None) -> None:
        self._place = place
        self._pooler = pooler
        self._settings = call_settings(timeout)
        self.handler_settings: str = handler_settings(None)
        #: The longest time that a consumer gives its handlers: zero before there is one, None for no limit.
        self._handler_timeout: timedelta | None = timedelta(0)
        #: Whether a pooler stands in between, and was found to keep a session for each client.
        self._has_sessions = False
        self.begin: str = "BEGIN" if pooler is None else begin_call(self._settings)

    @abstractmethod
    async def dial(self, *, prepares: bool) -> Foreign:
        """Open a connection with the defaults of its server; without ``prepares`` it names no prepared statement."""

    @abstractmethod
    def backend_pid(self, connection: Foreign) -> int:
        """Return the process that the server named when the connection was opened."""

    async def connect(self) -> Foreign:
        return await self._dialled(set_session(self._settings))

    async def connect_plain(self) -> Foreign:
        return await self._dialled(name_session())

    async def _dialled(self, first: str) -> Foreign:
        """Return a connection once ``first`` has run on it, which it never does on a session that clients share."""
        connection = await self.dial(prepares=self._pooler is None)
        if self._pooler is not None:
            return connection
        try:
            is_done = await self._run_first(connection, first)
        except BaseException:
            self.discard(connection)
            raise
        if is_done:
            return connection
        # Poolers make up the number of the server process, so something stands in between.
        self.discard(connection)
        if await self._shares_sessions():
            raise PoolerError(str(self._place))
        self._has_sessions = True
        return await self._dialled(first)

    async def _run_first(self, connection: Foreign, text: str) -> bool:
        """Run a SELECT, only if the session is that of the server process which the connection was opened with."""
        condition = "" if self._has_sessions else f" WHERE pg_backend_pid() = {self.backend_pid(connection)}"
        answer = await finish_async(self.driver.execute(connection, Statement(text + condition, {})))
        return answer.count > 0

    async def _shares_sessions(self) -> bool:
        """Tell whether two connections are given the session of one server process, or one connection those of two."""
        connections: list[Foreign] = []
        try:
            async with asyncio.timeout(_EXAMINATION):
                for _ in range(2):
                    connections.append(await self.dial(prepares=False))  # noqa: PERF401 -- closed below, however many
                return await self._are_mixed(connections)
        except TimeoutError:
            raise StoreTimeoutError(
                f"{self._place}: the pooler had no two server sessions within {_EXAMINATION:g} s; "
                "enlarge its pool, or end the transactions that use it up"
            ) from None
        finally:
            for connection in connections:
                self.discard(connection)

    async def _are_mixed(self, connections: list[Foreign]) -> bool:
        seen: list[set[tuple[object, ...]]] = [set(), set()]
        for turn in _TURNS:
            answer = await finish_async(self.run(connections[turn], _one(_IDENTITY), atomic=True))
            seen[turn].add(tuple(answer.rows[0]))
        return max(map(len, seen)) > 1 or seen[0] == seen[1]

    def run(self, connection: Foreign, script: Script[T], *, atomic: bool) -> Steps[T]:
        if atomic or self._pooler is None:
            return super().run(connection, script, atomic=atomic)
        return steps_of(script, partial(self._execute_alone, connection))

    def _execute_alone(self, connection: Foreign, statement: Statement) -> Steps[Result]:
        """Run one statement in a transaction of its own, with its settings."""
        if _NEEDS_SESSION.search(statement.text):
            raise ConfigurationError(
                "this change of the schema needs a session of its own, which a pooler in transaction mode does not "
                "give; run `postroom schema apply` on a direct connection to PostgreSQL"
            )
        return (yield from super().run(connection, _one(statement), atomic=True))

    def limit_handlers(self, timeout: timedelta | None) -> None:
        longest = self._handler_timeout
        self._handler_timeout = None if longest is None or timeout is None else max(longest, timeout)
        self.handler_settings = handler_settings(self._handler_timeout)


def _one(statement: Statement) -> Script[Result]:
    return (yield statement)
