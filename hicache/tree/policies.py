"""The eviction policies by name."""

from __future__ import annotations

from hicache.errors import ConfigError
from hicache.tree.adaptive import Adaptive
from hicache.tree.eviction import EvictionPolicy, Fifo, Filo, Lfu, Lru, Mru, Priority, Slru, Tlru

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (Lru, Lfu, Slru, Priority, Fifo, Mru, Filo, Tlru, Adaptive)
}
_OPTIONS = {
    "slru": ("protected_threshold",),
    "tlru": ("threshold", "next_prompt_estimate"),
    "adaptive": ("half_life",),
}


def make_policy(name: str, **options: object) -> EvictionPolicy:
    """Build a policy by name, most of them SGLang's; raises ConfigError naming what exists."""
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {name!r} is unknown; there are {', '.join(POLICIES)}")
    known = _OPTIONS.get(name, ())
    for option, value in options.items():
        if option not in known:
            raise ConfigError(
                f"eviction policy {name}: unknown option {option!r}; there are {', '.join(known) or 'none'}"
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"eviction policy {name}: {option}={value!r} must be an integer")
    return POLICIES[name](**options)
