"""The command that shows the next messages and changes nothing."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import click

from ..store import Peeked
from ..text import printable
from .options import StoreOptions, as_json, echo_json, run, store_options
from .status import show_age

__all__ = ["peek"]

_HEADINGS = ("id", "topic", "type", "key", "attempts", "due for", "bytes")


@click.command()
@store_options
@click.option("--topic", help="Show messages of this topic only.")
@click.option(
    "--limit", type=click.IntRange(1, 100), default=10, show_default=True, help="How many messages to show at most."
)
@click.option("--payload", is_flag=True, help="Show payloads too; they may hold personal data.")
@as_json
def peek(store_options: StoreOptions, *, topic: str | None, limit: int, payload: bool, as_json: bool) -> None:
    """Show the next messages that are due; change nothing.

    They are the messages that a dispatcher would deliver next, in that order. Messages that are not due yet, are being
    delivered, are dead, or wait for an earlier message of their key are not shown. Of a long backlog the first 1000
    messages are considered. With --json, each message is one line of JSON.

    \b
    Example:
      postroom peek --store sqlite:///shop.sqlite3
      postroom peek --namespace shop --topic orders --limit 1 --payload
      postroom peek --json | jq .id
    """  # noqa: D301
    peeked = run(lambda: _peeked(store_options, limit, topic))
    if as_json:
        for one in peeked:
            echo_json(_as_dict(one, with_payload=payload))
    elif peeked:
        click.echo("\n".join(_as_lines(peeked, with_payload=payload)))
    else:
        click.echo(printable(f"no message is due in namespace {store_options.namespace}" + _of(topic)))


async def _peeked(options: StoreOptions, limit: int, topic: str | None) -> list[Peeked]:
    store = options.make()
    try:
        await store.open()
        return await store.peek(limit, topic=topic)
    finally:
        await store.close()


def _of(topic: str | None) -> str:
    return "" if topic is None else f", topic {topic}"


def _as_lines(peeked: Sequence[Peeked], *, with_payload: bool) -> list[str]:
    """Return a table, with the payload of each message below it if wanted."""
    table: list[tuple[str, ...]] = [_HEADINGS, *map(_cells, peeked)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    heading, *lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
    shown = [heading]
    for line, one in zip(lines, peeked, strict=True):
        shown.append(line)
        if one.broken is not None:
            shown.append(f"    {printable(one.broken)}")
        elif with_payload:
            shown.append(f"    {printable(one.message.payload.decode(errors='backslashreplace'))}")
    return shown


def _cells(peeked: Peeked) -> tuple[str, ...]:
    message = peeked.message
    texts = (str(message.id), message.topic, message.type, "-" if message.key is None else message.key)
    return (*map(printable, texts), str(message.attempt), show_age(peeked.due_for), str(len(message.payload)))


def _as_dict(peeked: Peeked, *, with_payload: bool) -> dict[str, Any]:
    """Return a message for programs; durations are seconds."""
    message = peeked.message
    return {
        "id": str(message.id),
        "topic": message.topic,
        "type": message.type,
        "key": message.key,
        "attempts": message.attempt,
        "due_for": peeked.due_for.total_seconds(),
        "bytes": len(message.payload),
        "broken": peeked.broken,
        **(_payload(message.payload) if with_payload else {}),
    }


def _payload(payload: bytes) -> dict[str, str]:
    """Return a payload as text, or in base64 if it is not UTF-8."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}
