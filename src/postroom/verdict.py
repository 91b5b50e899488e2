"""What a publisher's answers mean: the outcome of every message of a batch, decided without any I/O."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import timedelta

from .message import Message
from .retry import Delay
from .store import Dead, Delivered, Outcome, Release, Retry

__all__ = ["Verdict", "judge"]

#: Databases have limits, and so has patience.
MAX_DELAY = timedelta(days=366)
NO_ANSWER = "PublishUnknownError: no answer came in time; the message may have been delivered"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcomes of a batch, and what it says about the destinations."""

    outcomes: list[Outcome]
    #: The places in the batch of messages that were answered, and of messages whose destination is down.
    answered: Sequence[int] = ()
    down: Sequence[int] = ()


def judge(
    messages: Sequence[Message],
    answers: Sequence[Outcome | None],
    *,
    destinations: Sequence[str],
    alive: Container[str] = (),
    backoff: Delay,
    max_attempts: int,
) -> Verdict:
    """Tell outages from failures, count attempts, and keep the order of keys.

    Where nothing is known of a message, others decide: if its destination answered for any of them, or is ``alive``
    by other calls, the message failed; if it was silent, the destination is down and no attempt is spent.
    """
    answers = [_clean(answer) for answer in answers]
    answered = [index for index, answer in enumerate(answers) if isinstance(answer, Delivered | Retry | Dead)]
    heard = {destinations[index] for index in answered}
    blocked: set[tuple[str, str]] = set()
    outcomes: list[Outcome] = []
    down: list[int] = []
    for index, (message, answer) in enumerate(zip(messages, answers, strict=True)):
        place = None if message.key is None else (message.topic, message.key)
        if place in blocked and not isinstance(answer, Delivered):
            outcomes.append(Release())  # an earlier one of its key failed
            continue
        is_alive = destinations[index] in heard or destinations[index] in alive
        outcome = _outcome(message, answer, is_alive=is_alive, backoff=backoff, max_attempts=max_attempts)
        if isinstance(outcome, Release):
            down.append(index)
        if place is not None and not isinstance(outcome, Delivered):
            blocked.add(place)
        outcomes.append(outcome)
    return Verdict(outcomes, answered, down)


def _outcome(message: Message, answer: Outcome | None, *, is_alive: bool, backoff: Delay, max_attempts: int) -> Outcome:
    if answer is None:
        answer = Retry(NO_ANSWER) if is_alive else Release()
    if not isinstance(answer, Retry):
        return answer
    if message.attempt >= max_attempts:
        return Dead(answer.error)
    return Retry(answer.error, backoff(message.attempt) if answer.delay is None else answer.delay)


def _clean(answer: object) -> Outcome | None:
    """Return an answer that every store can record, whatever an untyped publisher says."""
    match answer:
        case None:
            return None
        case Delivered():
            return Delivered()  # a kind of its own would be unknown to the stores
        case Release(delay):
            return Release(_clamped(delay) or timedelta(0))
        case Dead(error):
            return Dead(str(error))
        case Retry(error, delay):
            return Retry(str(error), _clamped(delay))
        case _:
            return Retry(f"the publisher answered with a {type(answer).__name__}, which is no outcome")


def _clamped(delay: object) -> timedelta | None:
    if not isinstance(delay, timedelta):
        return None
    return min(max(delay, timedelta(0)), MAX_DELAY)
