"""Middleware for consumers: one shape, ``async (message, call_next) -> messages``."""

from __future__ import annotations

from .attributes import CorrelationMiddleware, DeadlineMiddleware, RequiredMiddleware, SubjectMiddleware
from .chain import Middleware, Next
from .dead_letters import DeadLetterMiddleware
from .inbox import InboxMiddleware
from .observing import EventsMiddleware, LogMiddleware, RecoverMiddleware
from .outbox import OutboxMiddleware
from .retrying import RetryMiddleware
from .transaction import TransactionMiddleware
from .transactional import transactional

__all__ = [
    "CorrelationMiddleware",
    "DeadLetterMiddleware",
    "DeadlineMiddleware",
    "EventsMiddleware",
    "InboxMiddleware",
    "LogMiddleware",
    "Middleware",
    "Next",
    "OutboxMiddleware",
    "RecoverMiddleware",
    "RequiredMiddleware",
    "RetryMiddleware",
    "SubjectMiddleware",
    "TransactionMiddleware",
    "transactional",
]
