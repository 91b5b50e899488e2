"""The one shape of middleware, and how several of them are put around a handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Final, TypeAlias

from ..errors import MiddlewareOrderError
from ..message import Message
from ..transaction import ClaimingTransactions
from .layers import CLAIM, DEAD_LETTERS, INBOX, OUTBOX, RETRY, TRANSACTION

__all__ = ["NOTHING", "Middleware", "Next", "chained", "check_order", "connect", "limit_transactions"]

#: Handles a message and returns what is to be sent.
Next: TypeAlias = Callable[[Message], Awaitable[Sequence[Message]]]
#: Does something around ``call_next``, which is the next middleware or, at the end, the router.
#:
#: It may have more, which a consumer looks for when it starts: ``serve(tell)``, which runs beside handling until it is
#: cancelled, ``check_horizon(horizon)``, which may refuse a broker, ``limit_to(timeout)``, which learns how long a
#: handler has, and what `check_order` and `connect` need.
Middleware: TypeAlias = Callable[[Message, Next], Awaitable[Sequence[Message]]]

#: What is to be sent if nothing is.
NOTHING: Final[Sequence[Message]] = ()

_REASONS: Final = {
    DEAD_LETTERS: "since what it puts aside must stay when the transaction is rolled back",
    RETRY: "since a transaction that failed cannot be used again",
    CLAIM: "since the transaction inside of it completes its claim",
    TRANSACTION: "since what stands outside is not part of it",
    INBOX: "since a message that was handled must not lead to outputs again",
    OUTBOX: "since outputs belong to the transaction",
}
_ONLY_REDIS: Final = (
    "; an inbox may stand outside of its transaction only if that is in Redis and mode='pessimistic', the default"
)


def chained(middlewares: Sequence[Middleware], handler: Next) -> Next:
    """Return a handler with middlewares around it, the first of them outermost."""
    for middleware in reversed(middlewares):
        handler = _around(middleware, handler)
    return handler


def _around(middleware: Middleware, call_next: Next) -> Next:
    return lambda message: middleware(message, call_next)


def limit_transactions(middlewares: Sequence[Middleware], timeout: timedelta | None) -> None:
    """Tell middlewares that open transactions how long a handler has; None for no limit."""
    for middleware in middlewares:
        limit: Callable[[timedelta | None], None] | None = getattr(middleware, "limit_to", None)
        if limit is not None:
            limit(timeout)


def check_order(middlewares: Sequence[Middleware], *, is_manual: bool = False) -> None:
    """Refuse an order in which middlewares cannot keep what they promise.

    A handler that acknowledges by hand would do so before its transaction is committed.

    A middleware that depends on its place has a ``layer``, which rises from the outermost to the innermost. ``needs``
    says which other layer must be around it, and ``holds`` which ones it does the work of. All others may stand
    anywhere. An inbox may stand outside of a transaction that completes what it claims, as those of Redis do.

    Raises:
        MiddlewareOrderError: They cannot; it says which to move or to leave out.
    """
    seen: dict[int, Middleware] = {}
    for place, middleware in enumerate(middlewares):
        layer: int | None = getattr(middleware, "layer", None)
        if layer is not None:
            is_claiming = TRANSACTION not in seen and _completing(middleware, middlewares[place + 1 :]) is not None
            layer = CLAIM if is_claiming else layer
            _check(middleware, layer, seen)
            holds: Sequence[int] = getattr(middleware, "holds", (layer,))
            seen.update(dict.fromkeys(holds, middleware))
    if is_manual and TRANSACTION in seen:
        raise MiddlewareOrderError(
            f"with acking='manual' a message could be acknowledged before {_named(seen[TRANSACTION])} has committed; "
            "use acking='on_success'"
        )


def connect(middlewares: Sequence[Middleware]) -> None:
    """Give each middleware that has ``run_on(transactions)`` the ``transactions`` of the one around it.

    An inbox that stands outside of its transaction gets those that complete its claims, by ``claim_on(transactions)``.
    """
    transactions: object = None
    for place, middleware in enumerate(middlewares):
        transactions = getattr(middleware, "transactions", transactions)
        run_on: Callable[[object], None] | None = getattr(middleware, "run_on", None)
        if run_on is not None and transactions is not None:
            run_on(transactions)
        elif (completing := _completing(middleware, middlewares[place + 1 :])) is not None:
            claim_on: Callable[[ClaimingTransactions], None] = getattr(middleware, "claim_on")  # noqa: B009
            claim_on(completing)


def _completing(middleware: Middleware, inside: Sequence[Middleware]) -> ClaimingTransactions | None:
    """Return the transactions that complete what a middleware claims before they begin, None if there are none."""
    if not getattr(middleware, "can_claim_first", False):
        return None
    opened = (getattr(other, "transactions", None) for other in inside)
    first = next((transactions for transactions in opened if transactions is not None), None)
    return first if isinstance(first, ClaimingTransactions) else None


def _check(middleware: Middleware, layer: int, seen: dict[int, Middleware]) -> None:
    """Hold a middleware against those around it, by their layers."""
    name = _named(middleware)
    needs: int | None = None if layer == CLAIM else getattr(middleware, "needs", None)
    if needs is not None and needs not in seen:
        raise MiddlewareOrderError(
            f"{name} needs a transaction around it; put TransactionMiddleware before it in the list, "
            f"or use transactional(){_ONLY_REDIS if layer == INBOX else ''}"
        )
    same = CLAIM if layer == INBOX and CLAIM in seen else layer
    if same in seen:
        other = _named(seen[same])
        raise MiddlewareOrderError(
            f"{name} is there twice; leave one out"
            if other == name
            else f"{other} does what {name} does; leave {name} out"
        )
    for other_layer in sorted(seen):
        if other_layer > layer:
            raise MiddlewareOrderError(
                f"{name} stands inside {_named(seen[other_layer])}; put it outside, which is before it in the list, "
                f"{_REASONS[layer]}"
            )


def _named(middleware: Middleware) -> str:
    return getattr(middleware, "__name__", type(middleware).__name__)
