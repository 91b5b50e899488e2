"""The harness of the store in Redis, which looks at the keys through scripts of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Unpack
from uuid import UUID, uuid4

from postroom.outbox import AddResult, Options, Outbox
from postroom.stores.redis import RedisStore
from postroom.stores.redis.addresses import connect
from postroom.stores.redis.keys import Keys
from postroom.stores.redis.scripts import composed
from postroom.testing.contracts import StoredRow, StoreHarness

STATES = {"p": "pending", "l": "processing", "d": "delivered", "x": "dead"}
MICROSECOND = timedelta(microseconds=1)
#: A busy machine is no reason to fail.
PATIENCE = timedelta(seconds=60)

#: What becomes of all messages of a namespace when time passes: every moment lies further back.
SHIFT = """
local by = tonumber(ARGV[1])
local function shift(key)
  for _, id in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZINCRBY', key, -by, id) end
end
for _, key in ipairs({ leased, dead, done }) do shift(key) end
for _, id in ipairs(redis.call('HKEYS', states)) do
  local state = read(id)
  local where = {}
  local places = { { due, by_due }, { held, by_due }, { lanes, by_seq }, { tombs, by_seq } }
  if state[DESTINATION] then places[#places + 1] = { parked, by_parked } end
  for _, place in ipairs(places) do
    if redis.call('ZREM', place[1], place[2](id, state)) == 1 then where[#where + 1] = place end
  end
  for _, part in ipairs({ DUE, UNTIL, CHANGED, SEQ }) do
    if state[part] > 0 then state[part] = state[part] - by end
  end
  redis.call('HSET', states, id, cmsgpack.pack(state))
  for _, place in ipairs(where) do redis.call('ZADD', place[1], 0, place[2](id, state)) end
end
"""
DUMP = """
local rows = {}
for _, id in ipairs(redis.call('HKEYS', states)) do
  local state = read(id)
  local row = { id, state[STATUS], state[ATTEMPTS], state[TOKEN], state[SEQ], state[DUE] - now, state[UNTIL] - now }
  row[#row + 1] = state[CHANGED] - now
  row[#row + 1] = state[WORKER]
  row[#row + 1] = redis.call('HGET', errors, id) or ''
  for place = 3, 8 do row[place] = string.format('%.0f', row[place]) end
  rows[#rows + 1] = row
end
return rows
"""


class RedisHarness(StoreHarness):
    """Several stores on one server or cluster, each namespace under keys of its own."""

    can_damage = True

    def __init__(self, url: str) -> None:
        self._url = url
        #: The servers of a cluster are everybody's.
        self._table = f"test-{uuid4().hex}"
        self._namespaces: dict[str, Keys] = {}
        self.store: RedisStore = self._make("default")
        self._stores = [self.store]
        self._client: Any = connect(url, timeout=PATIENCE)

    def _make(self, namespace: str, keep_delivered: timedelta = timedelta(days=7)) -> RedisStore:
        self._know(namespace)
        return RedisStore(
            self._url, namespace=namespace, table=self._table, keep_delivered=keep_delivered, timeout=PATIENCE
        )

    def _know(self, namespace: str) -> None:
        self._namespaces.setdefault(namespace, Keys(self._table, namespace))

    async def start(self) -> None:
        """Open the store."""
        await self.store.open()

    async def another(self, *, namespace: str | None = None, keep_delivered: timedelta | None = None) -> RedisStore:
        keep = self.store.keep_delivered if keep_delivered is None else keep_delivered
        store = self._make(namespace or self.store.namespace, keep)
        self._stores.append(store)
        await store.open()
        return store

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._client.pipeline(transaction=True) as pipeline:
            yield pipeline
            await pipeline.execute()

    async def write(
        self,
        transaction: Any,  # noqa: ANN401 -- as the harness says
        *events: object,
        namespace: str | None = None,
        **options: Unpack[Options],
    ) -> list[AddResult]:
        namespace = namespace or self.store.namespace
        self._know(namespace)
        added: list[AddResult] = await Outbox(namespace=namespace, table=self._table).add(
            transaction, list(events), **options
        )
        return added

    async def add(self, *events: object, namespace: str | None = None, **options: Unpack[Options]) -> list[AddResult]:
        """Add with the client itself: a pipeline could not tell what was there."""
        return await self.write(self._client, *events, namespace=namespace, **options)

    async def advance(self, by: timedelta) -> None:
        await self._each(SHIFT, by // MICROSECOND)

    async def rows(self) -> list[StoredRow]:
        found = sorted((row for rows in await self._each(DUMP) for row in rows), key=lambda row: int(row[4]))
        return [self._row(*row) for row in found]

    def _row(  # noqa: PLR0913, PLR0917 -- as the script tells it
        self,
        identity: bytes,
        status: bytes,
        attempts: bytes,
        token: bytes,
        _seq: bytes,
        due: bytes,
        until: bytes,
        changed: bytes,
        worker: bytes,
        error: bytes,
    ) -> StoredRow:
        return StoredRow(
            id=UUID(bytes=identity),
            status=STATES[status.decode()],
            attempts=int(attempts),
            token=int(token),
            due_in=int(due) * MICROSECOND,
            worker=UUID(bytes=worker) if worker else None,
            lease_left=int(until) * MICROSECOND if worker else None,
            last_error=error.decode() or None,
            unchanged_for=-int(changed) * MICROSECOND,
        )

    async def damage(self, message_id: UUID) -> None:
        entries = self._namespaces["default"].all[0]
        body: bytes = await self._client.hget(entries, message_id.bytes)
        end = 4 + int.from_bytes(body[:4])
        head = json.dumps({**json.loads(body[4:end]), "headers": []}).encode()
        await self._client.hset(entries, message_id.bytes, len(head).to_bytes(4) + head + body[end:])

    async def hint(self) -> None:
        await self._client.publish(self._namespaces["default"].channel, b"")

    async def _each(self, text: str, *arguments: int) -> list[Any]:
        whole = composed(text).text
        return [
            await self._client.eval(whole, len(keys.all), *keys.all, *arguments) for keys in self._namespaces.values()
        ]

    async def close(self) -> None:
        for keys in self._namespaces.values():
            await self._client.unlink(*keys.all)
        for store in self._stores:
            await store.close()
        await self._client.aclose()
