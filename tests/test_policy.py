"""The choice of a way, and how far ahead may be copied: pure functions of integers."""

from __future__ import annotations

import pytest

from hf_prefetch.scheduling.policy import Path, choose_path, depth_in_acquire


@pytest.mark.parametrize(
    ("routed_ids", "expected"), [(255, Path.PLAIN), (256, Path.LOOKAHEAD), (None, Path.LOOKAHEAD), (0, Path.PLAIN)]
)
def test_the_gate_is_two_routed_ids_per_expert(routed_ids: int | None, expected: Path) -> None:
    """An unknown number counts as many."""
    assert choose_path(routed_ids, 128, 2, can_look_ahead=True) is expected


def test_without_overlap_every_call_is_plain() -> None:
    """However many tokens it has."""
    assert choose_path(10**6, 8, 2, can_look_ahead=False) is Path.PLAIN


@pytest.mark.parametrize(("slots", "depth"), [(2, 1), (3, 2), (4, 2)])
def test_one_slot_is_read_and_the_others_may_be_filled(slots: int, depth: int) -> None:
    """Two ahead at most; nothing where a copy would hold the host."""
    assert depth_in_acquire(slots, holds_host=False) == depth
    assert depth_in_acquire(slots, holds_host=True) == 0
