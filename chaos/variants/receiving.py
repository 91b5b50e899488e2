"""Broken variants of the receiving half: inbox, transaction, acknowledgement and dead letters."""

# ruff: noqa: ARG001, B010, SLF001 -- private parts are set by name, under the types of those that they replace

from __future__ import annotations

from collections.abc import Sequence

from postroom import consumer
from postroom.delivery import current_delivery
from postroom.errors import CommitUnknownError
from postroom.inbox import Inbox
from postroom.message import Message
from postroom.middleware import DeadLetterMiddleware, Next, OutboxMiddleware, TransactionMiddleware
from postroom.stores.sql.driver import Begun, Steps
from postroom.stores.sql.drivers.asyncpg import AsyncpgDriver
from postroom.stores.sql.transactions import UnitOfWork
from postroom.transaction import Transaction

from .registry import ASYNCPG, Patched, reword, variant

# They are found by their names.
__all__: list[str] = []


def _mark_apart() -> None:
    """Have the inbox mark with a statement of its own, which the variants below break."""

    def open_for(self: TransactionMiddleware, inbox: Inbox) -> None:
        """Mark nothing along with BEGIN."""

    setattr(TransactionMiddleware, "open_for", open_for)


@variant("A message is acknowledged when its handler has returned, before its transaction is committed.")
def ack_before_commit() -> None:
    sound = OutboxMiddleware.__call__

    async def handle(self: OutboxMiddleware, message: Message, call_next: Next) -> Sequence[Message]:
        outputs = await sound(self, message, call_next)
        await current_delivery().ack()
        return outputs

    setattr(OutboxMiddleware, "__call__", handle)


@variant("The inbox does not look whether a message was there before.")
def duplicate_not_recognised() -> None:
    _mark_apart()
    sound = Inbox.admit

    async def admit(self: Inbox, transaction: Transaction, message: Message) -> bool:
        await sound(self, transaction, message)
        return True

    async def has(self: Inbox, transaction: Transaction, message: Message) -> bool:
        return False

    setattr(Inbox, "admit", admit)
    setattr(Inbox, "has", has)


@variant("A duplicate is found by an INSERT that fails, after which PostgreSQL commits nothing.", stores=ASYNCPG)
def plain_insert_inbox() -> None:
    _mark_apart()
    reword({r"ON CONFLICT DO NOTHING": ""}, only=r"INTO \{inbox\} ")
    sound = Inbox.admit

    async def admit(self: Inbox, transaction: Transaction, message: Message) -> bool:
        try:
            return await sound(self, transaction, message)
        except Exception as error:
            if getattr(error, "sqlstate", "") != "23505":
                raise
            return False

    setattr(Inbox, "admit", admit)


@variant(
    "A message is marked through another connection, and stays marked when its transaction is rolled back.",
    stores=("postgres", "mariadb"),
)
def inbox_outside_the_transaction() -> None:
    _mark_apart()
    sound = Inbox.admit

    async def admit(self: Inbox, transaction: Transaction, message: Message) -> bool:
        async with transaction.opened_by.begin() as other:
            return await sound(self, other, message)

    setattr(Inbox, "admit", admit)


@variant("What BEGIN brings along is not asked whether the message was marked before.", stores=ASYNCPG)
def mark_with_begin_not_looked_at() -> None:
    sound: Patched = UnitOfWork._starting

    def starting(self: Patched) -> Steps[None]:
        yield from sound(self)
        self.is_admitted = self._opening is not None or None

    setattr(UnitOfWork, "_starting", starting)


@variant("That COMMIT was answered with ROLLBACK, since an error was swallowed before, is not noticed.", stores=ASYNCPG)
def swallowed_error_is_acked() -> None:
    def check(self: AsyncpgDriver, connection: Patched, begun: Begun) -> Steps[None]:
        yield from ()

    def commit(self: AsyncpgDriver, connection: Patched, begun: Begun) -> Steps[None]:
        yield begun.handle.commit()

    setattr(AsyncpgDriver, "check", check)
    setattr(AsyncpgDriver, "commit", commit)


@variant("All consumers go by one name, so that what one of them has handled the others never get.")
def consumer_name_shared() -> None:
    sound: Patched = Inbox.__init__

    def initialise(self: Inbox, consumer: str, **options: Patched) -> None:
        sound(self, "everybody", **options)

    setattr(Inbox, "__init__", initialise)


@variant("Where COMMIT got no answer the message is acknowledged, as if it had been committed.")
def unknown_commit_is_acked() -> None:
    sound = TransactionMiddleware.__call__

    async def handle(self: TransactionMiddleware, message: Message, call_next: Next) -> Sequence[Message]:
        try:
            return await sound(self, message, call_next)
        except CommitUnknownError:
            return ()

    setattr(TransactionMiddleware, "__call__", handle)


@variant("That the database was away counts as a failure of the message, which becomes a dead letter in time.")
def outage_costs_a_delivery() -> None:
    def is_outage(error: BaseException) -> bool:
        return False

    setattr(consumer, "is_outage", is_outage)


@variant("A message that is marked after its handler has run is handled twice by two that begin together.")
def optimistic_without_the_final_check() -> None:
    sound: Patched = Inbox.admit

    async def admit(self: Inbox, transaction: Transaction, message: Message) -> bool:
        is_new: bool = await sound(self, transaction, message)
        return is_new or self.mode == "optimistic"

    setattr(Inbox, "admit", admit)


@variant("A message that is put aside is acknowledged before it is stored as a dead letter.")
def dead_letter_acked_before_it_is_stored() -> None:
    sound: Patched = DeadLetterMiddleware._bury

    async def bury(self: DeadLetterMiddleware, message: Message, error: str) -> Sequence[Message]:
        await current_delivery().ack()
        buried: Sequence[Message] = await sound(self, message, error)
        return buried

    setattr(DeadLetterMiddleware, "_bury", bury)
