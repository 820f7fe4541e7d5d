from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataPlane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_PLANE_UNSPECIFIED: _ClassVar[DataPlane]
    DATA_PLANE_INLINE: _ClassVar[DataPlane]
    DATA_PLANE_SHM: _ClassVar[DataPlane]

class WriteOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITE_OUTCOME_UNSPECIFIED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_STORED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_EXISTS: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_NO_SPACE: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_FAILED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_RESERVED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_BUSY: _ClassVar[WriteOutcome]

class RemovalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REMOVAL_REASON_UNSPECIFIED: _ClassVar[RemovalReason]
    REMOVAL_REASON_EVICTED: _ClassVar[RemovalReason]
    REMOVAL_REASON_DELETED: _ClassVar[RemovalReason]
    REMOVAL_REASON_CLEARED: _ClassVar[RemovalReason]
DATA_PLANE_UNSPECIFIED: DataPlane
DATA_PLANE_INLINE: DataPlane
DATA_PLANE_SHM: DataPlane
WRITE_OUTCOME_UNSPECIFIED: WriteOutcome
WRITE_OUTCOME_STORED: WriteOutcome
WRITE_OUTCOME_EXISTS: WriteOutcome
WRITE_OUTCOME_NO_SPACE: WriteOutcome
WRITE_OUTCOME_FAILED: WriteOutcome
WRITE_OUTCOME_RESERVED: WriteOutcome
WRITE_OUTCOME_BUSY: WriteOutcome
REMOVAL_REASON_UNSPECIFIED: RemovalReason
REMOVAL_REASON_EVICTED: RemovalReason
REMOVAL_REASON_DELETED: RemovalReason
REMOVAL_REASON_CLEARED: RemovalReason

class Arena(_message.Message):
    __slots__ = ("socket", "size_bytes", "table_bytes")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    socket: str
    size_bytes: int
    table_bytes: int
    def __init__(self, socket: _Optional[str] = ..., size_bytes: _Optional[int] = ..., table_bytes: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "client_id", "client_version", "model_name", "model_fingerprint", "shard", "data_planes", "refuse_other_fingerprint")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANES_FIELD_NUMBER: _ClassVar[int]
    REFUSE_OTHER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client_id: str
    client_version: str
    model_name: str
    model_fingerprint: str
    shard: str
    data_planes: _containers.RepeatedScalarFieldContainer[DataPlane]
    refuse_other_fingerprint: bool
    def __init__(self, protocol_version: _Optional[int] = ..., client_id: _Optional[str] = ..., client_version: _Optional[str] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., shard: _Optional[str] = ..., data_planes: _Optional[_Iterable[_Union[DataPlane, str]]] = ..., refuse_other_fingerprint: bool = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("session", "epoch", "protocol_version", "daemon_version", "store", "data_plane", "scope", "other_fingerprints", "notice", "max_message_bytes", "max_keys", "max_key_bytes", "max_object_bytes", "lease_seconds", "lease_bytes", "reservation_seconds", "reservation_bytes", "arena")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    OTHER_FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    protocol_version: int
    daemon_version: str
    store: str
    data_plane: DataPlane
    scope: str
    other_fingerprints: _containers.RepeatedScalarFieldContainer[str]
    notice: str
    max_message_bytes: int
    max_keys: int
    max_key_bytes: int
    max_object_bytes: int
    lease_seconds: float
    lease_bytes: int
    reservation_seconds: float
    reservation_bytes: int
    arena: Arena
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., protocol_version: _Optional[int] = ..., daemon_version: _Optional[str] = ..., store: _Optional[str] = ..., data_plane: _Optional[_Union[DataPlane, str]] = ..., scope: _Optional[str] = ..., other_fingerprints: _Optional[_Iterable[str]] = ..., notice: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., max_keys: _Optional[int] = ..., max_key_bytes: _Optional[int] = ..., max_object_bytes: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., lease_bytes: _Optional[int] = ..., reservation_seconds: _Optional[float] = ..., reservation_bytes: _Optional[int] = ..., arena: _Optional[_Union[Arena, _Mapping]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("session", "keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: bytes
    def __init__(self, present: _Optional[bytes] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("session", "keys", "limits")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    session: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    limits: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ..., limits: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("sizes", "data")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class BeginWriteRequest(_message.Message):
    __slots__ = ("session", "keys", "sizes", "in_arena", "release")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    IN_ARENA_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    session: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    in_arena: bool
    release: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ..., sizes: _Optional[_Iterable[int]] = ..., in_arena: bool = ..., release: _Optional[_Iterable[int]] = ...) -> None: ...

class BeginWriteReply(_message.Message):
    __slots__ = ("outcomes", "reservations", "offsets", "generations", "ready_bytes")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[WriteOutcome]
    reservations: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    ready_bytes: int
    def __init__(self, outcomes: _Optional[_Iterable[_Union[WriteOutcome, str]]] = ..., reservations: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., ready_bytes: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "reservations", "sizes", "data", "last")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    session: int
    reservations: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    last: bool
    def __init__(self, session: _Optional[int] = ..., reservations: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., last: bool = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[WriteOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[WriteOutcome, str]]] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("session", "keys", "limits", "release")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    session: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    limits: _containers.RepeatedScalarFieldContainer[int]
    release: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ..., limits: _Optional[_Iterable[int]] = ..., release: _Optional[_Iterable[int]] = ...) -> None: ...

class LocateReply(_message.Message):
    __slots__ = ("grant", "sizes", "offsets", "slots", "generations", "checksums", "ready_bytes")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    grant: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    ready_bytes: int
    def __init__(self, grant: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., ready_bytes: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("session", "reservations", "generations", "checksums", "release")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    session: int
    reservations: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    release: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., reservations: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., release: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "reservations")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    session: int
    reservations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., reservations: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("session", "keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class TouchReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session", "conversation", "keys", "ttl_seconds")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    session: int
    conversation: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    ttl_seconds: float
    def __init__(self, session: _Optional[int] = ..., conversation: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session", "conversation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    session: int
    conversation: str
    def __init__(self, session: _Optional[int] = ..., conversation: _Optional[str] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("session", "keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("session", "prefix")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    session: int
    prefix: str
    def __init__(self, session: _Optional[int] = ..., prefix: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("session", "prefix")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    session: int
    prefix: str
    def __init__(self, session: _Optional[int] = ..., prefix: _Optional[str] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("subscribed", "changes", "lost")
    class Subscribed(_message.Message):
        __slots__ = ("epoch",)
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        epoch: int
        def __init__(self, epoch: _Optional[int] = ...) -> None: ...
    class Changes(_message.Message):
        __slots__ = ("changes",)
        CHANGES_FIELD_NUMBER: _ClassVar[int]
        changes: _containers.RepeatedCompositeFieldContainer[Change]
        def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...
    class Lost(_message.Message):
        __slots__ = ("changes",)
        CHANGES_FIELD_NUMBER: _ClassVar[int]
        changes: int
        def __init__(self, changes: _Optional[int] = ...) -> None: ...
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    subscribed: WatchReply.Subscribed
    changes: WatchReply.Changes
    lost: WatchReply.Lost
    def __init__(self, subscribed: _Optional[_Union[WatchReply.Subscribed, _Mapping]] = ..., changes: _Optional[_Union[WatchReply.Changes, _Mapping]] = ..., lost: _Optional[_Union[WatchReply.Lost, _Mapping]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("kind", "reason", "key", "size_bytes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Change.Kind]
        KIND_STORED: _ClassVar[Change.Kind]
        KIND_REMOVED: _ClassVar[Change.Kind]
    KIND_UNSPECIFIED: Change.Kind
    KIND_STORED: Change.Kind
    KIND_REMOVED: Change.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: Change.Kind
    reason: RemovalReason
    key: str
    size_bytes: int
    def __init__(self, kind: _Optional[_Union[Change.Kind, str]] = ..., reason: _Optional[_Union[RemovalReason, str]] = ..., key: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("epoch", "daemon_version", "store", "uptime_seconds", "draining", "objects", "used_bytes", "capacity_bytes", "sessions", "reservations", "reserved_bytes", "watchers", "counters", "data_planes", "arena_bytes")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class DataPlanesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    daemon_version: str
    store: str
    uptime_seconds: float
    draining: bool
    objects: int
    used_bytes: int
    capacity_bytes: int
    sessions: int
    reservations: int
    reserved_bytes: int
    watchers: int
    counters: _containers.ScalarMap[str, float]
    data_planes: _containers.ScalarMap[str, int]
    arena_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., daemon_version: _Optional[str] = ..., store: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., draining: bool = ..., objects: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., reservations: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., watchers: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., data_planes: _Optional[_Mapping[str, int]] = ..., arena_bytes: _Optional[int] = ...) -> None: ...
