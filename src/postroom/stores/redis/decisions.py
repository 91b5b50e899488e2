"""Due-time decisions in Redis: every answer is one script, which looks, decides and stores the event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple
from uuid import UUID

from redis.exceptions import NoScriptError

from ...decisions import (
    Cancel,
    Decide,
    Due,
    Duplicate,
    Enqueued,
    Expired,
    FindDue,
    Forget,
    NotDue,
    Question,
    Renew,
    Revoked,
    Schedule,
    Scheduled,
    Stale,
    from_milliseconds,
    to_milliseconds,
)
from ...errors import ConfigurationError
from ...outbox import Addition, Outbox
from .keys import Keys
from .pipelines import refuse_unless_it_queues
from .scripts import Script, composed, function, source
from .stream_outbox import StreamOutbox

__all__ = ["NO_PIPELINE", "Asking", "ask", "ask_async", "asking", "ticket_keys", "ticket_script"]

# Clients of the library have no type that names both kinds.
Foreign = Any

NO_PIPELINE: Final = (
    "a pipeline tells what a script answers when it is executed, which is too late here; pass the client itself"
)
_NO_STREAM: Final = "a stream has no tickets, and their events would not be in it; use the outbox of a RedisStore"
#: A script holds up everybody else's commands, so none does more than this.
_AT_ONCE: Final = 500
_ENDS: Final = {"scheduled": Scheduled(), "revoked": Revoked(), "expired": Expired(), "not due": NotDue()}


class Asking(NamedTuple):
    """A question as a script and what it is called with."""

    question: Question
    script: Script
    arguments: Sequence[Any]


def asking(question: Question, outbox: Outbox, words: Callable[[Addition], Sequence[Any]]) -> Asking:
    """Return the script that answers a question; ``words`` says how an event is handed to one.

    Raises:
        ConfigurationError: The outbox is that of a stream.
    """
    if isinstance(outbox, StreamOutbox):
        raise ConfigurationError(_NO_STREAM)
    keys = _keys(outbox.table, outbox.namespace)
    name, arguments = _call(question, keys.channel, words)
    every = [*keys.all, *ticket_keys(keys)]
    return Asking(question, ticket_script(name), [len(every), *every, *arguments])


def ticket_keys(keys: Keys) -> list[str]:
    """Return the keys of the tickets of a namespace, in the slot of its messages."""
    return [f"{keys.prefix}:{name}" for name in ("tickets", "expiries", "endings")]


@lru_cache(maxsize=8)
def ticket_script(name: str) -> Script:
    """Return a script about tickets by the name of its file; it may store an event."""
    return composed("\n".join((function("enqueue"), source("tickets"), source(name))))


@lru_cache(maxsize=256)
def _keys(table: str, namespace: str) -> Keys:
    return Keys(table, namespace)


def _call(
    question: Question, channel: str, words: Callable[[Addition], Sequence[Any]]
) -> tuple[str, Sequence[str | int | bytes]]:
    match question:
        case Schedule(ticket, expires_at):
            return "schedule", (ticket, to_milliseconds(expires_at))
        case Renew(ticket, expires_at):
            return "renew", (ticket, to_milliseconds(expires_at))
        case FindDue(limit, due_cutoff):
            return "find_due", (min(max(limit, 0), _AT_ONCE), _until(due_cutoff))
        case Decide(ticket, expires_at, addition, is_revoked, due_cutoff):
            terms = to_milliseconds(expires_at), int(is_revoked), _until(due_cutoff)
            return "decide", (ticket, *terms, channel, *words(addition))
        case Cancel(ticket, addition):
            return "revoke", (ticket, channel, *words(addition))
        case Forget(older_than, limit):
            milliseconds = int(older_than.total_seconds() * 1000)
            return "forget", (milliseconds, min(max(limit, 0), _AT_ONCE))


def _until(due_cutoff: datetime | None) -> int | str:
    return "" if due_cutoff is None else to_milliseconds(due_cutoff)


def ask(connection: Foreign, outbox: Outbox, asking: Asking) -> object:
    """Ask through a client or pipeline whose calls return at once."""
    if _is_queueing(connection, asking):
        connection.execute_command("EVAL", asking.script.text, *asking.arguments)
        return Scheduled()
    try:
        told = connection.evalsha(asking.script.digest, *asking.arguments)
    except NoScriptError:
        told = connection.eval(asking.script.text, *asking.arguments)
    return _answered(asking, outbox, told)


async def ask_async(connection: Foreign, outbox: Outbox, asking: Asking) -> object:
    """Ask through a client or pipeline whose calls are awaited."""
    if _is_queueing(connection, asking):
        queued = connection.execute_command("EVAL", asking.script.text, *asking.arguments)
        if asyncio.iscoroutine(queued):
            await queued
        return Scheduled()
    try:
        told = await connection.evalsha(asking.script.digest, *asking.arguments)
    except NoScriptError:
        told = await connection.eval(asking.script.text, *asking.arguments)
    return _answered(asking, outbox, told)


def _is_queueing(connection: Foreign, asking: Asking) -> bool:
    """Tell whether a connection is a pipeline; refuse one where the answer is what counts."""
    is_queueing = hasattr(connection, "execute")
    if is_queueing and not isinstance(asking.question, Schedule):
        raise ConfigurationError(NO_PIPELINE)
    refuse_unless_it_queues(connection, "schedule()")
    return is_queueing


def _answered(asking: Asking, outbox: Outbox, told: Foreign) -> object:
    if isinstance(asking.question, Forget):
        return told
    texts = [item.decode() if isinstance(item, bytes) else item for item in told]
    if isinstance(asking.question, FindDue):
        # Round numbers may come with an exponent: how a server writes its scores is up to its version.
        ends = [from_milliseconds(int(float(text))) for text in texts[1::2]]
        return [Due(ticket, end) for ticket, end in zip(texts[::2], ends, strict=True)]
    return _decided(asking.question, outbox, texts)


def _decided(question: Question, outbox: Outbox, texts: Sequence[str]) -> object:
    match texts, question:
        case ["told", "1"], Decide() | Cancel():
            if outbox.wake is not None:
                outbox.wake()
            return Enqueued(question.addition.message.id)
        case ["told", there], _:
            return Duplicate(UUID(there))
        case ["duplicate"], Decide():
            return Duplicate(question.addition.message.id)
        case ["stale", *more], _:
            return Stale(from_milliseconds(int(more[0])) if more else None)
        case _:
            return _ENDS[texts[0]]
