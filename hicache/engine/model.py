"""The reference decoder, put together from its layers: weights, embedding and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from hicache.engine.architecture import ReferenceConfig
from hicache.engine.compressed import CompressedLayer
from hicache.engine.layers import AttentionLayer, Ranks, RecurrentLayer, Span, Weights, normed, rotary
from hicache.types import Component


class ReferenceModel:
    """The decoder's weights and arithmetic. Stateless between calls; one thread at a time."""

    def __init__(
        self, config: ReferenceConfig, *, device: str | torch.device = "cpu", ranks: Ranks | None = None
    ) -> None:
        """`ranks` is this rank's place in a tensor-parallel group; alone without."""
        ranks = ranks or Ranks()
        self.config = config
        self.device = torch.device(device)
        weights = Weights(config, self.device)
        rotations = rotary(config).to(self.device)
        self._embedding = weights.matrix(config.vocab, config.hidden, gain=config.hidden**0.5)
        self.layers: list[AttentionLayer | RecurrentLayer] = []
        for component, ratio in zip_longest(config.layers, config.compression, fillvalue=0):
            if component is Component.MAMBA:
                self.layers.append(RecurrentLayer(config, weights, self.device, ranks=ranks))
            elif ratio:
                self.layers.append(CompressedLayer(config, weights, rotations, ratio=ratio, ranks=ranks))
            else:
                window = config.window if component is Component.SWA else 0
                self.layers.append(AttentionLayer(config, weights, rotations, window=window, ranks=ranks))
        self._norm = torch.ones(config.hidden, device=self.device)
        self._head = weights.matrix(config.vocab, config.hidden, gain=2.0)
        self.draft: AttentionLayer | None = None
        if config.draft:
            window = config.window if config.draft_component is Component.SWA else 0
            plain = replace(config, index_dim=0, indexed_ratio=0)
            self.draft = AttentionLayer(plain, weights, rotations, window=window, ranks=ranks)

    def embed(self, tokens: Sequence[int], span: Span) -> list[Tensor]:
        """Embed tokens [0, len) of a sequence for the tiles of the span; padding rows hold token 0."""
        padded = [0] * (len(span.tiles) * span.tile)
        at = span.start - span.tiles.start * span.tile
        padded[at : at + span.end - span.start] = tokens[span.start : span.end]
        ids = torch.tensor(padded, dtype=torch.int64, device=self.device)
        return list(torch.split(F.embedding(ids, self._embedding), span.tile))

    def logits(self, hidden: Tensor, row: int) -> Tensor:
        """Return the logits (vocab,) behind one row of a tile."""
        return F.linear(normed(hidden, self._norm), self._head)[row]
