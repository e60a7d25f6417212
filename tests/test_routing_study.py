"""Synthetic routing looks like that of published models, and the study of replacement policies measures what it says."""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from hf_prefetch.scheduling.replacement import CacheState, Replacement

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script by its name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


# -- synthetic routing --------------------------------------------------------------------------------------------------


def shares_in_use(
    scripts: Callable[[str], ModuleType], name: str, tokens: int, layers: int = 2, seeds: int = 20
) -> list[float]:
    """Share of the experts that prompts use: of each layer and seed. The layers of a seed change topic together."""
    synthetic = scripts("routing_synthetic")
    experts = synthetic.PROFILES[name].experts
    prompts = [synthetic.synthetic_ids(name, layers, tokens, seed) for seed in range(seeds)]
    return [count / experts for ids in prompts for count in synthetic.distinct(ids, tokens)]


@pytest.mark.parametrize(
    ("name", "tokens", "share"),
    [("qwen3-30b-a3b", 384, 63 / 128), ("384-experts", 512, 0.49), ("256-experts", 130, 0.40), ("256-experts", 1658, 0.77)],
)
def test_a_prompt_uses_as_many_experts_as_was_seen(
    scripts: Callable[[str], ModuleType], name: str, tokens: int, share: float
) -> None:
    """The median within 12% of the published figure."""
    assert statistics.median(shares_in_use(scripts, name, tokens)) == pytest.approx(share, rel=0.12)


def test_no_prompt_of_the_qwen_shape_uses_many_more(scripts: Callable[[str], ModuleType]) -> None:
    """At most 97 of 128 were seen; a hundredth of the layers may go beyond, by no more than a tenth."""
    shares = sorted(shares_in_use(scripts, "qwen3-30b-a3b", 384, layers=4, seeds=30))
    assert shares[-1] <= 1.1 * 97 / 128
    assert shares[int(0.99 * len(shares)) - 1] <= 97 / 128


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-30b-a3b-wide", "mixtral-8x7b", "gpt-oss-20b"])
def test_steps_share_experts_and_layers_have_favourites(scripts: Callable[[str], ModuleType], name: str) -> None:
    """Reuse within 0.18 to 0.5 (0.03 beyond for single layers), exponents of popularity within 0.3 to 1.0 (0.1 beyond)."""
    synthetic = scripts("routing_synthetic")
    profile = synthetic.PROFILES[name]
    ids = synthetic.synthetic_ids(name, 8, 5000)
    assert ids.shape == (8, 5000, profile.top_k)
    assert ids.dtype is torch.int64
    assert 0 <= int(ids.min()) < int(ids.max()) == profile.experts - 1
    assert bool((ids.sort(-1).values.diff(dim=-1) > 0).all()), "a token names an expert twice"
    reuse = synthetic.step_reuse(ids)
    assert 0.18 <= statistics.mean(reuse) <= 0.5
    assert 0.15 <= min(reuse) < max(reuse) <= 0.53
    exponents = synthetic.popularity_exponents(ids, profile.experts)
    assert 0.3 <= statistics.median(exponents) <= 1.0
    assert 0.2 <= min(exponents) < max(exponents) <= 1.1
    # Another order in each layer.
    favourites = {int(layer.flatten().bincount().argmax()) for layer in ids}
    assert len(favourites) > 3


def test_the_first_tokens_of_a_topic_say_more_about_the_next_ones_than_about_another_topic(
    scripts: Callable[[str], ModuleType],
) -> None:
    synthetic = scripts("routing_synthetic")
    ids = synthetic.synthetic_ids("qwen3-30b-a3b", 4, 6000)
    uses = torch.stack([torch.stack([part.flatten().bincount(minlength=128) for part in layer.split(100)]) for layer in ids])
    likeness = torch.nn.functional.cosine_similarity(uses[:, :-1].float(), uses[:, 1:].float(), dim=-1)
    far = torch.nn.functional.cosine_similarity(uses[:, :-30].float(), uses[:, 30:].float(), dim=-1)
    assert float(likeness.mean()) > float(far.mean()) + 0.15


def test_synthetic_routing_is_a_function_of_its_seed(scripts: Callable[[str], ModuleType]) -> None:
    synthetic = scripts("routing_synthetic")
    once, again = (synthetic.synthetic_ids("mixtral-8x7b", 2, 50, seed=3) for _ in range(2))
    assert torch.equal(once, again)
    assert not torch.equal(once, synthetic.synthetic_ids("mixtral-8x7b", 2, 50, seed=4))
    with pytest.raises(ValueError, match="no routing profile 'x'"):
        synthetic.synthetic_ids("x", 1, 1)


# -- the study ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 12, 31])
def test_the_simulator_does_what_the_reference_does(scripts: Callable[[str], ModuleType], rows: int) -> None:
    """Hits of every step, bank by bank."""
    ids = scripts("routing_synthetic").synthetic_ids("gpt-oss-20b", 3, 120).numpy()
    policies = scripts("routing_policies")
    policy = Replacement()
    hits = policies.simulate(ids, 32, rows, policies.Fading((policy.decay,)))
    for stream, steps in enumerate(ids):
        state = CacheState.empty(32, rows)
        for step, wanted in enumerate(steps):
            placement = policy.step(state, wanted.tolist())
            assert hits[stream, step] == len(wanted) - len(placement.fetches)
            state = placement.state


def test_no_policy_beats_the_optimum(scripts: Callable[[str], ModuleType]) -> None:
    ids = scripts("routing_synthetic").synthetic_ids("gpt-oss-20b", 4, 400).numpy()
    policies = scripts("routing_policies")
    others = [policies.Recency(), policies.Fading((1.0,)), policies.Fading((0.975,)), policies.FrequencyByAge()]
    for rows in (6, 16, 32):
        bound = policies.simulate(ids, 32, rows, policies.Belady()).sum(axis=1)
        assert all((policies.simulate(ids, 32, rows, other).sum(axis=1) <= bound).all() for other in others)
    # A small decay is recency.
    half = [policies.simulate(ids[:, :100], 32, 16, other) for other in (policies.Recency(), policies.Fading((0.25,)))]
    assert abs(int(half[0].sum()) - int(half[1].sum())) <= 0.01 * half[0].sum()


def test_the_document_is_current_and_the_default_is_the_one_that_was_measured(scripts: Callable[[str], ModuleType]) -> None:
    results: Any = json.loads((SCRIPTS.parent / "docs" / "routing.json").read_text())
    assert results["default"]["decay"] == round(Replacement().decay, 6)
    assert scripts("routing").main(["render", "--check"]) == 0


def test_guesses_that_come_true(scripts: Callable[[str], ModuleType]) -> None:
    """Routing that follows from the layer before is foreseen by who looks there, and by nobody else."""
    generator = np.random.default_rng(3)
    experts, steps = 32, 400
    first = np.stack([generator.permutation(experts)[:2] for _ in range(steps)])
    # The second layer of each of two sequences uses what its first layer has used, shifted.
    streams = np.stack([first, first[::-1], (first + 5) % experts, (first[::-1] + 5) % experts])
    found = scripts("routing_foresight").foresight(streams, experts, 4, 2, 1, 200)
    assert found["right"]["layer before"] > 0.9
    assert found["right"]["score"] < 0.3
    assert found["right"]["given up"] < 0.3
    assert 1.5 < found["misses"] <= 2.0
