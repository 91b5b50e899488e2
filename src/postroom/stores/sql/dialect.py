"""One database's SQL: adding, deciding, claiming, settling, receiving, upkeep; dialects override what differs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from ...store import ClaimTerms
from .claiming import Claiming
from .counting import Counting
from .decisions import Deciding
from .parking import Parking
from .peeking import Peeking
from .receiving import Receiving
from .settling import Settling
from .statement import Script, Statement

__all__ = ["CHUNK", "LEASE_RAN_OUT", "Dialect", "Server"]

#: How many rows one pass of the sweep or the purge touches.
CHUNK = 1000

LEASE_RAN_OUT = "the lease ran out on the last attempt: the worker crashed or stalled"


@dataclass(frozen=True, slots=True)
class Server:
    """What a database server says of itself."""

    product: str
    version: tuple[int, ...]
    read_only: bool = False


class Dialect(Deciding, Claiming, Peeking, Settling, Parking, Receiving, Counting):
    """One database's SQL for one outbox and its inbox, as statements and scripts without any I/O."""

    needed: ClassVar[str]

    def sweep(self, namespace: str, terms: ClaimTerms) -> Script[int]:
        """Bury messages without an attempt left."""
        count = 0
        for text, reason, still in self._hopeless:
            found = yield self.query(text, namespace=namespace, max_attempts=terms.max_attempts)
            if found.rows:
                buried = yield self.sql(
                    f"""
                    UPDATE {{outbox}}
                    SET status = 'dead', locked_by = NULL, locked_until = NULL, updated_at = {{now}},
                        last_error = COALESCE(:reason, last_error, 'no attempts left')
                    WHERE id IN :ids AND attempts >= :max_attempts AND {still}
                    """,
                    ids=[row[0] for row in found.rows],
                    max_attempts=terms.max_attempts,
                    reason=reason,
                )
                count += buried.count
        return count

    _crashed: ClassVar[str] = f"""
        SELECT id FROM {{outbox}}{{by_lease}}
        WHERE namespace = :namespace AND status = 'processing' AND locked_until < {{now}} AND attempts >= :max_attempts
        ORDER BY locked_until LIMIT {CHUNK}{{locking}}
        """
    # Only the front of what is due is looked at: claims pass over such rows, so they gather there.
    _spent: ClassVar[str] = f"""
        SELECT id FROM (
            SELECT id, attempts FROM {{outbox}}{{by_due}}
            WHERE namespace = :namespace AND {{lane}} AND status = 'pending' AND next_attempt_at <= {{now}}
            ORDER BY next_attempt_at, seq LIMIT {CHUNK}) AS front
        WHERE attempts >= :max_attempts
        """
    # Asked again when the row is changed: meanwhile a dispatcher that allows more attempts may have claimed it. States
    # are named by what they are not, so that the row is found by its id and by nothing else.
    _is_crashed: ClassVar[str] = "status NOT IN ('pending', 'delivered', 'dead') AND locked_until < {now}"
    _is_spent: ClassVar[str] = "status NOT IN ('processing', 'delivered', 'dead') AND next_attempt_at <= {now}"
    #: What finds messages without an attempt left, why they are dead if they do not say it, and what must still hold.
    _hopeless: ClassVar[tuple[tuple[str, str | None, str], ...]] = (
        (_crashed, LEASE_RAN_OUT, _is_crashed),
        (_spent.replace("{lane}", "{loose}"), None, _is_spent),
        (_spent.replace("{lane}", "{ordered}"), None, _is_spent),
    )

    def purge(self, namespace: str, older_than: timedelta, limit: int) -> Statement:
        """Delete delivered messages past their retention."""
        return self.sql(self._purge, namespace=namespace, duration=self.duration(older_than), limit=limit)

    _purge: ClassVar[str] = """
        DELETE FROM {outbox}
        WHERE id IN (
            SELECT id FROM {outbox}
            WHERE namespace = :namespace AND status = 'delivered' AND delivered_at <= {earlier}
            ORDER BY delivered_at LIMIT :limit)
        """

    def probe(self) -> Script[Server]:
        """Ask the server what it is."""
        raise NotImplementedError

    def is_supported(self, server: Server) -> bool:
        """Tell whether the server has what claims need."""
        raise NotImplementedError
