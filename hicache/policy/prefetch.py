"""When a queued request stops waiting for L3. Pure decisions over times and counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hicache.types import PrefetchPolicy


class PrefetchVerdict(enum.Enum):
    """What to do with a prefetch that has not ended."""

    WAIT = "wait"
    STOP = "stop"  # the policy is content with what has arrived
    EXPIRED = "expired"  # the bound is up


@dataclass(frozen=True, slots=True)
class PrefetchRule:
    """The prefetch policies of SGLang, each with a bounded end (law 9)."""

    policy: PrefetchPolicy
    timeout_base: float  # s
    timeout_per_ki_token: float  # s per 1024 tokens
    timeout_max: float  # s

    def deadline(self, tokens: int) -> float:
        """Seconds a request may be held back for `tokens` tokens under `timeout`; monotonic and capped."""
        return min(self.timeout_base + self.timeout_per_ki_token * tokens / 1024, self.timeout_max)

    def expires(self, *, blocked_since: float, progress_at: float, tokens: int) -> float:
        """When the wait ends whatever has arrived.

        `blocked_since` is when the scheduler first wanted the request, `progress_at` when the read
        last moved, `tokens` what it is after.
        """
        if self.policy is PrefetchPolicy.BEST_EFFORT:
            return blocked_since
        if self.policy is PrefetchPolicy.TIMEOUT:
            return blocked_since + self.deadline(tokens)
        return max(blocked_since, progress_at) + self.timeout_max

    def decide(self, *, now: float, blocked_since: float, progress_at: float, tokens: int) -> PrefetchVerdict:
        """Judge a prefetch still running at `now`."""
        if now < self.expires(blocked_since=blocked_since, progress_at=progress_at, tokens=tokens):
            return PrefetchVerdict.WAIT
        best_effort = self.policy is PrefetchPolicy.BEST_EFFORT
        return PrefetchVerdict.STOP if best_effort else PrefetchVerdict.EXPIRED
