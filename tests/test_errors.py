"""The tree of errors."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from postroom import errors
from postroom.errors import PostroomError

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, PostroomError)]


def drawn() -> dict[str, str]:
    """Return the parent of each class in the tree of the docstring."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"([│ ├└─]*)(\w+Error)\b", line):
            depth = len(match[1]) // 4
            path = [*path[:depth], match[2]]
            parents[match[2]] = path[depth - 1] if depth else ""
    return parents


@pytest.mark.requirement("G12")
def test_the_tree_in_the_docstring_is_the_hierarchy() -> None:
    """Who must act is told by the branch an error is on."""
    real = {kind.__name__: "" if kind is PostroomError else kind.__bases__[0].__name__ for kind in CLASSES}

    assert len(real) > 30
    assert drawn() == real


@pytest.mark.requirement("G12")
def test_every_error_is_exported_and_explained() -> None:
    """An error that cannot be named cannot be caught."""
    assert [kind.__name__ for kind in CLASSES if not kind.__doc__ or kind.__doc__ == PostroomError.__doc__] == [
        "PostroomError"
    ]
    assert sorted(errors.__all__) == sorted(kind.__name__ for kind in CLASSES)


MADE = [
    (errors.InvalidNameError("table", "Bad Name", "lower case"), "use lower case"),
    (errors.UnknownConnectionError(object(), "asyncpg"), "pass the connection"),
    (errors.UnknownURLError("x:…", "sqlite:///file"), "supported: sqlite"),
    (errors.MissingExtraError("asyncpg", "postgres"), r"pip install 'postroom\[postgres\]'"),
    (errors.UnsupportedDatabaseError("MySQL 5.7", "MySQL 8"), "use MySQL 8"),
    (errors.InvalidTopicError("", 249), "pass another topic="),
    (errors.InvalidKeyError("", 255), "pass key=None"),
    (errors.InvalidDedupeKeyError("x" * 300, 255), "hash a longer one"),
    (errors.InvalidTicketError("", 255), "hash a longer one"),
    (errors.TenantMismatchError(uuid4(), "k"), "must begin with"),
    (errors.PayloadTooLargeError(2, 1), "send a reference"),
    (errors.AlreadyHandledError(uuid4(), None), "was handled by somebody else"),
    (errors.PoolerError("db/shop"), r'db/shop: .* create the store with PostgresStore\(…, pooler="transaction"\)'),
    (errors.EncodeError(object(), "no form"), "pass a dict"),
    (errors.NotInTransactionError("run BEGIN"), "pass outside_transaction=True"),
    (errors.TransactionAbortedError(), "roll back and start again"),
    (errors.CommandRefusedError("GET", "read before"), "GET cannot be part of this transaction: read before"),
    (errors.CommitRefusedError("'k' is a set"), "nothing of the transaction was applied: 'k' is a set"),
    (errors.PartlyAppliedError("k", "overflow"), "Put the data right by hand, then delete 'k'"),
    (errors.QuarantinedError("k", "overflow"), "see 'k'"),
    (errors.FencedError(), "raise lease= or longest="),
    (errors.MessageBusyError(timedelta(seconds=5)), r"looked at again in 5\.0 s"),
    (errors.CommitUnknownError(), "look for the message id"),
    (errors.AlreadyStartedError("a handler was added"), "do it before"),
    (errors.HandlerExistsError("order.placed"), "one type has one handler, which may call several"),
    (errors.NoTransactionError("the inbox"), "the inbox needs a transaction.* put TransactionMiddleware"),
    (errors.TransactionClosedError(), "before the handler returns"),
    (errors.NoHandlerError("order.placed"), r"add one with router\.on\('order\.placed'\)"),
    (errors.HandlerRejectedError("order.placed"), "since its match refused it"),
    (errors.NoDeliveryError(), "call this from a handler that a Consumer runs"),
    (errors.SchemaMissingError("t"), "run `postroom schema apply`"),
    (errors.StoreFileMissingError(Path("shop.db")), "run `postroom schema apply`"),
    (errors.SchemaVersionError("t", (3, 0), (3, 1)), "run `postroom schema apply`"),
    (errors.SchemaVersionError("t", (4, 0), (3, 1)), "upgrade postroom"),
]


@pytest.mark.requirement("G12")
@pytest.mark.parametrize(("error", "remedy"), MADE)
def test_an_error_says_what_to_do(error: PostroomError, remedy: str) -> None:
    """What happened, and what to do about it."""
    assert re.search(remedy, str(error))


@pytest.mark.requirement("G12")
def test_every_error_that_words_its_message_is_among_those() -> None:
    """One that takes its text from where it is raised is tested there."""
    wording = {kind for kind in CLASSES if "__init__" in vars(kind)} - {errors.InvalidHeaderError}

    assert {type(error) for error, _ in MADE} == wording


@pytest.mark.requirement("G11")
def test_a_long_text_is_cut_in_an_error() -> None:
    """An error text has a limit."""
    assert len(str(errors.InvalidTopicError("x" * 100_000, 249))) < 250


@pytest.mark.requirement("G12")
async def test_an_unknown_commit_can_be_asked_about_if_somebody_knows() -> None:
    """By whoever knows what the transaction wrote; without one the error says so."""
    error = errors.CommitUnknownError()
    with pytest.raises(errors.ConfigurationError, match="use an inbox, or look yourself"):
        await error.resolve()

    async def stored() -> bool:
        return True

    error.witness = stored
    assert await error.resolve() is True
