"""When pages go down a tier. Pure decisions over hit counts and reserves."""

from __future__ import annotations

from hicache.types import WritePolicy


def hits_to_write(policy: WritePolicy) -> int | None:
    """Accesses a page needs before it is written down; None: only when it is about to be evicted."""
    if policy is WritePolicy.WRITE_THROUGH:
        return 1
    if policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
        return 2
    return None
