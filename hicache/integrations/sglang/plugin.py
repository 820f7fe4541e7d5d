"""The entry point that SGLang runs in each of its processes: says once what is installed beside it.

It changes nothing in SGLang; the storage backend is chosen by flags alone.
"""

from __future__ import annotations

import logging
import multiprocessing
from importlib import metadata

from hicache.integrations.sglang import TESTED_VERSIONS

logger = logging.getLogger(__name__)


def activate() -> None:
    """Log one line in SGLang's first process; nothing in the others."""
    if multiprocessing.parent_process() is not None:
        return
    ours, theirs = metadata.version("hicache-tiered"), metadata.version("sglang")
    tested = theirs in TESTED_VERSIONS
    logger.log(
        logging.INFO if tested else logging.WARNING,
        "HiCache %s is installed beside SGLang %s (%s). It is active only where --hicache-storage-backend "
        "dynamic names it; `hicache sglang-flags` prints the flags.",
        ours,
        theirs,
        "tested" if tested else f"never tested; tested are {', '.join(TESTED_VERSIONS)}",
    )
