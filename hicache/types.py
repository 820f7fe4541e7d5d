"""Values without behaviour that every layer shares: components, tiers, tokens by tier."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import TypeAlias

# Slots of one pool, one per page, dtype int32. A slot is a page index in a pool; NO_SLOT marks an
# absent page (for SWA: a tombstone).
Slots: TypeAlias = "array[int]"
NO_SLOT = -1

# What tokens may be handed over as: any C-contiguous buffer of little-endian u32.
TokenBuffer: TypeAlias = "bytes | bytearray | memoryview | array[int]"
TOKEN_BYTES = 4


class Component(enum.IntEnum):
    """A kind of layer state. Evicting one takes those of higher value along."""

    FULL = 0
    SWA = 1
    MAMBA = 2


class Tier(enum.IntEnum):
    """Where a page lives: L1 device, L2 host, L3 storage."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class WritePolicy(str, enum.Enum):
    """When a page is written to the next tier; names and meaning as in SGLang."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PrefetchPolicy(str, enum.Enum):
    """How long a queued request may wait for L3; names and meaning as in SGLang."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


@dataclass(slots=True)
class CachedTokens:
    """Tokens of one prompt by the tier that made them a hit; `computed` is the rest of the prompt.

    The lowest tier that a boundary needs has the tokens up to it: those whose FULL pages are on the device
    count for storage if it had to bring the window or state without which they would have been computed.
    What was moved is counted by component, apart from this (hicache.cache.stats).
    `asked` of storage = storage + failed by reason; `ceiling`, what an infinite cache would have had, =
    cached + missed by reason. Reasons: hicache.cache.accounts.Shortfall.
    """

    device: int = 0
    host: int = 0
    storage: int = 0
    computed: int = 0
    asked: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    ceiling: int = 0
    missed: dict[str, int] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage
