"""A name says everything that its bytes depend on, in every process, for writer and reader alike."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys
from array import array

import pytest

from hicache.keys import key_prefix, object_key, page_hashes, scope
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.types import Component, PrefetchPolicy


def spec(**changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "model_id": "m",
        "weights": "1",
        "dtype": "float16",
        "page_size": 16,
        "layers": 2,
        "heads": 4,
        "window": 32,
        "sidecar": "index",
        **changes,
    }
    page = fields["page_size"]
    pools = tuple(
        PoolSpec(name, fields["layers"], (fields["heads"], 8), fields["dtype"], page)  # type: ignore[arg-type]
        for name in ("kv", fields["sidecar"])
    )
    swa = PoolSpec("swa", 1, (8,), "float16", page)  # type: ignore[arg-type]
    return ModelSpec(
        fields["model_id"],  # type: ignore[arg-type]
        page,  # type: ignore[arg-type]
        (ComponentSpec(FULL, pools), ComponentSpec(SWA, (swa,), window=fields["window"])),  # type: ignore[arg-type]
        weight_version=fields["weights"],  # type: ignore[arg-type]
    )


VARIANTS = {
    "model_id": "n",
    "weights": "2",
    "dtype": "bfloat16",  # as many bytes, other values
    "page_size": 32,
    "layers": 3,
    "heads": 8,
    "window": 48,
    "sidecar": "scales",
}


def test_changing_any_one_or_two_facts_changes_every_name() -> None:
    """A server with another dtype or other weights would load these pages as its own."""
    prints = {(): spec().fingerprint}
    for count in (1, 2):
        for names in itertools.combinations(VARIANTS, count):
            prints[names] = spec(**{name: VARIANTS[name] for name in names}).fingerprint
    assert len(set(prints.values())) == len(prints)
    assert spec().fingerprint == spec().fingerprint
    shards = [f"{rank}of{world}" for world in (1, 2, 4) for rank in range(world)]
    page = bytes(32)
    keys = {object_key(p, s, c, page) for p in prints.values() for s in shards for c in Component}
    assert len(keys) == len(prints) * len(shards) * len(Component)


def test_one_served_name_with_other_weights_shares_nothing() -> None:
    """The second server would answer with the first one's model."""
    mine, other = spec(), dataclasses.replace(spec(), weight_version="2")
    assert mine.model_id == other.model_id
    assert key_prefix(mine.fingerprint) != key_prefix(other.fingerprint)


def test_scopes_share_no_page_on_write_probe_and_prefetch() -> None:
    """One adapter's answer would continue with another's state."""
    prompt = tokens(41)
    scopes = {
        "base": scope(),
        "lora a": scope(lora="a"),
        "lora b": scope(lora="b"),
        "salt a": scope(cache_salt="a"),
        "salt b": scope(cache_salt="b"),
        "key a": scope(extra_key="a"),
        "empty": scope(extra_key=""),
    }
    bed = ScriptedCache((FULL, SWA, MAMBA), hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    seen = 0
    for name, value in scopes.items():
        first = bed.run(name, prompt, scope=value)
        assert first.cached.cached == 0, name
        assert len(bed.stored()) == seen + 10
        seen += 10
    bed.drop_memory()
    for name, value in scopes.items():
        assert bed.run(f"{name} again", prompt, scope=value).cached.storage == 40, name
        bed.drop_memory()
    bed.check_quiet()


def test_long_content_ids_that_differ_in_any_bits_have_their_own_chains() -> None:
    """Two images under one question would share their pages."""
    rng = random.Random(3)
    ids = [rng.randbytes(32).hex() for _ in range(10_000)]
    base = "0" * 64
    ids += [base, "1" + base[1:], base[:-1] + "1", base[:32] + "1" + base[33:]]
    text = array("I", range(16)).tobytes()
    assert len({page_hashes(scope(extra_key=i), text, 16)[0] for i in ids}) == len(ids)


def test_every_process_computes_the_same_names() -> None:
    """Two replicas with different hash seeds would never hit each other's pages."""
    program = (
        "from array import array; from hicache.keys import page_hashes, scope;"
        "print(''.join(h.hex() for n in range(100) for h in page_hashes(scope(extra_key=str(n % 3)),"
        " array('I', range(n)), 8)))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(answers) == 1
    assert len(answers.pop()) > 1000


def test_an_empty_tree_finds_all_that_storage_has() -> None:
    """A request without any local match would skip storage altogether."""
    bed = ScriptedCache()
    bed.store_only(tokens(33))
    assert bed.cache.tree.resident(bed.cache.pools.kinds[0][0], FULL) == 0
    assert bed.run("r", tokens(33)).cached.storage == 32
    bed.check_quiet()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA, MAMBA)], ids=str)
def test_prompts_of_every_odd_length_are_served(page_size: int, kinds: tuple[Component, ...]) -> None:
    """A prompt shorter than a page would raise an index error in a lookup."""
    lengths = sorted({1, page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size} - {0})
    for from_storage in (False, True):
        for length in lengths:
            bed = ScriptedCache(kinds, page_size=page_size, window=2 * page_size)
            prompt = tokens(length)
            assert bed.cache.tree.match(b"", prompt[:0], 0).host == 0
            first = bed.run("a", prompt)
            assert first.cached.cached == 0
            if from_storage:
                bed.drop_memory()
            again = bed.run("b", prompt)
            expected = (length - 1) // page_size * page_size if kinds == (FULL,) else again.cached.cached
            assert again.cached.cached == expected
            assert again.cached.cached + again.cached.computed == length
            bed.check_quiet()
