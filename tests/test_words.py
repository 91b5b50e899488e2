"""The page that says what names of other designs are called here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "words.md"

#: Every name of the API of each design, under the heading of its table.
NAMES = {
    "Transactions, inbox and outbox in SQL": """
        TxMiddleware TxFromContext InboxMiddleware InboxConfig Subscriber OutboxMiddleware OutboxConfig InboxSchema
        OutboxSchema Init InitInbox InitOutbox isDuplicateKeyError processed_messages OutboxPublisher
        OutboxPublisherConfig PollInterval BatchSize Source StartCleanup CleanupConfig Retention Interval AckOnSuccess
        Use AddHandler published
    """,
    "Transactions, inbox and outbox in Redis": """
        InboxMiddleware InboxConfig Retention KeyFunc SetNX TxMiddleware TxPipeline Exec Discard ContextWithPipeline
        PipelineFromContext CmdableFromContext Cmdable OutboxMiddleware OutboxConfig Stream MarshalFunc OutboxPublisher
        OutboxPublisherConfig Group Consumer BatchSize BlockTimeout ClaimInterval MaxIdleTime UnmarshalFunc Source
        claimIdle NewCommandHandler CommandHandlerConfig
    """,
    "The outbox with leases": """
        enqueue OutboxMessage DBRunner DBProvider ClaimCfg batch_size lease_duration max_attempts ClaimedMessage
        OutboxStore worker_id claim_batch ack nack base_delay max_delay poll_interval modkit_outbox_events
    """,
    "The outbox in Redis by scripts": """
        RedisOutboxBackend OutboxBackend requiresActiveTransaction persistPending findPendingBatch markSent
        markFailureAttempt FAILED RedisOutboxRelay RedisOutboxPollerWorker RedisOutboxRepairWorker RedisOutboxEntry
        OutboxRecord RedisOutboxScripts RedisOutboxKeys RedisOutboxBackoff RedisOutboxMetrics
        RedisOutboxStorageException recordExpiryDue findDueExpiries decideExpiry expiredEventId expiredEntry dueCutoff
        alreadyRevoked ExpiryDecision
    """,
    "The transactional outbox with a processor": """
        OutboxStore Store GetPending MarkPublished MarkFailed DeleteOld Transaction OutboxMessage Properties
        PostgresOutboxStore NewPostgresOutboxStore OutboxProcessor NewOutboxProcessor Start Stop OutboxConfig
        PollInterval BatchSize MaxRetries RetryBackoff CleanupInterval CleanupAge Publisher Publish BackoffFunc
        ExponentialBackoff NewCommandHandlerWithOutbox message_outbox
    """,
}


@pytest.mark.requirement("S4-02")
@pytest.mark.parametrize("design", NAMES)
def test_every_name_of_a_design_has_a_row(design: str) -> None:
    section = PAGE.read_text().partition(f"### {design}\n")[2].partition("\n### ")[0]
    there = " ".join(re.findall(r"^\| (.*?) \| .* \|$", section, re.MULTILINE))

    assert [name for name in NAMES[design].split() if not re.search(rf"\b{name}\b", there)] == []
