"""The documentation is true: its snippets run, its links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import sqlalchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import postroom
from postroom import Message
from postroom.stores import PostgresStore
from postroom.testing.waiting import until

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


class Base(DeclarativeBase):
    """The tables of the snippets."""


class Order(Base):
    """An order of the snippets."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Client:
    """The broker's client of the snippets: keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, str | None]] = []

    async def send(self, topic: str, payload: bytes, *, key: str | None) -> None:
        self.sent.append((topic, payload, key))


@pytest.fixture
async def names(postgres_dsn: str) -> AsyncIterator[dict[str, Any]]:
    """What the README takes as given: a pool, an engine, a table, a broker's client."""
    engine = sqlalchemy.create_engine(postgres_dsn.replace("postgresql://", "postgresql+psycopg://"))
    Base.metadata.create_all(engine)
    store = PostgresStore(postgres_dsn, namespace="shop")
    await store.apply_schema()
    await store.close()
    async with asyncpg.create_pool(postgres_dsn, min_size=1, max_size=2) as pool:
        yield {"pool": pool, "engine": engine, "Order": Order, "dsn": postgres_dsn, "client": Client()}
    engine.dispose()


async def execute(snippet: str, names: dict[str, Any]) -> None:
    """Run a snippet as it stands, ``await`` at the top included."""
    code = compile(snippet, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    made = eval(code, names)  # noqa: S307 -- our own README
    if inspect.isawaitable(made):
        await made


async def run_until(snippet: str, names: dict[str, Any], condition: Any) -> None:  # noqa: ANN401
    """Run a snippet that goes on for ever until it has done what it says."""
    running = asyncio.create_task(execute(snippet, names))
    await until(lambda: condition() or running.done(), "the snippet doing its work")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_snippets_of_the_readme_run(names: dict[str, Any]) -> None:
    """S4-18: produce through asyncpg and SQLAlchemy, deliver, and read: as printed."""
    produce_async, produce_sync, deliver, read = SNIPPETS
    await execute(produce_async, names)
    await execute(produce_sync, names)
    client: Client = names["client"]

    await run_until(deliver, names, lambda: len(client.sent) == 2)

    assert client.sent == [("orders", b'{"order_id":42}', "42"), ("orders", b'{"order_id":43}', "43")]

    handled: list[Message] = []

    async def handle(message: Message) -> None:
        handled.append(message)

    async with names["pool"].acquire() as connection, connection.transaction():
        await names["outbox"].add(connection, {"order_id": 44}, topic="orders")
    await run_until(read, {**names, "handle": handle}, lambda: bool(handled))

    assert [message.payload for message in handled] == [b'{"order_id":44}']


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """A page that was moved takes its links along."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())

    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_decision_says_when_to_revisit_it() -> None:
    """A decision without an end is a dogma."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))

    assert pages
    assert [page.name for page in pages if "**Revisit when**" not in page.read_text()] == []
    assert [page.name for page in pages if len(page.read_text().splitlines()) > 40] == []


def modules() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(postroom.__path__, "postroom.")]
    return ["postroom", *(name for name in found if not name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public API is documented with examples that work."""
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)

    assert results.failed == 0


@pytest.mark.parametrize("name", modules())
def test_every_module_lists_what_it_offers_and_says_what_it_is(name: str) -> None:
    """A module begins with a sentence, and ``__all__`` names only what is there."""
    module = importlib.import_module(name)

    assert module.__doc__
    assert [item for item in getattr(module, "__all__", []) if not hasattr(module, item)] == []


def test_no_page_promises_what_nobody_can() -> None:
    """S4-21: at-least-once delivery and effectively-once handling, never more."""
    sources = [*PAGES, *(ROOT / "src").rglob("*.py")]

    assert [str(path) for path in sources if "exactly-once" in path.read_text().lower()] == []


async def test_the_patterns_work_as_printed(names: dict[str, Any]) -> None:
    """S4-19, S2-41: a command handler's events are stored with its effect; a consumer skips what it has handled."""
    pool: asyncpg.Pool = names["pool"]
    await pool.execute("CREATE TABLE handled (consumer text, message_id uuid, PRIMARY KEY (consumer, message_id))")
    await pool.execute("CREATE TABLE stock (reserved int)")
    await pool.execute("INSERT INTO stock VALUES (0)")
    page = (ROOT / "docs" / "patterns.md").read_text()
    command_handler, consumer = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    await execute(command_handler, names)

    async def refused(connection: Any, command: Any) -> list[object]:  # noqa: ANN401
        await connection.execute("INSERT INTO orders (id) VALUES (8)")
        raise ValueError("out of stock")

    with pytest.raises(ValueError, match="out of stock"):
        await names["handle"]({"order_id": 8}, refused)
    assert [row["id"] for row in await pool.fetch("SELECT id FROM orders")] == [7]
    assert await pool.fetchval("SELECT count(*) FROM postroom_outbox") == 1

    await execute(consumer, names)
    message = Message(topic="orders", payload=b"{}")
    for _ in range(3):
        await names["reserve"](message)
    await names["reserve"](Message(topic="orders", payload=b"{}"))
    assert await pool.fetchval("SELECT reserved FROM stock") == 2
