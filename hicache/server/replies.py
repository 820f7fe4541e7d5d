"""Replies in SGLang's shape, built up from the engine's progress on one request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TypeAlias

from hicache.request import Request
from hicache.server.engine_thread import Finish, Progress
from hicache.server.tokenizer import decode
from hicache.types import CachedTokens

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | list[int] | str | int | float | bool | None"


@dataclass(slots=True)
class Reply:
    """One request's reply so far. Lives on the event loop; the engine's progress comes through `sink`."""

    request: Request
    weight_version: str
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    message: str = ""
    cached: CachedTokens = field(default_factory=CachedTokens)
    started: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    ended: float | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _news: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)

    def sink(self, progress: Progress) -> None:
        """Take progress from the engine thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._news.put_nowait, progress)

    async def advance(self) -> None:
        """Wait for progress and take in all there is. Must not be called once the reply has ended."""
        self._take(await self._news.get())
        while not self._news.empty():
            self._take(self._news.get_nowait())

    async def whole(self) -> None:
        """Wait for the end."""
        while self.finish is None:
            await self.advance()

    def _take(self, progress: Progress) -> None:
        if progress.tokens:
            self.tokens += progress.tokens
            self.cached = progress.cached
            self.first_at = self.first_at or time.monotonic()
        if progress.finish is not None:
            self.finish, self.message, self.ended = progress.finish, progress.message, time.monotonic()

    @property
    def latency_s(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.started

    def as_json(self) -> dict[str, JSON]:
        """The reply as it stands: text and output ids are everything so far, as SGLang streams them."""
        cached = self.cached
        meta: dict[str, JSON] = {
            "id": self.request.rid,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": self.request.prompt_length,
            "completion_tokens": len(self.tokens),
            "cached_tokens": cached.cached,
            "cached_tokens_details": {
                "device": cached.device,
                "host": cached.host,
                "storage": cached.storage,
            },
            "hicache": {
                "computed": cached.computed,
                "ceiling": cached.ceiling,
                "missed": {**cached.missed},
                "storage_asked": cached.asked,
                "storage_failed": {**cached.failed},
            },
            "weight_version": self.weight_version,
        }
        if self.finish is not None:
            meta["e2e_latency"] = self.latency_s
        return {"text": decode(self.tokens), "output_ids": list(self.tokens), "meta_info": meta}

    def _finish_reason(self) -> JSON:
        if self.finish is None:
            return None
        if self.finish is Finish.LENGTH:
            return {"type": "length", "length": len(self.tokens)}
        if self.finish is Finish.STOP:
            return {"type": "stop", "matched": self.tokens[-1]}
        return {"type": "abort", "message": self.message}
