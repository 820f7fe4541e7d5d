"""Published readings that the built-in workloads are compared with; nothing here is measured by us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Hit rates in percent per zero-based round, and effective input throughput, by tier set."""

    rounds: tuple[int, ...]
    hit_percent: Mapping[str, tuple[int, ...]]
    effective_input_tokens_per_s: Mapping[str, float]
    l3_mean_ttft_s: float | None  # None where only a bound is given
    source: str


_SOURCE = (
    "SGLang and LMSYS, article on the Unified Radix Cache (2026-08-11), Figure 4 and its table: "
    "third-party readings of a chart, rounded to one percent, not raw logs"
)

_INKLING_RISE = (0, 51, 68, 76, 81, 84, 86, 88, 89, 90, 91, 92, 93, 93, 94, 94, 94, 95)

PUBLISHED: Mapping[str, Published] = {
    "deepseek-v4-flash": Published(
        rounds=tuple(range(0, 60, 5)),
        hit_percent={
            "l1": (0, 83, 91, 94, 0, 0, 0, 0, 0, 0, 0, 0),
            "l1+l2": (0, 83, 91, 94, 95, 96, 97, 97, 0, 0, 0, 0),
            "l1+l2+l3": (0, 83, 91, 94, 95, 96, 97, 97, 98, 98, 98, 98),
        },
        effective_input_tokens_per_s={"l1": 9_400, "l1+l2": 14_300, "l1+l2+l3": 145_500},
        l3_mean_ttft_s=None,
        source=_SOURCE,
    ),
    "inkling-small": Published(
        rounds=tuple(range(30)),
        hit_percent={
            "l1": (0, 6) + (0,) * 28,
            "l1+l2": (*_INKLING_RISE, 62, *(0,) * 11),
            "l1+l2+l3": (*_INKLING_RISE, 95, 95, 95, 96, 96, 96, 96, 96, 96, 97, 97, 97),
        },
        effective_input_tokens_per_s={"l1": 15_500, "l1+l2": 21_100, "l1+l2+l3": 67_100},
        l3_mean_ttft_s=1.23,
        source=_SOURCE,
    ),
}
