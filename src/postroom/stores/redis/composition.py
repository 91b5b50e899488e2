"""Scripts of the user's own that store messages, in one step with whatever else they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Unpack, cast

from ...errors import ConfigurationError
from ...outbox import Options, Outbox
from .scripts import around
from .stream_outbox import StreamOutbox
from .writer import AT_ONCE, arguments_of

__all__ = ["scripted"]

_NO_STREAM: Final = "a stream needs no script of ours; call XADD in yours, or use the outbox of a RedisStore"


def scripted(
    outbox: Outbox,
    text: str,
    event: object,
    /,
    *,
    keys: Sequence[Any] = (),
    arguments: Sequence[Any] = (),
    **options: Unpack[Options],
) -> list[Any]:
    """Return what EVAL is called with, to run a script of your own that stores messages if it wants to.

    The script finds its own ``KEYS`` and ``ARGV``, and calls ``add_messages()``, which answers for each message a 1 if
    it is new, or the id of the one that is there. If it must refuse, it has written nothing, and its answer has the
    field ``err``: so call it before your own writes, and return such an answer. The types of the keys of the outbox are
    looked at before your script begins.

    Args:
        outbox: Where the messages go.
        text: The script, in Lua.
        event: What `Outbox.add` takes: one event or message, or a list of them.
        keys: The keys of your script; in a cluster, those of the namespace's slot.
        arguments: The arguments of your script.
        options: Those of `Outbox.add`.

    Raises:
        ConfigurationError: There are more messages than one script takes, or the outbox is that of a stream.
        MessageError: A message is not valid; the subclass says what.

    Example:
        >>> from postroom import Outbox
        >>> from postroom.stores.redis import scripted
        >>> call = scripted(Outbox(), "return add_messages()", {"order_id": 7}, topic="orders")
        >>> call[1]
        15
    """
    if isinstance(outbox, StreamOutbox):
        raise ConfigurationError(_NO_STREAM)
    events = cast("Sequence[object]", event) if isinstance(event, list | tuple) else (event,)
    if len(events) > AT_ONCE:
        raise ConfigurationError(f"{len(events)} messages are too many for one script; it takes {AT_ONCE}")
    ours, words = arguments_of([outbox.prepare(one, **options) for one in events], outbox)
    return [around(text).text, len(ours) + len(keys), *ours, *keys, len(ours), len(words), *words, *arguments]
