"""Synthetic routing: expert ids that look like those of published models, deterministic by seed.

What is known of real routing, and what each part here stands for:

- Popularity is about Zipf with an exponent of 0.3 to 1.0, another one and another order in each layer.
- A prompt uses a part of the experts only: Qwen3-30B-A3B 63 of 128 (median; at most 97) within 384 tokens, a model with 384
  experts 49% within 512 tokens, one with 256 experts 40% within 130 and 77% within 1,658. So a topic has a set of active
  experts in each layer, in which it has its own preferences, and topics change.
- A token shares 0.18 to 0.5 of its experts with the token before it.

Ids are drawn without replacement in proportion to popularity x preference (the k largest of log-weight + Gumbel noise).
Independent uniform ids would use all experts in any prompt and hit a cache as often as it is large: they show nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["PROFILES", "RoutingProfile", "distinct", "popularity_exponents", "step_reuse", "synthetic_ids"]

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class RoutingProfile:
    """How a model routes.

    Attributes:
        experts, top_k: of each layer.
        active: share of the experts that a topic uses in a layer, in the mean; layers differ by `_SPREAD` either way.
        tilt: standard deviation of a topic's preferences among experts, as log-weights.
        gap: how much the log-weight of an inactive expert is lower. A few are used all the same.
        carry: correlation of a topic's preferences with those of the topic before.
        topic_tokens: mean length of a topic.
        zipf: lowest and highest exponent of a layer's popularity.
    """

    experts: int
    top_k: int
    active: float = 1.0
    tilt: float = 1.0
    gap: float = 7.0
    carry: float = 0.5
    topic_tokens: float = 600.0
    zipf: tuple[float, float] = (0.3, 1.0)


_SPREAD = 0.04

# What fixes a profile is in brackets.
PROFILES: dict[str, RoutingProfile] = {
    # [63 experts at 384 tokens]
    "qwen3-30b-a3b": RoutingProfile(128, 8, active=0.475, tilt=1.5, topic_tokens=900.0),
    # The same shape with all experts in use. [A cache of half the rows that evicts the least recently used hits 0.75 to 0.89,
    # as seen in long generations of other models; with 63 experts a prompt it could hardly miss.]
    "qwen3-30b-a3b-wide": RoutingProfile(128, 8, tilt=1.4),
    # [reuse]
    "mixtral-8x7b": RoutingProfile(8, 2, tilt=0.6),
    # [reuse; half the rows hit 0.75 to 0.89]
    "gpt-oss-20b": RoutingProfile(32, 4, active=0.8, gap=3.0),
    # [40% at 130 tokens, 77% at 1,658]
    "256-experts": RoutingProfile(256, 8, active=0.43, tilt=1.5, carry=0.4, topic_tokens=500.0),
    # [49% at 512 tokens]
    "384-experts": RoutingProfile(384, 8, active=0.45, tilt=1.75, topic_tokens=700.0),
}


def synthetic_ids(profile: str | RoutingProfile, layers: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Routed expert ids of one sequence, int64, (layers, tokens, top-k), the experts of a token in descending order of weight.

    The first tokens may serve as a prompt and the others as decode steps. Topics change at the same tokens in all layers.

    Raises:
        ValueError: there is no such profile, or nothing to draw.
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise ValueError(f"there is no routing profile {profile!r}, only {', '.join(PROFILES)}")
        profile = PROFILES[profile]
    if layers < 1 or tokens < 1:
        raise ValueError(f"{layers} layers of {tokens} tokens have no ids")
    cuts = _topic_starts(profile, tokens, np.random.default_rng((seed, 0)))
    drawn = [_layer(profile, tokens, cuts, np.random.default_rng((seed, 1 + layer))) for layer in range(layers)]
    return torch.from_numpy(np.stack(drawn))


def _topic_starts(profile: RoutingProfile, tokens: int, random: np.random.Generator) -> list[int]:
    """Where topics begin, and the end. Lengths are exponential, so a sequence may begin anywhere in a topic."""
    cuts = [0]
    while cuts[-1] < tokens:
        cuts.append(cuts[-1] + 1 + int(random.exponential(profile.topic_tokens)))
    return [*cuts[:-1], tokens]


def _layer(profile: RoutingProfile, tokens: int, cuts: list[int], random: np.random.Generator) -> Ids:
    experts = profile.experts
    popularity = np.empty(experts)
    popularity[random.permutation(experts)] = -random.uniform(*profile.zipf) * np.log(np.arange(1, experts + 1))
    share = min(1.0, profile.active + random.uniform(-_SPREAD, _SPREAD)) if profile.active < 1 else 1.0
    active = max(profile.top_k, round(share * experts))
    weights = random.gumbel(size=(tokens, experts)).astype(np.float32)
    preference = random.standard_normal(experts)
    for start, end in itertools.pairwise(cuts):
        topic = popularity + profile.tilt * preference
        topic[np.argsort(-topic, kind="stable")[active:]] -= profile.gap
        weights[start:end] += topic.astype(np.float32)
        fresh = random.standard_normal(experts)
        preference = profile.carry * preference + np.sqrt(1 - profile.carry**2) * fresh
    return np.argsort(-weights, axis=1, kind="stable")[:, : profile.top_k].astype(np.int64)


# -- what routing is described by ---------------------------------------------------------------------------------------


def distinct(ids: torch.Tensor, tokens: int) -> list[int]:
    """How many experts the first `tokens` tokens use, of each layer of (layers, tokens, top-k)."""
    return [len(np.unique(layer[:tokens].numpy())) for layer in ids]


def step_reuse(ids: torch.Tensor) -> list[float]:
    """The share of a token's experts that the token before it used as well, of each layer, in the mean over its tokens."""
    shared = (ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(-1)
    return [float(layer.float().mean()) for layer in shared]


def popularity_exponents(ids: torch.Tensor, experts: int) -> list[float]:
    """The exponent of Zipf's law fitted to the uses of the more popular half of the experts, of each layer."""
    fitted = []
    for layer in ids:
        uses = np.sort(np.bincount(layer.numpy().ravel(), minlength=experts))[::-1][: experts // 2]
        slope = np.polyfit(np.log(np.arange(1, len(uses) + 1)), np.log(np.maximum(uses, 1)), 1)[0]
        fitted.append(-float(slope))
    return fitted
