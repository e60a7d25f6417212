"""Which rows of a cache make room: the reference keeps what a call needs, whatever is asked of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_prefetch.scheduling.replacement import EMPTY, CacheState, Placement, Replacement

EXPERTS = 6
F32 = np.float32


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, float, list[list[int]]]:
    """Rows of a cache, a decay, and calls that fit it; with ids twice, and ids of experts that live elsewhere."""
    rows = draw(st.integers(1, EXPERTS))
    decay = draw(st.sampled_from([1e-3, 0.5, 0.9, 0.975, 1.0]))
    calls = []
    for _ in range(draw(st.integers(1, 12))):
        fitting = draw(st.lists(st.integers(0, EXPERTS - 1), max_size=rows, unique=True))
        repeated = draw(st.lists(st.sampled_from([*fitting, EXPERTS, EXPERTS + 3, -1]), max_size=4))
        calls.append(draw(st.permutations(fitting + repeated)))
    return rows, decay, calls


def check(before: CacheState, ids: list[int], placement: Placement) -> None:
    """What has to hold after any call."""
    after, needed = placement.state, {expert for expert in ids if 0 <= expert < EXPERTS}
    held = [expert for expert in after.experts if expert != EMPTY]
    assert len(held) == len(set(held)), "an expert is in two rows"
    assert needed <= set(held), "the call needs an expert that is in no row"
    for expert, row in zip(ids, placement.rows, strict=True):
        assert row == EMPTY if expert not in needed else after.experts[row] == expert
    # What was needed and cached stays where it was, and nothing changes but what is fetched.
    fetched = dict(placement.fetches)
    assert set(fetched) == needed - set(before.experts)
    assert list(fetched) == sorted(fetched)
    for row, (old, new) in enumerate(zip(before.experts, after.experts, strict=True)):
        assert new == old or (fetched.get(new) == row and old not in needed)
    # No row is replaced while another is empty.
    if EMPTY in after.experts:
        assert set(before.experts) - {EMPTY} <= set(held)


@given(histories())
@settings(max_examples=150, deadline=None)
def test_whatever_is_called_its_experts_are_cached_and_none_of_them_is_evicted(
    history: tuple[int, float, list[list[int]]],
) -> None:
    rows, decay, calls = history
    policy, state = Replacement(decay), CacheState.empty(EXPERTS, rows)
    for ids in calls:
        placement = policy.step(state, ids)
        check(state, ids, placement)
        assert policy.step(state, sorted(set(ids))).state == placement.state, "repeated ids and their order make a difference"
        state = placement.state


@given(histories())
@settings(max_examples=60, deadline=None)
def test_scores_are_those_of_float32_hardware(history: tuple[int, float, list[list[int]]]) -> None:
    """numpy computes in float32, one operation at a time."""
    rows, decay, calls = history
    policy, state, scores = Replacement(decay), CacheState.empty(EXPERTS, rows), np.zeros(EXPERTS, F32)
    for ids in calls * 5:
        state = policy.step(state, ids).state
        used = np.isin(np.arange(EXPERTS), ids)
        scores = (scores + used.astype(F32)) * F32(decay)
        scores[scores < F32(2.0**-126)] = 0
        assert scores.tolist() == list(state.scores)


def test_the_order_of_victims() -> None:
    """Empty rows, then the lowest score, then the lowest row; the missing experts take them in ascending order."""
    policy = Replacement(0.5)
    state = CacheState(scores=(4.0, 1.0, 1.0, 0.0, 8.0, 0.0), experts=(0, 2, EMPTY, 1))
    placement = policy.step(state, [5, 3])
    assert placement.fetches == ((3, 2), (5, 1))
    assert placement.rows == (1, 2)
    assert placement.state == CacheState((2.0, 0.5, 0.5, 0.5, 4.0, 0.5), (0, 5, 3, 1))
    # Row 0 has the highest score, but the call needs all others.
    assert policy.step(placement.state, [1, 3, 5, 4]).fetches == ((4, 0),)


def test_a_decay_of_one_counts_and_a_small_one_remembers_the_last_use() -> None:
    calls = [[0], [0], [0], [1], [2]]
    assert evicted(1.0, calls) == 1
    assert evicted(0.5, calls) == 0


def evicted(decay: float, calls: list[list[int]]) -> int:
    """Which of three cached experts makes room for a fourth after these calls."""
    policy, state = Replacement(decay), CacheState.empty(EXPERTS, 3)
    for ids in calls:
        state = policy.step(state, ids).state
    ((_, row),) = policy.step(state, [3]).fetches
    return state.experts[row]


def test_a_score_too_small_for_a_normal_float32_is_zero() -> None:
    policy, state = Replacement(0.5), CacheState.empty(2, 2)
    state = policy.step(state, [0]).state
    for _ in range(125):
        state = policy.step(state, []).state
    assert state.scores[0] == 2.0**-126
    assert policy.step(state, []).state.scores[0] == 0.0


def test_a_call_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 experts, but the cache has 2 rows"):
        Replacement().step(CacheState.empty(EXPERTS, 2), [0, 1, 2, 2])


@pytest.mark.parametrize("decay", [0, -0.5, 1.01, float("nan"), float("inf"), 1e-60, True, "0.5", None])
def test_a_decay_that_is_none_is_refused(decay: object) -> None:
    with pytest.raises(ValueError, match="decay"):
        Replacement(decay)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, -1, 1.5, True, None])
def test_a_window_that_is_none_is_refused(window: object) -> None:
    with pytest.raises(ValueError, match="window"):
        Replacement(window=window)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, EXPERTS + 1])
def test_a_cache_has_a_row_at_least_and_none_without_an_expert(rows: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {EXPERTS} rows"):
        CacheState.empty(EXPERTS, rows)


def test_the_default_is_a_float32_value() -> None:
    """So that a kernel that is given it computes with the same number."""
    decay = Replacement().decay
    assert decay == float(F32(decay))
    assert Replacement(decay) == Replacement()


# -- prompts ------------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, EXPERTS),
    st.lists(st.integers(0, 50), min_size=EXPERTS, max_size=EXPERTS),
    st.lists(st.integers(0, EXPERTS - 1), max_size=1),
    st.integers(50, 4000),
)
@settings(max_examples=60, deadline=None)
def test_after_a_prompt_its_hottest_experts_are_cached(rows: int, counts: list[int], decoded: list[int], tokens: int) -> None:
    policy = Replacement()
    state = policy.step(CacheState.empty(EXPERTS, rows), decoded).state
    placement = policy.prompt(state, counts, tokens)
    kept, added = (F32(weight) for weight in policy.weights(tokens))
    scores = np.array(state.scores, F32) * kept + np.array(counts, F32) * added
    assert scores.tolist() == list(placement.state.scores)
    assert set(placement.state.experts) == set(np.argsort(-scores, kind="stable")[:rows].tolist())
    check(state, list(placement.state.experts), Placement(placement.state, tuple(range(rows)), placement.fetches))


def test_a_prompt_of_one_token_weighs_what_a_decoded_one_does() -> None:
    policy = Replacement()
    assert policy.weights(1) == (policy.decay, pytest.approx(policy.decay, rel=1e-6))
    # A long one forgets what was before, and is remembered as if it had just been decoded.
    kept, added = policy.weights(10_000)
    assert kept == pytest.approx(0.0, abs=1e-30)
    assert added * policy.window == pytest.approx(policy.decay * (1 - policy.decay**128) / (1 - policy.decay), rel=1e-5)
    assert policy.weights(50_000)[1] == added, "only the window counts"
    assert Replacement(1.0).weights(10_000) == (1.0, 1.0)


def test_bad_prompts_are_refused() -> None:
    state = CacheState.empty(EXPERTS, 2)
    with pytest.raises(ValueError, match="5 counts for 6 experts"):
        Replacement().prompt(state, [1] * 5, 5)
    with pytest.raises(ValueError, match="at least one token"):
        Replacement().prompt(state, [0] * EXPERTS, 0)
