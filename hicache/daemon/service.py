"""What each call of the protocol means: checks the message, asks the store, words the answer."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress

import grpc

from hicache.clock import Clock
from hicache.config.serve import ServeConfig
from hicache.daemon.arena_store import extent_of
from hicache.daemon.attach import Answer
from hicache.daemon.edge import BadRequest, Cancelled, Context, Edge, Refusal, parse
from hicache.daemon.events import Change, ChangeKind, EventHub, Lost
from hicache.daemon.misses import Fate, Fates
from hicache.daemon.plane import ArenaPlane
from hicache.daemon.scope import FOREIGN
from hicache.daemon.sessions import Identity, Session, Sessions
from hicache.daemon.store import SharedStore
from hicache.daemon.writes import Writes
from hicache.metrics import DaemonMetrics
from hicache.rpc import wire
from hicache.rpc.v1 import cache_pb2 as pb
from hicache.storage_backends.base import MISS, HoldsSessions, WriteOutcome

logger = logging.getLogger(__name__)

WATCH_BATCH = 256
_ABSENT = bytes(1 if flag == 0 else 0 for flag in range(256))  # of a probe's flags
_LONGEST_PIN_S = 86400.0
_MAX_TEXT = 256  # characters of an identity's parts

_OUTCOMES = {
    WriteOutcome.STORED: pb.WRITE_OUTCOME_STORED,
    WriteOutcome.EXISTS: pb.WRITE_OUTCOME_EXISTS,
    WriteOutcome.NO_SPACE: pb.WRITE_OUTCOME_NO_SPACE,
    WriteOutcome.FAILED: pb.WRITE_OUTCOME_FAILED,
    WriteOutcome.BUSY: pb.WRITE_OUTCOME_BUSY,
}
_CHANGES = {
    ChangeKind.STORED: (pb.Change.KIND_STORED, pb.REMOVAL_REASON_UNSPECIFIED),
    ChangeKind.EVICTED: (pb.Change.KIND_REMOVED, pb.REMOVAL_REASON_EVICTED),
    ChangeKind.DELETED: (pb.Change.KIND_REMOVED, pb.REMOVAL_REASON_DELETED),
    ChangeKind.CLEARED: (pb.Change.KIND_REMOVED, pb.REMOVAL_REASON_CLEARED),
}


class CacheService:
    """The handlers. Thread-safe; holds no state of its own but the epoch."""

    def __init__(
        self,
        config: ServeConfig,
        store: SharedStore,
        *,
        hub: EventHub,
        sessions: Sessions,
        writes: Writes,
        metrics: DaemonMetrics,
        edge: Edge,
        clock: Clock,
        fates: Fates,
    ) -> None:
        self._fates = fates
        self.epoch = secrets.randbits(63) | 1
        self._config = config
        self._store = store
        self._hub = hub
        self._sessions = sessions
        self._writes = writes
        self._plane: ArenaPlane | None = None
        self._metrics = metrics
        self._edge = edge
        self._clock = clock
        self._started = clock.now()
        self._version = wire.software_version()

    def use(self, plane: ArenaPlane) -> None:
        """Offer a plane to clients that say Hello from now on."""
        self._plane = plane

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service for grpc.Server.add_generic_rpc_handlers."""
        edge = self._edge
        return grpc.method_handlers_generic_handler(
            wire.SERVICE,
            {
                "Hello": edge.unary("Hello", pb.HelloRequest, self.hello),
                "Probe": edge.unary("Probe", pb.ProbeRequest, self.probe),
                "Read": edge.stream_out("Read", pb.ReadRequest, self.read),
                "BeginWrite": edge.unary("BeginWrite", pb.BeginWriteRequest, self.begin_write),
                "Commit": edge.stream_in("Commit", self.commit),
                "Locate": edge.unary("Locate", pb.LocateRequest, self.locate),
                "Publish": edge.unary("Publish", pb.PublishRequest, self.publish),
                "Abort": edge.unary("Abort", pb.AbortRequest, self.abort),
                "Touch": edge.unary("Touch", pb.TouchRequest, self.touch),
                "Pin": edge.unary("Pin", pb.PinRequest, self.pin),
                "CloseSession": edge.unary("CloseSession", pb.CloseSessionRequest, self.close_session),
                "Delete": edge.unary("Delete", pb.DeleteRequest, self.delete),
                "Clear": edge.unary("Clear", pb.ClearRequest, self.clear),
                "Watch": edge.stream_out("Watch", pb.WatchRequest, self.watch),
                "Stats": edge.unary("Stats", pb.StatsRequest, self.stats),
            },
        )

    def local_answers(self) -> Mapping[str, Answer]:
        """Return what attached clients may call over their own connections, by name."""
        local = self._edge.local
        return {
            "Probe": local("Probe", pb.ProbeRequest, self.probe),
            "Locate": local("Locate", pb.LocateRequest, self.locate),
            "BeginWrite": local("BeginWrite", pb.BeginWriteRequest, self.begin_write),
            "Publish": local("Publish", pb.PublishRequest, self.publish),
        }

    # -- sessions --------------------------------------------------------------------------------

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        identity = Identity(request.client_id, request.model_name, request.model_fingerprint, request.shard)
        data_plane = self._check_hello(request, identity)
        others = self._sessions.other_fingerprints(identity)
        who = f"client {identity.client_id or '(unnamed)'} of model {identity.model_name!r}"
        notice = ""
        if others:
            notice = (
                f"fingerprint {identity.fingerprint or '(none)'} is isolated from "
                f"{', '.join(other or '(none)' for other in others)} under the same model name: "
                "they share nothing; where they should, compare weight version, dtype, page size and flags"
            )
        if others and request.refuse_other_fingerprint:
            self._metrics.hellos.labels("refused").inc()
            logger.warning("refused %s as it asked for: %s", who, notice)
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, f"refused as asked for: {notice}")
        session = self._sessions.open(identity)
        self._metrics.hellos.labels("isolated" if others else "shared").inc()
        if others:
            logger.warning("%s, shard %s: %s", who, identity.shard or "-", notice)
        else:
            logger.info("%s, shard %s, version %s", who, identity.shard or "-", request.client_version or "?")
        config = self._config
        return pb.HelloReply(
            session=session.id,
            epoch=self.epoch,
            protocol_version=wire.PROTOCOL_VERSION,
            daemon_version=self._version,
            store=self._store.backend.name,
            data_plane=data_plane,
            arena=self._plane.offer() if self._plane and data_plane == pb.DATA_PLANE_SHM else None,
            scope=session.scope.prefix,
            other_fingerprints=others,
            notice=notice,
            max_message_bytes=int(config.max_message),
            max_keys=wire.MAX_KEYS,
            max_key_bytes=wire.MAX_KEY_BYTES - len(session.scope.prefix),
            max_object_bytes=int(config.max_object),
            lease_seconds=config.lease_seconds,
            lease_bytes=config.session_lease_bytes,
            reservation_seconds=config.reservation_seconds,
            reservation_bytes=config.session_reservation_bytes,
        )

    def _check_hello(self, request: pb.HelloRequest, identity: Identity) -> pb.DataPlane:
        """Return the data plane: the first of the client's that there is. Raises Refusal and BadRequest."""
        if request.protocol_version != wire.PROTOCOL_VERSION:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this daemon ({self._version}) speaks protocol version {wire.PROTOCOL_VERSION}, "
                f"the client {request.protocol_version}; upgrade the older one",
            )
        if pb.DATA_PLANE_INLINE not in request.data_planes:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "offer the data plane INLINE; others may fail")
        for part in (*dataclasses.astuple(identity), request.client_version):
            if len(part) > _MAX_TEXT or not part.isprintable():
                raise BadRequest(f"the parts of an identity are printable and at most {_MAX_TEXT} long")
        if not set(identity.fingerprint).isdisjoint("/" + FOREIGN):
            raise BadRequest(f"a fingerprint has no / and no {FOREIGN}")
        ours = (pb.DATA_PLANE_INLINE,) if self._plane is None else (pb.DATA_PLANE_SHM, pb.DATA_PLANE_INLINE)
        return next(plane for plane in request.data_planes if plane in ours)

    def _names(self, session: Session, keys: Sequence[str]) -> list[str]:
        """Return the stored names of a request's keys. Raises BadRequest."""
        if len(keys) > wire.MAX_KEYS:
            raise BadRequest(f"{len(keys)} keys in one request; the most is {wire.MAX_KEYS}")
        name_of = session.scope.name
        names = [name_of(key) for key in keys]
        for key, name in zip(keys, names, strict=True):
            if not 0 < len(name) <= wire.MAX_KEY_BYTES or not key or key.startswith(FOREIGN):
                raise BadRequest(
                    f"key {key[:40]!r} of {len(key)} characters: a key has 1 to "
                    f"{wire.MAX_KEY_BYTES - len(session.scope.prefix)} and does not begin with {FOREIGN}"
                )
            if not name.isascii() or not name.isprintable() or " " in name:
                raise BadRequest(f"key {key[:40]!r}: a key is printable ASCII without blanks")
        return names

    # -- reading ---------------------------------------------------------------------------------

    def probe(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        session = self._sessions.get(request.session)
        names = self._names(session, request.keys)
        present = self._store.probe(session, names)
        hits = present.count(1)
        self._metrics.keys.labels("probe", "hit").inc(hits)
        self._metrics.keys.labels("probe", "miss").inc(len(present) - hits)
        self._count_misses("probe", hits, compress(names, present.translate(_ABSENT)))
        return pb.ProbeReply(present=present)

    def read(self, request: pb.ReadRequest, context: Context) -> Iterator[bytes]:
        session = self._sessions.get(request.session)
        names = self._names(session, request.keys)
        if len(request.limits) != len(names):
            raise BadRequest(f"{len(names)} keys but {len(request.limits)} limits")
        limits = [min(limit, int(self._config.max_object)) for limit in request.limits]
        at = 0
        for objects in self._store.read(names, limits):
            self._count_sizes(
                names[at : at + len(objects)],
                [size for size, _ in objects],
                [data is not None for _, data in objects],
            )
            at += len(objects)
            yield from self._messages(objects)

    def _messages(self, objects: Sequence[tuple[int, memoryview | None]]) -> Iterator[bytes]:
        """Yield ReadReply messages for some objects, filled up to the message size."""
        most = int(self._config.max_message)
        sizes: list[int] = []
        parts: list[memoryview] = []
        filled = 0
        for size, data in objects:
            sizes.append(size)
            while data is not None and len(data):
                if filled == most:
                    yield _read_reply(sizes, parts)
                    sizes, parts, filled = [], [], 0
                piece = data[: most - filled]
                parts.append(piece)
                filled += len(piece)
                data = data[len(piece) :]
        if sizes or parts:
            yield _read_reply(sizes, parts)

    def _count_sizes(self, names: Sequence[str], sizes: Sequence[int], given: Sequence[bool]) -> None:
        misses, hits = sizes.count(MISS), sum(given)
        self._metrics.sent_bytes.inc(sum(compress(sizes, given)))
        for outcome, number in (("hit", hits), ("miss", misses), ("too_large", len(sizes) - misses - hits)):
            if number:
                self._metrics.keys.labels("read", outcome).inc(number)
        self._count_misses("read", len(sizes) - misses, compress(names, (size == MISS for size in sizes)))

    def _count_misses(self, operation: str, there: int, missing: Iterable[str]) -> None:
        """Count why names are missing, and how many of all a store that drops nothing would have."""
        fates = self._fates.of(missing)
        for fate, number in fates.items():
            self._metrics.misses.labels(operation, fate.value).inc(number)
            there += number if fate is not Fate.NEVER_STORED else 0
        self._metrics.ceiling.labels(operation).inc(there)

    def locate(self, request: pb.LocateRequest) -> pb.LocateReply:
        session = self._sessions.get(request.session)
        plane = self._attached(session, request.release)
        names = self._names(session, request.keys)
        if len(request.limits) != len(names):
            raise BadRequest(f"{len(names)} keys but {len(request.limits)} limits")
        grant, places = plane.locate(session, names, request.limits)
        extents = [extent for _, extent in places]
        self._count_sizes(names, [size for size, _ in places], [extent is not None for _, extent in places])
        return pb.LocateReply(
            grant=grant,
            sizes=[size for size, _ in places],
            offsets=[extent.offset if extent else 0 for extent in extents],
            slots=[extent.slot if extent else 0 for extent in extents],
            generations=[extent.generation if extent else 0 for extent in extents],
            checksums=[extent.checksum or 0 if extent else 0 for extent in extents],
            ready_bytes=plane.ready_bytes,
        )

    def _attached(self, session: Session, release: Sequence[int]) -> ArenaPlane:
        """End grants, and return the plane. Raises Refusal where the session's client does not use it."""
        if self._plane is None:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "this daemon has no arena")
        self._plane.check_attached(session)
        self._plane.grants.expire()
        self._plane.grants.release(session.id, release)
        return self._plane

    # -- writing ---------------------------------------------------------------------------------

    def begin_write(self, request: pb.BeginWriteRequest) -> pb.BeginWriteReply:
        session = self._sessions.get(request.session)
        names = self._names(session, request.keys)
        self._check_sizes(len(names), request.sizes)
        plane = self._attached(session, request.release) if request.in_arena else None
        answers = self._writes.begin(session, names, request.sizes, in_arena=request.in_arena)
        self._count_writes(answer for _, answer in answers if isinstance(answer, WriteOutcome))
        reply = pb.BeginWriteReply(
            outcomes=[
                _OUTCOMES[answer] if isinstance(answer, WriteOutcome) else pb.WRITE_OUTCOME_RESERVED
                for _, answer in answers
            ],
            reservations=[number for number, _ in answers],
        )
        if plane is not None:
            places = [None if isinstance(one, WriteOutcome) else extent_of(one) for _, one in answers]
            reply.offsets.extend(one.offset if one else 0 for one in places)
            reply.generations.extend(one.generation if one else 0 for one in places)
            reply.ready_bytes = plane.ready_bytes
        return reply

    def publish(self, request: pb.PublishRequest) -> pb.CommitReply:
        session = self._sessions.get(request.session)
        self._attached(session, request.release)
        numbers = request.reservations
        if len(numbers) > wire.MAX_KEYS or len(set(numbers)) < len(numbers):
            raise BadRequest(f"{len(numbers)} reservations: at most {wire.MAX_KEYS}, and each once")
        if not len(numbers) == len(request.generations) == len(request.checksums):
            raise BadRequest(f"{len(numbers)} reservations but other numbers of generations or checksums")
        outcomes, stored_bytes = self._writes.publish(
            session, numbers, generations=request.generations, checksums=request.checksums
        )
        self._metrics.received_bytes.inc(stored_bytes)
        self._count_writes(outcomes)
        return pb.CommitReply(outcomes=[_OUTCOMES[outcome] for outcome in outcomes])

    def commit(self, stream: Iterator[bytes], context: Context) -> pb.CommitReply:
        request, data = _commit_request(stream)
        session = self._sessions.get(request.session)
        self._check_sizes(len(request.reservations), request.sizes)
        upload = self._writes.claim(session, request.reservations, request.sizes, context.cancel)
        try:
            while True:
                upload.feed(data)
                self._metrics.received_bytes.inc(len(data))
                self._writes.note_progress(upload)
                if request.last:
                    break
                request, data = _commit_request(stream)
                if request.session or request.reservations or request.sizes:
                    raise BadRequest("only the first message of a Commit names reservations")
            outcomes = self._writes.finish(upload)
        finally:
            self._writes.abandon(upload)
        self._count_writes(outcomes)
        return pb.CommitReply(outcomes=[_OUTCOMES[outcome] for outcome in outcomes])

    def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        self._writes.abort(self._sessions.get(request.session), request.reservations)
        return pb.AbortReply()

    def _check_sizes(self, count: int, sizes: Sequence[int]) -> None:
        if count > wire.MAX_KEYS:
            raise BadRequest(f"{count} reservations in one request; the most is {wire.MAX_KEYS}")
        if len(sizes) != count:
            raise BadRequest(f"{count} objects but {len(sizes)} sizes")
        for size in sizes:
            if not 1 <= size <= self._config.max_object:
                raise BadRequest(f"an object of {size} bytes; it has 1 to {int(self._config.max_object)}")

    def _count_writes(self, outcomes: Iterable[WriteOutcome]) -> None:
        for outcome, number in Counter(outcomes).items():
            self._metrics.keys.labels("write", outcome.value).inc(number)

    # -- the rest --------------------------------------------------------------------------------

    def touch(self, request: pb.TouchRequest) -> pb.TouchReply:
        session = self._sessions.get(request.session)
        self._store.backend.touch(self._names(session, request.keys))
        return pb.TouchReply()

    def pin(self, request: pb.PinRequest) -> pb.PinReply:
        session = self._sessions.get(request.session)
        names = self._names(session, request.keys)
        (conversation,) = self._names(session, [request.conversation])
        if not 0 < request.ttl_seconds <= _LONGEST_PIN_S:
            raise BadRequest(f"ttl_seconds {request.ttl_seconds:g}: above 0, and at most {_LONGEST_PIN_S:g}")
        if isinstance(self._store.backend, HoldsSessions):
            self._store.backend.pin(conversation, names, request.ttl_seconds)
        return pb.PinReply()

    def close_session(self, request: pb.CloseSessionRequest) -> pb.CloseSessionReply:
        session = self._sessions.get(request.session)
        (conversation,) = self._names(session, [request.conversation])
        if isinstance(self._store.backend, HoldsSessions):
            self._store.backend.close_session(conversation)
        return pb.CloseSessionReply()

    def delete(self, request: pb.DeleteRequest) -> pb.DeleteReply:
        session = self._sessions.get(request.session)
        return pb.DeleteReply(deleted=self._store.delete(self._names(session, request.keys)))

    def clear(self, request: pb.ClearRequest) -> pb.ClearReply:
        if request.session:
            session = self._sessions.get(request.session)
            prefixes = session.scope.name_prefixes(request.prefix)
            who = session.identity.client_id or "an unnamed client"
        elif request.prefix:
            raise BadRequest("without a session Clear takes no prefix: everything goes")
        else:
            prefixes, who = [""], "a caller without a session"
        deleted = self._store.clear(prefixes)
        logger.info("%s cleared %r: %d objects", who, request.prefix, deleted)
        return pb.ClearReply(deleted=deleted)

    def watch(self, request: pb.WatchRequest, context: Context) -> Iterator[bytes]:
        session = self._sessions.get(request.session) if request.session else None
        watcher = self._hub.subscribe(
            [request.prefix] if session is None else session.scope.name_prefixes(request.prefix)
        )
        try:
            if not context.add_callback(watcher.close):
                return
            yield pb.WatchReply(subscribed=pb.WatchReply.Subscribed(epoch=self.epoch)).SerializeToString()
            for batch in watcher.batches(WATCH_BATCH):
                if isinstance(batch, Lost):
                    yield pb.WatchReply(lost=pb.WatchReply.Lost(changes=batch.changes)).SerializeToString()
                    continue
                changes = [found for change in batch if (found := _change(change, session)) is not None]
                if changes:
                    yield pb.WatchReply(changes=pb.WatchReply.Changes(changes=changes)).SerializeToString()
        finally:
            self._hub.unsubscribe(watcher)

    def stats(self, request: pb.StatsRequest) -> pb.StatsReply:
        stats = self._store.backend.stats()
        attached = self._plane.attached if self._plane else 0
        return pb.StatsReply(
            epoch=self.epoch,
            daemon_version=self._version,
            store=self._store.backend.name,
            uptime_seconds=self._clock.now() - self._started,
            draining=self._edge.closed,
            objects=stats.objects,
            used_bytes=stats.used_bytes,
            capacity_bytes=stats.capacity_bytes,
            sessions=len(self._sessions),
            reservations=len(self._writes),
            reserved_bytes=self._writes.reserved_bytes(),
            watchers=self._hub.watchers,
            counters=self._metrics.counters(),
            data_planes={"shm": attached, "inline": max(0, len(self._sessions) - attached)},
            arena_bytes=self._plane.ready_bytes if self._plane else 0,
        )


def _read_reply(sizes: Sequence[int], parts: Sequence[memoryview]) -> bytes:
    return wire.join_data(pb.ReadReply(sizes=sizes).SerializeToString(), wire.READ_DATA_FIELD, parts)


def _commit_request(stream: Iterator[bytes]) -> tuple[pb.CommitRequest, memoryview]:
    """Return the next message of an upload, and its data. Raises Cancelled and BadRequest.

    gRPC's stream may end like a finished one when its client is killed; so only `last` ends an upload.
    """
    raw = next(stream, None)
    if raw is None:
        raise Cancelled("the stream ended without a message that says last")
    try:
        rest, data = wire.split_data(raw, wire.COMMIT_DATA_FIELD)
    except ValueError as error:
        raise BadRequest(f"not a CommitRequest: {error}") from error
    return parse(pb.CommitRequest, rest), data


def _change(change: Change, session: Session | None) -> pb.Change | None:
    key = change.name if session is None else session.scope.key(change.name)
    if key is None:
        # A clear of everything is everybody's; that of another model is not told.
        if change.kind is not ChangeKind.CLEARED or change.name:
            return None
        key = ""
    kind, reason = _CHANGES[change.kind]
    return pb.Change(kind=kind, reason=reason, key=key, size_bytes=change.size_bytes)
