"""The unified prefix tree: metadata only, no bytes moved, no threads."""

from hicache.tree.base import (
    Evicted,
    Freed,
    Inserted,
    Lease,
    Match,
    PathPresence,
    PathSlots,
    SessionRefs,
    TreeCore,
    TreeRules,
    WritePlan,
)
from hicache.tree.eviction import EvictionPolicy
from hicache.tree.policies import POLICIES, make_policy
from hicache.tree.residency import Loss, Observer
from hicache.tree.unified import UnifiedTree

__all__ = [
    "POLICIES",
    "Evicted",
    "EvictionPolicy",
    "Freed",
    "Inserted",
    "Lease",
    "Loss",
    "Match",
    "Observer",
    "PathPresence",
    "PathSlots",
    "SessionRefs",
    "TreeCore",
    "TreeRules",
    "UnifiedTree",
    "WritePlan",
    "make_policy",
]
