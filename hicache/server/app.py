"""SGLang's HTTP routes over the engine thread. Parses, waits and answers; decides nothing else."""

from __future__ import annotations

import asyncio
import logging
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from hicache.cache import SessionRefused
from hicache.engine.scheduler import RequestRefused
from hicache.errors import BackendError, ConfigError
from hicache.request import Request as CacheRequest
from hicache.server import metrics
from hicache.server.engine_thread import EngineStopped, EngineThread, Finish
from hicache.server.generate import BadRequest, GenerateCall, Limits, parse
from hicache.server.replies import JSON, Reply
from hicache.server.storage import StorageChoice, StorageControl, StorageRefused

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
_HEALTH_S = 20.0
_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Service:
    """What the routes work on. Lives on the event loop, but for the engine behind its own thread."""

    engine: EngineThread
    storage: StorageControl | None
    limits: Limits
    model_info: Mapping[str, object]
    server_info: Mapping[str, object]
    metrics: metrics.ServerMetrics | None
    executor_counters: Callable[[], Mapping[str, float]]
    read_choice: Callable[[str, object], StorageChoice]  # name and extra config of a PUT; raises ConfigError

    @property
    def weight_version(self) -> str:
        return str(self.model_info["weight_version"])


def create_app(service: Service) -> Starlette:
    """Build the application. The engine must be started before the first request."""
    both = ["GET", "POST"]
    table: list[tuple[str, list[str], Callable[[Service, Request], Awaitable[Response]]]] = [
        ("/generate", ["POST", "PUT"], generate),
        ("/health", ["GET"], health),
        ("/health_generate", ["GET"], health_generate),
        ("/get_model_info", ["GET"], model_info),
        ("/model_info", ["GET"], model_info),
        ("/get_server_info", ["GET"], server_info),
        ("/server_info", ["GET"], server_info),
        ("/flush_cache", both, flush_cache),
        ("/abort_request", ["POST"], abort_request),
        ("/open_session", both, open_session),
        ("/close_session", both, close_session),
        ("/hicache/storage-backend", ["GET"], storage_status),
        ("/hicache/storage-backend", ["PUT"], storage_attach),
        ("/hicache/storage-backend", ["DELETE"], storage_detach),
        ("/hicache/storage-backend/clear", ["POST"], storage_clear),
    ]
    if service.metrics is not None:
        table.append(("/metrics", ["GET"], show_metrics))
    routes = [
        Route(path, partial(_guarded, handler, service), methods=verbs) for path, verbs, handler in table
    ]
    return Starlette(routes=routes)


async def _guarded(
    handler: Callable[[Service, Request], Awaitable[Response]], service: Service, request: Request
) -> Response:
    """Turn what handlers raise on purpose into statuses; anything else is a bug and is logged as one."""
    try:
        return await handler(service, request)
    except (BadRequest, RequestRefused, SessionRefused, StorageRefused, ConfigError) as error:
        return _error(400, error)
    except (EngineStopped, BackendError) as error:
        return _error(503, error)
    except ClientDisconnect:
        return Response(status_code=499)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.url.path)
        return _error(500, error)


def _json(content: JSON | Mapping[str, object] | Sequence[object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _error(status: int, error: Exception) -> Response:
    return _json({"error": {"message": str(error)}}, status)


# -- generating ------------------------------------------------------------------------------------


async def generate(service: Service, request: Request) -> Response:
    """POST /generate: one reply, a list of them, or a stream of server-sent events."""
    call = parse(await _body(request), service.limits)
    replies = [Reply(r, service.weight_version) for r in call.requests]
    await _submit(service, replies)
    if call.stream:
        return StreamingResponse(_stream(service, call, replies), media_type="text/event-stream")
    try:
        if not await _all_or_gone(request, replies):
            return Response(status_code=499)
    finally:
        _settle(service, replies)
    failed = next((r for r in replies if r.finish is Finish.ABORT), None)
    if failed is not None and not service.engine.alive:
        return _error(503, EngineStopped(failed.message))
    answers = [reply.as_json() for reply in replies]
    return _json(answers if call.batch else answers[0])


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)


async def _submit(service: Service, replies: Sequence[Reply]) -> None:
    """Queue all requests or none."""
    for i, reply in enumerate(replies):
        try:
            await asyncio.wrap_future(service.engine.submit(reply.request, reply.sink))
        except BaseException as error:
            # What was refused is not queued, and its id may be another's; what was cut off may be queued.
            for queued in replies[: i if isinstance(error, Exception) else i + 1]:
                service.engine.abort(queued.request.rid)
            raise


async def _all_or_gone(request: Request, replies: Sequence[Reply]) -> bool:
    """Wait for every reply; False if the client went away first."""

    async def whole() -> None:
        await asyncio.gather(*(reply.whole() for reply in replies))

    work = asyncio.create_task(whole())
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(service: Service, call: GenerateCall, replies: Sequence[Reply]) -> AsyncIterator[bytes]:
    """Yield an event per reply that has news, with everything so far; a batch adds its index."""
    waiting = {asyncio.ensure_future(reply.advance()): i for i, reply in enumerate(replies)}
    try:
        while waiting:
            ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(ready, key=waiting.__getitem__):
                task.result()
                i = waiting.pop(task)
                event = replies[i].as_json()
                if call.batch:
                    event["index"] = i
                if replies[i].finish is None:
                    waiting[asyncio.ensure_future(replies[i].advance())] = i
                yield b"data: " + msgspec.json.encode(event) + b"\n\n"
        yield _DONE
    finally:
        for task in waiting:
            task.cancel()
        _settle(service, replies)


def _settle(service: Service, replies: Sequence[Reply]) -> None:
    """Count what ended; abort what nobody waits for any more."""
    for reply in replies:
        if reply.finish is None:
            service.engine.abort(reply.request.rid)
        if service.metrics is not None:
            service.metrics.observe(
                outcome=(reply.finish or Finish.ABORT).value,
                tokens=len(reply.tokens),
                ttft_s=reply.ttft_s,
                latency_s=reply.latency_s,
            )


async def abort_request(service: Service, request: Request) -> Response:
    """POST /abort_request {"rid"}: end a request; an unknown one is no error, as with SGLang."""
    fields = await _fields(request, {"rid"})
    rid = fields.get("rid")
    if not isinstance(rid, str):
        raise BadRequest("rid: name the request to end")
    found = await asyncio.wrap_future(service.engine.abort(rid))
    return _json({"rid": rid, "aborted": found})


# -- sessions --------------------------------------------------------------------------------------


async def open_session(service: Service, request: Request) -> Response:
    """POST /open_session {"session_id", "timeout"}, both optional: begin a session, and answer its id."""
    fields = await _fields(request, {"capacity_of_str_len", "session_id", "streaming", "timeout"})
    session_id = fields.get("session_id")
    if session_id is None:
        session_id = uuid.uuid4().hex
    timeout = fields.get("timeout")
    if not isinstance(session_id, str):
        raise BadRequest("session_id: give a text, or leave it out to be given one")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | None):
        raise BadRequest(f"timeout={timeout!r}: give seconds, or leave it out")
    if fields.get("streaming"):
        raise BadRequest("streaming sessions are not supported; leave streaming out")
    await asyncio.wrap_future(service.engine.call(lambda s: s.cache.sessions.open(session_id, timeout)))
    return _json(session_id)


async def close_session(service: Service, request: Request) -> Response:
    """POST /close_session {"session_id"}: end a session; an unknown one is no error, as with SGLang."""
    session_id = (await _fields(request, {"session_id"})).get("session_id")
    if not isinstance(session_id, str):
        raise BadRequest("session_id: name the session to close")
    found = await asyncio.wrap_future(service.engine.call(lambda s: s.cache.sessions.close(session_id)))
    return _json({"session_id": session_id, "closed": found})


# -- looking ---------------------------------------------------------------------------------------


async def health(service: Service, request: Request) -> Response:
    """GET /health: 200 while requests are taken."""
    return Response(status_code=200 if service.engine.alive else 503)


async def health_generate(service: Service, request: Request) -> Response:
    """GET /health_generate: 200 if a token can be produced now."""
    # A scope of its own: a health check must not appear as anybody's cache hit.
    probe = CacheRequest("", array("I", [0]), 1, 1, scope=b"\0" * 32)
    probe.rid = f"health-{id(probe):x}"
    reply = Reply(probe, service.weight_version)
    await asyncio.wrap_future(service.engine.submit(probe, reply.sink))
    try:
        await asyncio.wait_for(reply.whole(), _HEALTH_S)
    except asyncio.TimeoutError:
        service.engine.abort(probe.rid)
        return Response(status_code=503)
    return Response(status_code=200 if reply.finish is not Finish.ABORT else 503)


async def model_info(service: Service, request: Request) -> Response:
    """GET /get_model_info."""
    return _json(service.model_info)


async def server_info(service: Service, request: Request) -> Response:
    """GET /get_server_info: every flag as it is in force."""
    return _json(service.server_info)


async def show_metrics(service: Service, request: Request) -> Response:
    """GET /metrics, in Prometheus' text format."""
    assert service.metrics is not None
    counters = service.executor_counters
    samples = await asyncio.wrap_future(service.engine.call(lambda s: metrics.snapshot(s, counters())))
    page = service.metrics.render(samples)
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


# -- controlling -----------------------------------------------------------------------------------


async def flush_cache(service: Service, request: Request) -> Response:
    """POST /flush_cache: drop L1 and L2; refused while requests are queued or running."""
    if await asyncio.wrap_future(service.engine.call(lambda scheduler: scheduler.flush())):
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse("The cache is not flushed: requests are queued or running.\n", status_code=400)


async def storage_status(service: Service, request: Request) -> Response:
    """GET /hicache/storage-backend."""
    policies = {
        name: service.server_info[name]
        for name in ("hicache_storage_prefetch_policy", "hicache_write_policy")
    }
    return _json({**_storage(service).status(), **policies})


async def storage_attach(service: Service, request: Request) -> Response:
    """PUT /hicache/storage-backend: attach L3 while serving."""
    fields = await _fields(
        request,
        {
            "hicache_storage_backend",
            "hicache_storage_backend_extra_config_json",
            "hicache_storage_prefetch_policy",
            "hicache_write_policy",
        },
    )
    name = fields.get("hicache_storage_backend")
    if not isinstance(name, str):
        raise BadRequest("hicache_storage_backend: name the backend to attach")
    for policy in ("hicache_storage_prefetch_policy", "hicache_write_policy"):
        if fields.get(policy) not in (None, service.server_info[policy]):
            raise BadRequest(
                f"{policy} is {service.server_info[policy]}, set at start; leave it out to attach with that"
            )
    choice = service.read_choice(name, fields.get("hicache_storage_backend_extra_config_json"))
    return _json({"message": await run_in_threadpool(_storage(service).attach, choice)})


async def storage_detach(service: Service, request: Request) -> Response:
    """DELETE /hicache/storage-backend."""
    return _json({"message": await run_in_threadpool(_storage(service).detach)})


async def storage_clear(service: Service, request: Request) -> Response:
    """POST /hicache/storage-backend/clear: delete this model's objects from L3."""
    deleted = await run_in_threadpool(_storage(service).clear)
    return _json({"message": f"{deleted} objects deleted", "deleted": deleted})


def _storage(service: Service) -> StorageControl:
    if service.storage is None:
        raise StorageRefused("there is no L2 to put L3 behind: start with --enable-hierarchical-cache")
    return service.storage


async def _fields(request: Request, known: set[str]) -> dict[str, object]:
    raw = await _body(request)
    try:
        fields = msgspec.json.decode(raw or b"{}", type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON object: {error}") from error
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise BadRequest(f"{', '.join(unknown)}: unknown; known are {', '.join(sorted(known))}")
    return fields
