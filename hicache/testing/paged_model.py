"""The reference model over hand-made page tables: what a scheduler does for a runner, in little."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from hicache.engine.architecture import ReferenceConfig, reference_spec
from hicache.engine.model import ReferenceModel
from hicache.engine.runner import TorchRunner
from hicache.request import Capture, Request
from hicache.spec import ModelSpec
from hicache.types import NO_SLOT, Component


class PoisonedPools:
    """Pools in which every byte nobody wrote is NaN."""

    def __init__(self, spec: ModelSpec, capacity: int, device: str) -> None:
        self._pools = {
            p.name: torch.full(
                (p.num_layers, capacity, p.rows_per_page, *p.row_shape), float("nan"), device=device
            )
            for c in spec.components
            for p in c.pools
        }

    def pool(self, name: str) -> Tensor:
        return self._pools[name]


class PagedModel:
    """One model over poisoned pools, slots handed out in a shuffled order."""

    def __init__(
        self,
        config: ReferenceConfig,
        page_size: int,
        *,
        capacity: int = 1200,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.config, self.page_size = config, page_size
        self.spec = reference_spec(config, page_size)
        self.pools = PoisonedPools(self.spec, capacity, device)
        self.logits: list[Tensor] = []  # behind every sampled token, in order
        self.captured: dict[int, int] = {}  # position: slot, of the last prefill
        self.runner = TorchRunner(
            ReferenceModel(config, device=device),
            self.pools,
            page_size=page_size,
            observer=lambda _, row: self.logits.append(row.clone()),
        )
        self._free = list(range(capacity))
        random.Random(seed).shuffle(self._free)

    @property
    def _state_pools(self) -> list[str]:
        mamba = self.spec.get(Component.MAMBA)
        return [p.name for p in mamba.pools] if mamba else []

    def slot(self) -> int:
        return self._free.pop()

    def request(self, tokens: list[int], rid: str = "r") -> Request:
        """A request whose page tables cover its tokens."""
        made = Request(rid=rid, tokens=array("I", tokens), prompt_length=len(tokens), max_new_tokens=10_000)
        made.state = self.slot()
        self.cover(made)
        return made

    def cover(self, request: Request) -> None:
        while len(request.full) * self.page_size < len(request.tokens):
            request.full.append(self.slot())
            request.swa.append(self.slot())

    def resume(self, donor: Request, boundary: int, state: int) -> Request:
        """A request for the donor's tokens that reuses its pages up to `boundary`, as a hit would.

        SWA pages older than the window are tombstones; `state` is the checkpoint at the boundary,
        copied to a private slot.
        """
        pages = boundary // self.page_size
        made = Request(
            rid="hit", tokens=donor.tokens[:], prompt_length=len(donor.tokens), max_new_tokens=10_000
        )
        made.state = self.slot()
        for name in self._state_pools:
            self.pools.pool(name)[:, made.state] = self.pools.pool(name)[:, state]
        oldest = max(0, pages - self.spec.window_pages)
        made.full = donor.full[:pages]
        made.swa = array("i", [NO_SLOT] * oldest) + donor.swa[oldest:pages]
        made.computed = boundary
        self.cover(made)
        return made

    def discard(self, request: Request, boundary: int = 0) -> None:
        """Take back the slots of a request, but for the pages it shares below `boundary`."""
        shared = boundary // self.page_size
        self._free += [*request.full[shared:], *request.swa[shared:], request.state]

    def prefill(self, request: Request, chunks: Sequence[int], *, captures: Sequence[int] = ()) -> int:
        """Compute what is missing in chunks of the given sizes, over and over; returns the next token.

        The state at each position of `captures` is copied to a new slot, named in `self.captured`.
        """
        token, turn, self.captured = None, 0, {}
        while request.computed < len(request.tokens):
            size = chunks[turn % len(chunks)]
            end = min(request.computed + size, len(request.tokens))
            due = [position for position in captures if request.computed < position <= end]
            request.captures = [Capture(position, self.slot()) for position in due]
            self.captured |= {c.position: c.slot for c in request.captures}
            token = self.runner.prefill(request, request.computed, end)
            request.computed, turn = end, turn + 1
        assert token is not None
        return token

    def decode(self, request: Request, count: int) -> list[int]:
        """Sample `count` tokens after a prefill that returned the first of them."""
        out = []
        for _ in range(count):
            self.cover(request)
            request.captures = []
            out.append(self.runner.decode(request))
            request.computed = len(request.tokens)
            request.tokens.append(out[-1])
        return out

    def rows(self, request: Request, component: Component, start: int, end: int) -> list[Tensor]:
        """The rows that tokens [start, end) left in each pool of the component, all layers.

        Of a compressed pool those of groups that end there, of a compressor's sums one per page.
        """
        table, size = request.full if component is Component.FULL else request.swa, self.page_size
        found = []
        for pool in self.spec[component].pools:
            if pool.state_of:
                at = [(table[p], 0) for p in range(start // size, -(-end // size))]
            else:
                ends = [t for t in range(start, end) if (t + 1) % pool.ratio == 0]
                at = [(table[t // size], t % size // pool.ratio) for t in ends]
            if at:
                pages, rows = torch.tensor(at).unbind(1)
                found.append(self.pools.pool(pool.name)[:, pages, rows])
        return found

    def state(self, slot: int) -> list[Tensor]:
        """The state in a slot, every pool and layer."""
        return [self.pools.pool(name)[:, slot] for name in self._state_pools]
