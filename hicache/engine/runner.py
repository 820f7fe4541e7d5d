"""Runs one request's positions through the reference model, on the pages its page tables name.

Allocates nothing and decides nothing: the scheduler hands over page tables, captures and load
gates; the runner turns them into rows and states, and waits for each layer's gate before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hicache.engine.architecture import FULL_INDEX, FULL_KV, MAMBA_CONV, MAMBA_STATE, SWA_KV
from hicache.engine.model import AttentionLayer, ReferenceModel, Span, StateMemory, TokenMemory
from hicache.errors import InvariantViolation, LoadFailed
from hicache.request import Request
from hicache.transfer.base import LoadTicket
from hicache.types import NO_SLOT, Component, Slots

# Called with the logits (vocab,) each sampled token came from, before it is returned.
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
        self._memory = _layer_memory(model.config.layers, pools)

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
            hidden = self._forward(request, span)
            if end < len(request.tokens):
                return None
            logits = self._model.logits(hidden[-1], (end - 1) % config.tile)
            if self._observer is not None:
                self._observer(request, logits)
            return int(torch.argmax(logits))

    def decode(self, request: Request) -> int:
        """Compute the last position and return the next token."""
        n = len(request.tokens)
        token = self.prefill(request, n - 1, n)
        assert token is not None
        return token

    def _forward(self, request: Request, span: Span) -> list[Tensor]:
        """Run every layer over the span, each behind its gate; rows are named once per component."""
        hidden = self._model.embed(request.tokens, span)
        captures = [(c.position, c.slot) for c in request.captures]
        for position, slot in captures:
            if not span.start < position <= span.end or slot < 0:
                raise InvariantViolation(
                    f"{request.rid}: capture at {position} into {slot} outside of {span}"
                )
        rows: dict[Component, tuple[int, Tensor]] = {}
        failed: LoadFailed | None = None
        for number, (component, layer) in enumerate(self._layers):
            if request.load is not None and failed is None:
                failed = self._wait_layer(request.load, number)
            pools = self._memory[number]
            if isinstance(layer, AttentionLayer):
                if component not in rows:
                    first = layer.first_key(span.start)
                    rows[component] = first, self._rows(request, component, first, span.end)
                first, at = rows[component]
                layer.forward(hidden, span, TokenMemory(first, at, pools))
            else:
                if request.state == NO_SLOT:
                    raise InvariantViolation(f"{request.rid}: no private MAMBA state")
                layer.forward(hidden, span, StateMemory(pools[0], pools[1], request.state, captures))
        if request.load is not None and self._any_rank is not None and self._any_rank(failed is not None):
            raise failed or LoadFailed("the load failed on another rank of this replica")
        return hidden

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


def _layer_memory(layers: tuple[Component, ...], pools: PoolSource) -> list[tuple[Tensor, ...]]:
    """Per model layer, its component's pools seen as (rows, *row_shape), in the order the layer wants."""
    names = {
        Component.FULL: (FULL_KV, FULL_INDEX),
        Component.SWA: (SWA_KV,),
        Component.MAMBA: (MAMBA_STATE, MAMBA_CONV),
    }
    memory = []
    for number, component in enumerate(layers):
        at = layers[:number].count(component)
        memory.append(tuple(pools.pool(name)[at].flatten(0, 1) for name in names[component]))
    return memory
