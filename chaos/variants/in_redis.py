"""Broken variants of what is in Redis: inbox, commit, both stores and their producers."""

# ruff: noqa: B010 -- parts are set by name, under the types of those that they replace

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from postroom.errors import MessageBusyError
from postroom.inbox import Inbox
from postroom.message import Message
from postroom.outbox import Addition, Answer, Outbox
from postroom.store import Claim, ClaimTerms, Delivered, Settlement
from postroom.stores.redis import RedisInbox, RedisStreamStore
from postroom.stores.redis.inbox import RecorderWriter
from postroom.stores.redis.recorder import Recorder
from postroom.stores.redis.writer import AsyncRedisWriter

from .registry import REDIS, STREAM, Patched, rescript, variant

T = TypeVar("T")

# They are found by their names.
__all__: list[str] = []


# -- the inbox and the commit ----------------------------------------------------------------------------------------


@variant("A message is marked as handled by SETNX, before it is: the mode whose name says that it loses some.", REDIS)
def setnx_inbox() -> None:
    sound: Patched = RedisInbox.__init__

    def initialise(self: RedisInbox, consumer: str, **options: Patched) -> None:
        sound(self, consumer, **{**options, "mode": "setnx_may_lose_messages"})

    setattr(RedisInbox, "__init__", initialise)


@variant("A message that somebody else is handling is acknowledged, as if that one could not fail.", REDIS)
def busy_is_acked() -> None:
    sound = RecorderWriter.admit

    async def admit(self: RecorderWriter, connection: Recorder, inbox: Inbox, message: Message) -> bool:
        try:
            return await sound(self, connection, inbox, message)
        except MessageBusyError:
            return False

    setattr(RecorderWriter, "admit", admit)


@variant("A commit does not look whose message it is by now.", REDIS)
def commit_ignores_the_mark() -> None:
    rescript("commit", {"if state ~= expected then return { 'FENCED' } end": ""})


@variant("A commit leaves no mark behind, so that a duplicate is handled again.", REDIS)
def commit_forgets_the_mark() -> None:
    rescript("commit", {"redis.call('SET', mark, 'done:' .. token, 'PX', kept)": "redis.call('DEL', mark)"})


@variant("A commit does not look whether its commands can be applied, and leaves some of them when one cannot.", REDIS)
def commit_does_not_look_first() -> None:
    rescript("commit", {"if there ~= 'none' and there ~= needed then": "if false then"})


@variant("Who gives up a message deletes its mark, also if it is somebody else's.", REDIS)
def drop_takes_any_mark() -> None:
    rescript("drop", {"if state ~= expected then return { state == 'void:' .. token and 'DROPPED' or 'LOST' } end": ""})


# -- the store of scripts --------------------------------------------------------------------------------------------


@variant("Whoever settles a message in Redis settles it, whether or not its claim is still the current one.", REDIS)
def redis_settles_without_token() -> None:
    rescript("settle", {"if state[TOKEN] ~= token then return false end": ""})


@variant("Messages are read from Redis and published, but nothing there says that somebody has them.", REDIS)
def redis_reads_instead_of_claiming() -> None:
    rescript("claim", {"flush()\nreturn answer": "return answer"})


@variant("A lease in Redis keeps nobody away: what one worker holds the next one takes.", REDIS)
def redis_ignores_leases() -> None:
    rescript("claim", {"'(' .. string.format('%.0f', now), 'LIMIT'": "'+inf', 'LIMIT'", "state[UNTIL] < now and ": ""})


@variant("Messages are written at once, and not with the pipeline that they were added to.", REDIS)
def redis_adds_outside_the_pipeline() -> None:
    sound = AsyncRedisWriter.write

    async def write(
        self: AsyncRedisWriter,
        connection: Patched,
        additions: Sequence[Addition],
        outbox: Outbox,
        answer: Answer[T],
        *,
        outside_transaction: bool,
    ) -> T:
        if isinstance(connection, Pipeline):
            connection = Redis(connection_pool=connection.connection_pool)
        return await sound(self, connection, additions, outbox, answer, outside_transaction=outside_transaction)

    setattr(AsyncRedisWriter, "write", write)


# -- the stream ------------------------------------------------------------------------------------------------------


@variant(
    "Whoever settles an entry of the stream settles it, whether or not its claim is still the current one.", STREAM
)
def stream_settles_without_token() -> None:
    rescript(
        "stream_settle",
        {
            "elseif name == WAITING or base + count ~= token then": "elseif name == WAITING then",
            "elseif base + count ~= token then": "elseif false then",
        },
    )


@variant("A lease on an entry of the stream keeps nobody away.", STREAM)
def stream_ignores_leases() -> None:
    rescript(
        "stream_common",
        {
            "if is_gone or one[3] > lease then": "if true then",
            "leases, '-inf', whole(now), 'LIMIT'": "leases, '-inf', '+inf', 'LIMIT'",
        },
    )


@variant("Entries of the stream are acknowledged and deleted when they are read, before anybody has them.", STREAM)
def stream_acks_before_publish() -> None:
    sound = RedisStreamStore.claim

    async def claim(self: RedisStreamStore, limit: int, terms: ClaimTerms) -> list[Claim]:
        claims = await sound(self, limit, terms)
        await RedisStreamStore.settle(self, [Settlement(one, Delivered()) for one in claims])
        return claims

    setattr(RedisStreamStore, "claim", claim)


@variant("The group begins at the end of the stream, and what was added before it was made is never read.", STREAM)
def stream_group_at_the_end() -> None:
    rescript("stream_common", {"'CREATE', stream, group, '0'": "'CREATE', stream, group, '$'"})
