"""SGLang: a storage backend for its HiCache, chosen by `--hicache-storage-backend dynamic`.

Importing this package loads neither SGLang nor torch.
"""

from __future__ import annotations

TESTED_VERSIONS = ("0.5.23",)
"""Versions of SGLang whose interface the adapter was tested against, with the real engine."""
