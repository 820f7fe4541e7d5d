"""The entry point that SGLang runs in each of its processes: says once what is installed beside it.

The storage backend and the linker are chosen by flags alone. What is done here: listen for changes of the
weights, of which SGLang does not tell its storage, and make `--radix-cache-backend hicache` known.
"""

from __future__ import annotations

import logging
import multiprocessing
from importlib import metadata

from hicache.integrations.sglang import TESTED_VERSIONS, live
from hicache.integrations.sglang.radix import backend

logger = logging.getLogger(__name__)


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = tuple(
    f"{_UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")
)
"""What SGLang's scheduler changes weights by."""


def activate() -> None:
    """Hear of changes of the weights, offer the radix cache; log one line in SGLang's first process."""
    _listen()
    backend.register()
    if multiprocessing.parent_process() is not None:
        return
    ours, theirs = metadata.version("hicache-tiered"), metadata.version("sglang")
    tested = theirs in TESTED_VERSIONS
    logger.log(
        logging.INFO if tested else logging.WARNING,
        "HiCache %s is installed beside SGLang %s (%s). It is active only where --hicache-storage-backend "
        "dynamic, the external linker or --radix-cache-backend names it; `hicache sglang-flags` prints the "
        "flags.",
        ours,
        theirs,
        "tested" if tested else f"never tested; tested are {', '.join(TESTED_VERSIONS)}",
    )


def _listen() -> None:
    # Only SGLang runs this; elsewhere, as in --help, it is not there.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for target in UPDATES:
        HookRegistry.register(target, _before_update, HookType.BEFORE)


def _before_update(*args: object, **kwargs: object) -> None:
    live.weights_changed()
