"""The end of a drain: requests that are still running then are answered with 503, and counted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(slots=True)
class _Answer:
    """How far a request's answer is."""

    begun: bool = False


class Drain:
    """The application, with an end. Lives on the event loop.

    Whoever cancels a request's task (cut(), or the web server as it goes down) makes it answer 503 if its
    answer has not begun; an answer that has begun, a stream, ends where it is.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: dict[asyncio.Task[None], _Answer] = {}
        self._why = "the server is shutting down"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        answer = self._running[task] = _Answer()

        async def tell(message: Message) -> None:
            answer.begun = True
            await send(message)

        try:
            await self._app(scope, receive, tell)
        except asyncio.CancelledError:
            if not answer.begun:
                await self._refuse(send)
        finally:
            del self._running[task]

    def cut(self, why: str) -> int:
        """End what is running: 503 for all but streams, whose end is the engine's; return how many."""
        self._why = why
        for task, answer in self._running.items():
            if not answer.begun:
                task.cancel()
        return len(self._running)

    async def _refuse(self, send: Send) -> None:
        body = msgspec.json.encode({"error": {"message": self._why}})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
