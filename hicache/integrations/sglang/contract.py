"""What the adapter needs of SGLang's objects, so that everything but `storage` works without SGLang.

Names and meaning are SGLang's; `guard` checks them against the version that is installed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from hicache.errors import HiCacheError


class Refused(HiCacheError):
    """L3 stays off while SGLang serves on; the message says why and what to change."""


class StorageConfig(Protocol):
    """HiCacheStorageConfig. `is_mla_model` means that every TP rank holds the same KV bytes."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    model_name: str | None
    should_split_heads: bool
    extra_config: Mapping[str, object] | None

    @property
    def is_storage_writer(self) -> bool: ...


class HostPool(Protocol):
    """HostKVCache and its kin: pages of one pool in host memory. Indices count tokens."""

    page_size: int
    layout: str

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor: ...

    def get_dummy_flat_data_page(self) -> torch.Tensor: ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None: ...


class Transfer(Protocol):
    """PoolTransfer: pages of one pool. `host_indices` has one entry per token."""

    name: str
    host_indices: torch.Tensor | None
    keys: list[str] | None
    hit_policy: str
    indices_from_pool: str | None


class ExtraInfo(Protocol):
    """HiCacheStorageExtraInfo; the adapter needs nothing of it, for a key names its whole prefix."""

    prefix_keys: Sequence[str] | None


def text(name: str) -> str:
    """Return the plain text of one of SGLang's names, which are members of text enums."""
    return str(name.value) if isinstance(name, enum.Enum) else name
