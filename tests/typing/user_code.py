# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What users write, for the type checkers to read; it is never run."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from typing import assert_type

import aiosqlite
import asyncpg
import psycopg
import pymysql
from asyncpg.pool import PoolConnectionProxy
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from postroom import Added, Message, Outbox

outbox = Outbox()
message = Message(topic="orders", payload=b"{}")


async def with_asyncpg(
    connection: asyncpg.Connection[asyncpg.Record], pooled: PoolConnectionProxy[asyncpg.Record]
) -> None:
    """Add through asyncpg."""
    assert_type(outbox.add(connection, {"a": 1}, topic="orders"), Awaitable[Added])
    assert_type(await outbox.add(pooled, message), Added)
    assert_type(await outbox.add(connection, [message, message]), list[Added])
    assert_type(outbox.add(pooled, (message,)), Awaitable[list[Added]])


def with_psycopg(connection: psycopg.Connection) -> None:
    """Add through psycopg."""
    assert_type(outbox.add(connection, {"a": 1}, topic="orders"), Added)
    assert_type(outbox.add(connection, [message]), list[Added])


async def with_async_psycopg(connection: psycopg.AsyncConnection) -> None:
    """Add through psycopg's async half."""
    assert_type(outbox.add(connection, {"a": 1}, topic="orders"), Awaitable[Added])
    assert_type(await outbox.add(connection, [message]), list[Added])


def with_sqlite(connection: sqlite3.Connection) -> None:
    """Add through the standard library."""
    assert_type(outbox.add(connection, message), Added)
    assert_type(outbox.add(connection, [message]), list[Added])


async def with_aiosqlite(connection: aiosqlite.Connection) -> None:
    """Add through aiosqlite."""
    assert_type(outbox.add(connection, message), Awaitable[Added])
    assert_type(await outbox.add(connection, [message]), list[Added])


def with_pymysql(connection: pymysql.Connection[pymysql.cursors.Cursor]) -> None:
    """Add through PyMySQL."""
    assert_type(outbox.add(connection, message), Added)


def with_sqlalchemy(connection: Connection, session: Session, scoped: scoped_session[Session]) -> None:
    """Add through SQLAlchemy."""
    assert_type(outbox.add(connection, message), Added)
    assert_type(outbox.add(session, message), Added)
    assert_type(outbox.add(scoped, message), Added)
    assert_type(outbox.add(session, [message]), list[Added])


async def with_async_sqlalchemy(
    connection: AsyncConnection, session: AsyncSession, scoped: async_scoped_session[AsyncSession]
) -> None:
    """Add through SQLAlchemy's async half."""
    assert_type(outbox.add(connection, message), Awaitable[Added])
    assert_type(await outbox.add(session, message), Added)
    assert_type(await outbox.add(scoped, message), Added)
    assert_type(await outbox.add(session, [message]), list[Added])


def with_options(connection: sqlite3.Connection) -> None:
    """Say everything that can be said of a message."""
    outbox.add(
        connection,
        b"raw",
        topic="orders",
        key="42",
        type="order.placed",
        tenant_id=None,
        dedupe_key="order-42",
        headers={"a": "b"},
        content_type="application/json",
        delay=timedelta(seconds=1),
        outside_transaction=True,
    )
    outbox.add(connection, {"a": 1}, topic="orders", due_at=datetime.now(UTC))


async def with_mistakes(
    connection: sqlite3.Connection, asynchronous: aiosqlite.Connection, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """Be told of mistakes; a checker that finds none complains about the comment."""
    outbox.add(connection, {"a": 1}, topic="orders", dedup_key="k")  # type: ignore[call-overload]
    outbox.add(connection, {"a": 1}, topic="orders", delay=5)  # type: ignore[call-overload]
    outbox.add(connection, {"a": 1}, topic=b"orders")  # type: ignore[call-overload]
    outbox.add(object(), {"a": 1}, topic="orders")  # type: ignore[call-overload]
    await outbox.add(pool, {"a": 1}, topic="orders")  # type: ignore[call-overload]
    await outbox.add(connection, {"a": 1}, topic="orders")  # type: ignore[misc]
    print((await outbox.add(asynchronous, message)).addd)  # type: ignore[attr-defined]  # noqa: T201
