"""The choice of a way, and how far ahead may be copied: pure functions of integers."""

from __future__ import annotations

import pytest

from hf_prefetch.scheduling.policy import Path, choose_path, depth_in_acquire, is_small


@pytest.mark.parametrize(("routed_ids", "expected"), [(255, True), (256, False), (None, False), (0, True)])
def test_the_gate_is_two_routed_ids_per_expert(routed_ids: int | None, expected: bool) -> None:
    """An unknown number counts as many."""
    assert is_small(routed_ids, 128, 2) is expected


@pytest.mark.parametrize("can_cache", [False, True])
@pytest.mark.parametrize("can_look_ahead", [False, True])
def test_every_way(can_look_ahead: bool, can_cache: bool) -> None:
    """Single experts where they pay and can be had, from the cache if there is room; else whole banks, ahead if that can be."""
    whole = Path.LOOKAHEAD if can_look_ahead else Path.PLAIN
    rows = Path.CACHED if can_cache else Path.ROUTED
    for can_route in (False, True):
        options = {"can_look_ahead": can_look_ahead, "can_route": can_route, "can_cache": can_cache}
        assert choose_path(wants_rows=False, **options) is whole
        assert choose_path(wants_rows=True, **options) is (rows if can_route else Path.PLAIN)


@pytest.mark.parametrize(("slots", "depth"), [(2, 1), (3, 2), (4, 2)])
def test_one_slot_is_read_and_the_others_may_be_filled(slots: int, depth: int) -> None:
    """Two ahead at most; nothing where a copy would hold the host."""
    assert depth_in_acquire(slots, holds_host=False) == depth
    assert depth_in_acquire(slots, holds_host=True) == 0
