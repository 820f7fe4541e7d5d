"""Compressed attention of the reference model: a window of tokens, and one row per group of all before.

A group's row is the weighted mean of its tokens' keys and values; sums are made token by token, in
order, so that it does not matter where the work was cut. The sums of the group that is unfinished
are what a page leaves behind besides its rows: whoever resumes there goes on with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hicache.engine.architecture import ReferenceConfig
from hicache.engine.layers import AttentionLayer, Ranks, Span, TokenMemory, Weights, normed

# Sums of the group before, and of the one that the next token belongs to, unless it begins another.
Sums = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class PackedMemory:
    """Where one compressed layer's rows and sums live, besides its window's.

    `rows[g]` is the row of group g in every pool of `pools` (keys and values first, then indexer keys),
    for the groups that end in [0, span.end). `state` is (slots, groups kept, sums); the layer starts
    from the sums in `slot`, unless that is None, and leaves at `saves` (position, slot) those behind
    token position - 1.
    """

    window: TokenMemory
    rows: Tensor  # int64
    pools: tuple[Tensor, ...]
    state: Tensor
    slot: int | None
    saves: Sequence[tuple[int, int]]


class CompressedLayer(AttentionLayer):
    """Sliding attention that also sees one row per `ratio` tokens.

    With the indexed ratio a row's group reaches back into the one before, and the product of indexer
    keys and queries is added to the scores of rows.
    """

    def __init__(
        self, config: ReferenceConfig, weights: Weights, rotations: Tensor, *, ratio: int, ranks: Ranks
    ) -> None:
        super().__init__(config, weights, rotations, window=config.window, ranks=ranks)
        self.ratio = ratio
        self._overlap = ratio == config.indexed_ratio
        self._key_dim = config.index_dim if self._overlap else 0
        self._width = config.packed_width(ratio)
        self._compress = weights.matrix(self._width + self._key_dim, config.hidden, gain=1.5)
        columns = torch.arange(self._width, device=rotations.device)
        kv = columns[: 2 * config.kv_heads * config.head_dim].view(2, config.kv_heads, config.head_dim)
        # What of the sums is this rank's: its heads, and all that has no heads.
        self._own = torch.cat((kv[:, self._heads].flatten(), columns[kv.numel() :]))

    def forward_packed(self, hidden: list[Tensor], span: Span, memory: PackedMemory) -> None:
        """Advance `hidden`, one (tile, hidden) tensor per tile of the span, in place."""
        tile, tiles, window = span.tile, span.tiles, memory.window
        base = self._buffer_start(tiles.start, tile)
        (buffer,), (kept,) = self._buffers(span, window)
        packed, stored = self._packed(tiles.stop - 1, span.start // self.ratio, memory)
        sums = self._resume(memory)
        saves = dict(memory.saves)
        mixed = []
        for i, k in enumerate(tiles):
            lo, hi = span.rows(k)
            at = k * tile - base
            queries, (fresh,), _ = self._project(hidden[i], k, tile)
            buffer[at + lo : at + hi] = fresh[lo:hi]
            added = F.linear(normed(hidden[i], self._norm), self._compress)
            sums = self._add(added, k * tile, (lo, hi), sums, packed, memory.state, saves)
            keys = buffer[self._buffer_start(k, tile) - base : at + tile]
            groups = self._groups(k)
            mixed.append(
                self._mix(queries, keys, [rows[:groups] for rows in packed], added[:, self._width :], k)
            )
        window.pools[0].index_copy_(
            0, window.rows[span.start - window.first :], kept[span.start - base : span.end - base]
        )
        known, whole = span.start // self.ratio, span.end // self.ratio
        for pool, rows in zip(memory.pools, stored, strict=True):
            pool.index_copy_(0, memory.rows[known:whole], rows[known:whole])
        for i, columns in enumerate(self._ranks.whole(mixed)):
            hidden[i] = self.mlp.forward(F.linear(columns, self._out).add_(hidden[i]))

    def _packed(self, last: int, known: int, memory: PackedMemory) -> tuple[list[Tensor], list[Tensor]]:
        """Lay out the rows that tiles up to `last` may see, `known` or zero: whole, and this rank's."""
        c = self._config
        shapes = [(2, c.kv_heads, c.head_dim), *(tuple(pool.shape[1:]) for pool in memory.pools[1:])]
        packed = [
            pool.new_zeros((self._groups(last), *shape))
            for pool, shape in zip(memory.pools, shapes, strict=True)
        ]
        stored = [packed[0][:, :, self._heads], *packed[1:]]
        if known:
            for pool, rows in zip(memory.pools, stored, strict=True):
                rows[:known] = torch.index_select(pool, 0, memory.rows[:known])
        return packed, stored

    def _groups(self, k: int) -> int:
        """How many groups the last row of tile k may see the end of."""
        return -(-(k + 1) * self._config.tile // self.ratio)

    def _resume(self, memory: PackedMemory) -> Sums:
        sums = memory.state.new_zeros(memory.state.shape[1], self._width)
        if memory.slot is not None:
            sums[:, self._own] = memory.state[memory.slot]
        return sums[0], sums[-1]

    def _add(
        self,
        added: Tensor,
        first: int,
        rows: tuple[int, int],
        sums: Sums,
        packed: list[Tensor],
        state: Tensor,
        saves: dict[int, int],
    ) -> Sums:
        """Add the tokens of a tile to their groups, in order; finished groups become rows."""
        weight = torch.sigmoid(added[:, self._width - 1 : self._width])
        tokens = torch.cat((added[:, : self._width - 1] * weight, weight), 1)
        before, group = sums
        for row in range(*rows):
            position = first + row
            if position % self.ratio == 0:
                before, group = group, torch.zeros_like(group)
            group = group + tokens[row]
            if (position + 1) % self.ratio == 0:
                self._finish(position // self.ratio, before + group if self._overlap else group, packed)
            if position + 1 in saves:
                kept = torch.stack((before, group)[not self._overlap :])
                state[saves[position + 1]] = kept[:, self._own]
        return before, group

    @staticmethod
    def _finish(group: int, total: Tensor, packed: list[Tensor]) -> None:
        mean = total[:-1] / total[-1]
        at = 0
        for rows in packed:
            rows[group] = mean[at : at + rows[0].numel()].view(rows.shape[1:])
            at += rows[0].numel()

    def _mix(
        self, queries: Tensor, keys: Tensor, packed: list[Tensor], index_queries: Tensor, k: int
    ) -> Tensor:
        """Mix the values of the window and of the rows per query; returns (tile, heads * head_dim)."""
        c, tile = self._config, self._config.tile
        shape = (c.kv_heads, c.heads // c.kv_heads, tile)
        scale = 2.0 * c.head_dim**-0.5
        near = torch.bmm(queries, keys[:, 0].permute(1, 2, 0)).mul_(scale)
        near.view(*shape, len(keys)).add_(self._mask(len(keys)))
        rows = packed[0]
        far = torch.bmm(queries, rows[:, 0].permute(1, 2, 0)).mul_(scale)
        heads = far.view(*shape, len(rows))
        if self._overlap:
            heads += torch.mm(index_queries.contiguous(), packed[1].t())
        heads += self._row_mask(k, len(rows))
        weights = torch.softmax(torch.cat((near, far), -1), -1)
        mixed = torch.bmm(weights[..., : len(keys)], keys[:, 1].transpose(0, 1))
        mixed += torch.bmm(weights[..., len(keys) :], rows[:, 1].transpose(0, 1))
        mixed = mixed.view(*shape, c.head_dim)
        return mixed.permute(2, 0, 1, 3).reshape(tile, c.heads * c.head_dim)

    def _row_mask(self, k: int, groups: int) -> Tensor:
        """A position sees the groups that have ended with it or before: 0, else -inf."""
        tile, device = self._config.tile, self._out.device
        positions = torch.arange(k * tile, (k + 1) * tile, device=device)[:, None]
        ends = torch.arange(1, groups + 1, device=device)[None] * self.ratio - 1
        mask = torch.zeros(tile, groups, device=device)
        return mask.masked_fill_(ends > positions, float("-inf"))
