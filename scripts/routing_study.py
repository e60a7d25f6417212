"""The study behind the default replacement policy: hit rates of policies on recorded and synthetic routing.

Every cache starts empty and is one bank's own. The first `WARM_UP` tokens fill it and are what a static hot set is learnt
from; hits are counted after them. Parameters are judged by leaving kinds of text out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from demo_data import read_books, split_books, text_stream
from hf_prefetch.demo import load_demo_model, load_demo_tokenizer
from hf_prefetch.routing import record_routing
from hf_prefetch.scheduling.replacement import Replacement
from routing_foresight import foresight
from routing_policies import Belady, Fading, FrequencyByAge, HotSet, Ids, Policy, Recency, hot_rows, simulate
from routing_synthetic import PROFILES, synthetic_ids

__all__ = ["WARM_UP", "Routing", "demo", "hit_rates", "leave_out", "prompt_seeding", "study", "synthetic", "traces"]

Json = dict[str, Any]

WARM_UP = 256
LENGTH = 2048
FRACTIONS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
DECAYS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 0.998, 1.0)
# Pairs of (decay, gain). A gain weighs a use; a score that fades quickly counts recent uses only.
MIXTURES = (
    ((0.8, 1.0), (0.98, 1.0)),
    ((0.9, 1.0), (0.99, 1.0)),
    ((0.8, 2.0), (0.99, 1.0)),
    ((0.95, 1.0), (0.998, 0.25)),
)
# The synthetic shapes of the study. Seeds and layers of each: 24 banks.
SHAPES = ("qwen3-30b-a3b", "qwen3-30b-a3b-wide", "mixtral-8x7b", "gpt-oss-20b")
SEEDS, LAYERS = 4, 6
PROMPTS = (256, 512, 1024)
DECODED = (50, 200)


@dataclass(frozen=True)
class Routing:
    """Routing of one origin.

    Attributes:
        name: of the origin.
        experts: of each bank.
        kinds: kind of text (or seed) to ids, (streams, tokens, k); a stream is one bank in one sequence. The streams of all
            kinds have the same banks in the same order if `same_banks`.
        sequences: streams of one layer and kind, which come one after the other.
    """

    name: str
    experts: int
    kinds: dict[str, Ids]
    same_banks: bool = True
    sequences: int = 1

    @property
    def ids(self) -> Ids:
        """All streams: (streams, tokens, k)."""
        return np.concatenate(list(self.kinds.values()))

    @property
    def k(self) -> int:
        """Experts a token."""
        return int(next(iter(self.kinds.values())).shape[2])

    @property
    def sizes(self) -> list[int]:
        """Cache sizes from one token's experts to all."""
        return sorted({self.k, *(max(self.k, round(fraction * self.experts)) for fraction in FRACTIONS)})


def traces(path: Path, experts: int = 64) -> Routing:
    """Recorded traces: an archive of numpy arrays (layers, sequences, tokens, k), one a kind of text."""
    with np.load(path) as archive:
        kinds = {name: archive[name].astype(np.int64) for name in sorted(archive)}
    sequences = next(iter(kinds.values())).shape[1]
    streams = {name: ids.reshape(-1, *ids.shape[2:]) for name, ids in kinds.items()}
    return Routing("traces", experts, streams, sequences=sequences)


def synthetic(name: str) -> Routing:
    """A synthetic shape; each seed is another model."""
    kinds = {f"seed {seed}": synthetic_ids(name, LAYERS, LENGTH, seed).numpy() for seed in range(SEEDS)}
    return Routing(name, PROFILES[name].experts, kinds, same_banks=False)


def demo(length: int = LENGTH) -> Routing:
    """Routing of the demonstration model, reading the chapters that it was not trained on."""
    model, tokenizer = load_demo_model(torch.float32), load_demo_tokenizer()
    stream = text_stream(tokenizer, [split_books(read_books())[1]]).astype(np.int64)
    kinds: dict[str, Ids] = {}
    for part in range(2):
        at = part * (len(stream) // 2)
        with record_routing(model) as trace, torch.no_grad():
            model.model(torch.from_numpy(stream[None, at : at + length]))
        kinds[f"text {part + 1}"] = trace.stacked().numpy()
    return Routing("demo", max(trace.num_experts.values()), kinds)


def policies(routing: Routing) -> dict[str, Policy]:
    """The policies that are compared, the package's default among them."""
    return {
        "LRU": Recency(),
        "LFU": Fading((1.0,)),
        "LFRU": FrequencyByAge(),
        "static": HotSet(_uses(routing.ids[:, :WARM_UP], routing.experts)),
        "default": Fading((Replacement().decay,)),
    }


def _uses(ids: Ids, experts: int) -> NDArray[np.float32]:
    every = np.arange(ids.shape[0])[:, None, None]
    uses = np.zeros((ids.shape[0], experts), dtype=np.float32)
    np.add.at(uses, (np.broadcast_to(every, ids.shape), ids), 1)
    return uses


def _other_kinds(routing: Routing) -> HotSet:
    """A hot set of each bank, learnt from all other kinds of text."""
    uses = np.stack([_uses(ids, routing.experts) for ids in routing.kinds.values()])
    return HotSet((uses.sum(axis=0) - uses).reshape(-1, routing.experts))


def _rate(hits: NDArray[np.int16], k: int, start: int = WARM_UP) -> float:
    return float(hits[:, start:].mean()) / k


def hit_rates(routing: Routing, say: Callable[[str], None] = lambda text: None) -> Json:
    """Hit rates by cache size and policy; at half the rows also those of every decay and mixture, and by kind."""
    ids, experts, k = routing.ids, routing.experts, routing.k
    curves: Json = {}
    for rows in routing.sizes:
        compared = policies(routing) | {"Belady": Belady()}
        if routing.same_banks:
            compared["static, other kinds"] = _other_kinds(routing)
        curves[str(rows)] = {name: _rate(simulate(ids, experts, rows, policy), k) for name, policy in compared.items()}
        say(f"{routing.name}, {rows} of {experts} rows: {curves[str(rows)]}")
    half = max(k, experts // 2)
    by_kind: dict[str, dict[str, float]] = {}
    for name, policy in (policies(routing) | family()).items():
        hits = np.split(simulate(ids, experts, half, policy), len(routing.kinds))
        by_kind[name] = {kind: _rate(part, k) for kind, part in zip(routing.kinds, hits, strict=True)}
    mean = {name: float(np.mean(list(kinds.values()))) for name, kinds in by_kind.items()}
    return {
        "experts": experts,
        "top_k": k,
        "streams": len(ids),
        "half": half,
        "curves": curves,
        "family": mean,
        "kinds": by_kind,
    }


def family() -> dict[str, Policy]:
    """Every decay of the grid, and the mixtures of two."""
    single: dict[str, Policy] = {f"decay {decay:g}": Fading((decay,)) for decay in DECAYS}
    return single | {_mixture(pairs): Fading([d for d, _ in pairs], [g for _, g in pairs]) for pairs in MIXTURES}


def _mixture(pairs: Sequence[tuple[float, float]]) -> str:
    return " + ".join(f"{gain:g} x {decay:g}" for decay, gain in pairs)


def leave_out(by_kind: dict[str, dict[str, float]], group: Callable[[str], str]) -> list[Json]:
    """Choose the best member of the family on all groups of kinds but one, and try it on that one."""
    candidates = list(family())
    kinds = list(by_kind["LRU"])
    rows = []
    for held_out in sorted({group(kind) for kind in kinds}):
        inside = [kind for kind in kinds if group(kind) == held_out]
        others = [kind for kind in kinds if group(kind) != held_out]

        def mean(name: str, over: Sequence[str]) -> float:
            return float(np.mean([by_kind[name][kind] for kind in over]))

        chosen = max(candidates, key=lambda name: mean(name, others))
        best = max(by_kind, key=lambda name: mean(name, inside))
        row = {"held_out": held_out, "chosen": chosen, "hit_rate": mean(chosen, inside), "best": best}
        rows.append(row | {"best_hit_rate": mean(best, inside), "default": mean("default", inside), "LRU": mean("LRU", inside)})
    return rows


# -- what a prompt is good for ------------------------------------------------------------------------------------------


def prompt_seeding(routing: Routing) -> Json:
    """Hit rates of the first decoded tokens, half the rows cached, by length of the prompt and by what it leaves behind.

    - empty: nothing; the cache is empty and all scores are zero.
    - scores: the uses in its last tokens go into the scores, the cache is empty.
    - filled: besides, the cache holds the experts with the highest scores: `Replacement.prompt`.
    - filled, whole prompt: the same, but all of its tokens count alike.
    - filled, x 0.25 and x 4: filled, with lighter or heavier scores.
    - filled, no scores: the cache is filled, but the scores are zero.
    - exact: scores and cache as if each token of the prompt had been decoded, with its place in the prompt.
    - decoded: the cache that decoding the prompt token by token leaves.
    """
    policy, experts = Replacement(), routing.experts
    rows = max(routing.k, experts // 2)
    found: Json = {}
    for tokens in PROMPTS:
        starts = [start for start in (0, 800) if start + tokens + max(DECODED) <= routing.ids.shape[1]]
        whole = np.concatenate([routing.ids[:, start : start + tokens + max(DECODED)] for start in starts])
        prompt, decode = whole[:, :tokens], whole[:, tokens:]
        recent = min(tokens, policy.window)
        mean = _uses(prompt[:, -recent:], experts) * np.float32(policy.weights(tokens)[1])
        everything = _uses(prompt, experts) * np.float32(Replacement(policy.decay, tokens).weights(tokens)[1])
        exact = _faded(prompt, experts, policy.decay)
        zero = np.zeros_like(mean)
        ways: dict[str, tuple[NDArray[np.float32], NDArray[np.float32] | None]] = {
            "empty": (zero, None),
            "scores": (mean, None),
            "filled": (mean, mean),
            "filled, whole prompt": (everything, everything),
            "filled, x 0.25": (mean / 4, mean),
            "filled, x 4": (mean * 4, mean),
            "filled, no scores": (zero, mean),
            "exact": (exact, exact),
        }
        rates: Json = {}
        for name, (scores, fill) in ways.items():
            start = None if fill is None else hot_rows(fill, rows)
            hits = simulate(decode, experts, rows, Fading((policy.decay,), start=(scores,)), start)
            rates[name] = [_rate(hits[:, :count], routing.k, 0) for count in DECODED]
        hits = simulate(whole, experts, rows, Fading((policy.decay,)))[:, tokens:]
        rates["decoded"] = [_rate(hits[:, :count], routing.k, 0) for count in DECODED]
        found[str(tokens)] = rates
    return found


def _faded(ids: Ids, experts: int, decay: float) -> NDArray[np.float32]:
    keys = Fading((decay,))(ids, experts)
    scores = np.zeros((ids.shape[0], experts), dtype=np.float32)
    for step in range(ids.shape[1]):
        scores = keys(step, ids[:, step])
    return np.array(scores, dtype=np.float32)


def study(trace_file: Path | None, say: Callable[[str], None]) -> Json:
    """Everything, as it is written to the file."""
    origins = [traces(trace_file)] if trace_file is not None else []
    origins += [demo(), *(synthetic(name) for name in SHAPES)]
    results: Json = {"schema": 1, "warm_up": WARM_UP, "decoded": DECODED}
    results["default"] = {"decay": round(Replacement().decay, 6), "window": Replacement().window}
    results["routing"] = {}
    for routing in origins:
        rates = hit_rates(routing, say)
        rates["prompt"] = prompt_seeding(routing)
        half, kinds = rates["half"], len(routing.kinds)
        rates["foresight"] = foresight(routing.ids, routing.experts, half, routing.sequences, kinds, WARM_UP)
        if routing.name == "traces":
            rates["leave_out"] = {
                "one kind": leave_out(rates["kinds"], lambda kind: kind),
                "one sort": leave_out(rates["kinds"], lambda kind: kind.partition("_")[0]),
            }
        results["routing"][routing.name] = rates
    rounded: Json = _rounded(results)
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
