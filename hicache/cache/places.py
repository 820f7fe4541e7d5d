"""Where windows and states are kept along a path, and when a decoding request commits.

One rule for both components, since a boundary needs both. Decides places only; `tables` puts them
into effect.
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache.config.cache import CacheConfig, StateCheckpoints
from hicache.request import Request
from hicache.spec import ModelSpec


class Places:
    """The rule of one cache. Positions in pages.

    Without islands every page keeps its SWA, and a prefill leaves states every `mamba_track_interval`
    tokens. With islands both are kept at chunk ends, branching points, the last boundary that the prompt
    can be reused at, and every `swa_checkpoint_interval` tokens if that is set; in decode, behind every
    quarter of a chunk (or that interval) of progress; and at the end.
    """

    def __init__(self, spec: ModelSpec, config: CacheConfig) -> None:
        self.islands = spec.islands
        page, self._align = spec.page_size, spec.align_pages
        self._grid = page * spec.align_pages  # tokens between boundaries
        if not self.islands:
            every = config.mamba_prefill_checkpoints is StateCheckpoints.INTERVAL
            self._interval = config.mamba_track_interval // page if every else 0
            self.decode_interval = config.mamba_track_interval // page
        else:
            self._interval = config.swa_checkpoint_interval // page
            self.decode_interval = self._interval or max(1, config.chunked_prefill_size // (4 * page))

    def of_prefill(self, request: Request, start: int, end: int) -> list[int]:
        """Return the boundaries in (start, end) to keep besides `end`, dearest first."""
        wanted: list[int] = [*request.branch, (request.prompt_length - 1) // self._grid * self._align]
        if self._interval:
            wanted += range((start // self._interval + 1) * self._interval, end, self._interval)
        return [place for place in dict.fromkeys(wanted) if start < place < end]

    def of_commit(self, request: Request, start: int, end: int, states: Iterable[int]) -> list[int] | None:
        """Return the places whose windows the tree keeps of pages [start, end); None keeps every page."""
        if not self.islands:
            return None
        return [*self.of_prefill(request, start, end), *states, end]
