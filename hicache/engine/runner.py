"""Runs one request's positions through the reference model, on the pages its page tables name.

Allocates nothing and decides nothing: the scheduler hands over page tables, captures and load
gates; the runner turns them into rows and states, and waits for each layer's gate before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hicache.engine.architecture import (
    FULL_DRAFT,
    FULL_INDEX,
    FULL_KV,
    MAMBA_CONV,
    MAMBA_STATE,
    SWA_DRAFT,
    SWA_KV,
    ReferenceConfig,
    packed_index_name,
    packed_name,
    packed_state_name,
)
from hicache.engine.compressed import CompressedLayer, PackedMemory
from hicache.engine.layers import AttentionLayer, Span, StateMemory, TokenMemory
from hicache.engine.model import ReferenceModel
from hicache.errors import InvariantViolation, LoadFailed
from hicache.request import Request
from hicache.transfer.base import LoadTicket
from hicache.types import NO_SLOT, Component, Slots

# Called with the logits (vocab,) each sampled token came from, before it is returned; with a draft layer,
# its guess at the token behind that one follows in a second row.
LogitsObserver = Callable[[Request, Tensor], None]


class PoolSource(Protocol):
    """Device pools by name, each of shape (layers, slots, rows_per_page, *row_shape)."""

    def pool(self, name: str) -> Tensor: ...


class TorchRunner:
    """Implements the scheduler's Runner over torch pools. One compute thread calls it.

    Fixes torch to one CPU thread: how a product is split over threads decides its last bits.
    """

    def __init__(
        self,
        model: ReferenceModel,
        pools: PoolSource,
        *,
        page_size: int,
        observer: LogitsObserver | None = None,
        any_rank: Callable[[bool], bool] | None = None,
    ) -> None:
        """`any_rank` tells whether a flag is set on any rank of a tensor-parallel model; None: one rank."""
        torch.set_num_threads(1)
        self._model = model
        self._page_size = page_size
        self._observer = observer
        self._any_rank = any_rank
        self._layers = list(zip(model.config.layers, model.layers, strict=True))
        self._memory = _layer_memory(model.config, pools)

    def prefill(self, request: Request, start: int, end: int) -> int | None:
        """Compute positions [start, end); return the next token if that is all the request has."""
        config = self._model.config
        if not 0 <= start < end <= min(len(request.tokens), config.context_length):
            raise InvariantViolation(
                f"{request.rid}: positions [{start}, {end}) of {len(request.tokens)} tokens, "
                f"context {config.context_length}"
            )
        span = Span(start, end, config.tile)
        with torch.inference_mode():
            hidden, guess = self._forward(request, span)
            if end < len(request.tokens):
                return None
            row = (end - 1) % config.tile
            logits = self._model.logits(hidden[-1], row)
            if self._observer is not None:
                seen = logits if not guess else torch.stack((logits, self._model.logits(guess[-1], row)))
                self._observer(request, seen)
            return int(torch.argmax(logits))

    def decode(self, request: Request) -> int:
        """Compute the last position and return the next token."""
        n = len(request.tokens)
        token = self.prefill(request, n - 1, n)
        assert token is not None
        return token

    def _forward(self, request: Request, span: Span) -> tuple[list[Tensor], list[Tensor]]:
        """Run every layer over the span, each behind its gate; rows are named once per component.

        Returns the hidden rows of all tiles, and those behind the draft layer if there is one.
        """
        hidden = self._model.embed(request.tokens, span)
        captures = _captures(request, span)
        rows: dict[Component, tuple[int, Tensor]] = {}

        def tokens(component: Component, layer: AttentionLayer, pools: tuple[Tensor, ...]) -> TokenMemory:
            if component not in rows:
                first = layer.first_key(span.start)
                rows[component] = first, self._rows(request, component, first, span.end)
            return TokenMemory(*rows[component], pools)

        failed: LoadFailed | None = None
        for number, (component, layer) in enumerate(self._layers):
            if request.load is not None and failed is None:
                failed = self._wait_layer(request.load, number)
            pools = self._memory[number]
            if isinstance(layer, CompressedLayer):
                window = tokens(component, layer, pools.own)
                layer.forward_packed(hidden, span, self._packed(request, span, layer.ratio, window, pools))
            elif isinstance(layer, AttentionLayer):
                layer.forward(hidden, span, tokens(component, layer, pools.own))
            else:
                state, conv = pools.own
                layer.forward(hidden, span, StateMemory(state, conv, self._state_of(request), captures))
        guess, draft, of = list(hidden), self._model.draft, self._model.config.draft_component
        if draft is not None:
            draft.forward(guess, span, tokens(of, draft, self._memory[-1].draft))
        if request.load is not None and self._any_rank is not None and self._any_rank(failed is not None):
            raise failed or LoadFailed("the load failed on another rank of this replica")
        return hidden, [] if draft is None else guess

    @staticmethod
    def _state_of(request: Request) -> int:
        if request.state == NO_SLOT:
            raise InvariantViolation(f"{request.rid}: no private MAMBA state")
        return request.state

    def _packed(
        self, request: Request, span: Span, ratio: int, window: TokenMemory, pools: LayerPools
    ) -> PackedMemory:
        """Where a compressed layer finds its rows, and the sums of its unfinished group."""
        size, per_page = self._page_size, max(1, self._page_size // ratio)
        ends = range(ratio - 1, span.end, ratio)  # positions that end a group
        rows = [request.full[end // size] * per_page + end % size // ratio for end in ends]
        pages = range(span.start // size, (span.end - 1) // size + 1)
        saves = [(min((page + 1) * size, span.end), request.swa[page]) for page in pages]
        # Where groups do not overlap, nothing is unfinished at their ends.
        begins = span.start == 0 or (span.start % ratio == 0 and pools.state.shape[1] == 1)
        slot = None if begins else request.swa[(span.start - 1) // size]
        if min([slot for _, slot in saves] + rows + [0 if slot is None else slot]) < 0:
            raise InvariantViolation(f"{request.rid}: a page of compressed rows or their sums is not there")
        at = torch.tensor(rows, dtype=torch.int64, device=self._model.device)
        return PackedMemory(window, at, pools.packed, pools.state, slot, saves)

    def _wait_layer(self, load: LoadTicket, layer: int) -> LoadFailed | None:
        """Wait for a layer's pages. One of several ranks goes on with whatever they hold if the load failed.

        The others are in the same step and wait for its columns; all learn of it behind the last layer.
        """
        try:
            load.wait_layer(layer)
        except LoadFailed as error:
            if self._any_rank is None:
                raise
            return error
        return None

    def _rows(self, request: Request, component: Component, first: int, end: int) -> Tensor:
        """Rows of positions [first, end) in the component's flattened pools."""
        table: Slots = request.full if component is Component.FULL else request.swa
        size = self._page_size
        start_page, end_page = first // size, -(-end // size)
        slots = table[start_page:end_page]
        if len(slots) < end_page - start_page or min(slots) < 0:
            raise InvariantViolation(
                f"{request.rid}: {component.name} pages [{start_page}, {end_page}) are not all there: {slots}"
            )
        device = self._model.device
        rows = torch.tensor(slots.tolist(), dtype=torch.int64, device=device)[:, None] * size
        rows = (rows + torch.arange(size, device=device)).reshape(-1)
        return rows[first - start_page * size : end - start_page * size]


def _captures(request: Request, span: Span) -> list[tuple[int, int]]:
    captures = [(c.position, c.slot) for c in request.captures]
    for position, slot in captures:
        if not span.start < position <= span.end or slot < 0:
            raise InvariantViolation(f"{request.rid}: capture at {position} into {slot} outside of {span}")
    return captures


@dataclass(frozen=True, slots=True)
class LayerPools:
    """One model layer's part of the pools, each seen as (rows, *row_shape)."""

    own: tuple[Tensor, ...]  # of its component: keys and values, indexer keys; or state and convolution
    packed: tuple[Tensor, ...] = ()  # compressed keys and values, their indexer keys
    state: Tensor = field(default_factory=lambda: torch.empty(0))  # sums of unfinished groups
    draft: tuple[Tensor, ...] = ()


def _layer_memory(config: ReferenceConfig, pools: PoolSource) -> list[LayerPools]:
    names = {
        Component.FULL: (FULL_KV, FULL_INDEX) if config.index_dim else (FULL_KV,),
        Component.SWA: (SWA_KV,),
        Component.MAMBA: (MAMBA_STATE, MAMBA_CONV),
    }

    def layer(name: str, at: int) -> Tensor:
        return pools.pool(name)[at].flatten(0, 1)

    draft_name = FULL_DRAFT if config.draft_component is Component.FULL else SWA_DRAFT
    memory = []
    for number, component in enumerate(config.layers):
        at = config.layers[:number].count(component)
        own = tuple(layer(name, at) for name in names[component])
        draft = (layer(draft_name, 0),) if config.draft else ()
        ratio = config.compression[number] if config.compression else 0
        if not ratio:
            memory.append(LayerPools(own, draft=draft))
            continue
        at = config.compressed_layers(ratio).index(number)
        packed = [packed_name(ratio)] + [packed_index_name(ratio)] * (ratio == config.indexed_ratio)
        memory.append(
            LayerPools(
                own, tuple(layer(name, at) for name in packed), layer(packed_state_name(ratio), at), draft
            )
        )
    return memory
