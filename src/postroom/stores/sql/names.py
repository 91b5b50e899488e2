"""The names of tables, checked once because identifiers cannot be bound as parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import InvalidNameError

__all__ = ["TEMPORARY", "Names"]

#: The schema of PostgreSQL in which a model is built and thrown away.
TEMPORARY = "pg_temp"

# Room is left for the suffixes of indexes within the 63 characters that PostgreSQL keeps.
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,44}")
_RULE = "a lower-case letter or _, then up to 44 of a-z 0-9 _; sqlite_ and pg_ are taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the outbox table is called, and the schema it is in."""

    table: str = "postroom_outbox"
    schema: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is not a plain identifier."""
        for kind, name in (("table", self.table), ("schema", self.schema)):
            taken = name is not None and name != TEMPORARY and name.startswith(("sqlite_", "pg_"))
            if name is not None and (taken or not _NAME.fullmatch(name)):
                raise InvalidNameError(kind, name, _RULE)

    def render(self, quote: str) -> dict[str, str]:
        """Return the identifiers that statements are formatted with."""

        def quoted(name: str) -> str:
            return f"{quote}{name}{quote}"

        prefix = "" if self.schema is None else f"{quoted(self.schema)}."
        suffixed = {
            suffix: quoted(f"{self.table}_{suffix}")
            for suffix in (
                "ready",
                "ready_keyed",
                "leased",
                "keyed",
                "dead",
                "dedupe",
                "delivered",
                "seq",
                "status_check",
                "worker_check",
                "lease_check",
            )
        }
        return {
            "outbox": prefix + quoted(self.table),
            "version": prefix + quoted(f"{self.table}_version"),
            "lock": prefix + quoted(f"{self.table}_lock"),
            "published": prefix + quoted(f"{self.table}_published"),
            "messages": prefix + quoted(f"{self.table}_messages"),
            "key": quoted("key"),
            **suffixed,
        }
