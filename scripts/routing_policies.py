"""Replacement policies of a row cache, and a simulator that runs many banks at once.

A policy gives each expert a key after each step, and the cached expert with the lowest key that the step does not need makes
room. Rows, ties and the order of fetches are those of `hf_prefetch.scheduling.replacement`, so that simulating `Fading` with
one decay gives exactly what the package does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Belady", "Fading", "FrequencyByAge", "HotSet", "Keys", "Policy", "Recency", "hot_rows", "simulate"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
# Of a step and its ids, (streams, k), to the keys of all experts, (streams, experts).
Keys = Callable[[int, Ids], Floats]
# Of all ids, (streams, steps, k), and the number of experts, to that. A stream is one bank in one sequence.
Policy = Callable[[Ids, int], Keys]

_SMALLEST = np.float32(2.0**-126)


def simulate(
    ids: Ids, experts: int, rows: int, policy: Policy, start: Ids | None = None, watch: Callable[[int, Ids], None] | None = None
) -> NDArray[np.int16]:
    """Hits of each stream and step.

    Args:
        ids: (streams, steps, k), the k of a step all different.
        experts: how many there are.
        rows: of each stream's cache; at least k.
        policy: what decides.
        start: (streams, rows): the experts that are cached before the first step; none if it is not given.
        watch: called before each step with its number and the row of each expert, (streams, experts), -1 for none.

    Returns:
        (streams, steps): how many of the step's k experts were cached.
    """
    streams, steps, k = ids.shape
    every = np.arange(streams)[:, None]
    # The last column stands for empty rows: its key is below all others.
    table = np.full((streams, rows), experts) if start is None else start.copy()
    place = np.full((streams, experts + 1), -1)
    place[every, table] = np.arange(rows)
    place[:, experts] = -1
    keys = policy(ids, experts)
    padded = np.full((streams, experts + 1), -np.inf, dtype=np.float32)
    hits = np.zeros((streams, steps), dtype=np.int16)
    for step in range(steps):
        wanted = ids[:, step]
        if watch is not None:
            watch(step, place[:, :experts])
        found = place[every, wanted]
        cached = found >= 0
        hits[:, step] = cached.sum(axis=1)
        padded[:, :experts] = keys(step, wanted)
        if cached.all():
            continue
        ranks = padded[every, table]
        stream, slot = np.nonzero(cached)
        ranks[stream, found[stream, slot]] = np.inf
        victims = np.argsort(ranks, axis=1, kind="stable")[:, :k]
        missing = np.sort(np.where(cached, experts, wanted), axis=1)
        stream, slot = np.nonzero(missing < experts)
        row, expert = victims[stream, slot], missing[stream, slot]
        place[stream, table[stream, row]] = -1
        table[stream, row] = expert
        place[stream, expert] = row
    return hits


def hot_rows(keys: NDArray[np.floating], rows: int) -> Ids:
    """The experts with the highest keys, ties by expert: (streams, rows)."""
    return np.argsort(-keys, axis=1, kind="stable")[:, :rows].astype(np.int64)


@dataclass(frozen=True)
class Fading:
    """Scores that fade with each step and grow with each use; the key is their sum. decay 1 is least frequently used.

    Attributes:
        decays: of one or several scores.
        gains: what a use adds to each of them.
        start: (streams, experts) for each score: what it is before the first step; zero if not given.
    """

    decays: Sequence[float]
    gains: Sequence[float] = (1.0,)
    start: tuple[Floats, ...] | None = None

    def __call__(self, ids: Ids, experts: int) -> Keys:
        every = np.arange(ids.shape[0])[:, None]
        zero = np.zeros((ids.shape[0], experts), dtype=np.float32)
        scores = [zero.copy() for _ in self.decays] if self.start is None else [score.copy() for score in self.start]

        def keys(step: int, wanted: Ids) -> Floats:
            for score, decay, gain in zip(scores, self.decays, self.gains, strict=True):
                score[every, wanted] += np.float32(gain)
                np.multiply(score, np.float32(decay), out=score)
                score[score < _SMALLEST] = 0
            total: Floats = scores[0]
            for score in scores[1:]:
                total = np.add(total, score)
            return total

        return keys


class Recency:
    """Least recently used."""

    def __call__(self, ids: Ids, experts: int) -> Keys:
        every = np.arange(ids.shape[0])[:, None]
        last = np.zeros((ids.shape[0], experts), dtype=np.float32)

        def keys(step: int, wanted: Ids) -> Floats:
            last[every, wanted] = step + 1
            return last

        return keys


class FrequencyByAge:
    """Least frequently and recently used: uses so far, over the steps since the last one."""

    def __call__(self, ids: Ids, experts: int) -> Keys:
        every = np.arange(ids.shape[0])[:, None]
        last, uses = (np.zeros((ids.shape[0], experts), dtype=np.float32) for _ in range(2))

        def keys(step: int, wanted: Ids) -> Floats:
            last[every, wanted] = step
            uses[every, wanted] += 1
            rate: Floats = uses / (step + 1 - last)
            return rate

        return keys


@dataclass(frozen=True)
class HotSet:
    """A fixed order of the experts, learnt beforehand: the hottest stay, and what is fetched besides goes next.

    Attributes:
        uses: (streams, experts).
    """

    uses: Floats

    def __call__(self, ids: Ids, experts: int) -> Keys:
        return lambda step, wanted: self.uses


class Belady:
    """The optimum, which knows the future: the expert that is used again last makes room. A bound, not a policy."""

    def __call__(self, ids: Ids, experts: int) -> Keys:
        streams, steps, _ = ids.shape
        every = np.arange(streams)[:, None]
        never = 2 * steps
        upcoming = np.full((streams, experts), never, dtype=np.int64)
        following = np.empty(ids.shape, dtype=np.int64)
        for step in range(steps - 1, -1, -1):
            following[:, step] = upcoming[every, ids[:, step]]
            upcoming[every, ids[:, step]] = step
        next_use = upcoming.astype(np.float32)

        def keys(step: int, wanted: Ids) -> Floats:
            next_use[every, wanted] = following[:, step]
            return -next_use

        return keys
