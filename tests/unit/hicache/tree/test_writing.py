"""Writes under way: what becomes of pages that come to the tier from elsewhere meanwhile."""

from __future__ import annotations

from array import array

import pytest

from hicache.types import Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
IDS = array("I", map(ord, "abcd"))


@pytest.mark.parametrize("first", [0, 5], ids=["from the first slot on", "from another slot on"])
def test_pages_that_storage_brings_during_their_write_stay_and_the_copies_go_back(bed, first: int) -> None:
    """Two slots of one page: the tree would forget one of them, and the pool would never get it back."""
    b = bed((FULL, SWA, MAMBA), window=2)
    b.serve("abcd", states=(4,))
    lease = b.lock("abcd")
    plan = b.tree.plan_write(lease, Tier.HOST)
    cover = b.tree.begin_write(lease, plan)
    for kind in (FULL, SWA, MAMBA):
        b.take(Tier.HOST, kind, first)
    came = {kind: b.take(Tier.HOST, kind, count) for kind, count in ((FULL, 4), (SWA, 4), (MAMBA, 1))}
    refused = b.tree.insert_host(
        b"", IDS, 0, 4, full=came[FULL], swa=came[SWA], states=[(4, came[MAMBA][0])], stored=True
    )
    assert refused == {}
    b.tree.check_integrity()
    written = {kind: b.take(Tier.HOST, kind, len(at)) for kind, at in plan.pages.items()}
    assert b.tree.end_write(cover, plan, written) == written
    b.tree.release(lease)
    b.tree.check_integrity()
    found = b.match("abcd")
    path = b.tree.slots(found, 4)
    assert (path.swa_host, path.state_host) == (came[SWA][2:], came[MAMBA][0])
    for kind, count in ((FULL, 4), (SWA, 4), (MAMBA, 1)):
        assert b.tree.resident(Tier.HOST, kind) == count
