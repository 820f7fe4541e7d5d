"""Names of pages: the chained page hash and the scope that seeds it, exactly as SGLang computes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from hicache.types import Component, TokenBuffer

NO_SCOPE = b""  # the scope of a request that adds nothing to the key
