"""Free lists and counters."""

from __future__ import annotations

import pytest

from hpc_index.errors import InvariantError
from hpc_index.ledger import Counters, FreeList, SlotLedger


def test_ids_come_lowest_first() -> None:
    """Returned ids are taken again before higher ones, so that runs stay long (D6)."""
    pages = FreeList("page", 8)
    assert pages.take(5) == [0, 1, 2, 3, 4]
    pages.give([3, 1])
    assert pages.take(3) == [1, 3, 5]
    assert len(pages) == 2


def test_a_page_returned_twice_is_a_fault() -> None:
    """A double free would give a page two owners."""
    pages = FreeList("page", 2)
    with pytest.raises(InvariantError, match="page 0"):
        pages.give([0])
    with pytest.raises(InvariantError, match="3 asked for, 2 free"):
        pages.take(3)


def test_snapshots_never_take_a_lanes_slot() -> None:
    """3 slots with at most 1 for snapshots: the other two stay free for lanes."""
    slots = SlotLedger(3, 1)
    taken = slots.take_for_snapshot()
    assert taken == 0
    assert slots.take_for_snapshot() is None
    assert {slots.take_for_lane(), slots.take_for_lane()} == {1, 2}
    slots.give_from_snapshot(taken)
    slots.freeze()
    assert not slots.room


def test_counters_add_up() -> None:
    """A counter starts at nothing and only grows."""
    counters = Counters()
    counters.count("hits")
    counters.count("hits", 4)
    assert counters == {"hits": 5}
