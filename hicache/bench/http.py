"""Drives a server over HTTP: ours, or SGLang's, through /generate and /flush_cache.

Times are the client's: TTFT ends with the first streamed chunk that carries a token.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec

from hicache.bench.report import JSON, ByTier, RunReport, TurnResult, by_round
from hicache.bench.traffic import Traffic, Turn
from hicache.bench.workloads import Workload
from hicache.errors import HiCacheError

_FLUSH_RETRY_S = 0.2


class ServerError(HiCacheError):
    """The server cannot be reached, refused a request, or broke off a reply."""


@dataclass(slots=True)
class _Reply:
    """A streamed reply as far as it has come."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    by_tier: ByTier | None = None
    missed: Mapping[str, int] = field(default_factory=dict)
    output: array[int] = field(default_factory=lambda: array("I"))
    first_at: float | None = None


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """`label` names the run in reports: the tiers are the server's business. Times in seconds.

    `api_key` goes with every request as a bearer token, `admin_api_key` with the flush, if there is one.
    """

    url: str
    api_key: str = field(default="", repr=False)
    admin_api_key: str = field(default="", repr=False)
    label: str = "server"
    eviction_policy: str = "server"
    flush_timeout_s: float = 30.0
    request_timeout_s: float = 1800.0


def run_http(workload: Workload, options: HttpOptions, on_result: Callable[[TurnResult], None]) -> RunReport:
    """Flush the server's cache, then run the workload against it. Raises ServerError."""
    return asyncio.run(_run(workload, options, on_result))


async def _run(
    workload: Workload, options: HttpOptions, on_result: Callable[[TurnResult], None]
) -> RunReport:
    timeout = aiohttp.ClientTimeout(total=options.request_timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    headers = _bearer(options.api_key)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, read_bufsize=1 << 20, headers=headers
    ) as session:
        driver = _Driver(workload, options, session)
        try:
            await driver.flush()
            started = time.monotonic()
            results = await driver.drive(on_result)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise ServerError(f"{options.url}: {error or type(error).__name__}") from error
        duration = time.monotonic() - started
    details: dict[str, JSON] = {"url": options.url}
    if driver.replies_without_ids:
        details["replies_without_output_ids"] = driver.replies_without_ids
    return RunReport(
        tiers=options.label,
        eviction_policy=options.eviction_policy,
        engine="http",
        rounds=by_round(results),
        duration_s=duration,
        wall_s=duration,
        details=details,
    )


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class _Driver:
    def __init__(self, workload: Workload, options: HttpOptions, session: aiohttp.ClientSession) -> None:
        self._workload = workload
        self._url = options.url.rstrip("/")
        self._options = options
        self._session = session
        self.replies_without_ids = 0

    async def flush(self) -> None:
        """Empty the server's cache. A server refuses while it is busy: asked again for a while."""
        deadline = time.monotonic() + self._options.flush_timeout_s
        headers = _bearer(self._options.admin_api_key or self._options.api_key)
        while True:
            async with self._session.post(f"{self._url}/flush_cache", headers=headers) as reply:
                if reply.status == 200:
                    return
                text = (await reply.text())[:200]
            if reply.status in (401, 403):
                raise ServerError(
                    f"{self._url}/flush_cache: status {reply.status}: give the server's key with --api-key, "
                    "or with --admin-api-key where it has one"
                )
            if time.monotonic() > deadline:
                raise ServerError(f"{self._url}/flush_cache: status {reply.status}: {text}")
            await asyncio.sleep(_FLUSH_RETRY_S)

    async def drive(self, on_result: Callable[[TurnResult], None]) -> list[TurnResult]:
        traffic = Traffic(self._workload)
        results: list[TurnResult] = []
        pending: set[asyncio.Task[tuple[Turn, array[int], TurnResult]]] = set()
        try:
            while not traffic.done:
                now = time.monotonic()
                due = traffic.due_at()
                if due is not None and due <= now:
                    pending.add(asyncio.create_task(self._ask(traffic.take(now))))
                    continue
                if not pending:
                    await asyncio.sleep(max(0.0, (due or now) - now))
                    continue
                wait_s = None if due is None else due - now
                ended, pending = await asyncio.wait(
                    pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    turn, output, result = task.result()
                    traffic.finish(turn, output, now=time.monotonic())
                    results.append(result)
                    on_result(result)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return results

    async def _ask(self, turn: Turn) -> tuple[Turn, array[int], TurnResult]:
        body: dict[str, object] = {
            "input_ids": turn.prompt.tolist(),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self._workload.output_length,
                "ignore_eos": True,
            },
            "stream": True,
        }
        if turn.session is not None:
            body["session_id"] = turn.session
        reply = _Reply()
        started = time.monotonic()
        async with self._session.post(
            f"{self._url}/generate",
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
        ) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise ServerError(f"{self._url}/generate: status {response.status}: {text}")
            async for line in response.content:
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    self._take_chunk(reply, line[len(b"data:") :])
        ended = time.monotonic()
        if turn.session is not None and turn.last:
            await self._close_session(turn.session)
        if reply.first_at is None:
            raise ServerError(f"{self._url}/generate: the reply to {turn.rid} ended without a token")
        if not reply.cached_tokens:
            reply.by_tier = ByTier(device=0, host=0, storage=0)  # SGLang tells no tiers of a miss
        result = TurnResult(
            client=turn.client,
            round=turn.round,
            prompt_tokens=reply.prompt_tokens,
            history=turn.history,
            cached_tokens=reply.cached_tokens,
            by_tier=reply.by_tier,
            ttft_s=reply.first_at - started,
            latency_s=ended - started,
            missed=reply.missed,
        )
        return turn, self._said(turn, reply), result

    async def _close_session(self, session_id: str) -> None:
        url = f"{self._url}/close_session"
        async with self._session.post(url, json={"session_id": session_id}) as reply:
            if reply.status != 200:
                raise ServerError(f"{url}: status {reply.status}: {(await reply.text())[:200]}")

    def _take_chunk(self, reply: _Reply, data: bytes) -> None:
        try:
            chunk = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ServerError(f"{self._url}/generate: a chunk is no JSON: {error}") from error
        if "error" in chunk:
            raise ServerError(f"{self._url}/generate: {chunk['error']}")
        meta: Mapping[str, int] = chunk.get("meta_info", {})
        completed = int(meta.get("completion_tokens", 0))
        if reply.first_at is None and (completed or chunk.get("output_ids") or chunk.get("text")):
            reply.first_at = time.monotonic()
        reply.prompt_tokens = int(meta.get("prompt_tokens", reply.prompt_tokens))
        reply.cached_tokens = int(meta.get("cached_tokens", reply.cached_tokens))
        details = chunk.get("meta_info", {}).get("cached_tokens_details")
        if details:
            reply.by_tier = ByTier(
                device=int(details.get("device", 0)),
                host=int(details.get("host", 0)),
                storage=int(details.get("storage", 0)),
            )
        own = chunk.get("meta_info", {}).get("hicache")
        if isinstance(own, dict):
            reply.missed = own.get("missed", {})
        ids = chunk.get("output_ids") or []
        if len(ids) == completed:  # servers stream either all ids so far, or the new ones
            reply.output = array("I", ids)
        else:
            reply.output.extend(ids)

    def _said(self, turn: Turn, reply: _Reply) -> array[int]:
        """The reply's tokens; a server that tells no ids gets a stand-in of the same length."""
        wanted = self._workload.output_length
        if len(reply.output) >= wanted:
            return reply.output[:wanted]
        self.replies_without_ids += 1
        stand_in = self._workload.question(turn.client, self._workload.num_rounds + turn.round)
        return array("I", (stand_in * (wanted // len(stand_in) + 1))[:wanted])
