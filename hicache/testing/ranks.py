"""Ranks of one replica as threads of one process, in lockstep: what each does depends on its seed alone.

run_ranks(2, lambda collective: ...)  # one call per rank, each on its own thread
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from hicache.engine.scheduler import Runner
from hicache.errors import LoadFailed, RankLost
from hicache.request import Request
from hicache.transfer.agreement import Collective

_T = TypeVar("_T")


class Meeting:
    """Where `size` threads exchange messages. A thread that leaves, or comes too late, ends it for all."""

    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._messages: list[bytes] = [b""] * size
        self.lengths: list[list[int]] = [[] for _ in range(size)]  # of every message, by rank

    def member(self, rank: int) -> MeetingMember:
        return MeetingMember(self, rank)

    def gather(self, rank: int, message: bytes) -> list[bytes]:
        self.lengths[rank].append(len(message))
        self._messages[rank] = message
        try:
            self._barrier.wait()
            messages = list(self._messages)
            self._barrier.wait()  # nobody writes the next message before all have read this one
        except threading.BrokenBarrierError as error:
            raise RankLost("a rank of this replica is gone, or came too late") from error
        return messages

    def leave(self) -> None:
        self._barrier.abort()


class MeetingMember(Collective):
    """One thread's seat."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def gather(self, message: bytes) -> list[bytes]:
        return self._meeting.gather(self._rank, message)

    def close(self) -> None:
        self._meeting.leave()


def run_ranks(size: int, work: Callable[[MeetingMember], _T], *, timeout_s: float = 60.0) -> list[_T]:
    """Run `work` once per rank; return what each returned. Raises the first error that is no RankLost."""
    meeting = Meeting(size, timeout_s=timeout_s)
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(meeting.member(rank))
        except BaseException as error:  # noqa: BLE001 - raised again below, on the caller's thread
            errors.append(error)
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, RankLost)), errors[0])
    return [results[rank] for rank in range(size)]


class RankedRunner:
    """A runner whose step fails on every rank if a load failed on any, as a tensor-parallel model's does."""

    def __init__(self, inner: Runner, collective: Collective) -> None:
        self._inner, self._collective = inner, collective

    def prefill(self, request: Request, start: int, end: int) -> int | None:
        loading = request.load is not None
        token: int | None = None
        failed = False
        try:
            token = self._inner.prefill(request, start, end)
        except LoadFailed:
            failed = True
        if loading and b"\1" in self._collective.gather(bytes([failed])):
            raise LoadFailed("the load failed on a rank of this replica")
        if failed:
            raise LoadFailed("the load failed")
        return token

    def decode(self, request: Request) -> int:
        token = self.prefill(request, len(request.tokens) - 1, len(request.tokens))
        assert token is not None
        return token
