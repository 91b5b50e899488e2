"""The shelves, in a table; whatever is done here is part of the transaction that is open around the handler."""

from __future__ import annotations

import sqlite3

from postroom import current_transaction

SCHEMA = "CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, free INTEGER NOT NULL, reserved INTEGER NOT NULL)"
RESERVE = "UPDATE stock SET free = free - ?, reserved = reserved + ? WHERE item = ? AND free >= ?"


class SQLiteStock:
    """Stock in SQLite."""

    async def reserve(self, item: str, quantity: int) -> bool:
        """Put something aside; tell whether there was enough of it."""
        reserved: bool = await current_transaction().do(_reserve, item, quantity)
        return reserved


def _reserve(connection: sqlite3.Connection, item: str, quantity: int) -> bool:
    return connection.execute(RESERVE, (quantity, quantity, item, quantity)).rowcount == 1
