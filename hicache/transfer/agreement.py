"""What the ranks of one replica tell each other once a tick, and how it becomes one answer for all.

Every rank sends one message of one fixed size and gets those of all: which jobs have ended and what they
brought, whether storage is there, a digest of what it has decided, and from rank 0 the time and what it
has to say to the others. Pure data and one call; who carries the messages is a `Collective`.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache.clock import Clock
from hicache.errors import RanksDiverged
from hicache.transfer.base import Done, JobId, JobKind, Why

MESSAGE_BYTES = 32 << 10
_WORDS_BYTES = 12 << 10  # of a message: what rank 0 says to all

_VERSION = 1
# version, words in this message, storage (_THERE, _BYPASSED), tick, time, decisions, epoch of storage
_HEAD = struct.Struct("<HHBxxxQdQQ")
_JOB = struct.Struct("<BBd")  # ended | failed << 1, why as of _WHYS, seconds
_FRAME = struct.Struct("<I")
_ENDED, _FAILED = 1, 2
_THERE, _BYPASSED = 1, 2
_WHYS = (None, *Why)


class Collective(ABC):
    """Carries messages between the ranks of one replica. Used by the cache's thread of each rank."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def gather(self, message: bytes) -> list[bytes]:
        """Send a message as long as every other rank's, and return those of all, by rank.

        Blocks until all have come. Raises RankLost if one has gone, or does not come within the time-out.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave; whoever waits for this rank, or will, gets RankLost."""


class AgreedClock:
    """Rank 0's time as of the last tick: the same on all ranks, so that a deadline has one verdict."""

    def __init__(self, local: Clock) -> None:
        self.local = local
        self._now = float("-inf")  # before the first tick

    def now(self) -> float:
        return self._now

    def set(self, when: float) -> None:
        """Take over what rank 0 said; time does not go back."""
        self._now = max(self._now, when)


@dataclass(slots=True)
class AgreedJob:
    """A job that has not ended on all ranks, or whose flags are not all agreed yet."""

    job: JobId
    kind: JobKind
    count: int  # flags
    done: Done | None = None  # of this rank
    failed: bool = False  # on any rank, once it has ended on all
    seconds: float = 0.0  # of the slowest rank
    why: Why | None = None  # of the first rank that has a reason
    agreed: int = 0  # leading flags that are final
    flags: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.flags = bytearray(self.count)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a job's part lies in every rank's message."""

    entry: AgreedJob
    at: int
    first: int  # flag
    count: int  # flags


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank has to tell about itself."""

    tick: int
    now: float
    decisions: int
    has_storage: bool
    epoch: int
    bypassed: bool = False


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks have in common after a tick."""

    now: float
    has_storage: bool  # on every rank
    bypassed: bool  # attached on every rank, and left alone by some
    epoch: int  # grows when any rank's does
    ended: list[AgreedJob]


def layout(jobs: Sequence[AgreedJob]) -> list[_Place]:
    """Place open jobs in a message, oldest first; what does not fit waits for a later tick.

    A function of what all ranks know alike. A job with more flags than there is room for is agreed on piece
    by piece.
    """
    places, at, end = [], _HEAD.size, MESSAGE_BYTES - _WORDS_BYTES
    for entry in jobs:
        room = (end - at - _JOB.size) * 8
        if room < 8:
            break
        count = min(entry.count - entry.agreed, room)
        places.append(_Place(entry, at, entry.agreed, count))
        at += _JOB.size + -(-count // 8)
    return places


def encode(local: Local, places: Sequence[_Place], arrived: Sequence[bytes], words: bytes) -> bytes:
    """Write one rank's message. `arrived` has the flags of each placed job on this rank, so far or final."""
    message = bytearray(MESSAGE_BYTES)
    storage = (_THERE if local.has_storage else 0) | (_BYPASSED if local.bypassed else 0)
    head = (storage, local.tick, local.now, local.decisions, local.epoch)
    _HEAD.pack_into(message, 0, _VERSION, len(words), *head)
    for place, flags in zip(places, arrived, strict=True):
        done = place.entry.done
        status = 0 if done is None else _ENDED | (_FAILED if done.failed else 0)
        why, seconds = (0, 0.0) if done is None else (_WHYS.index(done.why), done.seconds)
        _JOB.pack_into(message, place.at, status, why, seconds)
        piece = np.frombuffer(flags.ljust(place.entry.count, b"\0"), np.uint8)
        bits = np.packbits(piece[place.first : place.first + place.count]).tobytes()
        start = place.at + _JOB.size
        message[start : start + len(bits)] = bits
    start = MESSAGE_BYTES - _WORDS_BYTES
    message[start : start + len(words)] = words
    return bytes(message)


def combine(tick: int, places: Sequence[_Place], messages: Sequence[bytes]) -> Agreed:
    """Make one answer out of all messages: the same on every rank.

    Jobs have ended when they have on all; flags are those that every rank has set. Raises RanksDiverged if
    the ranks are not at the same tick, or have decided differently before it.
    """
    heads = [_HEAD.unpack_from(message) for message in messages]
    for name, column in (("version", 0), ("tick", 3), ("decisions", 5)):
        values = [head[column] for head in heads]
        if len(set(values)) > 1:
            raise RanksDiverged(f"the ranks of this replica differ in their {name} at tick {tick}: {values}")
    there = all(head[2] & _THERE for head in heads)
    ended = []
    for place in places:
        statuses = [_JOB.unpack_from(message, place.at) for message in messages]
        start, size = place.at + _JOB.size, -(-place.count // 8)
        both = np.frombuffer(messages[0], np.uint8, size, start)
        for message in messages[1:]:
            both = both & np.frombuffer(message, np.uint8, size, start)
        entry = place.entry
        entry.flags[place.first : place.first + place.count] = np.unpackbits(
            both, count=place.count
        ).tobytes()
        if not all(status & _ENDED for status, _, _ in statuses):
            continue
        entry.failed = any(status & _FAILED for status, _, _ in statuses)
        entry.why = _WHYS[next((why for _, why, _ in statuses if why), 0)]
        entry.seconds = max(seconds for _, _, seconds in statuses)
        entry.agreed += place.count
        if entry.agreed == entry.count:
            ended.append(entry)
    return Agreed(
        now=heads[0][4],
        has_storage=there,
        bypassed=not there and all(head[2] for head in heads),
        epoch=sum(head[6] for head in heads),
        ended=ended,
    )


class Words:
    """What rank 0 says to all, in order, cut to the room that messages have for it."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._in = bytearray()

    def say(self, text: bytes) -> None:
        """Queue a text; every rank hears it whole, at the same tick."""
        self._out += _FRAME.pack(len(text)) + text

    def next(self) -> bytes:
        """Take what goes out with the next message."""
        piece = bytes(self._out[:_WORDS_BYTES])
        del self._out[:_WORDS_BYTES]
        return piece

    def hear(self, message: bytes) -> list[bytes]:
        """Take in rank 0's message; return the texts that are whole by now."""
        start = MESSAGE_BYTES - _WORDS_BYTES
        self._in += message[start : start + _HEAD.unpack_from(message)[1]]
        texts = []
        while len(self._in) >= _FRAME.size:
            end = _FRAME.size + _FRAME.unpack_from(self._in)[0]
            if len(self._in) < end:
                break
            texts.append(bytes(self._in[_FRAME.size : end]))
            del self._in[:end]
        return texts
