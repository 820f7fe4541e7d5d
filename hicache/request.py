"""One request as the cache and the engine share it: tokens, page tables, captures, accounting."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache.types import NO_SLOT, CachedTokens, Slots

if TYPE_CHECKING:
    from hicache.transfer.base import LoadTicket
    from hicache.tree.base import Lease


@dataclass(slots=True)
class Capture:
    """The runner copies the MAMBA state behind token `position - 1` into `slot` when it gets there."""

    position: int  # tokens; a page boundary
    slot: int


@dataclass(slots=True, eq=False)
class Request:
    """A request from enqueue to finish. Owned by the scheduler thread.

    Page tables: `full[i]` and `swa[i]` are the L1 slots of page i (NO_SLOT in `swa` outside of what
    is live), `state` is the private MAMBA working slot. Tokens [0, computed) have their KV in those
    pages; the runner computes from there. Pages [0, committed) are also in the tree.
    """

    rid: str
    tokens: array[int]  # typecode 'I': prompt, then sampled tokens
    prompt_length: int
    max_new_tokens: int
    scope: bytes = b""
    priority: int = 0
    session_id: str | None = None
    stop_tokens: frozenset[int] = frozenset()

    full: Slots = field(default_factory=lambda: array("i"))
    swa: Slots = field(default_factory=lambda: array("i"))
    state: int = NO_SLOT
    track: int = NO_SLOT  # holds the MAMBA state at `track_position`, the last page boundary of decode
    track_position: int = -1
    computed: int = 0  # tokens
    committed: int = 0  # pages
    cached: CachedTokens = field(default_factory=CachedTokens)
    page_keys: array[int] = field(default_factory=lambda: array("Q"))  # see cache.accounts.Ceiling
    captures: list[Capture] = field(default_factory=list)  # of the step about to run
    load: LoadTicket | None = None  # wait_layer() before reading a layer while it is set
    admissions: int = 0
    too_dear: bool = False  # loading what the host has of it would take longer than computing it
    load_failed: bool = False  # a load for it has failed
    host_limit: int | None = None  # pages; what it may load after a failed load, 0: nothing. None: all

    lease: Lease | None = None  # device lease while running
    branch: tuple[int, ...] = ()  # pages; boundaries whose MAMBA state a prefill should leave behind
    enqueued_at: float = 0.0
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def output(self) -> array[int]:
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        produced = len(self.tokens) - self.prompt_length
        if produced >= self.max_new_tokens:
            return True
        return produced > 0 and self.tokens[-1] in self.stop_tokens
