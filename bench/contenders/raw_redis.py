"""The bare commands on redis-py, as the best hand-written loop for the same work: same keys, same batch, two at a time.

For the store of scripts these are its own scripts, called by their digests; for the one in a stream XREADGROUP, then
XACK and XDEL in one MULTI. Two loops keep the server busy while one of them looks at what came.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis

from postroom.stores.redis.scripts import script

from ..contender import Arrivals, Drained
from ..redis_backlog import KEYS, STREAM
from .postroom_redis import PostroomRedis

__all__ = ["contender"]

_LOOPS = 2
_BATCH = 500
#: What the script is asked for after the limit: the lease, attempts, suspects, dead ones, tenant, worker, turn, since.
_TERMS = (30_000_000, 10, 3, 0, b"", uuid4().bytes, 0, b"")
#: Of how many parts a claim consists: its id, what is stored, attempts, token, and two more.
_PARTS = 6


class Raw(PostroomRedis):
    """Uses postroom's keys and backlog, and of its code the text of two scripts."""

    async def drain(self, count: int, keys: int) -> Drained:
        arrivals = Arrivals(count, keys)
        began = time.perf_counter()
        async with self.client() as client:
            if self.stream:
                await client.xgroup_create(STREAM.stream, "raw", "0")
            for name in ("claim", "settle"):
                await client.script_load(script(name).text)
            loop = self._read if self.stream else self._claim
            await asyncio.gather(*(loop(client, number, arrivals) for number in range(_LOOPS)))
            seconds = time.perf_counter() - began
        return arrivals.judged(seconds)

    async def _claim(self, client: Redis, _: int, arrivals: Arrivals) -> None:
        size, claim, settle = len(KEYS.all), script("claim").digest, script("settle").digest
        while True:
            parts: list[Any] = await client.evalsha(claim, size, *KEYS.all, _BATCH, *_TERMS)
            del parts[0]
            if not parts:
                return
            arrivals.payloads += [body[4 + int.from_bytes(body[:4]) :] for body in parts[1::_PARTS]]
            tokens = parts[3::_PARTS]
            told = b"".join(
                [identity + token.to_bytes(8) for identity, token in zip(parts[::_PARTS], tokens, strict=True)]
            )
            await client.evalsha(settle, size, *KEYS.all, 0, told)

    async def _read(self, client: Redis, number: int, arrivals: Arrivals) -> None:
        while True:
            found: Any = await client.xreadgroup("raw", f"loop-{number}", {STREAM.stream: ">"}, count=_BATCH)
            if not found:
                return
            entries = found[0][1]
            arrivals.payloads += [fields[b"data"] for _, fields in entries]
            names = [name for name, _ in entries]
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.xack(STREAM.stream, "raw", *names)
                pipeline.xdel(STREAM.stream, *names)
                await pipeline.execute()


def contender(dsn: str, **options: Any) -> Raw:  # noqa: ANN401 -- as for every contender
    """Return bare commands at work on one database."""
    return Raw(dsn, **options)
