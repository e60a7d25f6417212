"""Ledger: every byte that was allocated or page-locked, by purpose, and what is still held."""

from __future__ import annotations

from collections import Counter
from enum import Enum

__all__ = ["Ledger", "Purpose"]


class Purpose(Enum):
    """What memory is held for."""

    SLOTS = "slots on the device"
    BANKS = "expert banks in host memory"
    PINNED = "page-locked part of the banks"


class Ledger:
    """Bytes held, by purpose. Whoever allocates calls `take`, whoever frees calls `give`; both know their own sizes."""

    def __init__(self) -> None:
        self._held: Counter[Purpose] = Counter()

    def take(self, purpose: Purpose, nbytes: int) -> None:
        """Note that `nbytes` more are held."""
        self._held[purpose] += nbytes

    def give(self, purpose: Purpose, nbytes: int) -> None:
        """Note that `nbytes` were given back.

        Raises:
            ValueError: more is given back than is held, which means that something was freed twice.
        """
        if nbytes > self._held[purpose]:
            raise ValueError(f"{nbytes} bytes of {purpose.value} given back, but only {self._held[purpose]} are held.")
        self._held[purpose] -= nbytes

    def held(self, purpose: Purpose) -> int:
        """Bytes held now."""
        return self._held[purpose]
