"""Specs: what they say of boundaries, objects and identity, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache.errors import SpecError
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.testing.pools import compressed_spec
from hicache.types import Component

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


def kv(name: str, page: int, *, layers: int = 2) -> PoolSpec:
    return PoolSpec(name, layers, (3,), "float16", page)


def packed(ratio: int, page: int, name: str = "packed") -> PoolSpec:
    return PoolSpec(name, 1, (5,), "float16", max(1, page // ratio), ratio=ratio)


def state(*names: str, overlap: bool = False) -> PoolSpec:
    return PoolSpec("state", 1, (2,), "float32", 1, state_of=names, overlap=overlap)


def model(page: int, *pools: PoolSpec, swa: tuple[PoolSpec, ...] = ()) -> ModelSpec:
    components = [ComponentSpec(FULL, (kv("full", page), *pools))]
    if swa:
        components.append(ComponentSpec(SWA, (kv("swa", page), *swa), window=page))
    return ModelSpec("m", page, tuple(components))


@pytest.mark.parametrize(
    ("page", "ratio", "align"), [(256, 128, 1), (128, 128, 1), (64, 128, 2), (1, 4, 4), (64, 1, 1)]
)
def test_without_a_state_only_ends_of_groups_are_boundaries(page: int, ratio: int, align: int) -> None:
    """A hit inside a group would resume without what its tokens had added to the row."""
    assert model(page, packed(ratio, page)).align_pages == align


def test_a_state_makes_every_boundary_one_and_is_stored_where_a_group_is_unfinished() -> None:
    """Half of the hits would be lost; or states would be stored that nobody can need."""
    spec = model(64, packed(128, 64), swa=(state("packed"),))
    assert spec.align_pages == 1
    assert spec.periods == {FULL: 2, SWA: 2}
    assert [spec.absent(FULL, phase) for phase in (0, 1)] == [{"packed"}, frozenset()]
    assert [spec.absent(SWA, phase) for phase in (0, 1)] == [frozenset(), {"state"}]
    assert [spec.phase(SWA, page) for page in (0, 1, 2, 7)] == [0, 1, 0, 1]
    whole = spec[FULL].page_bytes
    assert [spec.object_bytes(FULL, phase) for phase in (0, 1)] == [whole - 10, whole]
    overlapping = model(64, packed(128, 64), swa=(state("packed", overlap=True),))
    assert [overlapping.absent(SWA, phase) for phase in (0, 1)] == [frozenset(), frozenset()]


def test_groups_that_end_with_every_page_leave_nothing_to_restore() -> None:
    """States of finished groups would be stored and required."""
    spec = model(256, packed(128, 256), swa=(state("packed"),))
    assert spec.periods == {FULL: 1, SWA: 1}
    assert spec.absent(SWA, 0) == {"state"}
    assert spec.absent(FULL, 0) == frozenset()


def test_several_ratios_meet_at_their_common_multiples() -> None:
    """One of the sidecars would be inside a group."""
    spec = model(2, packed(4, 2, "a"), packed(6, 2, "b"))
    assert spec.align_pages == 6
    assert spec.periods[FULL] == 6
    held = [{"a", "b"} - spec.absent(FULL, phase) for phase in range(6)]
    assert held == [set(), {"a"}, {"b"}, {"a"}, set(), {"a", "b"}]
    assert model(2, packed(4, 2, "a"), packed(6, 2, "b"), state("b")).align_pages == 2


def test_pools_are_read_by_the_layers_they_name_or_by_their_components() -> None:
    """A layer would read a sidecar before it is there."""
    spec = compressed_spec(16)
    by_name = {pool.name: spec.readers(c.component, pool) for c in spec.components for pool in c.pools}
    assert by_name == {
        "c4": (0, 2),
        "c4_index": (0, 2),
        "wide": (1,),
        "swa_kv": (0, 1, 2),
        "c4_state": (0, 0),
        "wide_state": (0,),
    }


def test_a_pool_that_names_no_layers_is_read_with_its_components_first_or_the_models() -> None:
    """A draft pool, or a sidecar of a component without layers, would have no gate."""
    draft, side = kv("draft", 4, layers=3), packed(2, 4, "side")
    swa = ComponentSpec(SWA, (kv("swa", 4, layers=1),), window=4)
    spec = ModelSpec("m", 4, (ComponentSpec(FULL, (kv("full", 4), draft)), swa), layers=(SWA, FULL, FULL))
    assert spec.readers(FULL, draft) == (1, 1, 1)
    logical = ModelSpec("m", 4, (ComponentSpec(FULL, (side,), logical=True), swa))
    assert logical.readers(FULL, side) == (0,)


def test_the_phase_of_a_state_is_that_of_the_page_it_ends() -> None:
    """A recurrent state would be stored without the sums that belong to it."""
    sums = PoolSpec("sums", 1, (2,), "float32", 1, state_of=("packed",))
    mamba = ComponentSpec(MAMBA, (kv("state", 1), sums))
    spec = ModelSpec("m", 4, (ComponentSpec(FULL, (kv("full", 4), packed(12, 4))), mamba))
    assert [spec.phase(MAMBA, boundary) for boundary in (1, 2, 3, 4)] == [0, 1, 2, 0]
    held = ["sums" not in spec.absent(MAMBA, spec.phase(MAMBA, boundary)) for boundary in (1, 2, 3)]
    assert held == [True, True, False]


BASE = compressed_spec(16)


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": 8, "rows_per_page": 2},
        {"row_shape": (6,)},
        {"dtype": "float16"},
        {"num_layers": 1, "at": (0,)},
        {"at": (0, 1)},
        {"name": "other"},
    ],
    ids=str,
)
def test_whatever_changes_the_bytes_of_a_sidecar_changes_the_identity(change: dict[str, object]) -> None:
    """A replica would read rows of another ratio or layer."""
    full, swa = BASE.components
    other = replace(full, pools=(*full.pools[:1], replace(full.pools[1], **change), *full.pools[2:]))  # type: ignore[arg-type]
    states = {"c4_index": str(change.get("name", "c4_index"))}
    pools = tuple(replace(p, state_of=tuple(states.get(n, n) for n in p.state_of)) for p in swa.pools)
    changed = replace(BASE, components=(other, replace(swa, pools=pools)))
    assert changed.fingerprint != BASE.fingerprint


@pytest.mark.parametrize("change", [{"overlap": False}, {"state_of": ("c4",)}], ids=str)
def test_what_a_state_is_of_is_part_of_the_identity(change: dict[str, object]) -> None:
    """Objects without the state would be taken for objects with it."""
    full, swa = BASE.components
    other = replace(swa, pools=(swa.pools[0], replace(swa.pools[1], **change), swa.pools[2]))  # type: ignore[arg-type]
    assert replace(BASE, components=(full, other)).fingerprint != BASE.fingerprint


REFUSED = {
    "neither divides the other": (lambda: model(4, packed(3, 4)), "one must divide the other"),
    "not even two tokens in an odd page": (lambda: model(3, packed(2, 3)), "one must divide the other"),
    "two rows where there is one": (lambda: model(2, replace(packed(2, 2), rows_per_page=2)), "makes 1"),
    "rows and ratio disagree": (
        lambda: model(8, replace(packed(4, 8), rows_per_page=8)),
        "its ratio makes 2",
    ),
    "a ratio below one": (lambda: replace(kv("x", 4), ratio=0), "at least one token"),
    "a state of nothing": (lambda: model(4, state("gone")), "no compressed pool"),
    "a state of an uncompressed pool": (lambda: model(4, state("full")), "no compressed pool"),
    "a compressed state": (lambda: replace(packed(8, 4), state_of=("x",)), "no compression ratio"),
    "an overlap of nothing": (lambda: replace(packed(8, 4), overlap=True), "the state of no pool"),
    "a compressed component": (lambda: ComponentSpec(FULL, (packed(8, 4),)), "only sidecars may"),
    "a compressed recurrent state": (
        lambda: ComponentSpec(MAMBA, (kv("s", 1), packed(8, 1))),
        "no compression ratio",
    ),
    "layers that do not exist": (lambda: model(4, replace(kv("x", 4), at=(1, 2))), "not all of the 2"),
    "layers out of order": (lambda: replace(kv("x", 4), at=(1, 0)), "ascending"),
    "layers that do not match": (lambda: replace(kv("x", 4), at=(1,)), "of each of its 2 layers"),
    "no layers at all": (
        lambda: ModelSpec("m", 4, (ComponentSpec(FULL, (kv("x", 4),), logical=True),)),
        "at least one layer",
    ),
    "a family without pools": (lambda: ComponentSpec(FULL, (), logical=True), "at least one pool"),
    "two pools of one name": (lambda: model(4, kv("full", 4)), "must be distinct"),
    "a window of nothing": (lambda: ComponentSpec(SWA, (kv("s", 4),)), "positive window"),
    "a window on FULL": (lambda: ComponentSpec(FULL, (kv("s", 4),), window=4), "positive window"),
    "pools without bytes": (lambda: PoolSpec("x", 1, (0,), "uint8", 4), "must be positive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_spec_that_contradicts_itself_is_refused_with_the_reason(name: str) -> None:
    """It would be found out by a wrong answer."""
    build, reason = REFUSED[name]
    with pytest.raises(SpecError, match=reason):
        build()
