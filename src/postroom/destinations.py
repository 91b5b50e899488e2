"""The destinations of a dispatcher: which topics are down, and which message may test one."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from . import events
from .retry import Breaker, Delay
from .store import Claim, Outcome, Release
from .verdict import Verdict

__all__ = ["Destinations"]

#: The cause of an outage that a publisher reports without an error.
UNREACHABLE = "the publisher reports that it cannot be reached"
#: How many topics can be down at once before the one that went down first is tried anew.
MAX_BREAKERS = 1000


class Destinations:
    """A breaker for each topic that is down."""

    def __init__(self, cooldown: Delay, tell: events.Listener) -> None:
        self._cooldown = cooldown
        self._tell = tell
        self._breakers: OrderedDict[str, Breaker] = OrderedDict()

    def down(self) -> tuple[str, ...]:
        """Return the topics that must be left alone now."""
        now = time.monotonic()
        return tuple(topic for topic, breaker in self._breakers.items() if not breaker.may_probe(now))

    def admit(self, claims: Sequence[Claim]) -> tuple[list[Claim], list[Claim]]:
        """Part the claims that may be tried from those of a topic that is down, but for the one that tests it."""
        if not self._breakers:
            return list(claims), []
        now, tried, waiting = time.monotonic(), list[Claim](), list[Claim]()
        for claim in claims:
            breaker = self._breakers.get(claim.message.topic)
            (tried if breaker is None or breaker.start_probe(now) else waiting).append(claim)
        return tried, waiting

    def hear(self, claims: Sequence[Claim], verdict: Verdict, causes: Mapping[str, str]) -> list[Outcome]:
        """Take note of what a batch says about its topics; return its outcomes, those of failed probes postponed.

        The message that tested a topic in vain waits as long as the topic, so that the next test is another
        message: one that can never be sent must not stand for its whole topic.
        """
        probed = self._breakers.keys() & verdict.down
        for topic in verdict.alive:
            if self._breakers.pop(topic, None) is not None:
                self._tell(events.BreakerClosed(topic))
        for topic in verdict.down:
            self._fail(topic, causes.get(topic, UNREACHABLE))
        if not probed:
            return list(verdict.outcomes)
        return [
            Release(self._breakers[claim.message.topic].wait(time.monotonic()))
            if outcome == Release() and claim.message.topic in probed
            else outcome
            for claim, outcome in zip(claims, verdict.outcomes, strict=True)
        ]

    def end_probes(self, claims: Sequence[Claim]) -> None:
        """Let topics be tested again that a batch was testing."""
        for topic in {claim.message.topic for claim in claims} & self._breakers.keys():
            self._breakers[topic].end_probe()

    def _fail(self, topic: str, error: str) -> None:
        breaker = self._breakers.get(topic)
        if breaker is None:
            if len(self._breakers) >= MAX_BREAKERS:
                self._breakers.popitem(last=False)
            breaker = self._breakers[topic] = Breaker(self._cooldown)
        if breaker.fail(time.monotonic()):
            self._tell(events.BreakerOpened(topic, error))
