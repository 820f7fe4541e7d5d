"""Runs a workload on the reference engine in this process: real tensors, real copies, real seconds.

The model is the preset that has the system's components; its own pools decide what a page holds, so
byte sizes and rates of the simulated system do not apply.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from hicache.bench.in_process import InProcessDriver
from hicache.bench.report import RunReport, TurnResult, by_round
from hicache.bench.system import SimulatedSystem, Tiers
from hicache.bench.workloads import Workload
from hicache.engine.architecture import PRESETS, ReferenceConfig, reference_spec
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.engine.scheduler import FinalToken
from hicache.errors import ConfigError
from hicache.registry import create_backend
from hicache.types import Component

_PRESET_OF = {
    (Component.FULL,): "full",
    (Component.FULL, Component.SWA): "full-swa",
    (Component.FULL, Component.MAMBA): "full-mamba",
    (Component.FULL, Component.SWA, Component.MAMBA): "hybrid",
}


def reference_model(workload: Workload, system: SimulatedSystem) -> ReferenceConfig:
    """Return the preset for the system's components, with room for the longest conversation.

    Raises ConfigError if the workload draws token ids that the model does not have.
    """
    preset = PRESETS[_PRESET_OF[system.components]]
    if workload.vocab_size > preset.vocab:
        raise ConfigError(
            f"--vocab-size {workload.vocab_size}: the reference model has {preset.vocab} tokens"
        )
    context = workload.longest_prompt + workload.output_length
    return replace(preset, context_length=-(-context // preset.tile) * preset.tile)


def run_reference(
    workload: Workload,
    system: SimulatedSystem,
    *,
    tiers: Tiers,
    eviction_policy: str,
    final_token: FinalToken,
    on_result: Callable[[TurnResult], None],
) -> RunReport:
    """Run a workload to its end on a fresh engine; L3 is a `memory` backend in this process."""
    started = time.perf_counter()
    model = reference_model(workload, system)
    sizes = system.sizes(tiers, reference_spec(model, system.page_size, islands=system.enable_swa_islands))
    settings = EngineSettings(
        model=model,
        page_size=system.page_size,
        sizes=sizes,
        cache=system.config(eviction_policy),
        max_running_requests=system.max_running_requests,
        final_token=final_token,
        islands=system.enable_swa_islands,
    )
    storage = None
    if tiers is Tiers.L1_L2_L3:
        storage = create_backend("memory", {"capacity_bytes": int(system.l3_bytes)})
    driver = InProcessDriver(workload, on_result)
    engine = ReferenceEngine(settings, storage=storage, on_finish=driver.finished)
    try:
        duration = driver.drive(engine.scheduler)
    finally:
        engine.close()
        if storage is not None:
            storage.close()
    return RunReport(
        tiers=tiers.value,
        eviction_policy=eviction_policy,
        engine="reference",
        rounds=by_round(driver.results),
        duration_s=duration,
        wall_s=time.perf_counter() - started,
    )
