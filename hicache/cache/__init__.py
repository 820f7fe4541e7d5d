"""The façade: one HiCache per engine rank, the only owner of the tree."""

from hicache.cache.cache import HiCache
from hicache.cache.sessions import SessionRefused
from hicache.cache.stats import CacheStats

__all__ = ["CacheStats", "HiCache", "SessionRefused"]
