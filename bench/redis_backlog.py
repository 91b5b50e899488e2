"""A backlog in postroom's own keys, made by the server itself, which is far quicker than to add it."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from postroom import Message
from postroom.stores.redis.keys import Keys
from postroom.stores.redis.record import packed
from postroom.stores.redis.scripts import script
from postroom.stores.redis.stream_keys import stream_keys
from postroom.stores.redis.stream_record import marshalled

from .contender import PAYLOAD

__all__ = ["KEYS", "STREAM", "connect", "fill", "fill_stream"]

KEYS = Keys("postroom_outbox", "default")
STREAM = stream_keys("postroom_stream", "default")
#: How many messages one call makes: what the server does meanwhile is nothing else.
_AT_ONCE = 10_000
_EMPTY = Message(topic="orders", type="orders", payload=b"")

#: The payload of message ``n``, the same bytes as `contender.payload` makes, and an id like no other.
_MAKERS = f"""
    local function payload(n)
      local start = string.format('{{"n": %d, "pad": "', n)
      return start .. string.rep('x', {PAYLOAD - 2} - #start) .. '"}}'
    end
    local function identity(n)
      return struct.pack('>I4I4I8', math.random(0, 2147483647), math.random(0, 2147483647), n)
    end
    """
#: ARGV: the first number, the last one, and what is stored before a payload.
_FILL = f"""
    local function enqueue(KEYS, ARGV)
      {script("enqueue").text}
    end
    {_MAKERS}
    local SIZE = 500
    for first = tonumber(ARGV[1]), tonumber(ARGV[2]), SIZE do
      local words = {{ '' }}
      for n = first, math.min(first + SIZE - 1, tonumber(ARGV[2])) do
        for _, word in ipairs({{ identity(n), ARGV[3] .. payload(n), '1', '0', 'orders', '', '', '' }}) do
          words[#words + 1] = word
        end
      end
      local answer = enqueue(KEYS, words)
      if answer.err then return answer end
    end
    """
#: ARGV: the first number, the last one, and the fields other than id and data.
_FILL_STREAM = f"""
    {_MAKERS}
    for n = ARGV[1], ARGV[2] do
      local id = identity(n):gsub('.', function(byte) return string.format('%02x', byte:byte()) end)
      redis.call('XADD', KEYS[1], '*', 'id', id, 'data', payload(n), unpack(ARGV, 3))
    end
    """


def connect(dsn: str, **options: Any) -> Redis:  # noqa: ANN401 -- as the library takes them
    """Return a client as a user would make one for postroom."""
    return Redis.from_url(dsn, retry=Retry(NoBackoff(), 0), **options)


async def fill(client: Redis, count: int) -> None:
    """Empty the database and have messages 1 to ``count`` waiting in the keys of a `RedisStore`."""
    await _fill(client, _FILL, KEYS.all, count, packed(_EMPTY))


async def fill_stream(client: Redis, count: int) -> None:
    """Empty the database and have messages 1 to ``count`` waiting in the stream of a `RedisStreamStore`."""
    fields = {name: value for name, value in marshalled(_EMPTY).items() if name not in {"id", "data"}}
    await _fill(client, _FILL_STREAM, [STREAM.stream], count, *(word for pair in fields.items() for word in pair))


async def _fill(client: Redis, text: str, keys: list[str], count: int, *arguments: bytes | str) -> None:
    await client.flushdb()
    for first in range(1, count + 1, _AT_ONCE):
        last = min(first + _AT_ONCE - 1, count)
        await client.eval(text, len(keys), *keys, first, last, *arguments)
