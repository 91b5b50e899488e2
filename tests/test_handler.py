"""Handlers: functions of the application, called with what they ask for."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from postroom import Codec, Delivery, JSONCodec, Message, Transaction
from postroom.delivery import current
from postroom.errors import ConfigurationError, DecodeError, NoDeliveryError, NoTransactionError
from postroom.handler import Handler, bound
from postroom.testing.waiting import until
from postroom.transaction import Opening, entered

if TYPE_CHECKING:
    from nowhere import Absent  # type: ignore[import-not-found]


@dataclass(frozen=True)
class Order:
    order_id: int


MESSAGE = Message(topic="orders", type="order.placed", payload=b'{"order_id":42}')
ORDER = Order(42)


async def call(handler: Handler, codec: Codec | None = None) -> object:
    return await bound(handler, codec or JSONCodec())(MESSAGE)


class Stock:
    async def reserve(self, order: Order) -> object:
        return order

    def count(self, order: Order) -> object:
        return order

    @staticmethod
    async def refill(order: Order) -> object:
        return order

    @classmethod
    async def drop(cls, order: Order) -> object:
        return order

    async def __call__(self, order: Order) -> object:
        return order


class PlainStock:
    def __call__(self, order: Order) -> object:
        return order


async def first_bound(stock: Stock, order: Order) -> object:
    return await stock.reserve(order)


async def by_keyword(order: Order, *, stock: Stock) -> object:
    return await stock.reserve(order)


async def with_default(order: Order, limit: int = 3, *rest: int, deep: bool = True, **more: int) -> object:
    return order if (limit, rest, deep, more) == (3, (), True, {}) else None


async def keyword_only(*, order: Order) -> object:
    return order


async def positional_only(order: Order, /) -> object:
    return order


def logged(handler: Callable[[Order], Awaitable[object]]) -> Callable[[Order], Awaitable[object]]:
    @functools.wraps(handler)
    def wrapper(order: Order) -> Awaitable[object]:
        return handler(order)

    return wrapper


@logged
async def decorated(order: Order) -> object:
    return order


async def with_a_return_type_for_checkers(order: Order, other: Absent | None = None) -> Absent:
    return order


HANDLERS: list[Handler] = [
    Stock().reserve,
    Stock().count,
    Stock.refill,
    Stock.drop,
    Stock(),
    PlainStock(),
    partial(first_bound, Stock()),
    partial(by_keyword, stock=Stock()),
    partial(partial(first_bound), Stock()),
    partial(Stock()),
    partial(Stock().count),
    with_default,
    keyword_only,
    positional_only,
    decorated,
    with_a_return_type_for_checkers,
]


@pytest.mark.requirement("F-22")
@pytest.mark.parametrize("handler", HANDLERS, ids=[str(number) for number in range(len(HANDLERS))])
async def test_whatever_can_be_called_with_one_payload_is_a_handler(handler: Handler) -> None:
    """Methods, objects, partials and decorated functions, async or plain."""
    assert await call(handler) == ORDER


@pytest.mark.requirement("F-22")
async def test_a_payload_becomes_what_its_parameter_is_annotated_with() -> None:
    """Without an annotation it is the plain value, as bytes what was sent."""

    async def untyped(order):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return order

    async def mapping(order: dict[str, int]) -> object:
        return order

    async def raw(order: bytes) -> object:
        return order

    async def nothing() -> object:
        return "called"

    assert await call(untyped) == {"order_id": 42}
    assert await call(mapping) == {"order_id": 42}
    assert await call(raw) == MESSAGE.payload
    assert await call(nothing) == "called"


class Nowhere:
    """Opens transactions nowhere."""

    def begin(self, opening: Opening | None = None) -> AbstractAsyncContextManager[Transaction]:
        raise NotImplementedError

    def savepoint(self, transaction: Transaction) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError


@pytest.mark.requirement("F-21", "S4-18")
@pytest.mark.parametrize("is_plain", [False, True], ids=["async", "plain"])
async def test_a_handler_may_ask_for_message_delivery_and_transaction(is_plain: bool) -> None:  # noqa: FBT001
    """By annotation, in any order, beside the payload."""

    async def ask(message: Message, order: Order, *, delivery: Delivery, transaction: Transaction) -> object:
        return [message, order, delivery, transaction]

    def ask_plainly(message: Message, order: Order, *, delivery: Delivery, transaction: Transaction) -> object:
        return [message, order, delivery, transaction]

    async def settle(_: object) -> None: ...

    transaction, delivery = Transaction(object(), Nowhere()), Delivery(MESSAGE, settle)
    token = current.set(delivery)
    with entered(transaction):
        given = await call(ask_plainly if is_plain else ask)
    current.reset(token)

    assert given == [MESSAGE, ORDER, delivery, transaction]


@pytest.mark.requirement("F-21", "S1-17")
async def test_a_handler_that_asks_for_what_is_not_there_is_told_where_it_would_be() -> None:
    """Outside a consumer there is no delivery, and without a middleware no transaction."""

    async def delivery(delivery: Delivery) -> None: ...

    async def transaction(transaction: Transaction) -> None: ...

    with pytest.raises(NoDeliveryError):
        await call(delivery)
    with pytest.raises(NoTransactionError):
        await call(transaction)


REQUEST: ContextVar[str] = ContextVar("request")


@pytest.mark.requirement("F-18")
async def test_a_plain_handler_runs_on_a_thread_with_the_context_of_its_caller() -> None:
    """A handler that blocks holds up nobody, and finds what adapters left for it."""

    def handle(order: Order) -> object:
        return threading.current_thread() is threading.main_thread(), REQUEST.get(), order

    token = REQUEST.set("r-1")
    try:
        assert await call(handle) == (False, "r-1", ORDER)
    finally:
        REQUEST.reset(token)


@pytest.mark.requirement("F-13", "F-17")
async def test_a_plain_handler_runs_where_its_transaction_says() -> None:
    """A connection belongs to one thread, and its handler comes to it, with its context."""

    def handle(order: Order, transaction: Transaction) -> object:
        return threading.current_thread().name, transaction.connection, order

    with ThreadPoolExecutor(1, thread_name_prefix="mine") as thread:

        async def on_my_thread(function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
            return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)

        connection = object()
        with entered(Transaction(connection, Nowhere(), is_async=False, call=on_my_thread)):
            assert await call(handle) == ("mine_0", connection, ORDER)


@pytest.mark.requirement("F-20")
@pytest.mark.parametrize("cancels", [1, 3])
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
async def test_a_plain_handler_that_is_cancelled_is_waited_for(cancels: int, fails: bool) -> None:  # noqa: FBT001
    """Nothing is rolled back under a thread that still writes, however often somebody cancels."""
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def handle(order: Order) -> None:
        began.set()
        assert may_end.wait(20)
        ended.set()
        if fails:
            raise ValueError

    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    task = asyncio.create_task(_coroutine(handle))
    await until(began.is_set, "the handler's beginning")
    for _ in range(cancels):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not task.done()
    may_end.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    del task
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def _coroutine(handler: Handler) -> object:
    return await call(handler)


@pytest.mark.requirement("F-18", "F-21")
async def test_outputs_that_are_yielded_are_all_made_where_the_handler_runs() -> None:
    """A generator's body is the handler, and not what is left of it for the event loop."""

    def plainly(order: Order) -> Iterator[object]:
        yield threading.current_thread() is threading.main_thread()
        yield order

    async def asynchronously(order: Order) -> AsyncIterator[object]:
        yield order
        await asyncio.sleep(0)
        yield order

    assert await call(plainly) == [False, ORDER]
    assert await call(asynchronously) == [ORDER, ORDER]


@pytest.mark.requirement("F-03", "F-20")
async def test_an_error_of_a_handler_comes_through_as_it_is() -> None:
    """What is raised decides what becomes of the message."""

    async def fail(order: Order) -> None:
        raise LookupError(order.order_id)

    def fail_plainly(order: Order) -> None:
        raise LookupError(order.order_id)

    def stop(order: Order) -> object:
        return next(iter([order][1:]))

    for handler in (fail, fail_plainly):
        with pytest.raises(LookupError, match="42"):
            await call(handler)
    with pytest.raises(RuntimeError, match=r"handler of 'order\.placed' raised StopIteration"):
        async with asyncio.timeout(20):
            await call(stop)


@pytest.mark.requirement("F-22")
async def test_a_payload_that_does_not_fit_never_reaches_the_handler() -> None:
    """The handler sees what it is annotated with, or nothing."""
    calls: list[object] = []

    async def handle(order: list[int]) -> None:
        calls.append(order)

    def handle_plainly(order: list[int]) -> None:
        calls.append(order)

    for handler in (handle, handle_plainly):
        with pytest.raises(DecodeError, match="dict is no list"):
            await call(handler)
    assert calls == []


class Shouting:
    """A codec of an application."""

    content_type = "text/plain"

    def encode(self, event: object) -> bytes:
        return str(event).upper().encode()

    def decode(self, payload: bytes, kind: Any = object, /) -> Any:  # noqa: ANN401
        return payload.decode().upper(), kind


class Wrapping(JSONCodec):
    def decode(self, payload: bytes, kind: Any = object, /) -> Any:  # noqa: ANN401
        return [super().decode(payload, kind)]


@pytest.mark.requirement("F-22")
async def test_a_codec_of_the_application_decodes_for_its_handlers() -> None:
    """Also one that is made of ours."""

    async def handle(order: Order) -> object:
        return order

    assert await call(handle, Shouting()) == ('{"ORDER_ID":42}', Order)
    assert await call(handle, Wrapping()) == [ORDER]


async def two_payloads(order: Order, item: Order) -> None: ...


async def one_unannotated(order: Order, item) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ...


async def not_decodable(order: threading.Thread) -> None: ...


async def unreadable(order: Absent) -> None: ...


async def misspelt(order: threading.Absent) -> None: ...  # type: ignore[name-defined]


async def text_or_none(order: "Order" | None) -> None: ...  # noqa: UP037 -- it cannot be evaluated


@pytest.mark.requirement("F-21")
@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (two_payloads, "handler two_payloads has 2 parameters for one payload, order and item; annotate the others"),
        (one_unannotated, "2 parameters for one payload"),
        (not_decodable, "nothing is known of Thread"),
        (unreadable, "annotations of handler unreadable cannot be read: .*Absent.*level of the module"),
        (misspelt, "annotations of handler misspelt cannot be read: .*Absent"),
        (text_or_none, "annotations of handler text_or_none cannot be read: .*unsupported operand"),
        (partial(int), "the parameters of handler .* cannot be read"),
    ],
)
def test_a_handler_that_cannot_be_served_is_refused_before_there_is_a_message(handler: Handler, said: str) -> None:
    """A mistake in a signature is found at the start."""
    with pytest.raises(ConfigurationError, match=said):
        bound(handler, JSONCodec())


@pytest.mark.requirement("F-24")
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_what_a_plain_handler_raises_to_end_the_process_reaches_its_own_task(error: BaseException) -> None:
    """There it can be settled, or caught by RecoverMiddleware; the event loop goes on."""

    def handler(_: Order) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await call(handler)

    assert raised.value is error
