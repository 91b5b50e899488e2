"""postroom: commit your data and your messages together; postroom delivers them."""

from __future__ import annotations

from .broker import Each, Publisher
from .codec import Codec, JSONCodec, type_name
from .dispatcher import Dispatcher
from .message import Limits, Message, uuid7
from .outbox import Added, Outbox
from .retry import Backoff
from .source import Delivery, source
from .store import Claim, ClaimTerms, Dead, Delivered, Features, Outcome, Release, Retry, Settlement, Stats, Store

__all__ = [
    "Added",
    "Backoff",
    "Claim",
    "ClaimTerms",
    "Codec",
    "Dead",
    "Delivered",
    "Delivery",
    "Dispatcher",
    "Each",
    "Features",
    "JSONCodec",
    "Limits",
    "Message",
    "Outbox",
    "Outcome",
    "Publisher",
    "Release",
    "Retry",
    "Settlement",
    "Stats",
    "Store",
    "source",
    "type_name",
    "uuid7",
]
