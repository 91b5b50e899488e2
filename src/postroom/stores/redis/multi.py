"""The commit with MULTI and EXEC: for commands that the guarded commit does not know, and for handlers that read."""

from __future__ import annotations

import contextlib

from ...errors import StoreError
from .client import Client
from .marks import Mark, milliseconds
from .recorder import WatchingRecorder
from .scripts import script

__all__ = ["apply_multi"]


async def apply_multi(client: Client, recorder: WatchingRecorder, mark: Mark) -> list[str]:
    """Apply what was recorded, and answer as the script of the guarded commit does.

    It is weaker: a command that fails does not keep the others from being applied. Every reply is looked at, and the
    message goes into quarantine then; a crash just before that, or a reply that is lost, leaves it marked as done.

    Raises:
        StoreContentionError: The mark or another watched key was changed meanwhile; nothing was applied.
        StoreError: The server refused everything, or no answer came.
    """
    pipeline = recorder.pipeline
    await recorder.ask(pipeline.watch, mark.key)
    found: bytes | None = await recorder.ask(pipeline.immediate_execute_command, "GET", mark.key)
    if (found or b"").decode(errors="replace") != mark.expected:
        return ["FENCED"]
    pipeline.multi()
    for command in recorder.recorded:
        pipeline.execute_command(*command.words)
    for call in recorder.calls:
        pipeline.execute_command("EVAL", script(call.script).text, len(call.keys), *call.keys, *call.arguments)
    pipeline.execute_command("SET", mark.key, f"done:{mark.token}", "PX", milliseconds(mark.kept))
    replies: list[object] = await recorder.ask(pipeline.execute, raise_on_error=False)
    return await _inspected(client, replies, mark)


async def _inspected(client: Client, replies: list[object], mark: Mark) -> list[str]:
    failed = [reply for reply in replies if isinstance(reply, Exception)]
    if not failed:
        return ["OK"]
    if len(failed) == len(replies):
        return ["REFUSED", str(failed[0])]
    why = f"{len(replies) - len(failed)} of {len(replies)} applied: {failed[0]}"
    # The mark says that all is done, which nobody must believe; if it cannot be put right, at least the caller knows.
    with contextlib.suppress(StoreError):
        await client.call(client.foreign.set(mark.key, f"partial:{mark.token} {why}"))
    return ["PARTIAL", why]
