"""Middleware for consumers: one shape, ``async (message, call_next) -> messages``."""

from __future__ import annotations

from .attributes import CorrelationMiddleware, DeadlineMiddleware, RequiredMiddleware, SubjectMiddleware
from .chain import Middleware, Next
from .observing import EventsMiddleware, LogMiddleware, RecoverMiddleware
from .retrying import RetryMiddleware
from .transactional import (
    DeadLetterMiddleware,
    InboxMiddleware,
    OutboxMiddleware,
    TransactionMiddleware,
    transactional,
)

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
