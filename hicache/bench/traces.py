"""Recorded request traces: both formats, in time order, with block ids made into tokens.

Traces carry no contents, only ids of blocks: equal ids are equal blocks. `Trace.tokens` expands them
deterministically, so that equal blocks become equal tokens and different ones never collide.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from hicache.errors import ConfigError
from hicache.keys import NO_SCOPE
from hicache.keys import scope as scope_of

_Record: TypeAlias = "Mapping[str, object]"

CONVERSATION_BLOCK = 512  # tokens per block id of the JSONL format, which does not state it itself
_MAX_TOKEN_ID = 2**32


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `blocks` name its tokens from the start; they may end within the last block, or before it.

    Blocks of equal id in the same scope hold equal tokens. Tokens that no block names are this
    request's own.
    """

    time_s: float
    input_length: int
    output_length: int
    blocks: tuple[int, ...]
    block_size: int
    scope: bytes


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a .jsonl file, a .json session, or a folder of either, as one stream in time order.

    Sessions of a folder begin together, each in its own scope. Raises ConfigError, naming file and
    line or request, for what cannot be used.
    """
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl"))
        if not files:
            raise ConfigError(f"{path}: no .json or .jsonl file in this folder")
    elif path.is_file():
        files = [path]
    else:
        raise ConfigError(f"{path}: no such file or folder")
    requests = [request for file in files for request in _read_file(file)]
    if not requests:
        raise ConfigError(f"{path}: no request in it")
    return sorted(requests, key=lambda request: request.time_s)


def _read_file(file: Path) -> Iterator[TraceRequest]:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    if file.suffix == ".jsonl":
        yield from _conversation(file, raw)
    else:
        yield from _session(file, raw)


def _conversation(file: Path, raw: bytes) -> Iterator[TraceRequest]:
    """One JSON a line; ids are global and blocks of 512, the last may be filled in part."""
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        record = _decode(line, where)
        yield _request(
            record,
            where,
            time_s=_number(record, "timestamp", where) / 1000,
            names=("input_length", "output_length"),
            block_size=CONVERSATION_BLOCK,
            scope=NO_SCOPE,
        )


def _session(file: Path, raw: bytes) -> Iterator[TraceRequest]:
    """One session a file; sub-agents are nested in `requests`, in their own time but the same scope."""
    record = _decode(raw, str(file))
    block_size = _integer(record, "block_size", str(file))
    if block_size < 1:
        raise ConfigError(f"{file}: block_size {block_size} must be positive")
    is_local = record.get("hash_id_scope") == "local"
    scope = scope_of(extra_key=str(record.get("id", file.stem))) if is_local else NO_SCOPE
    pending = [(record, 0.0, str(file))]
    while pending:
        parent, start_s, where = pending.pop()
        for number, child in enumerate(_children(parent, where)):
            here = f"{where} request {number}"
            time_s = start_s + _number(child, "t", here)
            if "requests" in child:
                pending.append((child, time_s, here))
                continue
            yield _request(
                child, here, time_s=time_s, names=("in", "out"), block_size=block_size, scope=scope
            )


def _request(
    record: _Record, where: str, *, time_s: float, names: tuple[str, str], block_size: int, scope: bytes
) -> TraceRequest:
    input_length, output_length = (_integer(record, name, where) for name in names)
    blocks = record.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(b) is int and b >= 0 for b in blocks):
        raise ConfigError(f"{where}: hash_ids must be a list of non-negative integers")
    if input_length < 1:
        raise ConfigError(f"{where}: {names[0]} {input_length} must be at least 1")
    if len(blocks) > -(-input_length // block_size):
        raise ConfigError(f"{where}: {len(blocks)} blocks of {block_size} for {input_length} tokens")
    return TraceRequest(time_s, input_length, output_length, tuple(blocks), block_size, scope)


def _decode(raw: bytes, where: str) -> _Record:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, not {type(value).__name__}")
    return value


def _children(record: _Record, where: str) -> list[_Record]:
    children = record.get("requests")
    if not isinstance(children, list) or not all(isinstance(c, dict) for c in children):
        raise ConfigError(f"{where}: `requests` must be a list of objects")
    return children


def _number(record: _Record, name: str, where: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: {name} is {value!r}, not a number")
    return float(value)


def _integer(record: _Record, name: str, where: str) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where}: {name} is {value!r}, not a whole number")
    return value


class TokenExpander:
    """Makes block ids into tokens: distinct blocks get distinct tokens, so prefixes match as recorded.

    Token j of block i is i * block_size + j, counted within the request's scope. Tokens no block
    names are drawn downwards from the top of the id space, never twice.
    """

    def __init__(self) -> None:
        self._highest = 0  # first token id above every named block so far
        self._own = _MAX_TOKEN_ID  # the lowest id drawn for unnamed tokens so far
        self._offsets: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = {}

    def expand(self, request: TraceRequest) -> array[int]:
        """Return the prompt's tokens, typecode 'I'. Raises ConfigError once 2**32 ids do not suffice."""
        size = request.block_size
        if size not in self._offsets:
            self._offsets[size] = np.arange(size, dtype=np.int64)
        named = np.asarray(request.blocks, dtype=np.int64)[:, None] * size + self._offsets[size]
        named = named.reshape(-1)[: request.input_length]
        missing = request.input_length - named.size
        self._highest = max(self._highest, (max(request.blocks, default=-1) + 1) * size)
        self._own -= missing
        if self._highest > self._own:
            raise ConfigError(
                f"block ids up to {max(request.blocks, default=0)} need more than 2**32 token ids"
            )
        tokens = array("I", named.astype("<u4").tobytes())
        tokens.extend(range(self._own, self._own + missing))
        return tokens
