"""The storage backends of this process, for events that SGLang does not tell its storage about.

The one such event is a change of the weights: SGLang empties L1 and L2 then, while what L3 holds under the
old weight version would be read on with the new weights.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class KnowsWeights(Protocol):
    """A backend whose objects are those of certain weights."""

    def weights_changed(self) -> None:
        """Turn L3 off until it is attached with another weight version."""


_lock = threading.Lock()
_backends: weakref.WeakSet[KnowsWeights] = weakref.WeakSet()


def add(backend: KnowsWeights) -> None:
    """Let a backend hear of changes for as long as it lives."""
    with _lock:
        _backends.add(backend)


def weights_changed() -> None:
    """Tell every backend of this process."""
    with _lock:
        backends = list(_backends)
    for backend in backends:
        backend.weights_changed()
