"""Calls over the Unix socket of an attached client: the same messages as gRPC's, a fifth of the time.

A frame is the payload's length (u32), a number (u32) and a byte, all little-endian, then the payload.
The byte of a request is an index of METHODS; of an answer, which repeats the request's number, a gRPC
status code, and the payload is the reply or the status's message. One request at a time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import grpc

from hicache.rpc import wire

METHODS = ("Probe", "Locate", "BeginWrite", "Publish")

_HEAD = struct.Struct("<IIB")
_RECEIVE = 1 << 18
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class ChannelLost(Exception):
    """The other end closed, or what it sends makes no sense; gRPC tells what happened."""


class CallStatus(grpc.RpcError):
    """What a call ended with instead of a reply, as gRPC raises it."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self._status = status
        self._message = message

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._message


class Frames:
    """Frames out of and into a connected socket. One reader and one writer at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()  # of the frame that is not there whole

    def receive(self, *, timeout_s: float | None = None) -> tuple[int, int, bytes]:
        """Return the next frame's number, byte and payload. Raises ChannelLost, TimeoutError (call again)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        received = self._received
        while True:
            if len(received) >= _HEAD.size:
                size, number, what = _HEAD.unpack_from(received)
                if size > wire.MAX_CONTROL_BYTES:
                    raise ChannelLost(f"a frame of {size} bytes")
                end = _HEAD.size + size
                if len(received) >= end:
                    payload = bytes(received[_HEAD.size : end])
                    del received[:end]
                    return number, what, payload
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            try:
                self._connection.settimeout(left)
                data = self._connection.recv(_RECEIVE)
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelLost(str(error)) from error
            if not data:
                raise ChannelLost("closed by the other end")
            received += data

    def send(self, number: int, what: int, payload: bytes, *, timeout_s: float | None = None) -> None:
        """Send a frame. Raises ChannelLost, also when the time was up with a part sent."""
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(_HEAD.pack(len(payload), number, what) + payload)
        except OSError as error:
            raise ChannelLost(str(error)) from error


class Channel:
    """The client's end. Thread-safe: callers take turns. A call that timed out leaves it usable."""

    def __init__(self, connection: socket.socket) -> None:
        self._frames = Frames(connection)
        self._lock = threading.Lock()  # held during a call, for at most its time
        self._number = 0
        self._lost = False

    def call(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """Return the reply. Raises CallStatus, ChannelLost and TimeoutError."""
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError
        try:
            if self._lost:
                raise ChannelLost("lost before")
            number = self._number = (self._number + 1) % (1 << 32)
            self._frames.send(number, METHODS.index(method), request, timeout_s=deadline - time.monotonic())
            while True:
                told, status, payload = self._frames.receive(timeout_s=deadline - time.monotonic())
                if told == number:
                    break  # others answer calls that nobody waits for any more
        except ChannelLost:
            self._lost = True
            raise
        finally:
            self._lock.release()
        if status:
            code = _CODES.get(status, grpc.StatusCode.UNKNOWN)
            raise CallStatus(code, payload.decode(errors="replace"))
        return payload


def close(connection: socket.socket) -> None:
    """Close a socket that other threads may be blocked on; they see its end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
