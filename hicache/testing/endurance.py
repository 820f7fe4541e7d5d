"""Simulated histories by the million operations; `make test-simulation OPS=1000000 SEED=0`.

One history after another, each from its own seed and checked after every operation. The first that
breaks a law is named by its seed, and replays from it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from hicache.testing.simulation import World, make_world, run

STEPS = 500  # of one history


class BrokenHistory(Exception):
    """A law was broken; the message says how to see it again."""


def run_histories(operations: int, seed: int, steps: int = STEPS, *, minute_s: float = 60.0) -> Counter[str]:
    """Run histories from `seed` on until so many operations are done; return what happened in them.

    Raises BrokenHistory, from the failure itself, at the first history that breaks a law.
    """
    done: Counter[str] = Counter()
    told = time.monotonic()
    while done["operations"] < operations:
        count = min(steps, operations - done["operations"])
        try:
            world = make_world(seed)
            run(world, count)
        except Exception as error:
            raise BrokenHistory(
                f"seed {seed} breaks a law within {count} operations: {type(error).__name__}: {error}\n"
                f"replay: make test-simulation SEED={seed} OPS={count}"
            ) from error
        done["operations"] += count
        done["histories"] += 1
        done += what_happened(world)
        seed += 1
        if time.monotonic() - told > minute_s:
            told = time.monotonic()
            sys.stderr.write(f"{done['operations']} of {operations} operations; next seed {seed}\n")
    return done


def what_happened(world: World) -> Counter[str]:
    """Return the counts that tell whether a history went through everything."""
    stats = world.cache.stats
    totals = {
        "requests": len(world.seen),
        "requests with a hit in storage": sum(r.cached.storage > 0 for r in world.seen),
        "finished": world.finished,
        "aborted": world.aborted,
        "prompt tokens": stats.prompt_tokens,
        "tokens from the device": stats.device_tokens,
        "tokens from the host": stats.host_tokens,
        "tokens from storage": stats.storage_tokens,
        "pages evicted": sum(stats.evicted_pages.values()),
        "pages lost": stats.lost_pages,
        "pages written to the host": sum(stats.written_pages.values()),
        "pages stored": sum(stats.stored_pages.values()),
        "pages loaded": sum(stats.loaded_pages.values()),
        "pages fetched": sum(stats.fetched_pages.values()),
        "pages not stored after all tries": stats.store_failed_pages,
        "requests retracted": stats.retracted,
        "loads failed": stats.failed_loads,
    }
    ends = {f"prefetches: {reason}": count for reason, count in stats.prefetch.items()}
    return Counter(totals) + Counter(ends)


def main(arguments: list[str] | None = None) -> int:
    """Run histories; return 0 if all keep every law, 1 behind the first that does not."""
    parser = argparse.ArgumentParser(
        prog="python -m hicache.testing.endurance", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"operations of one history ({STEPS})")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # failed loads and stores are what is simulated
    started = time.monotonic()
    try:
        done = run_histories(given.operations, given.seed, given.steps)
    except BrokenHistory as broken:
        traceback.print_exception(broken.__cause__)
        sys.stderr.write(f"{broken}\n")
        return 1
    seconds = time.monotonic() - started
    last = given.seed + done["histories"] - 1
    sys.stdout.write(f"no law was broken; seeds {given.seed} to {last}, {seconds:.0f} s\n")
    sys.stdout.writelines(f"{count:12,} {name}\n" for name, count in done.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
