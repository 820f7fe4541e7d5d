"""The arithmetic of islands: bytes a token, tokens that fit, requests that the SWA pool lets run.

Pure numbers, all of them tokens or bytes; nothing here looks at a cache. It says what a pool ratio
assumes, so that flags and ratio can be checked together.
"""

from __future__ import annotations

from dataclasses import dataclass

from hicache.errors import ConfigError


def retained_tokens(window: int, page_size: int) -> int:
    """Return the tokens of SWA that a running request keeps: the pages of its window, and one more."""
    return (-(-window // page_size) + 1) * page_size


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What one token of L1 costs. `other` is what every token takes besides, as a draft model's KV."""

    full: float
    swa: float
    other: float = 0.0

    def __post_init__(self) -> None:
        for name in ("full", "swa"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name}-token-bytes {getattr(self, name):g} must be above 0")
        if not 0 <= self.other < float("inf"):
            raise ConfigError(f"--other-token-bytes {self.other:g} must be 0 or more")

    def marginal(self, ratio: float) -> float:
        """Return the bytes of one FULL token and its share of the SWA pool."""
        return self.full + self.swa * ratio + self.other


@dataclass(frozen=True, slots=True)
class IslandPlan:
    """Everything but the pool split. `hold` is what a request keeps of SWA without islands, in tokens."""

    memory: float  # bytes
    costs: TokenBytes
    window: int
    page_size: int
    chunk: int
    running: int
    hold: int

    def __post_init__(self) -> None:
        positive = {
            "--memory": self.memory,
            "--sliding-window": self.window,
            "--page-size": self.page_size,
            "--chunked-prefill-size": self.chunk,
            "--max-running-requests": self.running,
            "--hold-tokens": self.hold,
        }
        for flag, value in positive.items():
            if value < 1:
                raise ConfigError(f"{flag} {value} must be at least 1")

    @property
    def retained(self) -> int:
        """Tokens of SWA that a request keeps with islands, besides the chunk in flight."""
        return retained_tokens(self.window, self.page_size)

    @property
    def floor(self) -> int:
        """Tokens of SWA with which `running` requests can run with islands: one chunk, and their windows."""
        return self.chunk + self.running * self.retained

    def split(self, ratio: float, total: int | None = None) -> Split:
        """Split the memory at one ratio; `total` FULL tokens instead of all that fit. Raises ConfigError."""
        if not 0 < ratio <= 1:
            raise ConfigError(f"--swa-full-tokens-ratio {ratio:g} must be in (0, 1]")
        if total is not None and total < 1:
            raise ConfigError(f"--max-total-tokens {total} must be at least 1")
        fits = int(self.memory / self.costs.marginal(ratio))
        full = fits if total is None else total
        swa = int(full * ratio)
        return Split(
            ratio=ratio,
            token_bytes=self.costs.marginal(ratio),
            fits=fits,
            full_tokens=full,
            swa_tokens=swa,
            running_without=swa / self.hold,
            running_with=max(0.0, (swa - self.chunk) / self.retained),
            over_floor=swa / self.floor,
        )


@dataclass(frozen=True, slots=True)
class Split:
    """One pool ratio. Running requests are what the SWA pool bounds; FULL bounds them too."""

    ratio: float
    token_bytes: float
    fits: int  # FULL tokens in the memory
    full_tokens: int
    swa_tokens: int
    running_without: float
    running_with: float
    over_floor: float


def ratio_warning(
    *, full_tokens: int, swa_tokens: int, chunk: int, running: int, window: int, page_size: int
) -> str | None:
    """Say why a pool split assumes islands, for a system that runs without them; None if it does not.

    Without islands the windows of a request's whole last chunk stay. FULL has room for the chunks of so
    many requests of two chunks and more; the split assumes islands if SWA has none for theirs.
    """
    chunk = max(page_size, min(chunk, full_tokens))
    wanted = min(float(running), full_tokens / (2 * chunk))
    if swa_tokens >= wanted * chunk:
        return None
    ratio = min(1.0, wanted * chunk / full_tokens)
    floor = chunk + running * retained_tokens(window, page_size)
    enough = "that is enough with them" if swa_tokens >= floor else f"with them it takes {floor}"
    return (
        f"--swa-full-tokens-ratio {swa_tokens / full_tokens:.3g} assumes islands, and they are off: "
        f"{swa_tokens} SWA tokens hold the last chunks of {swa_tokens / chunk:.1f} requests, FULL those of "
        f"{wanted:.1f}; dead windows will displace live ones. Set --enable-swa-islands ({enough}), or a "
        f"ratio of at least {ratio:.2g}"
    )
