"""An outbox with a database of its own, and the broker that it delivers to, for tests of applications."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ..brokers.memory import MemoryBroker
from ..dispatcher import Dispatcher
from ..message import Message
from ..outbox import Outbox
from ..store import Store, as_store
from ..stores.sql.store import SQLiteStore

__all__ = ["Published", "SQLiteOutbox"]


class SQLiteOutbox(Outbox):
    """An outbox whose tables are in a SQLite file of its own, with a connection to add through."""

    def __init__(self, path: Path) -> None:
        """Make the file and its tables."""
        super().__init__()
        self.path: Path = path
        #: For your tables, your statements and `add`: ``with outbox.connection as connection:`` is a transaction.
        self.connection: sqlite3.Connection = sqlite3.connect(path)
        #: Where the messages are, for a dispatcher, a consumer or a look at its ``stats()``.
        self.store: SQLiteStore = SQLiteStore(path)
        SQLiteStore.create_tables(self.connection)

    def close(self) -> None:
        """Close the connection, and those of the store."""
        self.connection.close()
        self.store.disconnect()


class Published(MemoryBroker):
    """A broker in memory, to which a dispatcher takes what a store holds whenever a test asks for it.

    Example:
        >>> import asyncio
        >>> from postroom import Outbox
        >>> from postroom.stores import MemoryStore
        >>> from postroom.testing.published import Published
        >>> store = MemoryStore()
        >>> with store.transaction() as transaction:
        ...     added = Outbox().add(transaction, {"order_id": 42}, topic="orders")
        >>> published = Published(store)
        >>> [message.payload for message in asyncio.run(published.drain())]
        [b'{"order_id":42}']
    """

    def __init__(self, store: Store | str) -> None:
        """Set up a broker for the messages of a store, which may be given by its URL."""
        super().__init__()
        self._store: Store = as_store(store)

    async def drain(self) -> list[Message]:
        """Deliver everything that is due, and return what was delivered by this call, in order."""
        before = self.confirmed
        await Dispatcher(self._store, self).run(until_idle=True)
        delivered = self.confirmed - before
        return self.received[-delivered:] if delivered else []
