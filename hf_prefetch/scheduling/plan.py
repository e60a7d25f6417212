"""LookaheadOrder: which bank comes after which. Pure: integers in, integers out."""

from __future__ import annotations

import itertools

__all__ = ["LookaheadOrder"]


class LookaheadOrder:
    """The order in which banks are called, as last seen.

    It starts as the order of the model's modules and is corrected by what happens: towers may be skipped, decoders
    drafted early, encoder and decoder take turns. A *pass* is a run of calls in which no bank comes twice; the last
    bank of a pass predicts nothing, because nobody knows whether another pass follows. A wrong prediction costs the
    time of a copy, never a byte.
    """

    def __init__(self, banks: list[int]) -> None:
        self._successor: dict[int, int] = dict(itertools.pairwise(banks))
        self._seen_in_pass: set[int] = set()
        self._last: int | None = None
        self._first: int = banks[0]

    def observe(self, bank: int) -> bool:
        """A bank is being called. Returns whether this may begin another pass.

        A bank called twice in a row does not say: it may be one call in two parts, or a pass that broke off and begins
        again. The order that is known stays as it is.
        """
        if bank == self._last:
            return True
        begins = bank in self._seen_in_pass
        if begins:
            self._seen_in_pass.clear()
            self._first = bank
            if self._last is not None:
                self._successor.pop(self._last, None)
        elif self._last is not None:
            self._successor[self._last] = bank
        self._seen_in_pass.add(bank)
        self._last = bank
        return begins

    def upcoming(self, count: int) -> list[int]:
        """The first `count` banks of a pass that is about to begin."""
        return [self._first, *self.ahead(self._first, count - 1)][:count]

    def ahead(self, bank: int, distance: int) -> list[int]:
        """Up to `distance` banks that are expected after `bank`, nearest first; never `bank` itself, none twice."""
        expected: list[int] = []
        current: int | None = bank
        while len(expected) < distance:
            current = self._successor.get(current) if current is not None else None
            if current is None or current == bank or current in expected:
                break
            expected.append(current)
        return expected
