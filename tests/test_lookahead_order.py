"""LookaheadOrder: predictions follow what is called."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_prefetch.scheduling.plan import LookaheadOrder


def test_the_first_guess_is_the_order_of_the_modules() -> None:
    """Nothing was called yet."""
    order = LookaheadOrder([0, 1, 2, 3])
    assert order.ahead(0, 2) == [1, 2]
    assert order.ahead(2, 2) == [3]
    assert order.ahead(3, 2) == []


def test_what_is_called_corrects_the_guess() -> None:
    """Bank 1 is skipped: from then on 2 follows 0."""
    order = LookaheadOrder([0, 1, 2, 3])
    for bank in (0, 2, 3):
        order.observe(bank)
    assert order.ahead(0, 2) == [2, 3]


def test_the_last_bank_of_a_pass_predicts_nothing() -> None:
    """Another pass may never come. A prefix that ends early counts as a pass, too."""
    order = LookaheadOrder([0, 1, 2, 3])
    for bank in (0, 1, 2, 3, 0, 1, 0):
        order.observe(bank)
    assert order.ahead(3, 2) == []
    assert order.ahead(1, 2) == []
    order.observe(1)
    order.observe(2)
    assert order.ahead(1, 2) == [2, 3]


def test_a_bank_called_twice_in_a_row_changes_nothing() -> None:
    """Some models split one call into chunks."""
    order = LookaheadOrder([0, 1, 2])
    for bank in (0, 0, 0):
        order.observe(bank)
    assert order.ahead(0, 2) == [1, 2]


def test_encoder_and_decoder_take_turns() -> None:
    """One encoder pass, then decoder steps: each predicts its own successors."""
    order = LookaheadOrder([10, 11, 20, 21])
    for bank in (10, 11, 20, 21, 20, 21, 20, 21):
        order.observe(bank)
    assert order.ahead(10, 2) == [11, 20]
    assert order.ahead(20, 2) == [21]


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(0, 6), st.integers(0, 5))
def test_predictions_are_distinct_and_never_the_bank_itself(calls: list[int], bank: int, distance: int) -> None:
    """Whatever was called: at most `distance` banks, each once."""
    order = LookaheadOrder(list(range(7)))
    for call in calls:
        order.observe(call)
    ahead = order.ahead(bank, distance)
    assert len(ahead) <= distance
    assert bank not in ahead
    assert len(set(ahead)) == len(ahead)


@given(st.permutations(range(6)))
def test_a_steady_order_is_predicted_after_two_passes(banks: list[int]) -> None:
    """Whatever the order of the modules."""
    order = LookaheadOrder(list(range(6)))
    for bank in (*banks, *banks, *banks[:1]):
        order.observe(bank)
    for position, bank in enumerate(banks):
        assert order.ahead(bank, 2) == banks[position + 1 : position + 3]
