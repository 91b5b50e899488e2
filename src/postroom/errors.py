"""Everything postroom raises, grouped by who must act.

PostroomError
├── ConfigurationError               fix the code or the settings
│   ├── InvalidNameError
│   ├── UnknownConnectionError
│   ├── UnknownURLError
│   ├── MissingExtraError
│   ├── UnsupportedDatabaseError
│   ├── PoolerError
│   ├── AlreadyStartedError
│   ├── HandlerExistsError
│   └── MiddlewareOrderError
├── MessageError                     fix the message; nothing was written
│   ├── InvalidMessageError
│   ├── InvalidTopicError
│   ├── InvalidKeyError
│   ├── InvalidDedupeKeyError
│   ├── InvalidHeaderError
│   ├── InvalidDueTimeError
│   ├── InvalidTicketError
│   ├── TenantMismatchError
│   ├── PayloadTooLargeError
│   ├── EncodeError
│   └── DecodeError
├── TransactionError                 fix how the transaction is opened or ended
│   ├── NotInTransactionError
│   ├── NoTransactionError
│   ├── TransactionClosedError
│   ├── TransactionAbortedError
│   ├── CommandRefusedError
│   ├── CommitRefusedError           nothing was applied
│   ├── PartlyAppliedError           somebody must look at it
│   └── CommitUnknownError
├── HandlingError                    a received message found nobody who takes it
│   ├── NoHandlerError
│   ├── HandlerRejectedError
│   ├── NoDeliveryError
│   └── AlreadyHandledError
├── SchemaError                      run `postroom schema apply`
│   ├── SchemaMissingError
│   │   └── StoreFileMissingError    of SQLite
│   └── SchemaVersionError
├── StoreError                       the database; a dispatcher tries again by itself
│   ├── StoreUnavailableError
│   ├── StoreAuthenticationError
│   ├── StorePermissionError         grant what is missing; dispatchers and consumers stop
│   ├── StoreTimeoutError
│   ├── StoreContentionError
│   │   └── FencedError
│   ├── MessageBusyError
│   └── ReadOnlyStoreError
└── BrokerError                      what a publisher raises to say what happened
    ├── BrokerUnavailableError       the destination is down: no attempt is spent
    ├── PublishUnknownError          no answer came: it may have been delivered
    └── RejectError                  this message can never be delivered or handled: dead at once
        ├── ExpiredError
        └── QuarantinedError
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import cast
from uuid import UUID

__all__ = [
    "AlreadyHandledError",
    "AlreadyStartedError",
    "BrokerError",
    "BrokerUnavailableError",
    "CommandRefusedError",
    "CommitRefusedError",
    "CommitUnknownError",
    "ConfigurationError",
    "DecodeError",
    "EncodeError",
    "ExpiredError",
    "FencedError",
    "HandlerExistsError",
    "HandlerRejectedError",
    "HandlingError",
    "InvalidDedupeKeyError",
    "InvalidDueTimeError",
    "InvalidHeaderError",
    "InvalidKeyError",
    "InvalidMessageError",
    "InvalidNameError",
    "InvalidTicketError",
    "InvalidTopicError",
    "MessageBusyError",
    "MessageError",
    "MiddlewareOrderError",
    "MissingExtraError",
    "NoDeliveryError",
    "NoHandlerError",
    "NoTransactionError",
    "NotInTransactionError",
    "PartlyAppliedError",
    "PayloadTooLargeError",
    "PoolerError",
    "PostroomError",
    "PublishUnknownError",
    "QuarantinedError",
    "ReadOnlyStoreError",
    "RejectError",
    "SchemaError",
    "SchemaMissingError",
    "SchemaVersionError",
    "StoreAuthenticationError",
    "StoreContentionError",
    "StoreError",
    "StoreFileMissingError",
    "StorePermissionError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "TenantMismatchError",
    "TransactionAbortedError",
    "TransactionClosedError",
    "TransactionError",
    "UnknownConnectionError",
    "UnknownURLError",
    "UnsupportedDatabaseError",
]


class PostroomError(Exception):
    """Anything postroom raises on purpose."""


class ConfigurationError(PostroomError, ValueError):
    """A setting cannot work; the message says which and what would."""


class InvalidNameError(ConfigurationError):
    """A table, schema or namespace name cannot be used as an identifier."""

    def __init__(self, kind: str, name: str, rule: str) -> None:
        super().__init__(f"{name!r} cannot name a {kind}; use {rule}")
        self.kind = kind
        self.name = name


class UnknownConnectionError(ConfigurationError, TypeError):
    """``add`` was given something that holds no transaction it knows."""

    def __init__(self, connection: object, accepted: str, hint: str = "") -> None:
        kind = type(connection)
        super().__init__(
            f"cannot add through a {kind.__module__}.{kind.__qualname__}{hint}; pass the connection or "
            f"session that holds your transaction: {accepted}"
        )


class UnknownURLError(ConfigurationError):
    """No store or broker is known for a URL."""

    def __init__(self, url: str, accepted: str) -> None:
        super().__init__(f"unsupported URL {url!r}; supported: {accepted}")


class MissingExtraError(ConfigurationError, ImportError):
    """An optional library is not installed."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed; run: pip install 'postroom[{extra}]'")
        self.extra = extra


class UnsupportedDatabaseError(ConfigurationError):
    """The database server lacks something postroom needs."""

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(f"postroom does not work with {found}, which lacks what claims need; use {needed}")


class PoolerError(ConfigurationError):
    """A pooler gives one server session to several clients, and the store was not set up for it."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place}: a pooler in transaction mode stands before the database; create the store with "
            'PostgresStore(…, pooler="transaction"), pass --pooler transaction to the postroom command, or connect to '
            "PostgreSQL directly"
        )
        self.place = place


class AlreadyStartedError(ConfigurationError):
    """Something was changed that is in use."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} after it was started; do it before")


class HandlerExistsError(ConfigurationError):
    """A type of message has a handler already."""

    def __init__(self, message_type: str) -> None:
        super().__init__(f"{message_type!r} has a handler already; one type has one handler, which may call several")


class MiddlewareOrderError(ConfigurationError):
    """Middlewares stand in an order in which they cannot keep their promises."""


class MessageError(PostroomError, ValueError):
    """A message cannot be stored as it is; nothing was written."""


class InvalidMessageError(MessageError):
    """A part of a message is missing or contradicts another."""


class InvalidTopicError(MessageError):
    """A topic is empty, too long or holds control characters."""

    def __init__(self, topic: object, longest: int) -> None:
        super().__init__(bad_text("topic", topic, longest) + "; pass another topic=")


class InvalidKeyError(MessageError):
    """An ordering key is empty, too long or holds control characters."""

    def __init__(self, key: object, longest: int) -> None:
        super().__init__(bad_text("key", key, longest) + "; for no order pass key=None")


class InvalidDedupeKeyError(MessageError):
    """A dedupe key is empty, too long or holds control characters."""

    def __init__(self, key: object, longest: int) -> None:
        super().__init__(bad_text("dedupe key", key, longest) + "; hash a longer one first")


class InvalidHeaderError(MessageError):
    """A header cannot travel to every broker."""

    def __init__(self, what: str, rule: str) -> None:
        super().__init__(f"bad header {what}; {rule}")


class InvalidDueTimeError(MessageError):
    """``due_at`` or ``delay`` does not name one moment."""


class InvalidTicketError(MessageError):
    """The name of a ticket is empty, too long or holds control characters."""

    def __init__(self, ticket: object, longest: int) -> None:
        super().__init__(bad_text("ticket", ticket, longest) + "; hash a longer one first")


class TenantMismatchError(MessageError):
    """A dedupe key does not begin with the tenant it is used for."""

    def __init__(self, tenant_id: UUID, dedupe_key: str) -> None:
        super().__init__(
            f"dedupe key {dedupe_key!r} must begin with '{tenant_id.hex}/' or '{tenant_id}/', its tenant; "
            "or create the outbox with opaque_dedupe_keys=True"
        )


class PayloadTooLargeError(MessageError):
    """A payload is over the limit of its outbox."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the payload has {size} bytes, over the limit of {limit}; store it elsewhere and send a "
            "reference, or create the outbox with limits=Limits(payload=...)"
        )
        self.size = size
        self.limit = limit


class EncodeError(MessageError):
    """An event cannot be turned into bytes."""

    def __init__(self, event: object, reason: str) -> None:
        super().__init__(
            f"cannot encode {type(event).__qualname__}: {reason}; pass a dict, dataclass, msgspec.Struct, "
            "pydantic model or bytes, or a codec of your own"
        )


class DecodeError(MessageError):
    """A payload cannot be decoded, or breaks its schema; as the next version may read it, it is redelivered."""


class TransactionError(PostroomError):
    """The caller's transaction is not in a state that can be used."""


class NotInTransactionError(TransactionError):
    """A message would be written outside any transaction."""

    def __init__(self, how: str) -> None:
        super().__init__(
            f"no transaction is open: {how}; without one the message could outlive a rollback. "
            "To write it alone on purpose, pass outside_transaction=True"
        )


class NoTransactionError(TransactionError):
    """Something needs the transaction of a handler, and none is open."""

    def __init__(self, who: str) -> None:
        super().__init__(
            f"{who} needs a transaction and none is open; put TransactionMiddleware, or transactional, around"
        )


class TransactionClosedError(TransactionError):
    """A transaction was used after its end."""

    def __init__(self) -> None:
        super().__init__(
            "the transaction has ended, so nothing more can be part of it; finish all its work, tasks and callbacks "
            "among it, before the handler returns"
        )


class TransactionAbortedError(TransactionError):
    """The transaction cannot be committed: a statement of it has failed, or it has ended already."""

    def __init__(
        self, message: str = "the transaction has failed and can only be rolled back; roll back and start again"
    ) -> None:
        super().__init__(message)


class CommandRefusedError(TransactionError):
    """A command cannot be part of a transaction that is recorded and applied at its end."""

    def __init__(self, command: str, why: str) -> None:
        super().__init__(f"{command} cannot be part of this transaction: {why}")
        self.command = command


class CommitRefusedError(TransactionError):
    """The store would not apply a transaction as it stands, and has applied nothing of it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"nothing of the transaction was applied: {why}")


class PartlyAppliedError(TransactionError):
    """A command failed when it was applied, by a value for example, and those before it cannot be undone."""

    def __init__(self, mark: str, why: str) -> None:
        super().__init__(
            f"a part of the transaction was applied and the rest was not: {why}; its message is never handled again by "
            f"itself. Put the data right by hand, then delete {mark!r} to have it handled, or leave it"
        )
        #: The key that says so.
        self.mark = mark


class CommitUnknownError(TransactionError):
    """COMMIT was sent and no answer came: the transaction may be stored or not."""

    def __init__(self) -> None:
        super().__init__(
            "the connection was lost during COMMIT; do not repeat blindly: look for the message id "
            "(or its dedupe key) in the outbox, or call resolve(), to learn whether it was stored"
        )
        #: As for a `StoreError`.
        self.is_outage = False
        #: Looks for something that the transaction wrote; set by whoever knows what that is.
        self.witness: Callable[[], Awaitable[bool]] | None = None

    async def resolve(self) -> bool:
        """Tell whether the transaction was committed, by its row in the inbox; asks on a new connection.

        Raises:
            ConfigurationError: The transaction had no inbox that could tell.
        """
        if self.witness is None:
            raise ConfigurationError(
                "nothing tells whether this transaction was stored; use an inbox, or look yourself"
            )
        return await self.witness()


class HandlingError(PostroomError):
    """A message was received that no handler takes."""


class NoHandlerError(HandlingError):
    """No handler is known for the type of a message."""

    def __init__(self, message_type: str) -> None:
        super().__init__(
            f"no handler takes {message_type!r}; add one with router.on({message_type!r}), or create the router with "
            "Router(unhandled='ignore')"
        )


class HandlerRejectedError(HandlingError):
    """The handler of a type does not want this message."""

    def __init__(self, message_type: str) -> None:
        super().__init__(
            f"the handler of {message_type!r} does not take this message, since its match refused it; change the "
            "match, or create the router with Router(unhandled='ignore')"
        )


class NoDeliveryError(HandlingError):
    """Something wants to acknowledge a message where none is being handled."""

    def __init__(self) -> None:
        super().__init__("no message is being handled here; call this from a handler that a Consumer runs")


class AlreadyHandledError(HandlingError):
    """A message was handled by somebody else meanwhile, so this transaction is rolled back; it is no failure."""

    def __init__(self, message_id: UUID, transaction: object) -> None:
        super().__init__(f"message {message_id} was handled by somebody else meanwhile")
        #: The transaction that is to be rolled back; to no other does it say anything.
        self.transaction = transaction


class SchemaError(PostroomError):
    """The tables are not as this version needs them."""


class SchemaMissingError(SchemaError):
    """The outbox table is not there."""

    def __init__(self, table: str) -> None:
        super().__init__(
            f"table {table} does not exist; run `postroom schema apply` or the SQL of `postroom schema print`"
        )


class StoreFileMissingError(SchemaMissingError):
    """The SQLite file does not exist."""

    def __init__(self, path: Path) -> None:
        SchemaError.__init__(
            self, f"{path} does not exist; run `postroom schema apply` or call `SQLiteStore.apply_schema` to create it"
        )
        self.path = path


class SchemaVersionError(SchemaError):
    """The schema is older or newer than this version of postroom."""

    def __init__(self, table: str, found: tuple[int, int], needed: tuple[int, int]) -> None:
        remedy = "run `postroom schema apply`" if found < needed else "upgrade postroom"
        super().__init__(
            f"the schema of {table} has version {version_text(found)}, "
            f"version {version_text(needed)} is needed; {remedy}"
        )
        self.found = found
        self.needed = needed


def version_text(version: tuple[int, int]) -> str:
    """Return a version of the schema and its additional steps as ``3.1``, or ``3`` without any."""
    number, step = version
    return f"{number}.{step}" if step else str(number)


class StoreError(PostroomError):
    """The store failed; the cause is chained."""

    #: Whether it says nothing about the message that was being handled, since its handler had not begun or could not
    #: help it; set by `TransactionMiddleware`.
    is_outage: bool = False


class StoreUnavailableError(StoreError):
    """The store cannot be reached, or the connection broke."""


class StoreAuthenticationError(StoreError):
    """The store refused the credentials; check user, password and database name."""


class StorePermissionError(StoreError):
    """The store refused a statement that its user may not run; grant what the message names."""

    #: The table of ours that the statement was for, where a connection of the application refused it.
    table: str | None = None
    #: Whether a handler asked for it on its own account, so that only its message fails; set by `Router`.
    is_of_handler: bool = False


class StoreTimeoutError(StoreError):
    """The store did not answer in time; the connection was thrown away."""


class StoreContentionError(StoreError):
    """The store gave up because of other transactions; the same call may succeed next time."""


class FencedError(StoreContentionError):
    """Somebody else has taken a message over meanwhile, so nothing that was done for it here was applied."""

    def __init__(self) -> None:
        super().__init__(
            "the lease on the message ended before its transaction did, so nothing was applied; "
            "raise lease= or longest= if handlers take that long"
        )


class MessageBusyError(StoreError):
    """Somebody else handles the message right now, and it is not known yet how that ends."""

    def __init__(self, delay: timedelta) -> None:
        super().__init__(
            f"the message is being handled elsewhere; it is looked at again in {delay.total_seconds():.1f} s"
        )
        #: After which time it is worth to look again.
        self.delay = delay


class ReadOnlyStoreError(StoreError):
    """The connection leads to a replica; claims need the primary."""


class BrokerError(PostroomError):
    """What a publisher raises to say what became of a message."""


class BrokerUnavailableError(BrokerError):
    """The destination is down; its messages wait without spending an attempt."""


class PublishUnknownError(BrokerError):
    """No answer came, so the message may have been delivered; it will be sent again."""


class RejectError(BrokerError):
    """This message can never be delivered, or handled: it becomes dead at once."""


class ExpiredError(RejectError):
    """A message was received after the time up to which it means something."""


class QuarantinedError(RejectError):
    """A part of what a message leads to was applied, so it is not handled until somebody has put that right."""

    def __init__(self, mark: str, why: str) -> None:
        super().__init__(f"a part of the message's effect was applied before ({why}); see {mark!r}")


def consists_of(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Tell whether an error is of one of these classes; of a group, all of its errors must be."""
    if isinstance(error, BaseExceptionGroup):
        return all(consists_of(each, *kinds) for each in cast("BaseExceptionGroup[BaseException]", error).exceptions)
    return isinstance(error, kinds)


def is_rejection(error: BaseException) -> bool:
    """Tell whether an error ends a message at once; every other one spends an attempt, or none."""
    return consists_of(error, RejectError)


def is_outage(error: BaseException) -> bool:
    """Tell whether an error says that the database was away, which is no fault of the message that was handled."""
    return isinstance(error, StoreError | CommitUnknownError) and error.is_outage


def ungrouped(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the missing permission that a group of errors holds, or else the group."""
    denied: BaseException | None = group.subgroup(StorePermissionError)
    while isinstance(denied, BaseExceptionGroup):
        denied = cast("BaseExceptionGroup[BaseException]", denied).exceptions[0]
    return group if denied is None else denied


def shown(text: object) -> str:
    """Return a text fit for an error message, however long it is."""
    if not isinstance(text, str):
        return f"of type {type(text).__qualname__}"
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}… ({len(text)} characters)"


def bad_text(what: str, text: object, longest: int) -> str:
    """Say what is wrong with a text that names something."""
    return (
        f"{what} {shown(text)} must be text of 1 to {longest} characters, without control characters and outer blanks"
    )


_SHOWN = 40
