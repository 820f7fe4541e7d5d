"""SGLang's own storage metrics: pages and bandwidth per operation, as its Prometheus collector takes them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

_MOST = 1024  # operations kept between two visits of the collector


@dataclass(slots=True)
class _Direction:
    pages: list[int] = field(default_factory=list)
    gigabytes_per_s: list[float] = field(default_factory=list)

    def add(self, pages: int, page_bytes: int, seconds: float) -> None:
        if pages and seconds > 0 and len(self.pages) < _MOST:
            self.pages.append(pages)
            self.gigabytes_per_s.append(pages * page_bytes / seconds / (1 << 30))


class OperationMetrics:
    """Thread-safe. Collects nothing unless SGLang runs with --enable-metrics."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._reads = _Direction()
        self._writes = _Direction()

    def read(self, pages: int, page_bytes: int, seconds: float) -> None:
        if self._enabled:
            with self._lock:
                self._reads.add(pages, page_bytes, seconds)

    def wrote(self, pages: int, page_bytes: int, seconds: float) -> None:
        if self._enabled:
            with self._lock:
                self._writes.add(pages, page_bytes, seconds)

    def take(self) -> object:
        """Return a StorageMetrics and begin anew; None unless enabled."""
        if not self._enabled:
            return None
        # SGLang checks the type; the module is heavy and only there beside a whole server.
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415

        with self._lock:
            reads, self._reads = self._reads, _Direction()
            writes, self._writes = self._writes, _Direction()
        return StorageMetrics(
            prefetch_pgs=reads.pages,
            backup_pgs=writes.pages,
            prefetch_bandwidth=reads.gigabytes_per_s,
            backup_bandwidth=writes.gigabytes_per_s,
        )
