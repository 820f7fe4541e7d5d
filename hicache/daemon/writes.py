"""Writes in progress: reservations by number, who holds them, when they lapse, and uploads into them.

reserved --claim--> uploading --finish--> visible      bytes through the daemon
    |                   |
  abort, lapse       abandon, stall ----> gone without a trace

reserved --publish--> visible                          bytes written in the arena by the client
    |
  abort, client gone ----> gone without a trace
  lapse --> set aside, since the client may still write --abort, publish, client gone, long time--> gone
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.clock import Clock
from hicache.daemon.arena_store import ArenaStore, extent_of
from hicache.daemon.extents import Extent
from hicache.daemon.sessions import Session
from hicache.daemon.store import SharedStore
from hicache.storage_backends.base import Reservation, WriteOutcome

logger = logging.getLogger(__name__)


# How much longer than a reservation its place in the arena is kept from others while its client lives.
ASIDE_FACTOR = 10


class WriterState(enum.Enum):
    """What is known of a process that is no longer attached."""

    LIVES = "lives"  # or may: it closed its connection, perhaps with a thread that still writes
    ENDED = "ended"


class BadUpload(Exception):
    """The stream does not carry the bytes that were announced."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One reservation of one session."""

    session: Session
    reservation: Reservation
    size: int
    lapses_at: float
    in_arena: bool  # its client writes to the extent itself


@dataclass(frozen=True, slots=True, eq=False)
class _Aside:
    """A place whose reservation lapsed while its client lives, stopped perhaps, and may yet write there."""

    session: Session
    extent: Extent
    ends_at: float


class Upload:
    """The bytes of a batch on their way into its reservations. Owned by the thread of one Commit."""

    def __init__(self, held: Sequence[Held | None], sizes: Sequence[int], stop: Callable[[], object]) -> None:
        self.held = tuple(held)  # None where the reservation is gone: its bytes are skipped
        self.stop = stop  # ends the stream from another thread
        self.progress_at = 0.0
        self._sizes = tuple(sizes)  # each at least 1
        self._index = 0
        self._offset = 0

    def feed(self, data: memoryview) -> None:
        """Copy the next bytes of the stream to where they belong. Raises BadUpload if there are too many."""
        while len(data):
            if self._index == len(self._sizes):
                raise BadUpload(f"{len(data)} bytes behind the last object")
            piece = data[: self._sizes[self._index] - self._offset]
            target = self.held[self._index]
            if target is not None:
                target.reservation.buffer[self._offset : self._offset + len(piece)] = piece
            self._offset += len(piece)
            data = data[len(piece) :]
            if self._offset == self._sizes[self._index]:
                self._index += 1
                self._offset = 0

    def check_complete(self) -> None:
        """Raise BadUpload unless every object has all its bytes."""
        if self._index < len(self._sizes):
            raise BadUpload(
                f"the stream ends in object {self._index} of {len(self._sizes)}, "
                f"at byte {self._offset} of {self._sizes[self._index]}"
            )


class Writes:
    """All reservations and uploads. Guarded by its own lock, which is not held across store calls."""

    def __init__(self, store: SharedStore, *, clock: Clock, reservation_seconds: float) -> None:
        self._store = store
        self._backend = store.backend
        self._arena = store.backend if isinstance(store.backend, ArenaStore) else None
        self._clock = clock
        self._seconds = reservation_seconds
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._held: dict[int, Held] = {}
        self._uploads: set[Upload] = set()
        self._aside: dict[int, _Aside] = {}  # by the reservation's number; counted in the session's share
        self.lapsed = 0  # reservations taken back, uploads stopped

    def __len__(self) -> int:
        return len(self._held) + sum(len(upload.held) for upload in tuple(self._uploads))

    def reserved_bytes(self) -> int:
        """Return the bytes of all reservations, and of places kept from others after one lapsed."""
        with self._lock:
            aside = sum(one.extent.size for one in self._aside.values())
            held = [*self._held.values(), *(one for upload in self._uploads for one in upload.held if one)]
        return aside + sum(one.size for one in held)

    def begin(
        self, session: Session, keys: Sequence[str], sizes: Sequence[int], *, in_arena: bool = False
    ) -> list[tuple[int, Reservation | WriteOutcome]]:
        """Reserve room; return (number, reservation) where it was given, (0, outcome) where not.

        `in_arena` says that the client writes to the extents itself.
        """
        self.expire()
        granted = session.reserve(sizes)
        wanted = [index for index, ok in enumerate(granted) if ok]
        answers: list[tuple[int, Reservation | WriteOutcome]] = [(0, WriteOutcome.NO_SPACE)] * len(keys)
        try:
            results = self._backend.begin_write([keys[i] for i in wanted], [sizes[i] for i in wanted])
        except BaseException:
            session.unreserve(sum(sizes[i] for i in wanted))
            raise
        lapses_at = self._clock.now() + self._seconds
        with self._lock:
            for index, result in zip(wanted, results, strict=True):
                if isinstance(result, WriteOutcome):
                    session.unreserve(sizes[index])
                    answers[index] = (0, result)
                else:
                    number = next(self._numbers)
                    self._held[number] = Held(session, result, sizes[index], lapses_at, in_arena)
                    answers[index] = (number, result)
        return answers

    def claim(
        self, session: Session, numbers: Sequence[int], sizes: Sequence[int], stop: Callable[[], object]
    ) -> Upload:
        """Take reservations out of the table into an upload, which must be finished or abandoned.

        `stop` is called from another thread if the upload makes no progress for the reservation time.
        Raises BadUpload, with nothing taken, if a size is not what was reserved or a number is repeated.
        """
        if len(set(numbers)) < len(numbers):
            raise BadUpload("a reservation is named twice")
        with self._lock:
            found = [self._held.get(number) for number in numbers]
            found = [one if one is not None and one.session is session else None for one in found]
            for number, one, size in zip(numbers, found, sizes, strict=True):
                if one is not None and one.size != size:
                    raise BadUpload(f"reservation {number} is of {one.size} bytes, not {size}")
            for number, one in zip(numbers, found, strict=True):
                if one is not None:
                    del self._held[number]
            upload = Upload(found, sizes, stop)
            upload.progress_at = self._clock.now()
            self._uploads.add(upload)
        return upload

    def note_progress(self, upload: Upload) -> None:
        upload.progress_at = self._clock.now()

    def finish(self, upload: Upload) -> list[WriteOutcome]:
        """Make a complete upload visible; return an outcome per object. The upload ends, whatever happens."""
        live = [one for one in upload.held if one is not None]
        try:
            upload.check_complete()
            outcomes = iter(self._store.commit([one.reservation for one in live]))
            live = []
        finally:
            self._end(upload)
            self._backend.abort([one.reservation for one in live])
        return [WriteOutcome.FAILED if one is None else next(outcomes) for one in upload.held]

    def abandon(self, upload: Upload) -> None:
        """End an upload without a trace. Fine for one that has ended."""
        if self._end(upload):
            self._backend.abort([one.reservation for one in upload.held if one is not None])

    def publish(
        self,
        session: Session,
        numbers: Sequence[int],
        *,
        generations: Sequence[int],
        checksums: Sequence[int],
    ) -> tuple[list[WriteOutcome], int]:
        """Make visible what the session wrote in the arena; return an outcome per reservation, all of which
        end, and the bytes taken."""
        with self._lock:
            held = [self._pop_of(session, number) for number in numbers]
            aside = self._pop_aside(session, numbers)
        good: list[Held | None] = []
        refused = []
        for one, generation, checksum in zip(held, generations, checksums, strict=True):
            good.append(None)
            if one is None:
                continue
            extent = extent_of(one.reservation) if one.in_arena else None
            if extent is None or extent.generation != generation:
                refused.append(one)
            else:
                extent.checksum = checksum
                good[-1] = one
        self._end_aside(aside)  # the client writes there no more
        self._give_back(refused)
        stored = [one for one in good if one is not None]
        session.unreserve(sum(one.size for one in stored))
        outcomes = iter(self._store.commit([one.reservation for one in stored]))
        answers = [WriteOutcome.FAILED if one is None else next(outcomes) for one in good]
        return answers, sum(one.size for one in stored)

    def _pop_of(self, session: Session, number: int) -> Held | None:
        """Take a reservation of this session out of the table. Called under the lock."""
        found = self._held.get(number)
        return self._held.pop(number) if found is not None and found.session is session else None

    def _pop_aside(self, session: Session, numbers: Sequence[int]) -> list[_Aside]:
        """Take places of this session that were set aside out of the table. Called under the lock."""
        if not self._aside:
            return []
        mine = [n for n in set(numbers) if n in self._aside and self._aside[n].session is session]
        return [self._aside.pop(number) for number in mine]

    def abort(self, session: Session, numbers: Sequence[int]) -> None:
        """Give reservations of this session back; others and unknown ones are ignored."""
        with self._lock:
            gone = [one for number in set(numbers) if (one := self._pop_of(session, number)) is not None]
            aside = self._pop_aside(session, numbers)
        self._give_back(gone)
        self._end_aside(aside)

    def in_arena(self, session: Session) -> bool:
        """Return whether a session has places in the arena that it may write to."""
        with self._lock:
            held = any(one.session is session and one.in_arena for one in self._held.values())
            return held or any(one.session is session for one in self._aside.values())

    def client_gone(self, session: Session, writer: WriterState) -> None:
        """Take back what a client had in the arena, at once if nobody is left who could write there."""
        now = self._clock.now()
        aside = []
        with self._lock:
            mine = [n for n, one in self._held.items() if one.session is session and one.in_arena]
            gone = [self._held.pop(number) for number in mine]
            if writer is WriterState.ENDED:
                numbers = [n for n, one in self._aside.items() if one.session is session]
                aside = [self._aside.pop(number) for number in numbers]
            self.lapsed += len(gone)
        if writer is WriterState.ENDED:
            self._give_back(gone)
            self._end_aside(aside)
        else:
            for number, one in zip(mine, gone, strict=True):
                self._set_aside(number, one, now)

    def expire(self) -> None:
        """Take back what has lapsed and stop uploads that stand still."""
        now = self._clock.now()
        with self._lock:
            late = [number for number, one in self._held.items() if one.lapses_at <= now]
            gone = [self._held.pop(number) for number in late]
            over = [number for number, one in self._aside.items() if one.ends_at <= now]
            aside = [self._aside.pop(number) for number in over]
            stalled = [upload for upload in self._uploads if upload.progress_at + self._seconds <= now]
            self.lapsed += len(gone) + len(stalled)
        if gone:
            logger.info("took back %d reservations that were neither committed nor aborted", len(gone))
        self._end_aside(aside)
        self._give_back([one for one in gone if not one.in_arena])
        for number, one in zip(late, gone, strict=True):
            if one.in_arena:
                self._set_aside(number, one, now)
        for upload in stalled:
            logger.warning("stopping an upload of %d objects that stands still", len(upload.held))
            upload.stop()

    def close(self) -> None:
        """Take every reservation back."""
        with self._lock:
            gone = list(self._held.values())
            self._held.clear()
            aside = list(self._aside.values())
            self._aside.clear()
        self._give_back(gone)
        self._end_aside(aside)

    def _give_back(self, gone: Sequence[Held]) -> None:
        if not gone:
            return
        for one in gone:
            one.session.unreserve(one.size)
        self._backend.abort([one.reservation for one in gone])

    def _set_aside(self, number: int, held: Held, now: float) -> None:
        """Free the key of a lapsed reservation, and keep its place from others."""
        if self._arena is None:
            return
        for extent in self._arena.withdraw([held.reservation]):
            aside = _Aside(held.session, extent, now + self._seconds * ASIDE_FACTOR)
            with self._lock:
                self._aside[number] = aside
            return
        held.session.unreserve(held.size)  # the store had ended it

    def _end_aside(self, ended: Sequence[_Aside]) -> None:
        for one in ended:
            one.session.unreserve(one.extent.size)
        if ended and self._arena is not None:
            self._arena.unpin([one.extent for one in ended])

    def _end(self, upload: Upload) -> bool:
        with self._lock:
            if upload not in self._uploads:
                return False
            self._uploads.remove(upload)
        for one in upload.held:
            if one is not None:
                one.session.unreserve(one.size)
        return True
