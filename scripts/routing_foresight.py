"""Would it pay to bring an expert into a row cache before the router has asked for it, while attention runs?

Before each step one expert that is not cached is guessed for each bank, from what is known by then, and compared with what the
step uses. Nothing is brought: the caches are those of the default policy, half of the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_prefetch.scheduling.replacement import Replacement
from routing_policies import Fading, Ids, simulate

__all__ = ["GUESSES", "foresight"]

Json = dict[str, Any]

GUESSES = {
    "score": "the expert outside of the cache that was used most of late",
    "given up": "the expert that was given up last",
    "layer before": "the expert outside that was used most often when the layer before had routed as it has now",
}


class _Guesses:
    """Guesses for all streams, counted where they come true.

    Args:
        ids: (streams, steps, k).
        experts: how many there are.
        before: the stream of the layer before for each stream; itself where there is none.
        warm_up: steps that are not counted.
    """

    def __init__(self, ids: Ids, experts: int, before: NDArray[np.int64], warm_up: int) -> None:
        streams, _, self.k = ids.shape
        self.ids, self.before, self.warm_up = ids, before, warm_up
        self.every = np.arange(streams)[:, None]
        self.scores = Fading((Replacement().decay,))(ids, experts)
        self.recent = np.zeros((streams, experts), dtype=np.float32)
        self.left = np.full((streams, experts), -1.0, dtype=np.float32)
        self.cached = np.zeros((streams, experts), dtype=bool)
        self.follow = np.zeros((streams, experts, experts), dtype=np.float32)
        self.right = dict.fromkeys(GUESSES, 0)
        self.guesses = dict.fromkeys(GUESSES, 0)
        self.misses = self.calls = 0

    def __call__(self, step: int, place: Ids) -> None:
        """Before a step; `place` is the row of each expert of each stream, -1 for none."""
        cached = place >= 0
        self.left[self.cached & ~cached] = step
        self.left[cached] = -1.0
        self.cached = cached
        wanted = np.zeros_like(cached)
        wanted[self.every, self.ids[:, step]] = True
        source = self.ids[self.before, step]
        if step >= self.warm_up:
            later = self.before != np.arange(len(cached))
            likely = self.follow[self.every, source].sum(axis=1)
            for name, keys, where in (
                ("score", self.recent, None),
                ("given up", self.left, None),
                ("layer before", likely, later),
            ):
                guess = np.where(cached, -np.inf, keys).argmax(axis=1)
                right, there = wanted[self.every[:, 0], guess], ~cached.all(axis=1)
                there = there if where is None else there & where
                self.right[name] += int(right[there].sum())
                self.guesses[name] += int(there.sum())
            self.misses += int((wanted & ~cached).sum())
            self.calls += len(cached)
        self.recent = self.scores(step, self.ids[:, step]).copy()
        for position in range(self.k):
            for expert in range(self.k):
                self.follow[self.every[:, 0], source[:, position], self.ids[:, step, expert]] += 1


def foresight(ids: Ids, experts: int, rows: int, sequences: int, kinds: int, warm_up: int) -> Json:
    """How often one guess a bank and token comes true.

    Args:
        ids: (streams, steps, k); of each kind the layers come one after the other, each with its sequences.
        experts: how many there are.
        rows: of each cache.
        sequences: streams of one layer and kind.
        kinds: how many there are.
        warm_up: steps that are not counted.

    Returns:
        The share of guesses that came true, of each kind of guess, and the misses of a bank and token.
    """
    number = np.arange(len(ids))
    first = number % (len(ids) // kinds) < sequences
    guesses = _Guesses(ids, experts, np.where(first, number, number - sequences), warm_up)
    simulate(ids, experts, rows, Fading((Replacement().decay,)), watch=guesses)
    shares = {name: guesses.right[name] / max(guesses.guesses[name], 1) for name in GUESSES}
    return {"right": shares, "misses": guesses.misses / guesses.calls}
