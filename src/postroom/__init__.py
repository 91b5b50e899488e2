"""postroom: commit your data and your messages together; postroom delivers them."""

from __future__ import annotations

from . import presets
from .broker import Each, Publisher, Subscriber
from .codec import Codec, JSONCodec, type_name
from .consumer import Consumer
from .delivery import Delivery, current_delivery, share
from .dispatcher import Dispatcher
from .inbox import Inbox
from .message import Limits, Local, Message, uuid7
from .middleware import TransactionMiddleware, transactional
from .outbox import AddResult, Outbox
from .outbox_subscriber import OutboxSubscriber
from .retry import Backoff
from .router import Match, Router
from .store import Claim, ClaimTerms, Dead, Delivered, Features, Outcome, Release, Retry, Settlement, Stats, Store
from .transaction import Transaction, current_connection, current_transaction

__all__ = [
    "AddResult",
    "Backoff",
    "Claim",
    "ClaimTerms",
    "Codec",
    "Consumer",
    "Dead",
    "Delivered",
    "Delivery",
    "Dispatcher",
    "Each",
    "Features",
    "Inbox",
    "JSONCodec",
    "Limits",
    "Local",
    "Match",
    "Message",
    "Outbox",
    "OutboxSubscriber",
    "Outcome",
    "Publisher",
    "Release",
    "Retry",
    "Router",
    "Settlement",
    "Stats",
    "Store",
    "Subscriber",
    "Transaction",
    "TransactionMiddleware",
    "current_connection",
    "current_delivery",
    "current_transaction",
    "presets",
    "share",
    "transactional",
    "type_name",
    "uuid7",
]
