"""What a run showed: one row per round, sums over sums, and the JSON that other tools read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"


@dataclass(frozen=True, slots=True)
class ByTier:
    """Cached tokens by the tier that supplied them."""

    device: int
    host: int
    storage: int


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One finished request. `history` of its prompt tokens had been said before; times in seconds.

    `missed` are tokens that an infinite cache would have had, by what kept them back, where that is told.
    """

    client: int
    round: int
    prompt_tokens: int
    history: int
    cached_tokens: int
    by_tier: ByTier | None  # None where the server does not tell
    ttft_s: float
    latency_s: float
    missed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round. Rates are fractions of the round's full prompt tokens, never means of ratios."""

    round: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    ceiling: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    by_tier: ByTier | None
    missed: Mapping[str, int] = field(default_factory=dict)

    @property
    def distance(self) -> float:
        """How far the hit rate stays below the ceiling."""
        return self.ceiling - self.hit_rate

    def as_json(self) -> dict[str, JSON]:
        row: dict[str, JSON] = {
            "round": self.round,
            "hit_rate": self.hit_rate,
            "ceiling": self.ceiling,
            "distance": self.distance,
            "ttft_mean_s": self.ttft_mean_s,
            "ttft_p50_s": self.ttft_p50_s,
            "ttft_p99_s": self.ttft_p99_s,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }
        if self.by_tier is not None:
            tiers = self.by_tier
            row["cached_by_tier"] = {"l1": tiers.device, "l2": tiers.host, "l3": tiers.storage}
        if self.missed:
            row["missed_tokens"] = dict(self.missed)
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RoundReport:
        """Read back what `as_json` wrote."""
        told = dict(row)
        del told["distance"]
        tiers = told.pop("cached_by_tier", None)
        by_tier = None if tiers is None else ByTier(tiers["l1"], tiers["l2"], tiers["l3"])
        missed = told.pop("missed_tokens", {})
        return cls(**told, by_tier=by_tier, missed=missed)


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run of a workload. `duration_s` is wall time, or virtual time where `engine` is virtual."""

    tiers: str
    eviction_policy: str
    engine: str
    rounds: tuple[RoundReport, ...]
    duration_s: float
    wall_s: float
    details: dict[str, JSON] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return sum(r.prompt_tokens for r in self.rounds)

    @property
    def hit_rate(self) -> float:
        return _ratio(sum(r.cached_tokens for r in self.rounds), self.prompt_tokens)

    @property
    def ceiling(self) -> float:
        return _ratio(sum(r.ceiling * r.prompt_tokens for r in self.rounds), self.prompt_tokens)

    @property
    def missed(self) -> dict[str, int]:
        """Tokens missed by reason, most first."""
        total: Counter[str] = Counter()
        for row in self.rounds:
            total.update(row.missed)
        return dict(total.most_common())

    @property
    def effective_input_tokens_per_s(self) -> float:
        return _ratio(self.prompt_tokens, self.duration_s)

    def as_json(self) -> dict[str, JSON]:
        return {
            "tiers": self.tiers,
            "eviction_policy": self.eviction_policy,
            "engine": self.engine,
            "rounds": [r.as_json() for r in self.rounds],
            "hit_rate": self.hit_rate,
            "ceiling": self.ceiling,
            "prompt_tokens": self.prompt_tokens,
            "duration_s": self.duration_s,
            "wall_s": self.wall_s,
            "effective_input_tokens_per_s": self.effective_input_tokens_per_s,
            **({"missed_tokens": dict(self.missed)} if self.missed else {}),
            **self.details,
        }


def by_round(results: Iterable[TurnResult]) -> tuple[RoundReport, ...]:
    """Group results by round, ascending."""
    rounds: dict[int, list[TurnResult]] = {}
    for result in results:
        rounds.setdefault(result.round, []).append(result)
    return tuple(_round(number, rounds[number]) for number in sorted(rounds))


def _round(number: int, results: Sequence[TurnResult]) -> RoundReport:
    prompt = sum(r.prompt_tokens for r in results)
    cached = sum(r.cached_tokens for r in results)
    ttfts = sorted(r.ttft_s for r in results)
    missed: Counter[str] = Counter()
    for result in results:
        missed.update(result.missed)
    told = [r.by_tier for r in results if r.by_tier is not None]
    return RoundReport(
        round=number,
        requests=len(results),
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_rate=_ratio(cached, prompt),
        ceiling=_ratio(sum(r.history for r in results), prompt),
        ttft_mean_s=sum(ttfts) / len(ttfts),
        ttft_p50_s=percentile(ttfts, 0.50),
        ttft_p99_s=percentile(ttfts, 0.99),
        by_tier=_sum_tiers(told) if len(told) == len(results) else None,
        missed=missed,
    )


def _sum_tiers(parts: Sequence[ByTier]) -> ByTier:
    return ByTier(
        device=sum(p.device for p in parts),
        host=sum(p.host for p in parts),
        storage=sum(p.storage for p in parts),
    )


def percentile(ascending: Sequence[float], q: float) -> float:
    """Return the value at index int(q * n), as SGLang's multi-turn bench counts percentiles."""
    return ascending[min(len(ascending) - 1, int(q * len(ascending)))]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
