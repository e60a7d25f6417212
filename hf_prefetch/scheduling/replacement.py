"""Replacement: which rows of a bank's cache make room for experts that are missing. Pure Python, exact in float32.

A device with a row cache keeps the weights of some of a bank's experts in rows. Its bookkeeping lives on the device and is
updated once a call without the host, so the policy is a number in a formula and not a branch in code: each expert has a
score that fades with every call and grows with every use, and the cached expert with the lowest score goes first. A decay
up to 0.5 is least recently used, 1 is least frequently used, and what lies between forgets with a half-life.

This file is the reference that the kernels are compared with, bit for bit. All arithmetic is in float32, each operation
rounded by itself. A step adds first and multiplies then, which no compiler can contract into a fused multiply-add.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["EMPTY", "CacheState", "Placement", "Replacement"]

# The expert of a row that holds none.
EMPTY = -1
# The smallest normal float32. What falls below becomes zero: hardware differs on denormals, and so small a score says nothing.
_SMALLEST = 2.0**-126


@dataclass(frozen=True)
class CacheState:
    """The bookkeeping of one bank's cache.

    Attributes:
        scores: one an expert, float32 values, none negative.
        experts: one a row: the expert whose weights it holds, or EMPTY. No expert is in two rows.
    """

    scores: tuple[float, ...]
    experts: tuple[int, ...]

    @classmethod
    def empty(cls, num_experts: int, rows: int) -> CacheState:
        """Nothing cached and nothing known.

        Raises:
            ValueError: there is no row, or more rows than experts.
        """
        if not 1 <= rows <= num_experts:
            raise ValueError(f"a cache has 1 to {num_experts} rows, one for each expert at most, not {rows}")
        return cls((0.0,) * num_experts, (EMPTY,) * rows)

    def row_of(self, expert: int) -> int:
        """The row that holds an expert, or EMPTY."""
        return self.experts.index(expert) if expert in self.experts else EMPTY


@dataclass(frozen=True)
class Placement:
    """What a call does to the cache.

    Attributes:
        state: the bookkeeping afterwards.
        rows: of each id of the call, in its order, the row that holds its expert; EMPTY for ids beyond the last expert.
        fetches: (expert, row) pairs to be copied before the call's kernels run, experts ascending.
    """

    state: CacheState
    rows: tuple[int, ...]
    fetches: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Replacement:
    """The policy, as a value.

    Attributes:
        decay: what a call leaves of a score, above 0 and at most 1; it is rounded to float32. The default remembers about
            50 decoded tokens: half of a score is gone after 34.
        window: of a prompt, the uses in the last so many tokens count, at least 1. Topics change within long prompts.

    docs/routing.md has the measurements that chose the defaults.
    """

    decay: float = 0.98
    window: int = 128

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 < self.decay <= 1:
            raise ValueError(f"decay must be a number above 0 and at most 1 (what a call leaves of a score), not {self.decay}")
        if _float32(self.decay) < _SMALLEST:
            raise ValueError(f"decay is {self.decay!r}, less than float32 can hold; for least recently used take 0.5")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window must be a number of tokens, 1 or more, not {self.window!r}")
        object.__setattr__(self, "decay", _float32(self.decay))

    def step(self, state: CacheState, ids: Iterable[int]) -> Placement:
        """One call that computes from the cache: every expert that it routes to is in a row afterwards.

        1. An expert is needed if its id is among `ids`, once or several times. Ids beyond the last expert (sentinels of
           expert parallelism) need nothing; nor do negative ones.
        2. Every score becomes (score + 1) * decay if its expert is needed, else score * decay; below 2**-126 it becomes 0.
        3. Rows that may be replaced are ranked: empty ones first, then those of experts that are not needed, by their new
           score, the lowest first; ties by row, the lowest first.
        4. The m-th needed expert that is in no row, in ascending order, gets the m-th of these rows.

        Raises:
            ValueError: the call needs more experts than there are rows. It must not reach the cache.
        """
        ids = tuple(ids)
        needed = {expert for expert in ids if 0 <= expert < len(state.scores)}
        added = (_float32(score + 1.0) if expert in needed else score for expert, score in enumerate(state.scores))
        scores = tuple(_flushed(_float32(score * self.decay)) for score in added)
        return _place(CacheState(scores, state.experts), needed, ids)

    def weights(self, tokens: int) -> tuple[float, float]:
        """What a prompt of `tokens` tokens leaves of a score, and what each use in its window adds: as if its tokens had been
        decoded one by one, the uses of each expert spread evenly over the window. Both are rounded to float32.

        Raises:
            ValueError: there is no token.
        """
        if tokens < 1:
            raise ValueError(f"a prompt has at least one token, not {tokens}")
        counted = min(tokens, self.window)
        # The mean of decay, decay**2, ... decay**counted.
        mean = 1.0 if self.decay == 1 else self.decay * (1 - self.decay**counted) / ((1 - self.decay) * counted)
        return _flushed(_float32(self.decay**tokens)), _float32(mean)

    def prompt(self, state: CacheState, counts: Sequence[int], tokens: int) -> Placement:
        """A prompt has passed by in whole banks, so any expert can be cached for nothing: those with the highest scores are.

        1. Every score becomes score * kept + count * added, with `weights(tokens)`; both products are rounded, then the
           sum. Below 2**-126 it becomes 0.
        2. The experts to keep are as many as there are rows, by their new score, the highest first; ties by expert, the
           lowest first.
        3. Those that are in a row stay there. The others get rows as in a step, all rows of other experts being replaced.

        Args:
            state: the bookkeeping before.
            counts: how many ids of its last min(tokens, window) tokens name each expert, one an expert; below 2**24, so that
                float32 holds them.
            tokens: tokens of the whole prompt.

        Raises:
            ValueError: the counts are not one an expert, or there is no token.
        """
        if len(counts) != len(state.scores):
            raise ValueError(f"{len(counts)} counts for {len(state.scores)} experts")
        kept, added = self.weights(tokens)
        scores = tuple(
            _flushed(_float32(_float32(score * kept) + _float32(count * added)))
            for score, count in zip(state.scores, counts, strict=True)
        )
        ranked = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))
        return _place(CacheState(scores, state.experts), set(ranked[: len(state.experts)]), ())


def _place(state: CacheState, needed: set[int], ids: Sequence[int]) -> Placement:
    """Find rows for the needed experts that have none, in the order that `Replacement.step` describes."""
    if len(needed) > len(state.experts):
        raise ValueError(f"the call needs {len(needed)} experts, but the cache has {len(state.experts)} rows")
    free = [row for row, expert in enumerate(state.experts) if expert not in needed]
    free.sort(key=lambda row: (-math.inf if state.experts[row] == EMPTY else state.scores[state.experts[row]], row))
    missing = sorted(needed.difference(state.experts))
    fetches = tuple(zip(missing, free, strict=False))
    experts = list(state.experts)
    for expert, row in fetches:
        experts[row] = expert
    after = CacheState(state.scores, tuple(experts))
    return Placement(after, tuple(after.row_of(expert) if expert in needed else EMPTY for expert in ids), fetches)


def _float32(value: float) -> float:
    """The nearest float32. Sums and products of float32 values in float64 come out as float32 hardware computes them."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _flushed(value: float) -> float:
    return value if value >= _SMALLEST else 0.0
