"""Which banks stay on the device: as many as fit, and where that hides most."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_prefetch.scheduling.residency import NoRoomError, choose_host_banks, first_banks, spread


def test_everything_stays_where_everything_fits() -> None:
    """Then there are no slots, so they take nothing."""
    assert choose_host_banks([10] * 4, 40, slots=3) == []


def test_slots_count_against_the_budget() -> None:
    """Of 70 bytes three slots take 30, so four of eight banks stay."""
    assert choose_host_banks([10] * 8, 70, slots=3) == [1, 3, 5, 7]
    assert choose_host_banks([10] * 8, 69, slots=3) == spread(5, 8)


def test_too_little_for_the_slots_is_an_error_with_the_numbers() -> None:
    """Not a plan that fails later."""
    mib = 2**20
    with pytest.raises(NoRoomError, match=r"20.00 MiB are left .* 3 slots .* take 30.00 MiB"):
        choose_host_banks([10 * mib] * 4, 20 * mib, slots=3)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(0, 4000), st.integers(2, 4))
def test_a_plan_fits_and_one_bank_fewer_in_host_memory_would_not(sizes: list[int], budget: int, slots: int) -> None:
    """With banks of one size there is no better plan; with several sizes the plan still fits."""
    try:
        host = choose_host_banks(sizes, budget, slots)
    except NoRoomError:
        assert slots * max(sizes) > budget
        return

    def needs(chosen: list[int]) -> int:
        return sum(sizes) - sum(sizes[i] for i in chosen) + slots * max((sizes[i] for i in chosen), default=0)

    assert needs(host) <= budget
    assert host == sorted(set(host))
    assert all(0 <= index < len(sizes) for index in host)
    if host:
        assert needs(spread(len(host) - 1, len(sizes))) > budget


@given(st.integers(1, 60), st.data())
def test_spread_is_even(banks: int, data: st.DataObject) -> None:
    """Gaps differ by one at most, and the first bank stays on the device as long as any does."""
    count = data.draw(st.integers(1, banks))
    places = spread(count, banks)
    assert len(set(places)) == count
    assert places[-1] < banks
    gaps = {after - before for before, after in itertools.pairwise(places)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert (0 in places) == (count == banks)


def test_first_banks_are_the_first() -> None:
    """More than there are means all."""
    assert first_banks(2, 5) == [0, 1]
    assert first_banks(9, 3) == [0, 1, 2]
    assert first_banks(0, 3) == []
