"""Publishes KV events over ZMQ as SGLang does: msgpack batches on a PUB socket, missed ones on request.

A message is topic, sequence (8 bytes, big-endian), and [time, events, rank]. A replay request is an empty
frame and a sequence; its replies are messages from there on, then one with sequence -1.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from typing import Any

import msgspec
import zmq

from hicache.cache.events import Batch, Cleared, Event, Removed
from hicache.config.kv_events import KvEventsConfig
from hicache.errors import ConfigError
from hicache.types import Component, Tier

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_STOP_S = 2.0
_LINGER_MS = 500  # what subscribers have not been sent when the publisher stops
_MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU_PINNED", Tier.STORAGE: "EXTERNAL"}


class _Tagged(msgspec.Struct, omit_defaults=True, tag=True):
    """On the wire: a map with `type`, and without what is None or not said."""


class BlockStored(_Tagged):
    """SGLang's event, and `component` where it is not FULL."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    component: str = "full"


class BlockRemoved(_Tagged):
    """SGLang's event, and why; `component` where it is not FULL."""

    block_hashes: list[int]
    medium: str | None = None
    reason: str = ""
    component: str = "full"


class AllBlocksCleared(_Tagged):
    """This replica holds nothing any more."""


def block_hash(digest: bytes) -> int:
    """A page's digest as routers know it: its first 8 bytes, signed."""
    return int.from_bytes(digest[:8], "big", signed=True)


def on_the_wire(event: Event, block_size: int) -> _Tagged:
    """Return an event in SGLang's shape."""
    if isinstance(event, Cleared):
        return AllBlocksCleared()
    hashes = [block_hash(digest) for digest in event.digests]
    component = event.component.name.lower()
    if isinstance(event, Removed):
        return BlockRemoved(hashes, _MEDIA[event.tier], event.why.value, component)
    parent = None if event.parent is None else block_hash(event.parent)
    return BlockStored(hashes, parent, event.tokens.tolist(), block_size, None, _MEDIA[event.tier], component)


class ZmqPublisher:
    """One PUB socket and the memory behind it, on a thread of its own. offer() is for one other thread.

    The constructor binds, so that a port that is taken is said at start (ConfigError). `described` is what
    a router must know to subscribe.
    """

    def __init__(self, config: KvEventsConfig, block_size: int) -> None:
        self._config, self._block_size = config, block_size
        self._components = {Component[name.upper()] for name in config.components}
        self._queue: deque[Batch] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._topic = config.topic.encode()
        self._stopping = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay: Any = None
        try:
            self._open()
        except zmq.ZMQError as error:
            self._close()
            raise ConfigError(
                f"--kv-events-config: {self._config.endpoint} or {self._config.replay_endpoint}: {error}"
            ) from error
        self.described = self._describe()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        config = self._config
        self._pub.set(zmq.SNDHWM, config.hwm)
        if config.binds:
            self._pub.bind(config.endpoint)
        else:
            self._pub.connect(config.endpoint)
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.set(zmq.SNDHWM, config.buffer_steps + 1)  # a whole replay, and its end
            self._replay.bind(config.replay_endpoint)

    def _describe(self) -> dict[str, object]:
        return {
            "endpoint": self._pub.get_string(zmq.LAST_ENDPOINT),
            "replay_endpoint": None if self._replay is None else self._replay.get_string(zmq.LAST_ENDPOINT),
            "topic": self._config.topic,
            "block_size": self._block_size,
            "components": list(self._config.components),
        }

    def has_room(self) -> bool:
        return len(self._queue) < self._config.max_queue_size

    def offer(self, batch: Batch) -> None:
        """Queue a batch. Never blocks."""
        self._queue.append(batch)
        self._ring()

    def stop(self) -> None:
        """Send what is queued and end."""
        self._stopping = True
        self._ring()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            logger.warning("the publisher of KV events is stuck; its thread is left behind")
            return
        self._close()

    def _ring(self) -> None:
        try:
            self._wake.send(b"\0")
        except BlockingIOError:
            return  # it has not noticed the last ones either

    def _close(self) -> None:
        for one in (self._pub, self._replay):
            if one is not None:
                one.close(linger=_LINGER_MS)
        self._context.term()
        self._wake.close()
        self._woken.close()

    # -- on the publisher's thread -------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken.fileno(), zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                stopping = self._stopping
                ready = dict(poller.poll())
                if self._woken.fileno() in ready:
                    self._woken.recv(4096)
                while self._queue:
                    self._publish(self._queue.popleft())
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay.recv_multipart())
                if stopping:
                    return
                if self._stopping:
                    self._ring()
        except zmq.ZMQError:
            logger.exception("KV events are not published any more")

    def _publish(self, batch: Batch) -> None:
        """Send a batch; one without anything that is told still moves the sequence on."""
        events = [
            on_the_wire(event, self._block_size)
            for event in batch.events
            if isinstance(event, Cleared) or event.component in self._components
        ]
        payload = msgspec.msgpack.encode([batch.at, events, 0])
        self._sent.append((batch.sequence, payload))
        self._pub.send_multipart((self._topic, batch.sequence.to_bytes(8, "big"), payload))

    def _answer(self, frames: list[bytes]) -> None:
        """Send what is kept from a sequence on, then the end."""
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a replay request of %d frames is not answered; it is '', sequence", len(frames))
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for sequence, payload in self._sent:
            if sequence >= first:
                self._replay.send_multipart((client, b"", self._topic, sequence.to_bytes(8, "big"), payload))
        self._replay.send_multipart((client, b"", b"", _END, b""))
