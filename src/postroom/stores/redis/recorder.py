"""The recorder: takes the commands of a transaction down, under the names that the library gives them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import redis.exceptions
from redis.commands.core import AsyncCoreCommands

from ...errors import (
    CommandRefusedError,
    PostroomError,
    StoreContentionError,
    StoreError,
    TransactionClosedError,
)
from .client import Client
from .commands import READS, STEERING, Command, keys_of, name_of, slot_of, understood
from .marks import Mark, Renewal, drop

__all__ = ["Recordable", "Recorder", "ScriptCall", "WatchingRecorder"]

# The library's own types say neither what commands take nor what they answer.
Foreign = Any

#: What one commit may hold: a script holds up everybody else's commands.
MOST_COMMANDS: Final = 1000
MOST_BYTES: Final = 1024 * 1024
#: What a word takes besides its own bytes when it is sent, so that many empty ones are many bytes too.
_FRAME: Final = 6
#: The command that runs a script, as refusals name it.
_EVAL: Final = b"EVAL"


#: The scripts of the store that a commit can run as functions, by the names of their files.
Recordable: TypeAlias = Literal["enqueue"]


class ScriptCall(NamedTuple):
    """A script that the commit runs, and its keys and arguments."""

    script: Recordable
    keys: tuple[bytes, ...]
    arguments: tuple[bytes, ...]


class _Recorded:
    """What a recorded command answers: nothing, with or without an ``await``."""

    def __await__(self) -> Generator[None]:
        """Answer at once."""
        yield from ()


_RECORDED: Final = _Recorded()


class Recorder(AsyncCoreCommands):
    """Stands for a client in a transaction: its commands are recorded, and sent by the commit.

    It has the names of an async client's commands, so that the same code runs at once with a client, and with a
    recorder when the transaction is committed. To await a command is allowed and gives None.
    """

    # The library's base class wants one, for clients that are told of lost connections.
    _event_dispatcher: Foreign = None

    def __init__(self, client: Client, *, tag: str, slot: int | None) -> None:
        """Set up.

        Args:
            client: Asks what has to be known before the commit.
            tag: What stands between braces in the keys of marks.
            slot: Where all keys must be, None if the server is no cluster.
        """
        self.client = client
        self.tag = tag
        self._encode: Callable[[Foreign], bytes] = client.foreign.get_encoder().encode
        self._slot = slot
        self._is_open = True
        self._size = 0
        self._refused: PostroomError | None = None
        self.recorded: list[Command] = []
        self.calls: list[ScriptCall] = []
        #: The mark of the message that is handled; without one, the commit has one of its own.
        self.mark: Mark | None = None
        #: Keeps the lease on it.
        self.renewal: Renewal | None = None
        #: What is deleted, whoever has written it, if the transaction fails: the protocol that may lose messages.
        self.literal: str | None = None
        #: Whether a commit was sent and no answer has come.
        self.is_in_doubt: bool = False
        #: Waits until what was committed before is as safe as it was promised to be; None if it is so at once.
        self.assure: Callable[[], Awaitable[None]] | None = None
        self.after_commit: list[Callable[[], object]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to be applied."""
        return not (self.recorded or self.calls)

    def execute_command(self, *words: Foreign, **options: Foreign) -> Awaitable[None]:
        """Record a command.

        Raises:
            CommandRefusedError: It reads, or the commit could not check it.
            TransactionClosedError: The transaction has ended.
        """
        self._check_open()
        encoded = tuple(map(self._encode, words))
        with self._keeping_refusals():
            command = self._understood(encoded)
            self._check_slot(command.words[0], keys_of(command.words))
            self.recorded.append(command)
            self._check_size(encoded[0], encoded)
        return _RECORDED

    def run(self, script: Recordable, keys: Sequence[str], *arguments: Foreign) -> Awaitable[None]:
        """Record the call of a script, which a `Client` would run at once; the commit runs it after all commands.

        Raises:
            CommandRefusedError: A key is in another slot of the cluster, or the transaction becomes too large.
            TransactionClosedError: The transaction has ended.
        """
        self._check_open()
        call = ScriptCall(script, tuple(map(self._encode, keys)), tuple(map(self._encode, arguments)))
        with self._keeping_refusals():
            self._check_slot(_EVAL, call.keys)
            self.calls.append(call)
            self._check_size(_EVAL, call.arguments)
        return _RECORDED

    def close(self) -> None:
        """Take nothing down any more."""
        self._is_open = False

    async def aclose(self) -> None:
        """Do nothing, as the transaction ends by itself: it is there since a client has it."""

    async def end(self) -> None:
        """Let go of everything that belongs to the transaction."""
        if self.renewal is not None:
            await self.renewal.stop()

    def check(self) -> None:
        """Raise what was refused before: a handler that has caught it would be applied without it."""
        if self._refused is not None:
            raise self._refused

    def keep(self) -> Callable[[], Awaitable[None]]:
        """Return what forgets everything that is recorded from now on, and gives up what is claimed from now on."""
        commands, calls, size, refused = len(self.recorded), len(self.calls), self._size, self._refused
        mark, literal = self.mark, self.literal

        async def forget() -> None:
            del self.recorded[commands:]
            del self.calls[calls:]
            self._size, self._refused = size, refused
            # A message whose effect is forgotten must not be marked as done by the rest of the transaction.
            if (self.mark, self.literal) != (mark, literal):
                try:
                    await self.give_up()
                finally:
                    self.mark, self.literal, self.renewal = mark, literal, None

        return forget

    async def give_up(self) -> None:
        """Let the message be handled again at once; if that fails, the lease of its mark ends it."""
        with contextlib.suppress(StoreError):
            if self.renewal is not None:
                await self.renewal.stop()
            if self.mark is not None and (self.mark.is_claimed or self.is_in_doubt):
                await drop(self.client, self.mark)
            if self.literal is not None:
                await self.client.call(self.client.foreign.delete(self.literal))

    async def watch(self, *names: Foreign) -> Foreign:  # type: ignore[override]  # as the library's own
        """Refuse: nothing is read, so nothing need be watched."""
        raise CommandRefusedError("WATCH", "use RedisTransactions(client, mode='multi') to read what you then change")

    async def unwatch(self) -> Foreign:  # type: ignore[override]  # as the library's own
        """Refuse like `watch`."""
        raise CommandRefusedError("UNWATCH", "it ends what watch() began, which only mode='multi' has")

    @contextlib.contextmanager
    def _keeping_refusals(self) -> Generator[None]:
        """Have `check` raise what is refused in the block as well, in case the handler catches it."""
        try:
            yield
        except CommandRefusedError as error:
            # A handler may read elsewhere instead; what it was to write must not be missing.
            if error.command not in READS:
                self._refused = error
            raise

    def _check_open(self) -> None:
        if not self._is_open:
            raise TransactionClosedError

    def _check_size(self, name: bytes, sent: Sequence[bytes]) -> None:
        self._size += sum(map(len, sent)) + _FRAME * len(sent)
        if len(self.recorded) + len(self.calls) > MOST_COMMANDS or self._size > MOST_BYTES:
            raise CommandRefusedError(
                name.decode(errors="replace"),
                f"it would be more than {MOST_COMMANDS:,} commands or {MOST_BYTES:,} bytes in one transaction, during "
                "which the server does nothing else; do less for one message",
            )

    def _understood(self, words: tuple[bytes, ...]) -> Command:
        return understood(words)

    def _check_slot(self, name: bytes, keys: Sequence[bytes]) -> None:
        if self._slot is None:
            return
        for key in keys:
            if slot_of(key) != self._slot:
                raise CommandRefusedError(
                    name.decode(errors="replace"),
                    f"its key {key.decode(errors='replace')!r} is in another slot of the cluster than the mark of the "
                    "message; put the same text between braces into all keys, as RedisTransactions.key() does",
                )


class WatchingRecorder(Recorder):
    """A recorder for MULTI and EXEC, which takes down any command, and reads at once after `watch`."""

    def __init__(self, client: Client, *, tag: str, slot: int | None) -> None:
        super().__init__(client, tag=tag, slot=slot)
        self.pipeline: Foreign = client.foreign.pipeline(transaction=True)
        self.is_watching: bool = False
        #: There is one connection, on which one question at a time can be asked.
        self._turn = asyncio.Lock()
        self._is_lost = False
        self._is_over = False

    def execute_command(self, *words: Foreign, **options: Foreign) -> Awaitable[Foreign]:
        """Record a command, or answer it at once if it reads and something is watched."""
        if not self.is_watching or name_of(self._encode(words[0])) not in READS:
            return super().execute_command(*words, **options)
        self._check_open()
        return self.ask(self.pipeline.immediate_execute_command, *words, **options)

    async def watch(self, *names: Foreign) -> Foreign:  # type: ignore[override]  # as the library's own
        """Have the commit refused if one of these keys changes, and let commands that read be answered from now on."""
        self._check_slot(b"WATCH", [self._encode(name) for name in names])
        self._check_open()
        answer = await self.ask(self.pipeline.watch, *names)
        self.is_watching = True
        return answer

    def check(self) -> None:
        """Raise also if somebody has caught that the connection was lost: nothing is watched on the next one."""
        super().check()
        if self._is_lost:
            raise StoreContentionError("the connection that watched keys was lost; nothing was applied")

    async def ask(self, question: Callable[..., Awaitable[Foreign]], *words: Foreign, **options: Foreign) -> Foreign:
        """Wait for an answer on the connection that watches.

        Raises:
            StoreContentionError: What is watched was changed meanwhile; nothing was applied.
            StoreError: The server refused, or no answer came.
            TransactionClosedError: The transaction has ended, and the connection is somebody else's.
        """
        async with self._turn:
            if self._is_over:
                raise TransactionClosedError
            try:
                return await self.client.call(question(*words, **options))
            except StoreError as error:
                cause = error.__cause__
                if isinstance(cause, redis.exceptions.ResponseError):
                    # The library quotes the whole command and the server its words: nobody else's business.
                    said = str(cause).rpartition("of pipeline caused error: ")[2]
                    plain = type(cause)(said.partition(", with args beginning with")[0])
                    raise self.client.told(plain) from plain
                self._is_lost = True
                if not isinstance(cause, redis.exceptions.WatchError):
                    raise
                lost = cause.__context__
                if lost is None:
                    raise StoreContentionError("a watched key was changed meanwhile; nothing was applied") from error
                # The library says the same of a connection that is lost, after which everything may be applied.
                raise self.client.told(lost) from lost
            except BaseException:
                # Whoever gives up waiting loses the connection, or the next question would get this one's answer.
                self._is_lost = True
                raise

    async def end(self) -> None:
        """Let go of the connection as well, on which nothing is watched any more."""
        try:
            await super().end()
        finally:
            async with self._turn:
                self._is_over = True
                with contextlib.suppress(StoreError):
                    await self.client.call(self.pipeline.reset())

    def _understood(self, words: tuple[bytes, ...]) -> Command:
        name = name_of(words[0])
        if name in READS:
            raise CommandRefusedError(name, "it reads, and nothing is watched; await watch() of its keys first")
        if name in STEERING:
            raise CommandRefusedError(name, "it steers the connection, which is the transaction's own until its end")
        return Command(words, "")
