"""Leases through splits, joins, growth and transfers: what they name stays, and only as long."""

from __future__ import annotations

from array import array

import pytest

from hicache.errors import InvariantViolation
from hicache.tree import TreeRules, UnifiedTree, make_policy
from hicache.types import NO_SLOT, Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def nodes(bed) -> int:
    """Nodes of the default scope without its root."""
    waiting = list(bed.tree._forest.roots.values())
    for node in waiting:
        waiting.extend(node.children.values())
    return len(waiting) - len(bed.tree._forest.roots)


def test_a_long_conversation_is_one_node(bed) -> None:
    """A node per turn makes every match as slow as the conversation is long."""
    b = bed((FULL, SWA, MAMBA))
    text = ""
    for turn in range(50):
        text += chr(97 + turn % 26) * 4
        b.serve(text, states=(len(text),))
    assert nodes(b) == 1
    assert b.match(text).device == 200


def test_leases_above_and_below_a_split_keep_covering_their_pages(bed) -> None:
    """A page freed under a running request is another request's memory: wrong output."""
    b = bed((FULL, SWA, MAMBA))
    b.serve("abcdefgh", states=(2, 5, 8))
    shallow, middle, deep = b.lock("abcdefgh", 2), b.lock("abcdefgh", 5), b.lock("abcdefgh", 8)
    before = [b.tree.slots(lease, lease.depth) for lease in (shallow, middle, deep)]
    b.serve("abcXY")  # splits at 3
    b.serve("abcdeZ")  # splits at 5
    assert nodes(b) == 5
    b.evict(99)
    b.evict(99, SWA)
    b.evict(99, MAMBA)
    after = [b.tree.slots(lease, lease.depth) for lease in (shallow, middle, deep)]
    assert [s.full_device for s in after] == [s.full_device for s in before]
    assert [s.swa_device for s in after] == [s.swa_device for s in before]
    assert [s.state_device for s in after] == [s.state_device for s in before]
    b.tree.release(deep)
    assert b.evict(99) == {(DEVICE, FULL): 3, (DEVICE, SWA): 2, (DEVICE, MAMBA): 1}
    b.tree.release(middle)
    b.tree.release(shallow)
    b.evict(99)
    assert nodes(b) == 0


def test_a_chain_joins_again_under_leases_and_in_flight_writes(bed) -> None:
    """Nodes that stay split for ever make matches slower with every fork that is long gone."""
    b = bed((FULL, SWA, MAMBA))
    b.serve("abcdefgh", states=(3, 8))
    b.serve("abcXYZ")
    b.serve("abcdefgh")
    assert nodes(b) == 3
    deep, shallow = b.lock("abcdefgh", 8), b.lock("abcdefgh", 3)
    plan = b.tree.plan_write(deep, HOST)
    cover = b.tree.begin_write(deep, plan)
    assert b.evict(3) == {(DEVICE, FULL): 3, (DEVICE, SWA): 3}  # the fork goes, the chain is joined
    assert nodes(b) == 1
    b.serve("abcdefQ")  # and split elsewhere while the write is in flight
    assert nodes(b) == 3
    outcome = {kind: b.take(HOST, kind, len(at)) for kind, at in plan.pages.items()}
    assert b.tree.end_write(cover, plan, outcome) == {}
    b.tree.check_integrity()
    found = b.match("abcdefgh")
    assert b.tree.slots(found, 8).state_host == outcome[MAMBA][-1]
    b.tree.release(deep)
    b.tree.release(shallow)
    b.evict(99)
    found = b.match("abcdefgh")
    assert (found.full_device, found.host) == (0, 8)
    assert b.tree.slots(found, 8).full_host == outcome[FULL]


def test_hits_and_recency_survive_split_and_join(bed) -> None:
    """Otherwise a fork that came and went makes a hot conversation look cold."""
    b = bed(policy="lfu")
    b.serve("abcdef")
    for _ in range(3):
        b.serve("abcdef")
    b.serve("abcXYZ")
    b.serve("other!")
    b.evict(6)  # the two used once go first
    assert (b.full("abcXYZ"), b.full("abcdef")) == (3, 6)
    lease = b.lock("abcdef")
    assert len(b.tree.plan_write(lease, HOST, min_hits=4).pages[FULL]) == 6
    assert len(b.tree.plan_write(lease, HOST, min_hits=5).pages[FULL]) == 3
    assert len(b.tree.plan_write(lease, HOST, min_hits=6).pages[FULL]) == 0


def test_an_aborted_write_leaves_nothing_and_can_be_tried_again(bed) -> None:
    """A failed copy that looked done would be read as garbage."""
    b = bed((FULL, SWA))
    b.serve("abcd")
    lease = b.lock("abcd")
    plan = b.tree.plan_write(lease, HOST)
    cover = b.tree.begin_write(lease, plan)
    assert b.tree.plan_write(lease, HOST).count == 0  # somebody is writing already
    failed = {kind: array("i", [NO_SLOT]) * len(at) for kind, at in plan.pages.items()}
    assert b.tree.end_write(cover, plan, failed) == {}
    assert b.tree.resident(HOST, FULL) == b.tree.resident(HOST, SWA) == 0
    again = b.tree.plan_write(lease, HOST)
    assert again.pages == plan.pages
    cover = b.tree.begin_write(lease, again)
    partly = {FULL: array("i", [1, 2, NO_SLOT, NO_SLOT]), SWA: array("i", [NO_SLOT, 1, NO_SLOT, NO_SLOT])}
    assert b.tree.end_write(cover, again, partly) == {}
    b.tree.check_integrity()
    assert list(b.tree.plan_write(lease, HOST).pages[FULL]) == [2, 3]
    assert list(b.tree.plan_write(lease, HOST).pages[SWA]) == [0, 2, 3]


def test_storage_is_written_root_first_and_a_lost_object_is_written_again(bed) -> None:
    """Another replica reads storage alone: a page whose ancestors are not there cannot be used."""
    b = bed()
    b.serve("abcd")
    b.back_up("abcd")
    b.back_up("abcd", Tier.STORAGE)
    lease = b.lock("abcd", tier=HOST)
    assert b.tree.plan_write(lease, Tier.STORAGE).count == 0
    b.tree.forget_stored(lease, FULL, [1, 2])
    plan = b.tree.plan_write(lease, Tier.STORAGE)
    assert list(plan.pages[FULL]) == [1, 2]
    assert plan.hashes[FULL] == b.tree.page_hashes(lease, 1, 3)


def test_a_page_only_on_the_device_cuts_what_storage_can_be_sent(bed) -> None:
    """The ancestors a write lacks go first; what cannot be read from the host cannot go at all."""
    b = bed()
    b.serve("abcd")
    ids = array("I", map(ord, "abcd"))
    b.tree.insert_host(b"", ids, 0, 4, full=array("i", [5, 6, NO_SLOT, 7]), stored=False)
    lease = b.lock("abcd", tier=HOST)
    assert list(b.tree.plan_write(lease, Tier.STORAGE).pages[FULL]) == [0, 1]


def test_a_lease_ends_once_and_belongs_to_its_tree(bed) -> None:
    """A double release would take away someone else's protection."""
    b, other = bed(), bed()
    b.serve("abcd")
    lease = b.lock("abcd")
    with pytest.raises(InvariantViolation, match="belongs to another tree"):
        other.tree.release(lease)
    b.tree.release(lease)
    with pytest.raises(InvariantViolation, match="released"):
        b.tree.release(lease)
    with pytest.raises(InvariantViolation):
        b.tree.touch(lease, 1.0)


def test_a_tombstone_is_recovered_only_inside_the_last_window(bed) -> None:
    """Recovering more would hold SWA memory that no boundary needs."""
    b = bed((FULL, SWA), window=2)
    b.serve("abcdef")
    b.evict(6, SWA)
    lease = b.lock("abcdef", 0)
    offered = b.take(DEVICE, SWA, 6)
    full = b.take(DEVICE, FULL, 6)
    done = b.tree.insert(lease, array("I", map(ord, "abcdef")), 0, 6, full=full, swa=offered, now=9.0)
    assert done.new_pages == 0
    assert done.duplicates == {FULL: full, SWA: offered[:4]}
    assert list(done.swa) == [NO_SLOT] * 4 + list(offered[4:])
    assert b.match("abcdef").device == 6
    b.tree.check_integrity()


def test_a_window_that_is_computed_again_begins_with_one_access(bed) -> None:
    """It would outlive windows that were used as often and more lately."""
    b = bed((FULL, SWA), "lfu", window=2)
    b.serve("abcd")
    b.evict(4, SWA)
    lease = b.lock("abcd", 0)
    full, swa = b.take(DEVICE, FULL, 4), b.take(DEVICE, SWA, 4)
    b.tree.insert(lease, array("I", map(ord, "abcd")), 0, 4, full=full, swa=swa, now=9.0)
    b.tree.release(lease)
    b.now = 10.0
    b.serve("wxyz")
    b.evict(1, SWA)
    assert (b.match("abcd").device, b.match("wxyz").device) == (0, 4)


def test_bad_calls_are_refused_before_anything_changes(bed) -> None:
    """A wrong length or range must not leave half an insert."""
    b = bed((FULL, SWA))
    b.serve("abcd")
    ids = array("I", map(ord, "abcdef"))
    lease = b.lock("abcd")
    one = array("i", [900])
    for start, end, full, swa in (
        (4, 5, one * 2, None),
        (4, 5, one, one * 2),
        (5, 6, one, None),
        (4, 9, one * 5, None),
    ):
        with pytest.raises(ValueError, match=r"slots for pages|need a DEVICE lease|are not within"):
            b.tree.insert(lease, ids, start, end, full=full, swa=swa)
    with pytest.raises(ValueError, match="states for a tree without MAMBA"):
        b.tree.insert(lease, ids, 4, 5, full=one, states=[(5, 1)])
    with pytest.raises(ValueError, match="limit -1 must not be negative"):
        b.match("abcd", -1)
    with pytest.raises(ValueError, match="outside of"):
        b.tree.lock(lease, 5, DEVICE)
    with pytest.raises(ValueError, match="not of 'd'"):
        b.tree.match(b"", array("d", [1.0]), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no"):
        b.tree.evict(DEVICE, MAMBA, 1)
    with pytest.raises(ValueError, match="without a host tier"):
        UnifiedTree(TreeRules(1, (FULL,)), make_policy("lru"), host=False).insert_host(
            b"", ids, 0, 1, full=one
        )
    b.tree.check_integrity()
    assert b.match("abcdef").full == 4


def test_a_state_outside_of_what_is_offered_is_refused_before_anything_changes(bed) -> None:
    """Pages would be in the tree that their request believes it still owns."""
    b = bed((FULL, MAMBA))
    b.serve("ab")
    ids = array("I", map(ord, "abcd"))
    lease = b.lock("ab")
    full = b.take(DEVICE, FULL, 2)
    for at in (0, 2, 5):
        with pytest.raises(ValueError, match=rf"state at {at} is not inside \(2, 4\]"):
            b.tree.insert(lease, ids, 2, 4, full=full, states=[(4, 1), (at, 2)])
        with pytest.raises(ValueError, match=rf"state at {at} is not inside \(2, 4\]"):
            b.tree.insert_host(b"", ids, 2, 4, full=full, states=[(at, 2)])
    b.tree.check_integrity()
    assert b.match("abcd").full == 2
    b.tree.insert(lease, ids, 2, 4, full=full, states=[(4, b.take(DEVICE, MAMBA, 1)[0])])
    assert b.match("abcd").device == 4


def test_a_node_is_split_inside_only(bed) -> None:
    """A node of no pages would end every walk that comes by."""
    b = bed()
    b.serve("abcd")
    node = b.match("abcd").node
    for at in (0, 4):
        with pytest.raises(InvariantViolation, match="cannot split"):
            b.tree._forest.split(node, at)
    b.tree.check_integrity()


def test_check_integrity_notices_what_it_promises_to(bed) -> None:
    """A check that cannot fail guards nothing."""

    def broken(harm) -> None:
        b = bed((FULL, SWA, MAMBA))
        b.serve("abcdef", states=(3, 6))
        b.back_up("abcdef")
        b.serve("abcXYZ")
        b.lock("abcdef")
        node = b.match("abcdef").node
        b.tree.check_integrity()
        harm(b.tree._forest, node)
        with pytest.raises(InvariantViolation):
            b.tree.check_integrity()

    broken(lambda f, node: f.resident[0].__setitem__(0, 1))
    broken(lambda f, node: node.device.pop())
    broken(lambda f, node: node.device.__setitem__(0, node.device[1]))
    broken(lambda f, node: node.host.__setitem__(0, NO_SLOT))
    broken(lambda f, node: node.swa.device_has.__setitem__(0, 0))
    broken(lambda f, node: node.swa.runs.clear())
    broken(lambda f, node: node.marks[-1].__setattr__("hits", -9))
    broken(lambda f, node: node.mark_at.__setitem__(-1, node.end + 1))
    broken(lambda f, node: node.leases.clear())
    broken(lambda f, node: setattr(node, "pins", 7))
    broken(lambda f, node: setattr(node.parent, "device_children", 7))
    broken(lambda f, node: f.full[0].withdraw(node))
    broken(lambda f, node: f.forget_run(node.swa.runs[0]))
    broken(lambda f, node: f.states[0].withdraw(node.states[-1]))
    broken(lambda f, node: node.states[-1].__setattr__("at", 99))
    broken(lambda f, node: node.parent.children.popitem())
