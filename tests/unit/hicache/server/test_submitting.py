"""Queueing the requests of one call: all of them, or none."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.server.app import _submit


def test_a_refused_request_takes_back_its_batch_and_nobody_elses() -> None:
    """An id in use is refused; aborting by that id would cut off the client that uses it."""
    aborted: list[str] = []

    def submit(request: Any, sink: object) -> Future[None]:
        future: Future[None] = Future()
        if request.rid == "taken":
            future.set_exception(ValueError("in use"))
        else:
            future.set_result(None)
        return future

    service: Any = SimpleNamespace(engine=SimpleNamespace(submit=submit, abort=aborted.append))
    replies: Any = [
        SimpleNamespace(request=SimpleNamespace(rid=rid), sink=None) for rid in ("a", "taken", "b")
    ]
    with pytest.raises(ValueError, match="in use"):
        asyncio.run(_submit(service, replies))
    assert aborted == ["a"]
