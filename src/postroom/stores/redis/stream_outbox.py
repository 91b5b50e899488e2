"""Adding messages to a stream: one XADD for each, in the caller's pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ...codec import Codec
from ...errors import EncodeError
from ...message import DEFAULT_NAMESPACE, Limits, Message
from ...outbox import Addition, Outbox
from .commands import MOST_WORDS
from .scripts import script
from .stream_keys import stream_keys
from .stream_record import Marshal, marshalled

__all__ = ["SMALL", "StreamOutbox"]

#: How many bytes an entry may have without being announced to the claims, which then need not count its bytes. As many
#: as one claim takes are no more than a dispatcher claims at once by default.
SMALL: Final = 8 * 1024
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_RULE: Final = (
    "its marshal function must return names and values of fields, texts or bytes, and at least one, but not more than "
    f"{MOST_WORDS // 2:,}"
)


class StreamOutbox(Outbox):
    """Adds messages to the stream of a `RedisStreamStore`, through a client or pipeline of redis-py's.

    Every message becomes one entry, also one that was added before: a stream knows no duplicates. Keys and dedupe keys
    are handed on to the receiver, which may tell by them.

    Example:
        >>> from postroom.stores.redis.stream_outbox import StreamOutbox
        >>> StreamOutbox(namespace="shop").stream
        'postroom_stream:{shop}:stream'
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each choice a user has
        self,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        table: str = "postroom_stream",
        stream: str | None = None,
        marshal: Marshal | None = None,
        codec: Codec | None = None,
        limits: Limits | None = None,
        opaque_dedupe_keys: bool = False,
        wake: Callable[[], object] | None = None,
    ) -> None:
        """Set up an outbox; no connection is made.

        Args:
            namespace: Whose messages these are.
            table: What the key of the stream begins with.
            stream: The key of the stream, as `RedisStreamStore` has it; by default it is made of table and namespace.
            marshal: Turns a message into the fields of an entry; by default id, source, attributes and data.
            codec: Turns events into bytes; JSON by default.
            limits: How large messages may be.
            opaque_dedupe_keys: Do not ask that a dedupe key begins with its tenant.
            wake: Called after what was added outside of a pipeline, to deliver at once.

        Raises:
            InvalidNameError: There can be no stream of that name.
        """
        super().__init__(
            namespace=namespace,
            table=table,
            codec=codec,
            limits=limits,
            opaque_dedupe_keys=opaque_dedupe_keys,
            wake=wake,
        )
        self._marshal: Marshal = marshal or marshalled
        self._keys = stream_keys(table, namespace, stream)

    @property
    def stream(self) -> str:
        """The key of the stream."""
        return self._keys.stream

    def commands(self, additions: Sequence[Addition]) -> list[list[Any]]:
        """Return the commands that add messages, in their order; what is not due yet waits beside the stream.

        Raises:
            EncodeError: The marshal function failed, or its fields are none.
        """
        commands: list[list[Any]] = []
        later: list[Any] = []
        is_large = False
        for addition in additions:
            words = self._words(addition.message)
            if addition.due_at is None and not addition.delay:
                commands.append(["XADD", self.stream, "*", *words])
                is_large = is_large or _size(words) > SMALL
            else:
                later += _delayed(addition, words)
        keys = self._keys.all
        if is_large:
            commands.append(["HSETNX", self._keys.counters, "large", 0])
        if later:
            commands.append(["EVAL", script("stream_delay").text, len(keys), *keys, "", *later])
        return commands

    def _words(self, message: Message) -> list[Any]:
        try:
            fields: object = self._marshal(message)  # of somebody else's function
        except Exception as error:
            raise EncodeError(message, f"its marshal function raised {type(error).__name__}") from error
        words = _listed(fields)
        if not 0 < len(words) <= MOST_WORDS or not all(isinstance(word, str | bytes) for word in words):
            raise EncodeError(message, _RULE)
        return words


def _size(words: Sequence[str | bytes]) -> int:
    """Return how many bytes an entry has, or a few more: no character has more than four."""
    return sum(len(word) if isinstance(word, bytes) or word.isascii() else 4 * len(word) for word in words)


def _delayed(addition: Addition, words: Sequence[Any]) -> list[Any]:
    time = addition.delay if addition.due_at is None else addition.due_at - _EPOCH
    return [int(addition.due_at is None), time // _MICROSECOND, len(words), *words]


def _listed(fields: Any) -> list[Any]:  # noqa: ANN401 -- whatever somebody's function returned
    pairs: list[tuple[Any, Any]] = [*fields.items()] if hasattr(fields, "items") else []
    return [word for pair in pairs for word in pair]
