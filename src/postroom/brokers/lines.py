"""Messages as lines of JSON, one CloudEvent each, written to a stream."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..errors import BrokerUnavailableError
from ..message import Message
from ..store import Delivered, Outcome

__all__ = ["LinesBroker", "Output", "encode_line", "write_aside"]


class Output(Protocol):
    """A binary stream, buffered or not."""

    def write(self, data: memoryview, /) -> int | None:
        """Write what can be written now; return how much that was."""
        ...

    def flush(self) -> None:
        """Return when nothing waits in a buffer."""
        ...


class LinesBroker:
    """Writes each message as one line to a stream, and confirms what has left our buffers."""

    def __init__(self, stream: Output) -> None:
        self._stream = stream
        self._turn = threading.Lock()
        self._is_torn = False
        #: Whether the reader has closed its end, after which no message can go out any more.
        self.is_gone: bool = False

    @classmethod
    def stdout(cls) -> LinesBroker:
        """Return a broker that owns standard output."""
        # Unbuffered, because a buffer that a thread is stuck in would keep the process from ending.
        return cls(open(1, "wb", buffering=0, closefd=False))

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        """Write a batch of lines."""
        data = b"".join(encode_line(message) for message in messages)
        await write_aside(lambda: self._write(data), self._turn)
        return [Delivered()] * len(messages)

    def _write(self, data: bytes) -> None:
        # The rest of a line whose writing failed must not become the beginning of the next.
        left = memoryview(b"\n" + data if self._is_torn else data)
        self._is_torn = True
        try:
            while left:
                left = left[self._stream.write(left) or 0 :]
            self._stream.flush()
        except BrokenPipeError:
            self.is_gone = True
            raise
        self._is_torn = False


def encode_line(message: Message) -> bytes:
    """Return a message as a CloudEvent in JSON, with a newline and in ASCII.

    JSON content stands in ``data``, anything else in ``data_base64``; ``topic``, ``tenantid``, ``dedupekey``,
    ``headers`` and the like are added.
    """
    event: dict[str, Any] = {**message.attributes, "topic": message.topic}
    if message.tenant_id is not None:
        event["tenantid"] = str(message.tenant_id)
    if message.dedupe_key is not None:
        event["dedupekey"] = message.dedupe_key
    if message.headers:
        event["headers"] = dict(message.headers)
    event |= {"postroomattempt": message.attempt, "postroomtoken": message.token}
    if _is_json(message.content_type):
        with suppress(ValueError, RecursionError):
            data = json.loads(message.payload)
            # Infinity and NaN are no JSON; what holds them travels as the bytes that it is.
            return json.dumps(event | {"data": data}, allow_nan=False).encode() + b"\n"
    return json.dumps(event | {"data_base64": base64.b64encode(message.payload).decode()}).encode() + b"\n"


async def write_aside(write: Callable[[], None], turn: threading.Lock) -> None:
    """Write on a thread, one writer at a time; if the caller stops waiting, what has not begun is left out.

    Nobody waits for the thread when the process ends: a reader that stands still must not keep it alive.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    abandoned = threading.Event()

    def work() -> None:
        error: Exception | None = None
        try:
            with turn:
                if abandoned.is_set():
                    return
                write()
        except Exception as raised:  # noqa: BLE001 -- handed to the caller
            error = raised
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(_finish, done, error)

    threading.Thread(target=work, name="postroom-lines", daemon=True).start()
    try:
        await done
    except (OSError, ValueError) as error:
        raise BrokerUnavailableError(f"cannot write: {error}") from error
    finally:
        abandoned.set()


def _finish(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")
