"""The middlewares that need no database, and the order that all of them must stand in."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postroom import Message, events
from postroom.errors import (
    CommitUnknownError,
    ConfigurationError,
    DecodeError,
    ExpiredError,
    MiddlewareOrderError,
    RejectError,
)
from postroom.middleware import (
    CorrelationMiddleware,
    DeadLetterMiddleware,
    DeadlineMiddleware,
    EventsMiddleware,
    InboxMiddleware,
    LogMiddleware,
    Middleware,
    Next,
    OutboxMiddleware,
    RecoverMiddleware,
    RequiredMiddleware,
    RetryMiddleware,
    SubjectMiddleware,
    TransactionMiddleware,
)
from postroom.middleware.chain import chained, check_order
from postroom.middleware.json_schema import JSONSchemaMiddleware
from postroom.middleware.layers import CLAIM, DEAD_LETTERS, INBOX, OUTBOX, RETRY, TRANSACTION
from postroom.middleware.observing import HandlerCrashedError
from postroom.middleware.transactional import Transactional
from postroom.stores.redis import RedisInbox, RedisTransactions

MS = timedelta(milliseconds=1)
NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
SECRET = b'{"card": "4111-1111"}'


def order(*, payload: bytes = SECRET, key: str | None = "42", **headers: str) -> Message:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Message(topic="orders", type="order.placed", payload=payload, key=key, headers=named, attempt=2)


def output(*, key: str | None = None, **headers: str) -> Message:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Message(topic="stock", type="stock.reserved", payload=b"{}", key=key, headers=named)


def returning(*outputs: Message) -> Next:
    async def call_next(_: Message) -> Sequence[Message]:
        return outputs

    return call_next


def raising(error: BaseException) -> Next:
    async def call_next(_: Message) -> Sequence[Message]:
        raise error

    return call_next


# -- recover, log, events ----------------------------------------------------------------------------------------


@pytest.mark.requirement("F-24")
async def test_a_handler_that_exits_fails_its_message_only() -> None:
    """Recover makes an error of what would end the process."""

    async def call_next(_: Message) -> Sequence[Message]:
        sys.exit(3)

    with pytest.raises(HandlerCrashedError, match=r"'order\.placed' raised SystemExit: 3"):
        await RecoverMiddleware()(order(), call_next)


@pytest.mark.requirement("F-20", "F-24")
@pytest.mark.parametrize("error", [ValueError("plain"), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()])
async def test_errors_and_the_wish_of_others_to_end_pass_recovery(error: BaseException) -> None:
    """A cancelled task stays cancelled, and an error stays what it is."""
    with pytest.raises(type(error)) as raised:
        await RecoverMiddleware()(order(), raising(error))

    assert raised.value is error


@pytest.mark.requirement("F-24")
async def test_the_log_says_what_was_handled_and_never_a_payload(caplog: pytest.LogCaptureFixture) -> None:
    """Type, id, time and end; the text of an error may quote the payload, so it is left out."""
    message = order()
    with caplog.at_level(logging.INFO, "postroom"):
        await LogMiddleware()(message, returning(output()))
        with pytest.raises(ValueError, match="4111"):
            await LogMiddleware(level=logging.WARNING)(message, raising(ValueError("4111-1111")))

    good, bad = caplog.records
    assert f"message {message.id} topic={message.topic} type=order.placed" in good.getMessage()
    assert "attempt=2: handler returned 1 messages after " in good.getMessage()
    assert "failed with ValueError after 0.0" in bad.getMessage()
    assert (good.levelno, bad.levelno) == (logging.INFO, logging.WARNING)
    assert "4111" not in caplog.text
    assert getattr(good, "postroom_message_id", None) == message.id


@pytest.mark.requirement("F-24")
async def test_a_listener_is_told_how_each_message_was_handled() -> None:
    """What metrics are made of; a listener that fails changes nothing."""
    told: list[events.Event] = []

    def listener(event: events.Event) -> None:
        told.append(event)
        raise LookupError

    message, made = order(), output()

    assert await EventsMiddleware(listener)(message, returning(made)) == (made,)
    with pytest.raises(ValueError, match="no stock"):
        await EventsMiddleware(listener)(message, raising(ValueError("no stock")))

    good, bad = told
    assert isinstance(good, events.Handled)
    assert (good.message_id, good.type) == (message.id, "order.placed")
    assert timedelta(0) <= good.duration < timedelta(seconds=10)
    at = (message.id, "order.placed", 2)
    assert bad == events.HandlingFailed(*at, "ValueError: no stock", message.topic, message.key)


# -- retry -------------------------------------------------------------------------------------------------------


class Failing:
    """A handler that fails a few times."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self, _: Message) -> Sequence[Message]:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return [output()]


@pytest.mark.requirement("F-24")
async def test_a_failed_message_is_tried_again_after_a_wait_that_grows() -> None:
    """Retry within the delivery, for what passes quickly."""
    handler, waits = Failing(ValueError(), KeyError()), list[int]()

    def backoff(failures: int) -> timedelta:
        waits.append(failures)
        return timedelta(0)

    outputs = await RetryMiddleware(3, backoff=backoff)(order(), handler)

    assert (len(outputs), handler.calls, waits) == (1, 3, [1, 2])


async def test_after_the_last_attempt_its_error_is_the_messages() -> None:
    handler = Failing(ValueError("1"), ValueError("2"), ValueError("3"))

    with pytest.raises(ValueError, match="2"):
        await RetryMiddleware(2, backoff=lambda _: timedelta(0))(order(), handler)


@pytest.mark.requirement("G12", "F-24")
@pytest.mark.parametrize(
    "error",
    [
        RejectError("never"),
        ExpiredError("late"),
        CommitUnknownError(),
        asyncio.CancelledError(),
        KeyError(),
        ExceptionGroup("both", [RejectError("never"), DecodeError("no")]),
    ],
)
async def test_what_another_attempt_cannot_mend_is_not_tried_again(error: BaseException) -> None:
    """Neither what is rejected, nor an unknown commit, nor an end, nor what is not asked for."""
    handler = Failing(error)

    with pytest.raises(type(error)):
        await RetryMiddleware(5, on=(ValueError, CommitUnknownError, RejectError, ExceptionGroup))(order(), handler)

    assert handler.calls == 1


def test_no_attempt_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="attempts=0"):
        RetryMiddleware(0)


# -- deadline ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-24")
async def test_a_message_without_an_expiry_has_all_the_time() -> None:
    """The deadline is that of the message."""
    made = output()

    assert list(await DeadlineMiddleware()(order(), returning(made))) == [made]


@pytest.mark.requirement("F-24")
@pytest.mark.parametrize(
    "moment", ["2026-11-16T12:00:00Z", "2026-11-16T11:59:59.999+00:00", "2026-11-16T13:59:00+02:00"]
)
async def test_a_message_that_came_too_late_is_rejected_before_it_is_handled(moment: str) -> None:
    """It means nothing any more."""
    handler = Failing()

    with pytest.raises(ExpiredError, match=r"before 2026-11-16T1"):
        await DeadlineMiddleware(clock=lambda: NOW)(order(ce_expirytime=moment), handler)

    assert handler.calls == 0


@pytest.mark.requirement("F-24")
async def test_a_handler_at_work_when_the_time_is_over_is_cancelled() -> None:
    """And the message is rejected, since another attempt would come later still."""
    moment, ended = (NOW + 10 * MS).isoformat(), list[str]()

    async def call_next(_: Message) -> Sequence[Message]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("handler")
        return ()

    with pytest.raises(ExpiredError):
        await DeadlineMiddleware(clock=lambda: NOW)(order(ce_expirytime=moment), call_next)

    assert ended == ["handler"]


async def test_a_timeout_of_the_handlers_own_is_not_the_messages() -> None:
    with pytest.raises(TimeoutError, match="the handler's own"):
        await DeadlineMiddleware(clock=lambda: NOW)(
            order(ce_expirytime="2027-01-01T00:00:00Z"), raising(TimeoutError("the handler's own"))
        )


async def test_outputs_inherit_the_expiry_unless_they_have_one() -> None:
    later, own = "2026-11-17T00:00:00Z", "2026-11-18T00:00:00Z"

    outputs = await DeadlineMiddleware(clock=lambda: NOW)(
        order(ce_expirytime=later), returning(output(), output(ce_expirytime=own))
    )

    assert [made.headers["ce-expirytime"] for made in outputs] == [later, own]


@pytest.mark.parametrize(("moment", "said"), [("soon", "not a moment"), ("2026-11-17T00:00:00", "no time zone")])
async def test_an_expiry_that_names_no_moment_is_rejected(moment: str, said: str) -> None:
    with pytest.raises(RejectError, match=said):
        await DeadlineMiddleware()(order(ce_expirytime=moment), returning())


# -- correlation, subject, required ------------------------------------------------------------------------------


@pytest.mark.requirement("F-24")
async def test_outputs_tell_which_story_they_belong_to_and_what_led_to_them() -> None:
    """The first message begins the story with its own id, and later ones carry it on."""
    first = order()

    (second,) = await CorrelationMiddleware()(first, returning(output()))
    (third,) = await CorrelationMiddleware()(second, returning(output()))

    assert second.headers == {"ce-correlationid": str(first.id), "ce-causationid": str(first.id)}
    assert third.headers == {"ce-correlationid": str(first.id), "ce-causationid": str(second.id)}


async def test_ids_that_a_handler_gave_stay() -> None:
    (made,) = await CorrelationMiddleware()(order(), returning(output(ce_correlationid="mine")))

    assert made.headers["ce-correlationid"] == "mine"
    assert list(await CorrelationMiddleware()(order(), returning())) == []


@pytest.mark.requirement("F-24")
async def test_outputs_take_the_subject_of_their_message() -> None:
    """So that what follows from one order stays in order; what has a key keeps it."""
    outputs = await SubjectMiddleware()(order(key="42"), returning(output(), output(key="7")))
    without = await SubjectMiddleware()(order(key=None), returning(output()))

    assert [made.key for made in (*outputs, *without)] == ["42", "7", None]


async def test_a_function_may_name_the_subject() -> None:
    def subject(message: Message, made: Message) -> str:
        return f"{message.key}/{made.type}"

    (made,) = await SubjectMiddleware(subject)(order(key="42"), returning(output()))

    assert made.key == "42/stock.reserved"


@pytest.mark.requirement("F-24")
async def test_a_message_that_lacks_an_attribute_is_rejected() -> None:
    """Validate; all that is missing is named at once."""
    required = RequiredMiddleware("subject", "source", "time", "tenant", "traceparent")

    with pytest.raises(RejectError, match=r"lacks source, time, traceparent$"):
        await required(order(key="42", ce_tenant="t"), returning())
    with pytest.raises(RejectError, match=r"lacks subject$"):
        await RequiredMiddleware("subject")(order(key=None), returning())


async def test_a_message_that_has_all_it_needs_is_handled() -> None:
    made = output()
    required = RequiredMiddleware("id", "type", "subject", "source", "ce-tenant")

    assert await required(order(ce_source="/shop", ce_tenant="t"), returning(made)) == (made,)


def test_to_require_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs the names"):
        RequiredMiddleware()


# -- JSON Schema -------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "cards": {"type": "array", "items": {"$ref": "#/$defs/card"}}},
    "additionalProperties": {"type": "integer"},
    "$defs": {"card": {"type": "string", "maxLength": 4}},
}


@pytest.mark.requirement("F-24")
@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b'{"age": "4111-1111"}', "#/properties/age/type"),
        (b'{"cards": ["4111-1111"]}', "#/properties/cards/items/maxLength"),
        (b'{"4111-1111": "x"}', "#/additionalProperties/type"),
        (b"[4111]", "#/type"),
    ],
)
async def test_a_payload_that_breaks_its_schema_fails_without_being_shown(payload: bytes, rule: str) -> None:
    """The error names the rule, neither the value nor a key that may be data."""
    with pytest.raises(DecodeError) as raised:
        await JSONSchemaMiddleware({"order.placed": SCHEMA})(order(payload=payload), returning())

    assert str(raised.value) == f"the payload of 'order.placed' breaks the rule {rule} of its schema"
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


@pytest.mark.parametrize("payload", [b"4111-1111", b"\xff\xfe", b"[" * 100_000, b"NaN", b"1e999"])
async def test_a_payload_that_is_no_json_fails(payload: bytes) -> None:
    with pytest.raises(DecodeError, match=r"is not JSON$"):
        await JSONSchemaMiddleware({"order.placed": SCHEMA})(order(payload=payload), returning())


@pytest.mark.requirement("F-24")
@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        ({"type": "array", "items": {"$ref": "#"}}, b"[" * 300 + b"]" * 300),
        ({"multipleOf": 0.01}, b"1" + b"0" * 400),
    ],
)
async def test_a_payload_that_is_too_much_for_the_validator_fails(schema: dict[str, Any], payload: bytes) -> None:
    """It would be each time; and the error holds nothing that shows it."""
    with pytest.raises(DecodeError, match="to be checked") as raised:
        await JSONSchemaMiddleware({"order.placed": schema})(order(payload=payload), returning())

    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


@pytest.mark.requirement("F-24")
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/none"},
        {"properties": {"a": {"items": {"$ref": "#/$defs/none"}}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {"$ref": "other.json"}}},
    ],
)
def test_a_schema_that_refers_to_nothing_is_refused_at_once(schema: dict[str, Any]) -> None:
    """And not with each message."""
    with pytest.raises(ConfigurationError, match="which is not in it"):
        JSONSchemaMiddleware({"order.placed": schema})


async def test_references_within_a_schema_are_followed() -> None:
    schema = {
        "$id": "https://example.org/order",
        "$ref": "#item",
        "$defs": {"item": {"$anchor": "item", "$ref": "part"}, "part": {"$id": "part", "type": "integer"}},
        "enum": [1, {"$ref": "no reference, but a value"}],
    }
    middleware, made = JSONSchemaMiddleware({"order.placed": schema}), output()

    assert await middleware(order(payload=b"1"), returning(made)) == (made,)
    with pytest.raises(DecodeError, match="breaks the rule"):
        await middleware(order(payload=b'"1"'), returning(made))


async def test_valid_payloads_and_types_without_a_schema_pass() -> None:
    made = output()
    payload = json.dumps({"age": 3, "cards": ["1234"]}).encode()

    assert await JSONSchemaMiddleware({"order.placed": SCHEMA})(order(payload=payload), returning(made)) == (made,)
    assert await JSONSchemaMiddleware({"other": SCHEMA})(order(payload=b"?"), returning(made)) == (made,)


def test_a_schema_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"the schema of 'order\.placed' is not valid"):
        JSONSchemaMiddleware({"order.placed": {"type": "objekt"}})


async def test_a_schema_cannot_make_a_consumer_fetch_another() -> None:
    """A reference to the network is an error, and not a request that stops the event loop."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"

        with pytest.raises(ConfigurationError, match="which is not in it"):
            JSONSchemaMiddleware({"order.placed": {"$ref": address}})

        with pytest.raises(BlockingIOError):
            server.accept()


# -- order -------------------------------------------------------------------------------------------------------


class _Placed:
    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        return await call_next(message)


def bare(kind: type) -> Middleware:
    """Return a middleware of which only the place matters, without what it works with."""
    made: Any = object.__new__(kind)
    return made  # type: ignore[no-any-return]


TX, IN, OUT = bare(TransactionMiddleware), bare(InboxMiddleware), bare(OutboxMiddleware)
LETTERS, AGAIN, STACK = bare(DeadLetterMiddleware), RetryMiddleware(), bare(Transactional)
FREE = CorrelationMiddleware()


@pytest.mark.requirement("S1-02", "S1-06")
@pytest.mark.parametrize(
    "middlewares",
    [
        [],
        [FREE, FREE],
        [TX],
        [TX, IN],
        [TX, OUT],
        [TX, IN, OUT],
        [FREE, LETTERS, FREE, AGAIN, TX, FREE, IN, OUT, FREE],
        [STACK],
        [LETTERS, AGAIN, STACK, FREE],
    ],
)
def test_orders_that_keep_their_promises_are_taken(middlewares: list[Middleware]) -> None:
    """What has no place may stand anywhere."""
    check_order(middlewares)


@pytest.mark.requirement("S1-06", "S1-17", "S1-26")
@pytest.mark.parametrize(
    ("middlewares", "said"),
    [
        ([IN], "InboxMiddleware needs a transaction around it; put TransactionMiddleware before it"),
        ([OUT], "OutboxMiddleware needs a transaction around it"),
        ([IN, TX], "InboxMiddleware needs a transaction around it"),
        ([TX, OUT, IN], "InboxMiddleware stands inside OutboxMiddleware; put it outside, which is before it"),
        ([TX, AGAIN], "RetryMiddleware stands inside TransactionMiddleware; put it outside.*cannot be used again"),
        ([STACK, AGAIN], "RetryMiddleware stands inside Transactional; put it outside"),
        ([TX, LETTERS], "DeadLetterMiddleware stands inside TransactionMiddleware; put it outside.*rolled back"),
        ([AGAIN, LETTERS], "DeadLetterMiddleware stands inside RetryMiddleware; put it outside"),
        ([STACK, LETTERS], "DeadLetterMiddleware stands inside Transactional; put it outside"),
        ([TX, FREE, TX], "TransactionMiddleware is there twice; leave one out"),
        ([AGAIN, RetryMiddleware()], "RetryMiddleware is there twice; leave one out"),
        ([STACK, STACK], "Transactional is there twice; leave one out"),
        ([STACK, IN], "Transactional does what InboxMiddleware does; leave InboxMiddleware out"),
        ([STACK, OUT], "Transactional does what OutboxMiddleware does; leave OutboxMiddleware out"),
        ([STACK, TX], "Transactional does what TransactionMiddleware does; leave TransactionMiddleware out"),
        ([TX, STACK], "leave one|TransactionMiddleware does what Transactional does; leave"),
        ([TX, IN, STACK], "leave"),
    ],
)
def test_orders_that_break_a_promise_are_refused_with_what_to_do(middlewares: list[Middleware], said: str) -> None:
    """A wrong order is an error at start, not a surprise at run time."""
    with pytest.raises(MiddlewareOrderError, match=said):
        check_order(middlewares)


REDIS = TransactionMiddleware(RedisTransactions("redis://localhost"))
MARKS = InboxMiddleware(RedisInbox("stock"))
LATE_MARKS = InboxMiddleware(RedisInbox("stock", mode="optimistic"))
SQLITE = TransactionMiddleware("never-opened.db")


@pytest.mark.requirement("S0-09", "S0-10")
@pytest.mark.parametrize(
    "middlewares",
    [
        [MARKS, REDIS, OUT],
        [REDIS, MARKS, OUT],
        [REDIS, LATE_MARKS, OUT],
        [FREE, LETTERS, AGAIN, FREE, MARKS, FREE, REDIS, FREE, OUT],
    ],
)
def test_an_inbox_in_redis_stands_on_either_side_of_its_transaction(middlewares: list[Middleware]) -> None:
    """The transaction completes what the inbox has claimed before it."""
    check_order(middlewares)


@pytest.mark.requirement("S0-10", "S1-06")
@pytest.mark.parametrize(
    ("middlewares", "said"),
    [
        ([MARKS, SQLITE, OUT], "put TransactionMiddleware before it in the list.*only if that is in Redis"),
        ([MARKS, OUT], "put TransactionMiddleware before it in the list"),
        ([MARKS], "put TransactionMiddleware before it in the list"),
        ([LATE_MARKS, REDIS, OUT], "put TransactionMiddleware before it in the list.*mode='pessimistic'"),
        ([MARKS, STACK], "put TransactionMiddleware before it in the list, or use transactional"),
        ([MARKS, REDIS, MARKS], "InboxMiddleware is there twice; leave one out"),
        ([MARKS, MARKS, REDIS], "InboxMiddleware is there twice; leave one out"),
        ([MARKS, AGAIN, REDIS], "RetryMiddleware stands inside InboxMiddleware; put it outside"),
        ([MARKS, LETTERS, REDIS], "DeadLetterMiddleware stands inside InboxMiddleware; put it outside"),
        ([MARKS, OUT, REDIS], "OutboxMiddleware needs a transaction around it"),
    ],
)
def test_an_inbox_outside_of_a_transaction_that_cannot_complete_its_claim_is_refused(
    middlewares: list[Middleware], said: str
) -> None:
    """In SQL the mark is a row of the transaction; two inboxes would take each other for a duplicate."""
    with pytest.raises(MiddlewareOrderError, match=said):
        check_order(middlewares)


@pytest.mark.requirement("S1-06")
def test_places_rise_from_the_outermost_to_the_innermost() -> None:
    """Acking, transaction, inbox, outbox, handler."""
    assert DEAD_LETTERS < RETRY < CLAIM < TRANSACTION < INBOX < OUTBOX


async def test_a_chain_without_middlewares_is_the_handler() -> None:
    handler = returning(output())

    assert chained([], handler) is handler


@pytest.mark.requirement("F-02")
async def test_a_middleware_may_answer_for_the_handler_and_change_the_message() -> None:
    """One shape, which may do anything around what is inside."""
    seen: list[Message] = []

    async def handler(message: Message) -> Sequence[Message]:
        seen.append(message)
        return [output()]

    async def changing(message: Message, call_next: Next) -> Sequence[Message]:
        return [] if message.key is None else await call_next(order(key="changed"))

    chain: Callable[[Message], Awaitable[Sequence[Message]]] = chained([changing, _Placed()], handler)

    assert len(await chain(order())) == 1
    assert await chain(order(key=None)) == []
    assert [message.key for message in seen] == ["changed"]
