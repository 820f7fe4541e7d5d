"""Every exception HiCache raises on purpose.

    HiCacheError
    ├── ConfigError            a flag, option or file value is wrong; names it and what to do
    ├── SpecError              a model spec contradicts itself
    ├── LoadFailed             pages did not get from host to device; the prompt must be computed
    ├── RankLost               another rank of this replica is gone or stuck; this one must stop too
    ├── InvariantViolation     a law of the cache is broken; never caught below the top
    │   ├── DoubleFree         a slot was freed that is not held
    │   └── RanksDiverged      the ranks of a replica have decided differently
    └── BackendError           a storage backend could not do its work
        ├── BackendTimeout     ... within its time bound
        └── BackendUnavailable ... because it cannot be reached

Misses, full pools and slow stores are outcomes, not exceptions.
"""

from __future__ import annotations


class HiCacheError(Exception):
    """Root of the tree."""


class ConfigError(HiCacheError, ValueError):
    """A setting is refused; the message names the flag, its value and what to do."""


class SpecError(HiCacheError, ValueError):
    """A model spec contradicts itself."""


class LoadFailed(HiCacheError):
    """A copy from host to device failed: the pages it was to fill hold nothing, only this request suffers."""


class RankLost(HiCacheError):
    """Another rank of this replica is gone, or silent for too long; nothing can be decided without it."""


class InvariantViolation(HiCacheError, RuntimeError):
    """A law of the cache does not hold; continuing could serve wrong bytes."""


class DoubleFree(InvariantViolation):
    """A slot was freed that its pool does not hold as taken."""


class RanksDiverged(InvariantViolation):
    """The ranks of a replica have decided differently: their shards no longer belong together."""


class BackendError(HiCacheError):
    """A storage backend could not do its work; the cache treats it as a miss and counts it."""


class BackendTimeout(BackendError):
    """A storage backend did not answer within its bound."""


class BackendUnavailable(BackendError):
    """A storage backend cannot be reached."""
