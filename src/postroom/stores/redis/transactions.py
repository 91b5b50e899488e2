"""Transactions in Redis: what a handler writes is recorded, and applied by one script at the end, or not at all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar, get_args
from uuid import uuid4
from weakref import WeakValueDictionary

import redis.exceptions

from ... import events
from ...checks import check_choice
from ...errors import (
    CommitRefusedError,
    CommitUnknownError,
    ConfigurationError,
    FencedError,
    PartlyAppliedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from ...inbox import Inbox
from ...message import DEFAULT_NAMESPACE, Message
from ...reporting import Reporter
from ...transaction import InboxClaim, Opening, Transaction, in_transaction
from .claims import RedisInboxClaim
from .client import Client
from .commands import keys_of, slot_of
from .keys import Keys
from .marks import Mark, drop, milliseconds
from .multi import apply_multi
from .profile import Assurance, Profile
from .recorder import Recorder, WatchingRecorder
from .scripts import calling

__all__ = ["CommitMode", "RedisTransactions", "current_pipeline", "transactions_for"]

#: How a transaction is applied: by a script that first checks types and permissions, or by MULTI and EXEC.
CommitMode: TypeAlias = Literal["guarded", "multi"]

C = TypeVar("C")
# Clients have no type that a URL and both kinds of servers would fit.
Foreign = Any

#: How often a commit is sent whose answer is lost: it is applied once.
TRIES: Final = 3
_PAUSE: Final = 0.05


class RedisTransactions:
    """Opens transactions on a client of redis-py's; `TransactionMiddleware` makes one of a client by itself.

    The connection of such a transaction is a `Recorder`. Redis cannot roll back, so nothing is sent before the end.
    Then one script checks the type of every key and the user's permissions, and applies all commands, or none if a
    check fails. Values are not checked: a command that fails by one, such as INCRBY of a text, fails when it is
    applied. If it is the first one, nothing is applied; otherwise those before it stay, and the commit raises
    `PartlyAppliedError`.

    Example:
        >>> from postroom.stores.redis import RedisTransactions
        >>> RedisTransactions("redis://localhost:6379", tag="shop").key("stock:42")
        '{shop}:stock:42'
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        server: Foreign,
        *,
        mode: CommitMode = "guarded",
        tag: str = DEFAULT_NAMESPACE,
        table: str = "postroom_inbox",
        profile: Profile = "durable",
        replicas: int = 1,
        timeout: timedelta = timedelta(seconds=10),
        listener: events.Listener | None = None,
    ) -> None:
        """Set up; no connection is made.

        Args:
            server: A URL, or an async client of redis-py's that repeats nothing by itself and answers with bytes.
            mode: ``guarded`` applies everything with one script, which first checks types and permissions, and knows
                a closed list of commands. ``multi`` takes any command and lets handlers read what they watch; a
                command that fails there does not keep the others from being applied.
            tag: What stands between braces in the keys of marks. In a cluster all keys must have the same: those of
                handlers, and the namespace of the outbox.
            table: What the keys of marks begin with.
            profile: What the server has to promise: see `RedisStore`. It is asked before the first transaction, and a
                transaction ends when its promise is kept.
            replicas: How many replicas are to have everything, with ``replicated``.
            timeout: How long one call to the server may take.
            listener: Called if a transaction was applied in part, as the listener of the consumer is.

        Raises:
            ConfigurationError: The client repeats commands by itself, or turns bytes into texts; or there is no such
                profile.
        """
        check_choice("mode", mode, get_args(CommitMode))
        self.mode: CommitMode = mode
        self.tag = tag
        self.client: Client = Client(server, timeout=timeout)
        self._prefix = Keys(table, tag).prefix
        #: Holds the server to its profile; a store and its transactions have the same.
        self.assurance: Assurance = Assurance(
            self.client, profile, prefix=self._prefix, replicas=replicas, timeout=timeout
        )
        self._report = Reporter(listener)
        #: How long a commit may be on its way of which nobody has heard.
        self._late = (TRIES + 2) * timeout
        is_cluster = hasattr(self.client.foreign, "nodes_manager")
        if is_cluster and mode == "multi":
            raise ConfigurationError("mode='multi' watches keys on one connection; in a cluster use mode='guarded'")
        self._slot = slot_of(self._prefix.encode()) if is_cluster else None

    def transactions(self) -> Self:
        """Return itself: it may stand wherever a client may."""
        return self

    def key(self, name: str) -> str:
        """Return a key that a cluster keeps together with the marks and the outbox."""
        _, _, tag = self._prefix.partition(":")
        return f"{tag}:{name}"

    @asynccontextmanager
    async def begin(self, opening: Opening | None = None) -> AsyncGenerator[Transaction]:
        """Open a transaction; apply what was recorded when the block ends well, forget it whatever else happens.

        Raises:
            CommitRefusedError: A key has the wrong type, a permission is missing, or the first command failed; nothing
                was applied.
            PartlyAppliedError: A later command failed, by a value for example; the mark says so from now on.
            FencedError: The message is somebody else's by now; nothing was applied.
            CommitUnknownError: The server does not answer any more.
            StoreUnavailableError: It was applied, and may be lost all the same: too few disks or replicas have it.
            ConfigurationError: The server does not keep what the profile promises.
        """
        claim = None if opening is None else opening.claim
        transaction = await self._open() if claim is None else await claim.take()
        recorder: Recorder = transaction.connection
        with _completing(claim):
            try:
                try:
                    yield transaction
                finally:
                    callbacks = transaction.close()
                    recorder.close()
                is_applied = await self._commit(recorder, transaction)
            except BaseException:
                await recorder.give_up()
                raise
            finally:
                await recorder.end()
            if is_applied and recorder.assure is not None:
                await recorder.assure()
        for callback in dict.fromkeys((*callbacks, *recorder.after_commit)):
            callback()

    def savepoint(self, transaction: Transaction) -> AbstractAsyncContextManager[None]:
        """Make what is recorded in the block forgotten alone, if it fails."""
        return _forgetting(transaction.connection.keep())

    async def claim(self, inbox: Inbox, message: Message) -> RedisInboxClaim | None:
        """Claim a message before its transaction begins; return None if it was handled before.

        Raises:
            MessageBusyError: Another worker handles it.
            QuarantinedError: A part of its effect was applied before.
            StoreError: The server refused, or no answer came.
        """
        claim = RedisInboxClaim(inbox, message, self._open)
        await claim.hold()
        return None if claim.state == "duplicate" else claim

    async def _open(self) -> Transaction:
        return Transaction(await self._recorder(), self)

    async def _recorder(self) -> Recorder:
        # Before anything is written: a server that takes the place of this one later may not have it.
        checked = await self.assurance.known()
        kind = Recorder if self.mode == "guarded" else WatchingRecorder
        recorder = kind(self.client, tag=self.tag, slot=self._slot)
        if checked.waits:
            recorder.assure = partial(self.assurance.confirm, checked, self._prefix)
        return recorder

    # -- commit ------------------------------------------------------------------------------------------------

    async def _commit(self, recorder: Recorder, transaction: Transaction) -> bool:
        """Apply what was recorded; tell whether there was anything."""
        recorder.check()
        if recorder.is_empty and recorder.mark is None:
            return False
        mark = recorder.mark = recorder.mark or self._own_mark()
        recorder.is_in_doubt = True
        try:
            answer = await self._answer(recorder, mark)
        except StoreError as error:
            answer = await self._resolved(recorder, mark, error, transaction)
        recorder.is_in_doubt = False
        self._judge(answer, mark)
        return True

    def _own_mark(self) -> Mark:
        """Return the mark of a transaction that handles no message: by it a commit is known again."""
        token = uuid4().hex
        return Mark(f"{self._prefix}:commit:{token}", self._late, is_claimed=False, token=token)

    async def _answer(self, recorder: Recorder, mark: Mark) -> list[str]:
        """Send the commit until there is an answer: the mark lets it be applied once."""
        if isinstance(recorder, WatchingRecorder):
            return await apply_multi(self.client, recorder, mark)
        keys, arguments = _written(recorder, mark)
        script = calling("commit", "enqueue")
        for attempt in range(TRIES - 1):
            try:
                return _texts(await self.client.evaluate(script, keys, *arguments))
            except StoreError as error:
                if _was_answered(error) or isinstance(error, StoreTimeoutError):
                    raise
                await asyncio.sleep(random.uniform(0.5, 1) * _PAUSE * 2**attempt)
        return _texts(await self.client.evaluate(script, keys, *arguments))

    async def _resolved(self, recorder: Recorder, mark: Mark, error: StoreError, transaction: Transaction) -> list[str]:
        """Find out what became of a commit, by taking the mark away if it was not applied until now."""
        try:
            answer = await drop(self.client, mark)
        except StoreError:
            recorder.mark = None  # once is enough to try; the lease ends by itself
            if _was_answered(error):
                raise error from None
            transaction.witness = partial(self._was_applied, mark)
            raise CommitUnknownError from error
        if answer[0] in {"DONE", "PARTIAL"}:
            return answer
        recorder.is_in_doubt = False
        if type(error) is StoreError and _was_answered(error):
            raise CommitRefusedError(str(error)) from error
        if isinstance(error, StoreTimeoutError):
            # A statement that takes too long is its handler's doing; that nobody answered a commit is not.
            raise StoreUnavailableError(f"{error}; nothing was applied") from error
        raise error

    async def _was_applied(self, mark: Mark) -> bool:
        async with self.assurance.confirmed(self._prefix):
            word, *_ = await drop(self.client, mark)
        return word == "DONE"

    def _judge(self, answer: list[str], mark: Mark) -> None:
        match answer:
            case ["OK"] | ["DONE"]:
                return
            case ["FENCED"]:
                raise FencedError
            case ["BADTYPE", key, why]:
                raise CommitRefusedError(f"{key!r} is {why}")
            case ["UNDECIDED", key, command]:
                raise CommitRefusedError(
                    f"cannot determine whether {key!r} exists when {command} runs: that depends on its elements, which "
                    "are not checked; use SET without NX or XX"
                )
            case ["NOPERM", key, command]:
                raise CommitRefusedError(f"the user may not call {command} on {key!r}; let them with ACL SETUSER")
            case ["PARTIAL", why]:
                self._report(events.PartlyApplied(mark.key, why))
                raise PartlyAppliedError(mark.key, why)
            case _:
                raise CommitRefusedError(" ".join(answer[1:]))


@contextmanager
def _completing(claim: InboxClaim | None) -> Generator[None]:
    """Note in a claim that was taken over what became of its transaction."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if claim is not None and claim.state == "taken":
            claim.state = "done" if is_done else "given_up"


@asynccontextmanager
async def _forgetting(forget: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    try:
        yield
    except BaseException:
        await forget()
        raise


def _written(recorder: Recorder, mark: Mark) -> tuple[list[Foreign], list[Foreign]]:
    """Return the keys and arguments of the script."""
    keys: list[Foreign] = [mark.key]
    for call in recorder.calls:
        keys += call.keys
    keys += dict.fromkeys(key for command in recorder.recorded for key in keys_of(command.words))
    arguments: list[Foreign] = [mark.token, mark.expected, milliseconds(mark.kept), len(recorder.recorded)]
    for command in recorder.recorded:
        arguments += (len(command.words), command.needs, *command.words)
    arguments.append(len(recorder.calls))
    for call in recorder.calls:
        arguments += (len(call.keys), len(call.arguments), *call.arguments)
    return keys, arguments


def _texts(answer: list[bytes]) -> list[str]:
    return [word.decode(errors="replace") for word in answer]


def _was_answered(error: StoreError) -> bool:
    """Tell whether the server itself refused; otherwise nobody knows what it did."""
    return isinstance(error.__cause__, redis.exceptions.ResponseError)


#: Those that somebody uses, so that a handler finds the transaction of its own client; they keep their clients alive.
_known: WeakValueDictionary[int, RedisTransactions] = WeakValueDictionary()


def transactions_for(client: object) -> RedisTransactions:
    """Return what opens transactions on a client: the same for the same one."""
    known = _known.get(id(client))
    if known is None:
        known = _known[id(client)] = RedisTransactions(client)
    return known


def current_pipeline(fallback: C) -> C:
    """Return the recorder of the current transaction, or ``fallback`` where there is none.

    An adapter calls it with its own client, and its commands are recorded inside a handler's transaction, and run at
    once outside. In a transaction that has ended it raises `TransactionClosedError`.
    """
    transaction = in_transaction()
    if transaction is None or not isinstance(transaction.opened_by, RedisTransactions):
        return fallback
    pipeline: C = transaction.connection
    return pipeline
