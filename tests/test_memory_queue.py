"""The sorted queue of the store in memory."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from postroom.stores import memory_queue
from postroom.stores.memory_queue import Entry, SortedQueue

START = datetime(2026, 1, 1, tzinfo=UTC)
#: More than fit into one chunk, in an order that fills and splits chunks everywhere.
MANY = 5 * memory_queue._CHUNK  # noqa: SLF001


def entry(second: int, number: int) -> Entry:
    return START + timedelta(seconds=second), number, (number,)


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 30), st.data())
def test_it_is_as_a_sorted_list(seconds: list[int], now: int, data: st.DataObject) -> None:
    queue, entries = SortedQueue(), [entry(second, number) for number, second in enumerate(seconds)]
    for one in entries:
        queue.add(one)
    gone = data.draw(st.sets(st.sampled_from(entries))) if entries else set[Entry]()
    for one in gone:
        queue.remove(one)

    moment = START + timedelta(seconds=now)
    expected = sorted(one for one in entries if one not in gone and one[0] <= moment)

    assert list(queue.due(moment, newest_first=False)) == expected
    assert list(queue.due(moment, newest_first=True)) == expected[::-1]


def test_it_stays_in_order_across_its_chunks() -> None:
    queue, entries = SortedQueue(), [entry(number * 7919 % MANY, number) for number in range(MANY)]
    for one in entries:
        queue.add(one)
    for one in entries[::2]:
        queue.remove(one)

    half = START + timedelta(seconds=MANY // 2)
    expected = sorted(one for one in entries[1::2] if one[0] <= half)

    assert list(queue.due(half, newest_first=False)) == expected
    assert list(queue.due(half, newest_first=True)) == expected[::-1]
