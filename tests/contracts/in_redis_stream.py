"""The harness of the store in a stream of Redis, which looks at the keys through scripts of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Unpack
from uuid import UUID, uuid4

from postroom.outbox import AddResult, Options
from postroom.stores.redis.addresses import connect
from postroom.stores.redis.scripts import composed
from postroom.stores.redis.stream import RedisStreamStore
from postroom.stores.redis.stream_keys import StreamKeys
from postroom.stores.redis.stream_outbox import StreamOutbox
from postroom.testing.contracts import StoredRow, StoreHarness

from .in_redis import PATIENCE

GROUP = "outbox-publisher"
MICROSECOND = timedelta(microseconds=1)

#: What is common to both: everything in the stream, and who holds it.
EACH = """
local function each(visit)
  for _, one in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    local entry = one[1]
    local found = redis.pcall('XPENDING', stream, group, entry, entry, 1)
    visit(entry, one[2], not found.err and found[1] or nil)
  end
end
"""
#: What becomes of all messages of a namespace when time passes: every moment lies further back.
SHIFT = """
local by = tonumber(ARGV[2])
for _, key in ipairs({ leases, delayed, done }) do
  for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZINCRBY', key, -by, member) end
end
each(function(entry, _, held)
  local note = note_of(entry)
  local was = redis.call('ZREM', waiting, by_due(entry, note))
  for _, part in ipairs({ DUE, CHANGED }) do note[part] = note[part] - by end
  redis.call('HSET', notes, entry, cmsgpack.pack(note))
  if was == 1 then redis.call('ZADD', waiting, 0, by_due(entry, note)) end
  if held then
    local idle = held[3] + math.floor(by / 1000)
    redis.call('XCLAIM', stream, group, held[2], 0, entry, 'IDLE', idle, 'RETRYCOUNT', held[4], 'JUSTID')
  end
end)
for _, entry in ipairs(redis.call('HKEYS', graves)) do
  local grave = cmsgpack.unpack(redis.call('HGET', graves, entry))
  grave[4] = grave[4] - by
  redis.call('HSET', graves, entry, cmsgpack.pack(grave))
end
"""
DUMP = """
local rows = {}
local function row(id, status, attempts, token, due, changed, worker, ends, reason)
  rows[#rows + 1] = { id, status, attempts, token, whole(due), whole(changed), worker, whole(ends), reason }
end
local function id_of(fields)
  for number = 1, #fields, 2 do
    if fields[number] == 'id' then return fields[number + 1] end
  end
end
for number, member in ipairs(redis.call('ZRANGE', delayed, 0, -1)) do
  local record = cmsgpack.unpack(redis.call('HGET', later, member))
  row(id_of({ unpack(record, 2) }), 'pending', 0, 0, redis.call('ZSCORE', delayed, member) - now, 0, '', 0, '')
end
each(function(entry, fields, held)
  local note = note_of(entry)
  if not held then
    row(id_of(fields), 'pending', 0, 0, note[DUE] - now, note[CHANGED] - now, '', 0, '')
    return
  end
  local attempts, token = held[4] - note[RELEASED], base + held[4]
  if held[2] == WAITING then
    row(id_of(fields), 'pending', attempts, token, note[DUE] - now, note[CHANGED] - now, '', 0, note[REASON])
  else
    local worker, lease = held[2]:match('|(%x+)|(%d+)$')
    local left = (lease - held[3]) * 1000
    row(id_of(fields), 'processing', attempts, token, note[DUE] - now, -held[3] * 1000, worker, left, note[REASON])
  end
end)
for _, one in ipairs(redis.call('XRANGE', dead, '-', '+')) do
  local said = {}
  for number = 1, #one[2], 2 do said[one[2][number]] = one[2][number + 1] end
  local grave = cmsgpack.unpack(redis.call('HGET', graves, said['postroom:entry']))
  row(said.id, 'dead', grave[3], grave[2], 0, grave[4] - now, '', 0, said['postroom:error'])
end
for _, entry in ipairs(redis.call('ZRANGE', done, 0, -1)) do
  local receipt = cmsgpack.unpack(redis.call('HGET', receipts, entry))
  row(receipt[3], 'delivered', receipt[2], receipt[1], 0, redis.call('ZSCORE', done, entry) - now, '', 0, '')
end
return rows
"""


class RedisStreamHarness(StoreHarness):
    """Several stores on one server or cluster, each namespace under keys of its own."""

    can_damage = True

    def __init__(self, url: str, table: str = "") -> None:
        self._url = url
        self._table = table or f"test-{uuid4().hex}"
        self._namespaces: dict[str, StreamKeys] = {}
        #: Which message came when: moments of the server are too long to tell.
        self._arrivals: dict[UUID, int] = {}
        self.store: RedisStreamStore = self._make("default", timedelta(days=7))
        self._stores = [self.store]
        self.client: Any = connect(url, timeout=PATIENCE)

    def _make(self, namespace: str, keep_delivered: timedelta) -> RedisStreamStore:
        self._namespaces[namespace] = StreamKeys(self._table, namespace)
        return RedisStreamStore(
            self._url, namespace=namespace, table=self._table, keep_delivered=keep_delivered, timeout=PATIENCE
        )

    async def start(self) -> None:
        await self.store.open()

    async def another(
        self, *, namespace: str | None = None, keep_delivered: timedelta | None = None
    ) -> RedisStreamStore:
        keep = self.store.keep_delivered if keep_delivered is None else keep_delivered
        store = self._make(namespace or self.store.namespace, keep)
        self._stores.append(store)
        await store.open()
        return store

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self.client.pipeline(transaction=True) as pipeline:
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
        self._namespaces.setdefault(namespace, StreamKeys(self._table, namespace))
        added: list[AddResult] = await StreamOutbox(namespace=namespace, table=self._table).add(
            transaction, list(events), **options
        )
        for one in added:
            assert one.id is not None
            self._arrivals.setdefault(one.id, len(self._arrivals))
        return added

    async def advance(self, by: timedelta) -> None:
        await self._each(SHIFT, by // MICROSECOND)

    async def rows(self) -> list[StoredRow]:
        found = [self._row(*row) for rows in await self._each(DUMP) for row in rows]
        return sorted(found, key=lambda row: self._arrivals[row.id])

    def _row(  # noqa: PLR0913, PLR0917 -- as the script tells it
        self,
        identity: bytes,
        status: bytes,
        attempts: int,
        token: int,
        due: bytes,
        changed: bytes,
        worker: bytes,
        left: bytes,
        error: bytes,
    ) -> StoredRow:
        return StoredRow(
            id=UUID(identity.decode()),
            status=status.decode(),
            attempts=attempts,
            token=token,
            due_in=int(due) * MICROSECOND,
            worker=UUID(worker.decode()) if worker else None,
            lease_left=int(left) * MICROSECOND if worker else None,
            last_error=error.decode() or None,
            unchanged_for=-int(changed) * MICROSECOND,
        )

    async def damage(self, message_id: UUID) -> None:
        """Write all entries anew, since none can be changed, and one of them with headers that are none."""
        stream = self._namespaces["default"].stream
        for entry, fields in await self.client.xrange(stream):
            if fields[b"id"] == message_id.hex.encode():
                fields[b"attributes"] = json.dumps({"headers": ["none"]})
            await self.client.xdel(stream, entry)
            await self.client.xadd(stream, fields)

    async def hint(self) -> None:
        """Add something, which is the hint."""
        await self.client.xadd(self._namespaces["default"].stream, {"just": "a hint"})

    async def _each(self, text: str, *arguments: int) -> list[Any]:
        whole = composed(EACH + text, common="stream_common").text
        return [
            await self.client.eval(whole, len(keys.all), *keys.all, GROUP, *arguments)
            for keys in self._namespaces.values()
        ]

    async def close(self) -> None:
        for keys in self._namespaces.values():
            await self.client.unlink(*keys.all)
        for store in self._stores:
            await store.close()
        await self.client.aclose()
