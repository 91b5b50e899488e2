"""The inbox in Redis: a message is claimed with a token and a lease, and done in the same step as its effect."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, Literal, TypeAlias, TypeVar
from urllib.parse import quote

from ...checks import check_duration, check_function
from ...decisions import Question
from ...errors import (
    ConfigurationError,
    InvalidMessageError,
    MessageBusyError,
    QuarantinedError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from ...inbox import By, Inbox, Mode
from ...message import Message
from ...outbox import Addition, Answer, Outbox
from ...writer import Writer
from .decisions import NO_PIPELINE
from .keys import Keys
from .marks import PER_LEASE, Mark, Renewal, milliseconds
from .record import clipped, packed
from .recorder import Recorder
from .scripts import alone
from .stream_outbox import StreamOutbox
from .writer import hoped, script_calls

__all__ = ["DAY", "RecorderWriter", "RedisInbox", "RedisMode", "writer_for"]

T = TypeVar("T")

#: The modes of every inbox, and the one of SETNX alone, after which a crash loses the message.
RedisMode: TypeAlias = Mode | Literal["setnx_may_lose_messages"]

SETNX: Final = "setnx_may_lose_messages"
DAY: Final = timedelta(days=1)
#: When a message that somebody has is looked at for the first time.
_SOON: Final = timedelta(milliseconds=250)
#: How much longer everybody waits, so that not all come at once.
_JITTER: Final = 0.25


class RedisInbox(Inbox):
    """What one consumer has handled, by the ids of messages, as one key for each.

    A message is claimed before it is handled: its key holds a token, and ends with the lease if nobody is left to
    renew it. The commit finds its own token there, or applies nothing. From then on the key says that the message is
    done, until the retention is over: nothing has to be purged.

    Example:
        >>> from postroom.stores.redis import RedisInbox
        >>> RedisInbox("stock").retention
        datetime.timedelta(days=1)
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        consumer: str,
        *,
        table: str = "postroom_inbox",
        mode: RedisMode = "pessimistic",
        by: By = "id",
        retention: timedelta = DAY,
        redelivery_horizon: timedelta | None = None,
        lease: timedelta = timedelta(seconds=30),
        longest: timedelta = timedelta(minutes=10),
        key_func: Callable[[Message], str] | None = None,
    ) -> None:
        """Set up an inbox; no connection is made.

        Args:
            consumer: Who handles the messages; each consumer needs a name of its own.
            table: What its keys begin with.
            mode: As for every `Inbox`. Besides, ``setnx_may_lose_messages`` marks a message as handled before it is,
                so that a crash of its handler loses it, and a redelivery meanwhile is acknowledged.
            by: By what a message is known again, as for every `Inbox`.
            retention: How long a message is remembered; a day if it is zero or negative.
            redelivery_horizon: For how long after its first delivery a message may come again.
            lease: How long a message stays claimed by one who has crashed. It is renewed while a handler runs.
            longest: For how long it is renewed.
            key_func: Returns by what a message is known again, in place of ``by``.

        Raises:
            ConfigurationError: Messages would be forgotten while they may still come again, or a lease is none.
        """
        check_duration("retention", retention, least=timedelta.min)
        check_duration("lease", lease)
        check_duration("longest", longest, zero=True)
        check_function("key_func", key_func, "a message", optional=True)
        self.is_literal: bool = mode == SETNX
        super().__init__(
            consumer,
            table=table,
            mode="pessimistic" if mode == SETNX else mode,
            by=by,
            retention=retention if retention > timedelta(0) else DAY,
            redelivery_horizon=redelivery_horizon,
        )
        self.lease = lease
        self.longest = longest
        self._key_func = key_func

    def key(self, tag: str, message: Message) -> str:
        """Return the key of a message.

        Raises:
            InvalidMessageError: There is nothing by which it could be known again.
        """
        name = _identity(self.known(message)) if self._key_func is None else self._key_func(message)
        if not name:
            raise InvalidMessageError("the message has nothing by which the inbox could know it again")
        return f"{self.prefix(tag)}:{quote(self.consumer, safe='')}:{name}"

    def prefix(self, tag: str) -> str:
        """Return what the keys of all consumers begin with."""
        return f"{Keys(self.table, tag).prefix}:inbox"

    def dead_letters(self, tag: str) -> str:
        """Return the key of the hash of dead letters."""
        return f"{Keys(self.table, tag).prefix}:dead"


class RecorderWriter:
    """Writes through the recorder of a transaction; what the inbox has to know first, it asks at once."""

    async def write(
        self,
        connection: Recorder,
        additions: Sequence[Addition],
        outbox: Outbox,
        answer: Answer[T],
        *,
        outside_transaction: bool,
    ) -> T:
        """Have messages stored by the commit."""
        if isinstance(outbox, StreamOutbox):
            for command in outbox.commands(additions):
                connection.execute_command(*command)
        else:
            for keys, words in script_calls(additions, outbox):
                connection.run("enqueue", keys, *words)
        if outbox.wake is not None:
            connection.after_commit.append(outbox.wake)
        return answer(hoped(additions))

    async def admit(self, connection: Recorder, inbox: Inbox, message: Message) -> bool:
        """Claim a message at once; tell whether it was not handled before.

        Raises:
            MessageBusyError: Somebody else has it.
            QuarantinedError: A part of its effect was applied before.
            StoreUnavailableError: It was handled, and that may be lost all the same.
        """
        is_new = await self._claim(connection, _of_redis(inbox), message)
        if not is_new:
            await _make_sure(connection)
        return is_new

    async def _claim(self, connection: Recorder, inbox: RedisInbox, message: Message) -> bool:
        client, key = connection.client, inbox.key(connection.tag, message)
        if inbox.is_literal:
            is_new = await client.call(client.foreign.set(key, "1", nx=True, px=milliseconds(inbox.retention)))
            connection.literal = key if is_new else None
            return bool(is_new)
        if connection.mark is not None:
            if connection.mark.key == key:
                return False
            raise ConfigurationError("a transaction in Redis marks one message; open another one for another message")
        # Known before the call: if its answer is lost, the claim may be there.
        mark = connection.mark = Mark(key, inbox.retention, is_claimed=True)
        try:
            answer = await client.evaluate(alone("admit"), [key], mark.token, milliseconds(inbox.lease))
        except StoreTimeoutError as error:
            # It may come after a handler, and is none of its doing.
            raise StoreUnavailableError(str(error)) from error
        if answer[0] == b"CLAIMED":
            connection.renewal = Renewal(client, mark, lease=inbox.lease, longest=inbox.longest)
            return True
        connection.mark = None
        match answer:
            case [b"BUSY", int(left)]:
                raise MessageBusyError(_next_look(inbox.lease, left))
            case [b"QUARANTINED", why]:
                raise QuarantinedError(key, why.decode(errors="replace"))
            case _:
                return False

    async def has(self, connection: Recorder, inbox: Inbox, message: Message) -> bool:
        """Tell whether a message was handled, whoever may have it right now.

        Raises:
            QuarantinedError: A part of its effect was applied before.
            StoreUnavailableError: It was handled, and that may be lost all the same.
        """
        inbox, client = _of_redis(inbox), connection.client
        key = inbox.key(connection.tag, message)
        state: bytes | None = await client.call(client.foreign.get(key))
        word, _, rest = (state or b"").partition(b":")
        if word == b"partial":
            raise QuarantinedError(key, rest.partition(b" ")[2].decode(errors="replace"))
        was_handled = state is not None and word != b"p"
        if was_handled:
            await _make_sure(connection)
        return was_handled

    async def purge_inbox(self, connection: Recorder, inbox: Inbox, limit: int) -> int:
        """Do nothing: the server forgets by itself."""
        return 0

    async def bury(self, connection: Recorder, inbox: Inbox, message: Message, error: str) -> None:
        """Have a dead letter stored by the commit, unless there is one of this consumer and message."""
        key = _of_redis(inbox).dead_letters(connection.tag)
        field = f"{quote(inbox.consumer, safe='')}:{_identity(message)}"
        await connection.execute_command("HSETNX", key, field, packed(message))
        await connection.execute_command("HSETNX", key, f"{field}:error", clipped(error))
        await connection.execute_command("HSETNX", key, f"{field}:attempts", message.attempt)

    def ask(self, connection: Recorder, outbox: Outbox, question: Question) -> object:
        """Refuse: what a script answers is known when the transaction is over."""
        raise ConfigurationError(NO_PIPELINE)


async def _make_sure(connection: Recorder) -> None:
    """Wait until what an earlier transaction did is safe: whoever skips a message has it acknowledged."""
    if connection.assure is not None:
        await connection.assure()


def _next_look(lease: timedelta, left: int) -> timedelta:
    """Return when to look again at a message that somebody has for so many milliseconds, -1 for no end.

    After as long as it was held already, so that a handler that is quick is not waited for long, and one that takes
    its time is not asked all the time; and not after the end of its lease.
    """
    if left < 0:
        delay = lease
    else:
        rest = timedelta(milliseconds=max(left, 1))
        delay = min(max(lease - rest, min(_SOON, lease / PER_LEASE)), rest)
    return delay * random.uniform(1, 1 + _JITTER)


def _of_redis(inbox: Inbox) -> RedisInbox:
    if isinstance(inbox, RedisInbox):
        return inbox
    return RedisInbox(inbox.consumer, table=inbox.table, mode=inbox.mode, by=inbox.by, retention=inbox.retention)


def _identity(message: Message) -> str:
    return str(message.id) if message.tenant_id is None else f"{message.id}:{message.tenant_id}"


def writer_for(connection: object) -> Writer | None:
    """Return what writes through a recorder, None for anything else."""
    return RecorderWriter() if isinstance(connection, Recorder) else None
