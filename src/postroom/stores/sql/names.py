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
# What is called after a table; PostgreSQL has one room of names for tables, views, indexes and sequences.
_RELATIONS = ("version", "lock", "published", "messages", "tickets")
_OF_OUTBOX = (
    *_RELATIONS,
    *("ready", "ready_keyed", "leased", "keyed", "dead", "dedupe", "delivered", "parked", "seq"),
    *("status_check", "worker_check", "lease_check", "pkey", "version_pkey", "seq_seq"),
    *("tickets_due", "tickets_ended", "tickets_check", "tickets_pkey"),
)
_OF_INBOX = ("dead", "processed", "old", "pkey", "dead_pkey")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the tables of outbox and inbox are called, and the schema that both are in."""

    table: str = "postroom_outbox"
    schema: str | None = None
    inbox: str = "postroom_inbox"

    def __post_init__(self) -> None:
        """Refuse what is not a plain identifier, and what would be called the same."""
        for kind, name in (("table", self.table), ("schema", self.schema), ("table", self.inbox)):
            if name is not None and not _is_name(name):
                raise InvalidNameError(kind, name, _RULE)
        of_outbox = {self.table, *(f"{self.table}_{suffix}" for suffix in _OF_OUTBOX)}
        of_inbox = {self.inbox, *(f"{self.inbox}_{suffix}" for suffix in _OF_INBOX)}
        if not of_outbox.isdisjoint(of_inbox):
            rule = f"another name, since {min(of_outbox & of_inbox)} would be a part of the outbox {self.table} as well"
            raise InvalidNameError("table", self.inbox, rule)

    def render(self, quote: str) -> dict[str, str]:
        """Return the identifiers that statements are formatted with."""

        def quoted(name: str) -> str:
            return f"{quote}{name}{quote}"

        prefix = "" if self.schema is None else f"{quoted(self.schema)}."
        return {
            "key": quoted("key"),
            "outbox": prefix + quoted(self.table),
            **{suffix: quoted(f"{self.table}_{suffix}") for suffix in _OF_OUTBOX},
            **{suffix: prefix + quoted(f"{self.table}_{suffix}") for suffix in _RELATIONS},
            "json": prefix + quoted(f"{self.table}_json"),
            "inbox": prefix + quoted(self.inbox),
            "inbox_dead": prefix + quoted(f"{self.inbox}_dead"),
            "inbox_processed": prefix + quoted(f"{self.inbox}_processed"),
            "inbox_old": quoted(f"{self.inbox}_old"),
        }


def _is_name(name: object) -> bool:
    """Tell whether something is a plain identifier that no database keeps for itself."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return False
    return name == TEMPORARY or not name.startswith(("sqlite_", "pg_"))
