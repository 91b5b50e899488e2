"""Steps: an operation of a database library is written once, for callers that await and for those that do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postroom.stores.sql.driver import Steps, finish, finish_async


class Library:
    """A library whose calls return at once, or are awaited."""

    def __init__(self, *, is_async: bool) -> None:
        self.is_async = is_async
        self.calls: list[str] = []

    def call(self, name: str, error: Exception | None = None) -> Any:  # noqa: ANN401 -- an answer, or what is awaited
        if self.is_async:
            return self._awaited(name, error)
        return self._done(name, error)

    async def _awaited(self, name: str, error: Exception | None) -> str:
        await asyncio.sleep(0)
        return self._done(name, error)

    def _done(self, name: str, error: Exception | None) -> str:
        self.calls.append(name)
        if error is not None:
            raise error
        return name.upper()


def operation(library: Library, error: Exception | None = None) -> Steps[str]:
    """Run a statement, and close what it was run with whatever comes of it."""
    first = yield library.call("open")
    try:
        second = yield library.call("run", error)
    finally:
        yield library.call("close")
    return f"{first} {second}"


async def take(library: Library, steps: Steps[str]) -> str:
    return await finish_async(steps) if library.is_async else finish(steps)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_an_operation_is_the_same_for_both_halves_of_a_library(*, is_async: bool) -> None:
    library = Library(is_async=is_async)

    assert await take(library, operation(library)) == "OPEN RUN"
    assert library.calls == ["open", "run", "close"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_an_error_is_raised_where_the_call_stands(*, is_async: bool) -> None:
    """So that the steps may clean up, as a function would."""
    library = Library(is_async=is_async)

    with pytest.raises(LookupError, match="no such row"):
        await take(library, operation(library, LookupError("no such row")))

    assert library.calls == ["open", "run", "close"]


async def test_a_cancellation_is_raised_where_the_call_stands() -> None:
    library, begun = Library(is_async=True), asyncio.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    def steps() -> Steps[None]:
        try:
            yield hang()
        finally:
            yield library.call("close")

    task = asyncio.create_task(finish_async(steps()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert library.calls == ["close"]


@pytest.mark.parametrize("cleans_up", [False, True])
def test_steps_are_closed_when_their_event_loop_is_gone(*, cleans_up: bool) -> None:
    """Nothing can be awaited any more, so they must not go on."""
    library, ended = Library(is_async=False), list[str]()

    class Forever:
        def __await__(self) -> Any:  # noqa: ANN401
            yield

    def steps() -> Steps[None]:
        try:
            yield Forever()
            ended.append("went on")
        finally:
            ended.append("closed")
            if cleans_up:
                yield library.call("close")

    waiting = finish_async(steps())
    waiting.send(None)
    waiting.close()

    assert ended == ["closed"]
