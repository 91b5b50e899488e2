"""Repeats of one kind: what is let through, what is counted, and when it is summed up."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from postroom import events
from postroom.collapse import Collapser, Kind, Repeats
from postroom.events import Event
from postroom.logs import Collapsed
from postroom.testing.waiting import until

KIND, OTHER = Kind("PublishFailed", "orders", "ValueError"), Kind("PublishFailed", "mails", "ValueError")
MINUTE = timedelta(minutes=1)


def admitted(collapser: Collapser[int], kind: Kind, times: int, now: float, *, burst: int = 1) -> list[int]:
    return [number for number in range(times) if collapser.admit(kind, number, now, burst=burst)]


# -- the pure part -----------------------------------------------------------------------------------------------------


def test_the_first_of_a_kind_is_let_through_and_the_rest_is_summed_up_once_a_minute() -> None:
    collapser = Collapser[int]()

    assert admitted(collapser, KIND, 42, now=0.0) == [0]
    assert collapser.due(59.9) == []
    assert collapser.due(60.0) == [Repeats(41, 41, MINUTE)]
    assert admitted(collapser, KIND, 3, now=61.0) == []
    assert collapser.due(119.0) == []
    assert collapser.due(121.0) == [Repeats(2, 3, timedelta(seconds=61))]


def test_a_kind_that_has_ended_is_let_through_again() -> None:
    collapser = Collapser[int]()
    admitted(collapser, KIND, 1, now=0.0)

    assert collapser.due(60.0) == []
    assert collapser.next_due() is None
    assert admitted(collapser, KIND, 1, now=60.0) == [0]


def test_kinds_do_not_hide_each_other() -> None:
    collapser = Collapser[int]()

    assert admitted(collapser, KIND, 2, now=0.0) == [0]
    assert admitted(collapser, OTHER, 2, now=0.0) == [0]


def test_a_burst_is_let_through_one_by_one() -> None:
    collapser = Collapser[int]()

    assert admitted(collapser, KIND, 30, now=0.0, burst=20) == list(range(20))
    assert collapser.due(60.0) == [Repeats(29, 10, MINUTE)]
    assert len(admitted(collapser, KIND, 30, now=61.0, burst=20)) == 19


def test_what_was_held_back_is_there_at_the_end() -> None:
    collapser = Collapser[int]()
    admitted(collapser, KIND, 5, now=0.0)
    admitted(collapser, OTHER, 5, now=0.0)

    assert collapser.drain(12.0, place="orders") == [Repeats(4, 4, timedelta(seconds=12))]
    assert collapser.drain(12.0) == [Repeats(4, 4, timedelta(seconds=12))]
    assert collapser.next_due() is None
    assert admitted(collapser, KIND, 1, now=12.0) == [0]


def test_thousands_of_kinds_take_bounded_memory_and_are_counted_all_the_same() -> None:
    """As many destinations may be down at once."""
    collapser = Collapser[int](kinds=100)

    through = sum(collapser.admit(Kind("BreakerOpened", str(number), ""), number, 0.0) for number in range(5000))

    assert through == 101
    assert collapser.due(60.0) == [Repeats(4999, 4899, MINUTE)]


def test_threads_count_every_event() -> None:
    collapser = Collapser[int]()
    start = threading.Barrier(4)
    through: list[int] = []

    def work() -> None:
        start.wait()
        through.extend(admitted(collapser, KIND, 5000, now=0.0))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    [repeats] = collapser.drain(1.0)
    assert (len(through), repeats.count) == (1, 19_999)


# -- events ------------------------------------------------------------------------------------------------------------


class Written:
    """A listener over a clock of its own, and what it has written."""

    def __init__(self, window: timedelta = MINUTE) -> None:
        self.now = 0.0
        self.lines: list[tuple[str, int]] = []
        self.tell = Collapsed(self._write, window=window, clock=lambda: self.now)

    def _write(self, event: Event, repeats: Repeats[Event] | None) -> None:
        self.lines.append((str(event), repeats.count if repeats else 0))


def failed(topic: str = "orders", error: str = "ValueError: no", message_id: UUID | None = None) -> Event:
    return events.PublishFailed(message_id or uuid4(), topic, None, 1, error, ValueError("no"))


def test_failures_that_differ_in_ids_and_numbers_are_of_one_kind() -> None:
    written = Written()
    for number in range(5):
        written.tell(failed(error=f"LookupError: order {number} of {uuid4()} at 0x{number}f is unknown"))
    written.tell(failed(error="LookupError: customer is unknown"))
    written.tell(failed(topic="mails"))

    assert len(written.lines) == 3


def test_a_summary_shows_the_latest_and_comes_with_the_next_event_of_any_kind() -> None:
    written, latest = Written(), uuid4()
    for message_id in (uuid4(), uuid4(), latest):
        written.tell(failed(message_id=message_id))
    written.now = 60.0
    written.tell(events.Claimed(1))

    assert written.lines[1:] == [
        (f"delivery failed: message {latest} topic=orders attempt=1: ValueError: no", 2),
        ("messages claimed: 1", 0),
    ]


@pytest.mark.parametrize(
    ("ends", "flushed"),
    [
        (events.BreakerClosed("orders"), True),
        (events.BreakerClosed("mails"), False),
        (events.Stopped(uuid4(), 0), True),
        (events.ConsumerStopped(0), True),
    ],
)
def test_the_rest_is_written_when_the_trouble_or_the_work_ends(ends: Event, flushed: bool) -> None:  # noqa: FBT001
    written = Written()
    written.tell(failed())
    written.tell(failed())
    written.tell(ends)

    assert [count for _, count in written.lines] == [0, 1, 0] if flushed else [0, 0]


async def test_a_summary_comes_although_nothing_more_happens() -> None:
    """A burst of failures before a quiet night must not look like one."""
    lines: list[int] = []
    tell = Collapsed(
        lambda _, repeats: lines.append(repeats.count if repeats else 0), window=timedelta(milliseconds=20)
    )
    for _ in range(3):
        tell(failed())

    await until(lambda: lines == [0, 2], "the summary", within=timedelta(seconds=30))
    tell(failed())
    await until(lambda: lines in ([0, 2, 1], [0, 2, 0]), "another", within=timedelta(seconds=30))


def test_what_is_held_back_keeps_no_stack_alive() -> None:
    written = Written()
    seen: list[Event] = []
    written.tell = Collapsed(lambda event, _: seen.append(event), clock=lambda: 0.0)
    written.tell(failed())
    written.tell(failed())
    written.tell(events.Stopped(uuid4(), 0))

    assert [getattr(event, "exception", None) is None for event in seen] == [False, True, True]


def test_every_dead_message_is_logged_up_to_a_number_that_can_be_read() -> None:
    """An error asks for action now: none of them may be hidden by an earlier one."""
    written = Written()
    for _ in range(50):
        written.tell(events.Died(uuid4(), "orders", 10, "ValueError: no"))
    written.now = 61.0
    written.tell(events.Claimed(1))

    assert len([count for line, count in written.lines if " is dead: " in line and not count]) == 20
    assert [count for _, count in written.lines if count] == [30]


def test_only_failures_are_collapsed() -> None:
    written = Written()
    for _ in range(5):
        written.tell(events.BreakerClosed("orders"))
        written.tell(events.Claimed(1))

    assert len(written.lines) == 10


def test_the_log_says_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "postroom"):
        for _ in range(42):
            events.log_event(failed())
        events.log_event(events.Stopped(uuid4(), 0))

    first, summary = [record for record in caplog.records if record.name == "postroom"]
    assert first.exc_info is not None
    assert summary.exc_info is None
    assert summary.getMessage().startswith("41 more in the last 0.0")
    assert "most recently: delivery failed: message " in summary.getMessage()
    assert getattr(summary, "postroom_repeats", None) == 41
