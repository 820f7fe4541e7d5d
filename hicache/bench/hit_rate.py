"""Hit rate from logs: which fields a record may use, and sums per round and overall.

A line is one JSON record, or a list of them (SGLang's reply to a batch). Empty lines are skipped; any
other line that cannot be used is an error that names the line and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from hicache.bench.report import JSON
from hicache.errors import ConfigError

_Record: TypeAlias = "Mapping[str, object]"

ROUND_FIELDS = ("round", "round_index", "turn")
CACHED_FIELDS = ("cached_tokens", "cached", "cached_prompt_tokens")
PROMPT_FIELDS = ("prompt_tokens", "prompt", "input_tokens", "input_length", "prompt_len")

MAX_ERRORS_SHOWN = 5
_COUNTED = {"round": "requests", "interval": "samples"}  # by what a row is of


@dataclass(frozen=True, slots=True)
class Sample:
    """Cached and full prompt tokens of one request, or of one interval; `round` is None if not told."""

    round: int | None
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class HitRateRow:
    """A round, or everything (`round` None). Invariant: 0 <= cached <= prompt."""

    round: int | None
    requests: int
    cached_tokens: int
    prompt_tokens: int

    @property
    def hit_rate(self) -> float | None:
        """Fraction of prompt tokens; None where there were none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def as_json(self, unit: str) -> dict[str, JSON]:
        return {
            unit: self.round,
            "hit_rate": self.hit_rate,
            "cached_tokens": self.cached_tokens,
            "prompt_tokens": self.prompt_tokens,
            _COUNTED[unit]: self.requests,
        }


@dataclass(frozen=True, slots=True)
class HitRate:
    """Rows per round, ascending; samples without a round count in `overall` only."""

    rounds: tuple[HitRateRow, ...]
    overall: HitRateRow

    def as_json(self, unit: str = "round") -> dict[str, JSON]:
        """`unit` is what a row is of: a round has requests, an interval of a server's counters samples."""
        return {
            f"{unit}s": [row.as_json(unit) for row in self.rounds],
            "overall": self.overall.as_json(unit),
        }


def measure(samples: Iterable[Sample]) -> HitRate:
    """Sum samples per round and overall: sum over sum, never a mean of ratios."""
    sums: dict[int | None, list[int]] = {}
    total = [0, 0, 0]
    for sample in samples:
        for row in (sums.setdefault(sample.round, [0, 0, 0]), total):
            row[0] += 1
            row[1] += sample.cached_tokens
            row[2] += sample.prompt_tokens
    sums.pop(None, None)
    rounds = sorted((number, row) for number, row in sums.items() if number is not None)
    return HitRate(
        rounds=tuple(HitRateRow(number, *row) for number, row in rounds),
        overall=HitRateRow(None, *total),
    )


def read_samples(
    lines: Iterable[str], *, source: str, skipped: Callable[[str], None] | None = None
) -> list[Sample]:
    """Read JSONL; with `skipped`, bad lines are handed to it and left out, else they are a ConfigError."""
    samples: list[Sample] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            samples.extend([_sample(record) for record in _records(line)])
        except (msgspec.DecodeError, ValueError) as error:
            problems.append(f"{source} line {number}: {error}")
    if problems and skipped is None:
        shown = problems[:MAX_ERRORS_SHOWN]
        if len(problems) > len(shown):
            shown.append(f"... and {len(problems) - len(shown)} more bad lines")
        raise ConfigError("\n".join([*shown, "--skip-bad-lines leaves them out"]))
    if skipped is not None:
        for problem in problems:
            skipped(problem)
    return samples


def _records(line: str) -> Iterator[_Record]:
    value = msgspec.json.decode(line)
    for record in value if isinstance(value, list) else [value]:
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, not {type(record).__name__}")
        yield record


def _sample(record: _Record) -> Sample:
    """Read one record: flat fields, SGLang's `meta_info`, or an OpenAI `usage` with its details."""
    counts = record
    cached: object = None
    if isinstance(meta := record.get("meta_info"), dict):
        counts = meta
    elif isinstance(usage := record.get("usage"), dict):
        counts = usage
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens", 0) if isinstance(details, dict) else 0
    prompt_name, prompt = _field(counts, PROMPT_FIELDS)
    cached_name = "cached_tokens"
    if cached is None:
        cached_name, cached = _field(counts, CACHED_FIELDS)
    prompt_tokens = _count(prompt_name, prompt)
    cached_tokens = _count(cached_name, cached)
    if cached_tokens > prompt_tokens:
        raise ValueError(f"{cached_name} {cached_tokens} exceeds {prompt_name} {prompt_tokens}")
    return Sample(_round(record, counts), cached_tokens, prompt_tokens)


def _round(record: _Record, counts: _Record) -> int | None:
    for name in ROUND_FIELDS:
        for source in (record, counts):
            if source.get(name) is not None:
                return _count(name, source[name])
    return None


def _field(record: _Record, names: tuple[str, ...]) -> tuple[str, object]:
    for name in names:
        if name in record and not isinstance(record[name], str):
            return name, record[name]
    raise ValueError(f"none of the fields {', '.join(names)} is there with a number")


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, not a whole number")
    if value < 0:
        raise ValueError(f"{name} is {value}, which is negative")
    return value
