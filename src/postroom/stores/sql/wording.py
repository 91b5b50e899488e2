"""The words that statements are made of: a database's clock, locks and types."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from textwrap import dedent
from typing import Any, ClassVar
from uuid import UUID

from .names import Names
from .statement import Statement

__all__ = ["Wording", "letters"]

#: How many texts a dialect remembers as filled in; it has about forty of its own.
MAX_TEXTS = 64
# A name in braces; the braces of JSON hold none.
_WORD = re.compile(r"\{([a-z_]+)\}")
_WORDS = (
    *("now", "later", "earlier", "locking", "waiting", "loose", "ordered", "unsettled"),
    *("of_tenant", "skip_dead", "by_due", "by_lease", "by_key", "by_dead", "by_parked"),
    *("row", "size", "found", "is_parked", "after_key", "age_since_due", "age_since_created"),
    *("json_headers", "unless_there", "holding", "expiry"),
)


class Wording:
    """What one database calls things, for one outbox table."""

    name: ClassVar[str]
    quote: ClassVar[str] = '"'
    #: The database's clock, now and at the start of the statement.
    now: ClassVar[str]
    #: ``now`` and a parameter of the type that `duration` makes.
    later: ClassVar[str]
    earlier: ClassVar[str]
    #: How a SELECT locks what nobody else has locked, and how it waits for the others.
    locking: ClassVar[str] = ""
    waiting: ClassVar[str] = ""
    #: Which rows have no key, which have one, and which of those are not settled; as the indexes say it.
    loose: ClassVar[str] = "{key} IS NULL"
    ordered: ClassVar[str] = "{key} IS NOT NULL"
    unsettled: ClassVar[str] = "{key} IS NOT NULL AND status IN ('pending', 'processing')"
    of_tenant: ClassVar[str] = "(:tenant_id IS NULL OR tenant_id = :tenant_id)"
    skip_dead: ClassVar[str] = ":skip_dead"
    #: By which index a table is to be read, where the database does not find it by itself.
    by_due: ClassVar[str] = ""
    by_lease: ClassVar[str] = ""
    by_key: ClassVar[str] = ""
    by_dead: ClassVar[str] = ""
    by_parked: ClassVar[str] = ""
    #: What a claim finds a row by, and how many bytes of it a claim returns; headers are counted as they are stored.
    row: ClassVar[str] = "id"
    size: ClassVar[str] = "length(payload) + length(headers)"
    #: What a claim asks of rows that it may take: payloads are not read before it is known which of them fit.
    found: ClassVar[str] = "{row}, {size}"
    #: Which rows are parked: a claim raises the token, and so ends it without another write.
    is_parked: ClassVar[str] = "status = 'pending' AND parked = token"
    #: Which rows come after a key, in the order of topics and keys.
    after_key: ClassVar[str] = "(topic, {key}) > (:topic, :key)"
    #: For how many seconds a row has been due, and been there.
    age_since_due: ClassVar[str]
    age_since_created: ClassVar[str]
    #: The parameter ``headers``, which is JSON, and how an INSERT leaves a row alone that is there.
    json_headers: ClassVar[str] = ":headers"
    unless_there: ClassVar[str] = "ON CONFLICT DO NOTHING"
    #: How a SELECT locks a row until the transaction ends, and the milliseconds since 1970 of a ticket's end.
    holding: ClassVar[str] = ""
    expiry: ClassVar[str] = "expires_at"
    #: Whether the scripts of claim and settle are one transaction or need none.
    atomic: ClassVar[bool] = True
    #: Whether claims at the same time may run into a deadlock, although they skip rows that are locked.
    claims_deadlock: ClassVar[bool] = False

    def __init__(self, names: Names) -> None:
        self.names = names
        self.identifiers: dict[str, str] = names.render(self.quote)
        self._texts: dict[str, str] = {}

    def sql(self, text: str, /, **params: Any) -> Statement:  # noqa: ANN401 -- whatever the database stores
        """Return a statement, its ``{identifiers}`` and the words of this dialect filled in."""
        return Statement(self._formatted(text), params)

    def query(self, text: str, /, **params: Any) -> Statement:  # noqa: ANN401
        """Return a statement that answers with rows, filled in like `sql`."""
        return Statement(self._formatted(text), params, returns=True)

    def _formatted(self, text: str) -> str:
        if text not in self._texts:
            if len(self._texts) >= MAX_TEXTS:
                # Batches of every size make texts of their own, and large ones.
                self._texts.clear()
            words, filled = self._words, text
            while (more := _WORD.sub(lambda match: words[match[1]], filled)) != filled:  # words may hold words
                filled = more
            self._texts[text] = dedent(filled).strip()
        return self._texts[text]

    @property
    def _words(self) -> Mapping[str, str]:
        return {**self.identifiers, **{name: getattr(self, name) for name in _WORDS}}

    def channel(self, namespace: str) -> str:
        """Return where hints about a namespace are sent, if the database can send any."""
        name = f"{self.names.schema}.{self.names.table}.{namespace}".encode()
        return f"postroom_{hashlib.blake2b(name, digest_size=12).hexdigest()}"

    def uuid(self, value: UUID) -> Any:  # noqa: ANN401 -- each database has its own type
        """Return an id as the database stores it."""
        return value

    def to_uuid(self, value: Any) -> UUID:  # noqa: ANN401
        """Return a stored id."""
        return value if isinstance(value, UUID) else UUID(value)

    def time(self, value: datetime) -> Any:  # noqa: ANN401
        """Return a moment as the database stores it."""
        return value

    def to_time(self, value: Any) -> datetime:  # noqa: ANN401
        """Return a stored moment."""
        if not isinstance(value, datetime):
            raise TypeError(f"{value!r} is no moment")
        return value

    def duration(self, value: timedelta) -> Any:  # noqa: ANN401
        """Return a length of time as the wording of ``later`` wants it."""
        return value


def letters(number: int) -> str:
    """Return a number in letters, which is what parameter names are made of."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))
