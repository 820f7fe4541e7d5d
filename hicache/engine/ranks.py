"""Tensor-parallel ranks of one replica over torch.distributed: messages once a tick, columns once a layer.

A rank that dies closes its connections, one that stands still runs into the time-out; either way the others
get RankLost from the call they are in.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hicache.engine.architecture import Shard
from hicache.errors import RankLost
from hicache.transfer.agreement import Collective

logger = logging.getLogger(__name__)


class GlooRanks(Collective):
    """The ranks of one replica as a gloo group. One thread per rank, all calls in the same order.

    `group` may be an engine's own, made with backend gloo and with the time-out wanted; it stays the
    engine's. join() makes one.
    """

    def __init__(self, group: dist.ProcessGroup, *, owned: bool = False) -> None:
        self._group = group
        self._owned = owned
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def join(cls, init_method: str, *, rank: int, size: int, timeout_s: float = 30.0) -> GlooRanks:
        """Meet the others at `tcp://host:port` or `file:///path`. Raises RankLost if they do not come.

        `timeout_s` also bounds every later exchange. It makes torch's default group, so once per process.
        """
        Shard(rank, size)
        bound = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(
                "gloo", init_method=init_method, rank=rank, world_size=size, timeout=bound
            )
        except (RuntimeError, ValueError) as error:
            raise RankLost(
                f"rank {rank} of {size} did not meet the others at {init_method} within {timeout_s:g} s: "
                f"{_first_line(error)}"
            ) from error
        group = dist.group.WORLD
        assert group is not None
        return cls(group, owned=True)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def shard(self) -> Shard:
        return Shard(self._rank, self._size)

    def gather(self, message: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        return [one.numpy().tobytes() for one in self._all(own)]

    def columns(self, own: Tensor) -> Tensor:
        """Put (rows, width / size) of every rank together to (rows, width), in rank order."""
        return torch.cat(self._all(own), 1)

    def any(self, flag: bool) -> bool:
        """Return whether any rank says so."""
        return b"\1" in self.gather(bytes([flag]))

    def _all(self, own: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(own) for _ in range(self._size)]
        try:
            dist.all_gather(everyone, own, group=self._group)
        except RuntimeError as error:
            raise RankLost(
                f"rank {self._rank} of {self._size}: another rank of this replica is gone or stuck "
                f"({_first_line(error)}); restart the whole replica"
            ) from error
        return everyone

    def close(self) -> None:
        if self._owned:
            self._owned = False
            dist.destroy_process_group(self._group)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
