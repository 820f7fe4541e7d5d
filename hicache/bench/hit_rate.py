"""Hit rate from logs: which fields a record may use, and sums per round and overall.

A line is one JSON record, or a list of them (SGLang's reply to a batch). Empty lines are skipped; any
other line that cannot be used is an error that names the line and the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Cached and full prompt tokens of one request, or of one interval; `round` is None if not told.

    `ceiling_tokens` is what an infinite cache would have had, None where nobody says; `missed` is what
    of it was not cached, by reason.
    """

    round: int | None
    cached_tokens: int
    prompt_tokens: int
    ceiling_tokens: int | None = None
    missed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HitRateRow:
    """A round, or everything (`round` None). Invariant: 0 <= cached <= prompt.

    `ceiling_tokens` is None unless every sample tells it.
    """

    round: int | None
    requests: int
    cached_tokens: int
    prompt_tokens: int
    ceiling_tokens: int | None = None
    missed: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Fraction of prompt tokens; None where there were none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def ceiling(self) -> float | None:
        """Fraction of prompt tokens that an infinite cache would have had; None where nobody says."""
        if self.ceiling_tokens is None or not self.prompt_tokens:
            return None
        return self.ceiling_tokens / self.prompt_tokens

    def as_json(self, unit: str) -> dict[str, JSON]:
        row: dict[str, JSON] = {
            unit: self.round,
            "hit_rate": self.hit_rate,
            "cached_tokens": self.cached_tokens,
            "prompt_tokens": self.prompt_tokens,
            _COUNTED[unit]: self.requests,
        }
        if self.ceiling_tokens is not None:
            row |= {"ceiling": self.ceiling, "missed_tokens": dict(self.missed)}
        return row


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
    rounds: dict[int, list[Sample]] = {}
    everything: list[Sample] = []
    for sample in samples:
        everything.append(sample)
        if sample.round is not None:
            rounds.setdefault(sample.round, []).append(sample)
    return HitRate(
        rounds=tuple(_row(number, rounds[number]) for number in sorted(rounds)),
        overall=_row(None, everything),
    )


def _row(number: int | None, samples: Sequence[Sample]) -> HitRateRow:
    missed: Counter[str] = Counter()
    for sample in samples:
        missed.update(sample.missed)
    told = [s.ceiling_tokens for s in samples if s.ceiling_tokens is not None]
    return HitRateRow(
        number,
        len(samples),
        sum(s.cached_tokens for s in samples),
        sum(s.prompt_tokens for s in samples),
        sum(told) if samples and len(told) == len(samples) else None,
        +missed,
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
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
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
    counts, own = record, record.get("hicache")
    cached: object = None
    if isinstance(meta := record.get("meta_info"), dict):
        counts, own = meta, meta.get("hicache")
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
    ceiling, missed = _ceiling(own)
    return Sample(_round(record, counts), cached_tokens, prompt_tokens, ceiling, missed)


def _ceiling(own: object) -> tuple[int | None, dict[str, int]]:
    """Read what only HiCache's replies tell."""
    if not isinstance(own, dict) or "ceiling" not in own:
        return None, {}
    missed = own.get("missed", {})
    if not isinstance(missed, dict):
        raise ValueError(f"hicache.missed is {missed!r}, not tokens by reason")
    return _count("hicache.ceiling", own["ceiling"]), {
        str(reason): _count(f"hicache.missed.{reason}", tokens) for reason, tokens in missed.items()
    }


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
