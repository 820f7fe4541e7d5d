"""What both ends do with a mapping: have its pages mapped before they are used.

The first touch of each page of a mapping is a fault, about ten times the cost of copying the page.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Callable

import numpy as np

STEP_BYTES = 16 << 20  # populated by one system call, which holds other mappings of the process up


class Populate(enum.IntEnum):
    """MADV_POPULATE_*: what the pages are wanted for. Since Linux 5.14; older kernels refuse."""

    READ = 22
    WRITE = 23


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found.restype = ctypes.c_int
    return found  # the interpreter lock is free during a foreign call


def populate(memory: memoryview, offset: int, size: int, what: Populate) -> bool:
    """Map [offset, offset + size) of a mapping, both multiples of the page size; False if the kernel cannot.

    A hint: what is not mapped now is at its first use.
    """
    madvise = _madvise()
    if madvise is None:
        return False
    start = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0] + offset
    return all(
        madvise(start + at, min(STEP_BYTES, size - at), what) == 0 for at in range(0, size, STEP_BYTES)
    )
