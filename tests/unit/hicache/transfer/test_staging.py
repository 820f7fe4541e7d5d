"""Staging buffers, and those that an abandoned call may still write to."""

from __future__ import annotations

from hicache.transfer.staging import StagingPool


def test_a_buffer_given_back_is_used_again() -> None:
    """Registering memory costs milliseconds; one buffer per reader must do."""
    registered: list[memoryview] = []
    pool = StagingPool(4096, limit=2, register=registered.append)
    pool.prepare(1)
    first = pool.take()
    assert first is not None
    assert len(first) == 4096
    pool.give(first)
    assert pool.take() is first
    assert len(registered) == 1


def test_a_quarantined_buffer_never_comes_back() -> None:
    """A late write of a timed-out read into a reused buffer would pass for another object."""
    pool = StagingPool(4096, limit=2)
    lost = pool.take()
    assert lost is not None
    pool.quarantine(lost)
    lost[:4] = b"late"
    fresh = pool.take()
    assert fresh is not None
    assert fresh is not lost
    assert bytes(fresh[:4]) == bytes(4)
    assert pool.quarantined_bytes == 4096


def test_no_buffer_is_handed_out_once_the_cap_is_reached() -> None:
    """A store that hangs on every call must not eat the host's memory."""
    pool = StagingPool(4096, limit=2)
    for _ in range(2):
        buffer = pool.take()
        assert buffer is not None
        pool.quarantine(buffer)
    assert pool.exhausted
    assert pool.take() is None
