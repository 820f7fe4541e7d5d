"""Layers of the reference decoder: torch, float32, and a result that never depends on the cut.

Float results depend on the shapes of the products that made them, so every position is computed in
a tile of `tile` rows at absolute positions [k * tile, (k + 1) * tile), in prefill and in decode:
rows that are not asked for are padding, computed and thrown away. Keys are laid out in buffers
whose length is a function of k alone, with zeros where nothing may be seen. Row i of a product of
fixed shape depends on row i of its input only, a masked key weighs exactly 0, and recurrent states
advance row by row. So a prefix hit, any chunk size and a history written by decode give the same
bits. What pages hold these rows is the runner's business.

Tensor-parallel ranks keep and attend over their own KV heads and channels only, in products of the whole
shape with zeros for the others', and put their columns together before each output projection. No sum runs
over ranks, so the bits are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hicache.engine.architecture import WHOLE, ReferenceConfig, Shard

# Puts the columns of all ranks together: (rows, width / ranks) of each to (rows, width), in rank order.
Gather = Callable[[Tensor], Tensor]

_EPS = 1e-6
_ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Span:
    """Token positions [start, end) to compute, and the tiles that cover them."""

    start: int
    end: int
    tile: int

    @property
    def tiles(self) -> range:
        return range(self.start // self.tile, -(-self.end // self.tile))

    def rows(self, tile: int) -> tuple[int, int]:
        """Rows [lo, hi) of a tile that are asked for; the others are padding."""
        first = tile * self.tile
        return max(self.start - first, 0), min(self.end - first, self.tile)


@dataclass(frozen=True, slots=True)
class TokenMemory:
    """Where one attention layer's rows live. The layer reads [first, span.start), writes the span.

    `rows[i]` is the row of position `first + i` in every pool of `pools`; each pool is one layer
    seen as (rows, *row_shape), the component's own first.
    """

    first: int
    rows: Tensor  # int64, (span.end - first,)
    pools: tuple[Tensor, ...]


@dataclass(slots=True)
class StateMemory:
    """One recurrent layer's states: `state` (slots, channels, state_dim), `conv` (slots, inputs, channels).

    The layer starts from `slot` (from zero at position 0) and leaves the state behind the span there;
    `captures` are (position, slot): the state behind token position - 1 is copied to slot.
    """

    state: Tensor
    conv: Tensor
    slot: int
    captures: Sequence[tuple[int, int]]


class Weights:
    """Draws every weight from one generator on the CPU, so that the device does not change them."""

    def __init__(self, config: ReferenceConfig, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(config.seed)
        self._device = device

    def matrix(self, rows: int, columns: int, *, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=self._generator)
        drawn *= gain / columns**0.5
        return drawn.to(self._device)

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        drawn = torch.rand(*shape, generator=self._generator)
        return (low + (high - low) * drawn).to(self._device)


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank's part of the model, and how it gets the others'."""

    shard: Shard = WHOLE
    gather: Gather = lambda own: own

    def whole(self, tiles: list[Tensor]) -> list[Tensor]:
        """Complete (tile, width) tensors of which this rank's columns are right."""
        if self.shard.size == 1:
            return tiles
        own = torch.cat(tiles)[:, self.shard.of(tiles[0].shape[1])].contiguous()
        return list(torch.split(self.gather(own), len(tiles[0])))


class Mlp:
    """SwiGLU behind a norm, added to the residual."""

    def __init__(self, config: ReferenceConfig, weights: Weights, device: torch.device) -> None:
        self._norm = torch.ones(config.hidden, device=device)
        self._in = weights.matrix(2 * config.mlp, config.hidden, gain=1.5)
        self._out = weights.matrix(config.hidden, config.mlp, gain=1.5)
        self._mlp = config.mlp

    def forward(self, hidden: Tensor) -> Tensor:
        both = F.linear(normed(hidden, self._norm), self._in)
        gated = F.silu(both[:, : self._mlp]) * both[:, self._mlp :]
        return F.linear(gated, self._out).add_(hidden)


class AttentionLayer:
    """Grouped-query attention with rotary positions; sliding if `window` > 0, indexed if not.

    A FULL layer also writes one indexer key per token; its product with the position's indexer
    queries is added to the attention scores of every head, so a wrong indexer row shows.
    """

    def __init__(
        self, config: ReferenceConfig, weights: Weights, rotations: Tensor, *, window: int, ranks: Ranks
    ) -> None:
        device = rotations.device
        self._config = config
        self._ranks = ranks
        self._heads = ranks.shard.of(config.kv_heads)
        self._window = window
        self._rotations = rotations
        self._norm = torch.ones(config.hidden, device=device)
        self._turned = config.heads + config.kv_heads
        self._index_dim = 0 if window else config.index_dim
        columns = (self._turned + config.kv_heads) * config.head_dim + 2 * self._index_dim
        self._in = weights.matrix(columns, config.hidden, gain=1.5)
        self._out = weights.matrix(config.hidden, config.heads * config.head_dim, gain=1.5)
        self._masks: dict[int, Tensor] = {}
        self.mlp = Mlp(config, weights, device)

    def first_key(self, position: int) -> int:
        """The earliest position that `position` sees."""
        return max(0, position - self._window) if self._window else 0

    def forward(self, hidden: list[Tensor], span: Span, memory: TokenMemory) -> None:
        """Advance `hidden`, one (tile, hidden) tensor per tile of the span, in place."""
        tile, tiles = span.tile, span.tiles
        base = self._buffer_start(tiles.start, tile)
        buffers, stored = self._buffers(span, memory)
        known = span.start - memory.first
        mixed = []
        for i, k in enumerate(tiles):
            lo, hi = span.rows(k)
            at = k * tile - base
            queries, fresh, index_queries = self._project(hidden[i], k, tile)
            for made, buffer in zip(fresh, buffers, strict=True):
                buffer[at + lo : at + hi] = made[lo:hi]
            keys = slice(self._buffer_start(k, tile) - base, at + tile)
            mixed.append(self._attend(queries, [buffer[keys] for buffer in buffers], index_queries))
        for pool, kept in zip(memory.pools, stored, strict=True):
            pool.index_copy_(0, memory.rows[known:], kept[span.start - base : span.end - base])
        for i, columns in enumerate(self._ranks.whole(mixed)):
            hidden[i] = self.mlp.forward(F.linear(columns, self._out).add_(hidden[i]))

    def _buffers(self, span: Span, memory: TokenMemory) -> tuple[list[Tensor], list[Tensor]]:
        """Lay out each pool's rows for the tiles of the span: what is known of them, and zeros.

        Returns them whole, and this rank's part of them.
        """
        c, base = self._config, self._buffer_start(span.tiles.start, span.tile)
        length = span.tiles.stop * span.tile - base
        shapes = [(2, c.kv_heads, c.head_dim), *(tuple(pool.shape[1:]) for pool in memory.pools[1:])]
        buffers = [pool.new_zeros((length, *shape)) for pool, shape in zip(memory.pools, shapes, strict=True)]
        stored = [buffers[0][:, :, self._heads], *buffers[1:]]
        known, at = span.start - memory.first, memory.first - base
        if known:
            for pool, rows in zip(memory.pools, stored, strict=True):
                rows[at : at + known] = torch.index_select(pool, 0, memory.rows[:known])
        return buffers, stored

    def _buffer_start(self, k: int, tile: int) -> int:
        """Where the keys of tile k begin: a multiple of the tile at or before what its first row sees."""
        return self.first_key(k * tile) // tile * tile

    def _project(self, hidden: Tensor, k: int, tile: int) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return queries (kv_heads, group * tile, head_dim), rows to store per pool, indexer queries."""
        c = self._config
        y = F.linear(normed(hidden, self._norm), self._in)
        width = self._turned * c.head_dim
        pairs = torch.view_as_complex(y[:, :width].reshape(tile, self._turned, c.head_dim // 2, 2))
        turned = torch.view_as_real(pairs * self._rotations[k * tile : (k + 1) * tile])
        turned = turned.reshape(tile, self._turned, c.head_dim)
        values = y[:, width : width + c.kv_heads * c.head_dim].reshape(tile, c.kv_heads, c.head_dim)
        kv = torch.stack((turned[:, c.heads :], values), 1)
        group = c.heads // c.kv_heads
        queries = turned[:, : c.heads].reshape(tile, c.kv_heads, group, c.head_dim)
        queries = queries.permute(1, 2, 0, 3).reshape(c.kv_heads, group * tile, c.head_dim)
        if not self._index_dim:
            return queries, [kv], None
        index = y[:, width + c.kv_heads * c.head_dim :]
        return queries, [kv, index[:, : self._index_dim]], index[:, self._index_dim :].contiguous()

    def _attend(self, queries: Tensor, keys: list[Tensor], index_queries: Tensor | None) -> Tensor:
        """Mix the values of `keys` (length, ...) per query; returns (tile, heads * head_dim)."""
        c = self._config
        kv, length, tile = keys[0], len(keys[0]), c.tile
        scores = torch.bmm(queries, kv[:, 0].permute(1, 2, 0)).mul_(2.0 * c.head_dim**-0.5)
        heads = scores.view(c.kv_heads, c.heads // c.kv_heads, tile, length)
        mask = self._mask(length)
        if index_queries is not None:
            heads += torch.mm(index_queries, keys[1].t())
        heads[..., length - mask.shape[1] :] += mask
        mixed = torch.bmm(torch.softmax(scores, -1), kv[:, 1].transpose(0, 1))
        mixed = mixed.view(c.kv_heads, c.heads // c.kv_heads, tile, c.head_dim)
        return mixed.permute(2, 0, 1, 3).reshape(tile, c.heads * c.head_dim)

    def _mask(self, length: int) -> Tensor:
        """What a tile may see of the last keys: 0 or -inf; FULL hides only inside its own tile."""
        tile = self._config.tile
        columns = length if self._window else tile
        if columns not in self._masks:
            distance = torch.arange(tile)[:, None] - (torch.arange(columns)[None, :] - (columns - tile))
            hidden = distance < 0
            if self._window:
                hidden |= distance > self._window
            mask = torch.zeros(tile, columns).masked_fill_(hidden, float("-inf"))
            self._masks[columns] = mask.to(self._in.device)
        return self._masks[columns]


class RecurrentLayer:
    """A gated linear recurrence with input-dependent decay behind a short convolution."""

    def __init__(
        self, config: ReferenceConfig, weights: Weights, device: torch.device, *, ranks: Ranks
    ) -> None:
        d, n = config.hidden, config.state_dim
        self._config = config
        self._ranks = ranks
        self._norm = torch.ones(d, device=device)
        self._in = weights.matrix(3 * d + 2 * n, d, gain=1.5)
        self._taps = weights.uniform(d, config.conv_width, low=-1.0, high=1.0)
        self._decay = weights.uniform(d, n, low=0.02, high=1.0)
        self._out = weights.matrix(d, d, gain=1.5)
        self.mlp = Mlp(config, weights, device)

    def forward(self, hidden: list[Tensor], span: Span, memory: StateMemory) -> None:
        """Advance `hidden`, one (tile, hidden) tensor per tile of the span, in place."""
        c, carry, own = self._config, len(self._taps[0]) - 1, self._ranks.shard.of(self._config.hidden)
        state = memory.state.new_zeros(c.hidden, c.state_dim)
        conv = memory.conv.new_zeros(carry, c.hidden)
        if span.start:
            state[own], conv[:, own] = memory.state[memory.slot], memory.conv[memory.slot]
        captures = dict(memory.captures)
        mixed = []
        for i, k in enumerate(span.tiles):
            lo, hi = span.rows(k)
            inputs, states, columns = self._tile(hidden[i], (lo, hi), state, conv)
            mixed.append(columns)
            for position in captures.keys() & set(range(k * span.tile + lo + 1, k * span.tile + hi + 1)):
                row = position - k * span.tile
                memory.state[captures[position]] = states[row - 1][own]
                memory.conv[captures[position]] = inputs[row : row + carry, own]
            state, conv = states[hi - 1], inputs[hi : hi + carry]
        memory.state[memory.slot] = state[own]
        memory.conv[memory.slot] = conv[:, own]
        for i, columns in enumerate(self._ranks.whole(mixed)):
            hidden[i] = self.mlp.forward(F.linear(columns, self._out).add_(hidden[i]))

    def _tile(
        self, hidden: Tensor, rows: tuple[int, int], state: Tensor, conv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (conv inputs: carried rows then the tile's, state behind each row, what goes out)."""
        c = self._config
        lo, hi = rows
        d, n, carry = c.hidden, c.state_dim, c.conv_width - 1
        y = F.linear(normed(hidden, self._norm), self._in)
        inputs = y.new_zeros(carry + c.tile, d)
        inputs[lo : lo + carry] = conv
        inputs[carry + lo : carry + hi] = y[lo:hi, :d]
        value = F.silu((inputs.unfold(0, c.conv_width, 1) * self._taps).sum(-1))
        step = F.softplus(y[:, d : 2 * d])
        decay = torch.exp(step[:, :, None] * -self._decay).unbind(0)
        write = ((step * value)[:, :, None] * y[:, None, 3 * d : 3 * d + n]).unbind(0)
        states = y.new_zeros(c.tile, d, n)
        behind = states.unbind(0)
        for row in range(lo, hi):
            state = torch.addcmul(write[row], decay[row], state, out=behind[row])
        mixed = (states * y[:, None, 3 * d + n :]).sum(-1).add_(value)
        return inputs, states, mixed * F.silu(y[:, 2 * d : 3 * d])


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return RMS-normed rows."""
    return F.rms_norm(hidden, weight.shape, weight, _EPS)


def rotary(config: ReferenceConfig) -> Tensor:
    """Unit complex numbers (positions, 1, head_dim / 2), positions rounded up to whole tiles."""
    positions = -(-config.context_length // config.tile) * config.tile
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * _ROPE_BASE**-exponents
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]
