"""Writing through the caller's transaction: how messages, added or handled, become statements on its connection."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from ...decisions import Enqueued, FindDue, Question
from ...errors import UnsupportedDatabaseError
from ...inbox import Inbox
from ...message import Message
from ...outbox import Addition, Answer, Outbox
from .adding import add_all
from .commit_errors import explain
from .decisions import answering
from .dialect import Dialect
from .dialects.mysql import MySQL
from .dialects.postgres import PostgreSQL
from .dialects.sqlite import SQLite
from .driver import Driver, Foreign, Steps, Wake, finish, finish_async
from .drivers import driver_of
from .names import Names
from .statement import Script

__all__ = ["SQLWriter", "inbox_dialect", "writer_for"]

T = TypeVar("T")

_DIALECTS: Final[Mapping[str, type[Dialect]]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "mariadb": MySQL,
    "sqlite": SQLite,
}


def writer_for(connection: object) -> SQLWriter | None:
    """Return what writes through a connection, None if no driver knows it."""
    driver = driver_of(connection)
    return None if driver is None else _writer(driver)


@lru_cache(maxsize=64)
def _writer(driver: Driver) -> SQLWriter:
    return SQLWriter(driver)


class _Task(NamedTuple, Generic[T]):
    """What is to be done on a connection, once it is known which database that leads to."""

    #: The table that is missed if there is none, as statements call it, and what it is called by the user.
    identifier: str
    table: str
    schema: str | None
    script: Callable[[Dialect], Script[T]]
    outside_transaction: bool = False

    def dialect(self, name: str) -> Dialect:
        """Return the dialect for the tables of this task."""
        return _dialect(name, self.identifier in {"outbox", "tickets"}, self.table, self.schema)


@lru_cache(maxsize=256)
def _dialect(name: str, is_outbox: bool, table: str, schema: str | None) -> Dialect:  # noqa: FBT001
    if name not in _DIALECTS:
        raise UnsupportedDatabaseError(name, "PostgreSQL, MySQL, MariaDB or SQLite")
    return _DIALECTS[name](Names(table=table, schema=schema) if is_outbox else Names(inbox=table, schema=schema))


def inbox_dialect(name: str, inbox: Inbox) -> Dialect:
    """Return the dialect for the tables of an inbox."""
    return _dialect(name, False, inbox.table, inbox.schema)  # noqa: FBT003


class SQLWriter:
    """Writes through the connections of one driver; the answers of async ones are awaited."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def write(
        self,
        connection: Foreign,
        additions: Sequence[Addition],
        outbox: Outbox,
        answer: Answer[T],
        *,
        outside_transaction: bool,
    ) -> T | Coroutine[Any, Any, T]:
        """Add messages, and arrange for the wake-up after the commit where the library can."""
        script = partial(add_all, additions, answer=answer, strict_order=outbox.strict_order)
        task = _Task("outbox", outbox.table, outbox.schema, script, outside_transaction)
        return self._perform(connection, task, outbox.wake if additions else None)

    def admit(self, connection: Foreign, inbox: Inbox, message: Message) -> bool | Coroutine[Any, Any, bool]:
        """Mark a message as handled; tell whether it was not before."""
        return self._of_inbox(connection, inbox, lambda dialect: dialect.admit(inbox.consumer, inbox.known(message)))

    def has(self, connection: Foreign, inbox: Inbox, message: Message) -> bool | Coroutine[Any, Any, bool]:
        """Tell whether a message is marked as handled."""
        return self._of_inbox(connection, inbox, lambda dialect: dialect.has(inbox.consumer, inbox.known(message)))

    def purge_inbox(self, connection: Foreign, inbox: Inbox, limit: int) -> int | Coroutine[Any, Any, int]:
        """Delete marks past their retention; return how many."""
        return self._of_inbox(
            connection, inbox, lambda dialect: dialect.purge_inbox(inbox.consumer, inbox.retention, limit)
        )

    def bury(self, connection: Foreign, inbox: Inbox, message: Message, error: str) -> Coroutine[Any, Any, None] | None:
        """Write a dead letter, unless there is one of this consumer and message."""
        return self._of_inbox(
            connection, inbox, lambda dialect: dialect.bury_letter(inbox.consumer, message, error), "inbox_dead"
        )

    def ask(self, connection: Foreign, outbox: Outbox, question: Question) -> Any:  # noqa: ANN401 -- its answer
        """Answer a question about tickets."""
        script = answering(outbox.namespace, question, strict_order=outbox.strict_order)
        task = _Task("tickets", outbox.table, outbox.schema, script, isinstance(question, FindDue))
        return self._perform(connection, task, outbox.wake)

    def _of_inbox(
        self, connection: Foreign, inbox: Inbox, script: Callable[[Dialect], Script[T]], identifier: str = "inbox"
    ) -> T | Coroutine[Any, Any, T]:
        return self._perform(connection, _Task(identifier, inbox.table, inbox.schema, script))

    def _perform(self, connection: Foreign, task: _Task[T], wake: Wake | None = None) -> T | Coroutine[Any, Any, T]:
        """Run a task in the caller's transaction."""
        driver = self._driver
        steps = driver.in_one_hop(connection, partial(self._steps, task, wake))
        return finish_async(steps) if driver.is_async else finish(steps)

    def _steps(self, task: _Task[T], wake: Wake | None, connection: Foreign) -> Steps[T]:
        driver = self._driver
        dialect = task.dialect(driver.dialect_of(connection))
        if not task.outside_transaction:
            yield from driver.require_transaction(connection)
        try:
            answer = yield from driver.run(connection, task.script(dialect))
        except Exception as error:
            explain(error, dialect.identifiers[task.identifier])
            raise
        if wake is not None and (task.identifier == "outbox" or isinstance(answer, Enqueued)):
            driver.after_commit(connection, wake)
        return answer
