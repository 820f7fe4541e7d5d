"""Hit rate from a server's Prometheus metrics, sampled over time.

Reads any pair of counters named `<prefix>cached_tokens_total` and `<prefix>prompt_tokens_total`: SGLang's
(`sglang:`) and ours alike. Every interval is a row; a counter that went back is a restarted server.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from hicache.bench.hit_rate import Sample
from hicache.errors import HiCacheError

CACHED = "cached_tokens_total"
PROMPT = "prompt_tokens_total"
CEILING = "ceiling_tokens_total"
MISSED = "missed_tokens_total"

# Token counters repeat on every rank of these axes: one of them is the truth, their sum is not.
_RANK_LABELS = frozenset(
    {"tp_rank", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "moe_ep_rank", "pid"}
)


class ScrapeError(HiCacheError):
    """A server's metrics cannot be read, or lack the counters."""


_Series: TypeAlias = "dict[tuple[tuple[str, str], ...], float]"


@dataclass(frozen=True, slots=True)
class Counters:
    """A server's counters at one moment; the ceiling is None where the server does not tell it."""

    cached_tokens: int
    prompt_tokens: int
    ceiling_tokens: int | None = None
    missed: Mapping[str, int] = field(default_factory=dict)


def parse(text: str) -> Counters:
    """Read the counters from a /metrics page; without any cached token the first may be missing (0)."""
    sums: dict[str, _Series] = {CACHED: {}, PROMPT: {}, CEILING: {}, MISSED: {}}
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise ScrapeError(f"this is not a Prometheus page: {error}") from error
    for family in families:
        for sample in family.samples:
            wanted = next((w for w in sums if _is_counter(sample.name, w)), None)
            if wanted is None:
                continue
            rest = {k: v for k, v in sample.labels.items() if k not in _RANK_LABELS}
            key = (("", sample.name), *sorted(rest.items()))
            series = sums[wanted]
            series[key] = max(series.get(key, 0.0), sample.value)
    if not sums[PROMPT]:
        raise ScrapeError(f"no counter that ends in {PROMPT}: is the server started with --enable-metrics?")
    return Counters(
        cached_tokens=_total(sums[CACHED]),
        prompt_tokens=_total(sums[PROMPT]),
        ceiling_tokens=_total(sums[CEILING]) if sums[CEILING] else None,
        missed={dict(key).get("reason", ""): round(value) for key, value in sums[MISSED].items()},
    )


def _is_counter(name: str, wanted: str) -> bool:
    return name == wanted or (name.endswith((f":{wanted}", f"_{wanted}")) and "uncached" not in name)


def _total(series: _Series) -> int:
    """Sum the series; where a source "total" is exported beside its parts, only the totals count."""
    totals = [v for key, v in series.items() if any(value == "total" for _, value in key)]
    return round(sum(totals or series.values()))


def fetch(url: str, *, timeout_s: float = 10.0) -> Counters:
    """Read the counters of the server at `url`. Blocks at most `timeout_s`."""
    address = url.rstrip("/") + "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=timeout_s) as reply:
            return parse(reply.read().decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ScrapeError(f"{address}: {error}") from error


def sample_over_time(
    read: Callable[[], Counters],
    *,
    interval_s: float,
    duration_s: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[Sample]:
    """Yield the increase of the counters per interval until `duration_s` is over; at least one."""
    start = now()
    before = read()
    number = 0
    while number == 0 or now() - start + interval_s <= duration_s + interval_s / 2:
        sleep(max(0.0, start + (number + 1) * interval_s - now()))
        after = read()
        yield _increase(before, after, number)
        before = after
        number += 1


def _increase(before: Counters, after: Counters, number: int) -> Sample:
    if after.prompt_tokens < before.prompt_tokens or after.cached_tokens < before.cached_tokens:
        before = Counters(0, 0)  # the server began again from zero
    ceiling = after.ceiling_tokens
    return Sample(
        round=number,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        ceiling_tokens=None if ceiling is None else ceiling - (before.ceiling_tokens or 0),
        missed={reason: tokens - before.missed.get(reason, 0) for reason, tokens in after.missed.items()},
    )
