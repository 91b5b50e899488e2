"""Events: each is a sentence that a plain formatter shows, a level, and fields for structured logs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from postroom import events
from postroom.events import Event, log_event

ID = UUID("01981234-5678-7abc-8def-0123456789ab")
WORKER = UUID("0198aaaa-0000-7000-8000-000000000000")
SECONDS = timedelta(seconds=4)
PAGE = Path(__file__).parents[1] / "docs" / "logging.md"

M = f"message {ID}"
SENTENCES = [
    (events.Started(WORKER, "shop"), f"dispatcher started: namespace=shop worker={WORKER}"),
    (events.Stopped(WORKER, 2), f"dispatcher stopped: released=2 worker={WORKER}"),
    (events.DispatcherFailed(WORKER, "StoreError: gone"), "dispatcher failed: StoreError: gone"),
    (events.Claimed(3), "messages claimed: 3"),
    (events.MessagesDelivered(3), "messages delivered: 3"),
    (events.MessagesReleased(3), "messages released: 3"),
    (
        events.PublishFailed(ID, "orders", "42", 3, "OSError: gone", max_attempts=10),
        f"delivery failed: {M} topic=orders key=42 attempt=3/10: OSError: gone",
    ),
    (
        events.PublishFailed(ID, "orders", None, 1, "OSError: gone", count=500),
        f"delivery failed: {M} and 499 more of its batch topic=orders attempt=1: OSError: gone",
    ),
    (
        events.Retried(ID, "orders", 3, SECONDS, "OSError: gone", "42"),
        f"retrying in 4.0 s: {M} topic=orders key=42 attempt=3: OSError: gone",
    ),
    (events.Died(ID, "orders", 10, "no", "42"), f"{M} topic=orders key=42 attempt=10 is dead: no"),
    (
        events.LeaseLost(ID, "orders", 7, "42"),
        f"lease lost: {M} topic=orders key=42: another worker has claimed the message, so its outcome was not recorded",
    ),
    (events.BreakerOpened("orders", "OSError: gone"), "destination orders is down: OSError: gone; its messages wait"),
    (events.BreakerClosed("orders"), "destination orders is up again"),
    (
        events.StoreFailed("claim", "StoreError: gone", 3, SECONDS / 10),
        "store call 'claim' failed (attempt 3), retrying in 0.4 s: StoreError: gone",
    ),
    (events.StoreRecovered("claim"), "store call 'claim' succeeds again"),
    (
        events.ClockJumpedBack(SECONDS),
        "the store's clock was put back by 4.0 s; messages that were due wait until it has caught up",
    ),
    (
        events.DueElsewhere("default", ("12 in 'shop'", "1 in 'mail'")),
        (
            "no messages in namespace 'default', but messages are due in others of its store: 12 in 'shop', "
            "1 in 'mail'; if this dispatcher should deliver them, add messages with store.outbox(), which has the "
            "namespace of its store"
        ),
    ),
    (
        events.LoopStalled(SECONDS),
        "event loop was blocked for 4.0 s, so leases may have expired; move blocking calls to a thread",
    ),
    (events.Swept(2), "messages dead because their last attempt ended without an outcome: 2"),
    (
        events.Repaired(2),
        "index entries repaired that did not match their messages: 2; check the log of the server",
    ),
    (events.Purged(2), "delivered messages purged: 2"),
    (events.ConsumerStarted(("order.placed", "order.paid")), "consumer started: types=order.placed, order.paid"),
    (events.ConsumerStopped(2), "consumer stopped: released=2"),
    (events.ConsumerFailed("OSError: gone"), "consumer failed: OSError: gone"),
    (
        events.Handled(ID, "order.placed", SECONDS / 1000, "orders", "42"),
        f"handled in 0.004 s: {M} topic=orders type=order.placed key=42",
    ),
    (
        events.HandlingFailed(ID, "order.placed", 2, "KeyError: 'sku'", "orders", "42"),
        f"handling failed: {M} topic=orders type=order.placed key=42 attempt=2: KeyError: 'sku'",
    ),
    (events.DuplicateAdded(ID, "orders"), f"duplicate not added: {M} topic=orders"),
    (
        events.DuplicateSkipped("stock", ID, "order.placed", "orders"),
        f"duplicate skipped by consumer stock: {M} topic=orders type=order.placed",
    ),
    (
        events.Ignored(ID, "order.placed", "orders", "42"),
        f"ignored, since no handler takes it: {M} topic=orders type=order.placed key=42",
    ),
    (
        events.DeadLettered(ID, "order.placed", 2, "no", "orders", "42"),
        f"{M} topic=orders type=order.placed key=42 attempt=2 was dead-lettered: no",
    ),
    (
        events.AckFailed(ID, "order.placed", "OSError: gone", "orders"),
        f"acknowledgement failed, the message will be redelivered: {M} topic=orders type=order.placed: OSError: gone",
    ),
    (events.InboxPurged("stock", 2), "inbox rows purged: 2 of consumer stock"),
    (
        events.PartlyApplied("mark:1", "no"),
        "transaction mark:1 was applied in part and its message is in quarantine: no",
    ),
    (
        events.NamingFailed(ID, "orders", "KeyError: 'tenant'", "42"),
        f"naming the destination failed, so the topic is used: {M} topic=orders key=42: KeyError: 'tenant'",
    ),
    (
        events.BackoffFailed("KeyError: 11"),
        "the backoff function failed, so the default backoff is used: KeyError: 11",
    ),
    (
        events.CallbackFailed("OSError: gone"),
        "a callback after a commit failed; the commit stands, and polling finds its messages: OSError: gone",
    ),
    (events.ListenerFailed("Claimed", "KeyError: 'x'"), "a listener failed on Claimed: KeyError: 'x'"),
]

IDS = [f"{number}-{type(event).__name__}" for number, (event, _) in enumerate(SENTENCES)]


def kinds() -> list[type[Event]]:
    """Return every class of events, in the order in which they stand."""
    named = [value for value in vars(events).values() if isinstance(value, type) and issubclass(value, Event)]
    return [kind for kind in named if kind is not Event]


@pytest.mark.parametrize(("event", "sentence"), SENTENCES, ids=IDS)
def test_an_event_is_a_sentence(event: Event, sentence: str) -> None:
    assert str(event) == sentence


def test_no_event_is_left_out() -> None:
    assert {type(event) for event, _ in SENTENCES} == set(kinds())
    assert {kind.__name__ for kind in kinds()} <= set(events.__all__)


UNSAFE = "a\x1b[31mb\r\nERROR c\u2028d\u202ee"
ESCAPED = r"a\x1b[31mb\r\nERROR c\u2028d\u202ee"


@pytest.mark.parametrize(("event", "_"), SENTENCES, ids=IDS)
def test_no_field_of_an_event_reaches_the_log_with_control_characters(event: Event, _: str) -> None:
    """Rows may be written by raw SQL, and errors by anyone."""
    texts = {name: UNSAFE for name, value in event.as_dict().items() if isinstance(value, str)}
    unsafe = type(event)(**{**event.as_dict(), **texts})

    assert str(unsafe).isprintable()
    assert not texts or ESCAPED in str(unsafe)


@pytest.fixture
def stream() -> Iterator[StringIO]:
    """What a handler with a formatter of the documentation writes."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield StringIO()
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
    root.setLevel(level)


def raised(error: Exception) -> Exception:
    try:
        raise error  # noqa: TRY301
    except Exception as caught:  # noqa: BLE001
        return caught


def set_up(snippet: str, stream: StringIO) -> None:
    """Run a snippet of the page, and have its handler write to a stream."""
    names: dict[str, Any] = {}
    exec(snippet, names)  # noqa: S102 -- our own page
    names["handler"].setStream(stream)


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", [0, 1], ids=["json", "structlog"])
def test_the_set_ups_of_the_page_write_every_field_as_json(number: int, stream: StringIO) -> None:
    """Sentence, level, fields and traceback, one line each."""
    set_up(snippets()[number], stream)

    log_event(
        events.HandlingFailed(ID, "order.placed", 2, "KeyError: 'sku'", "orders", "4\n2", raised(KeyError("sku")))
    )
    log_event(events.Stopped(WORKER, 0))

    failed, stopped = (json.loads(line) for line in stream.getvalue().splitlines())
    assert failed["message"].startswith(f"handling failed: {M} topic=orders type=order.placed key=")
    assert failed["level"].lower() == "warning"
    assert failed["logger"] == "postroom"
    assert (failed["postroom_message_id"], failed["postroom_key"]) == (str(ID), "4\n2")
    assert "raise error" in failed["exception"]
    assert "postroom_exception" not in failed
    assert "exception" not in stopped


@pytest.mark.parametrize("number", [0, 1], ids=["json", "structlog"])
def test_the_set_ups_of_the_page_show_neither_rows_nor_notes_as_lines(number: int, stream: StringIO) -> None:
    """PostgreSQL quotes the row that it refuses, and payloads are in it."""
    set_up(snippets()[number], stream)
    error = ValueError("refused\nDETAIL:  Failing row contains (payload-canary).")
    error.add_note("x\nERROR postroom forged")

    log_event(events.HandlingFailed(ID, "order.placed", 2, "ValueError: refused", "orders", "42", raised(error)))

    failed = json.loads(stream.getvalue())
    assert failed["exception"].startswith("Traceback (most recent call last)")
    assert "payload-canary" not in stream.getvalue()
    assert not any(line.startswith("ERROR") for line in failed["exception"].splitlines())


@pytest.mark.parametrize("number", [0, 1], ids=["json", "structlog"])
def test_the_set_ups_of_the_page_take_records_of_others(number: int, stream: StringIO) -> None:
    """Some libraries ask for a traceback where there is no error."""
    set_up(snippets()[number], stream)

    logging.getLogger("other").error("odd", exc_info=(None, None, None))

    assert json.loads(stream.getvalue())["message"] == "odd"


def test_the_listener_of_the_page_counts(stream: StringIO) -> None:
    names: dict[str, Any] = {}
    exec(snippets()[2], names)  # noqa: S102 -- our own page
    for _ in range(2):
        names["listen"](events.MessagesDelivered(3))

    assert names["delivered"] == 6


def table() -> str:
    """Return the table of the page."""
    rows = ["| event | level | logged as |", "|---|---|---|"]
    for kind in kinds():
        text = re.sub(r"%\((\w+)\)s", r"*\1*", kind.text)
        rows.append(f"| `{kind.__name__}` | {logging.getLevelName(kind.level).lower()} | {text} |")
    return "\n".join(rows)


def test_the_page_lists_every_event_with_its_level_and_text() -> None:
    assert table() in PAGE.read_text(), table()


def test_an_exception_is_neither_compared_nor_shown_nor_a_field() -> None:
    error = raised(KeyError("secret"))
    event = events.HandlingFailed(ID, "t", 1, "KeyError", "orders", None, error)

    assert event == events.HandlingFailed(ID, "t", 1, "KeyError", "orders")
    assert "secret" not in repr(event)
    assert "exception" not in event.as_dict()
    assert isinstance(asdict(event)["exception"], KeyError)
