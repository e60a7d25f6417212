"""Ledger: every byte that is allocated or page-locked, by purpose.

Nothing is counted up and down: an interrupt between taking memory and counting it would leave a wrong number for good.
Whoever holds memory says how much it holds when it is asked. Holders know the ledger, so it must not keep them: what is held
would be held until the garbage collector runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum

__all__ = ["Ledger", "Purpose"]


class Purpose(Enum):
    """What memory is held for."""

    SLOTS = "slots on the device"
    CACHES = "row caches on the device"
    BANKS = "expert banks in host memory"
    FILES = "expert banks in files"
    PINNED = "page-locked part of the banks"
    STAGING = "staging buffers in host memory"


class Ledger:
    """Asks all holders of memory what they hold."""

    def __init__(self) -> None:
        self._holders: list[tuple[Purpose, weakref.WeakMethod[Callable[[], int]]]] = []

    def add(self, purpose: Purpose, holds: Callable[[], int]) -> None:
        """From now on `holds()` bytes are held for `purpose`, as long as the object is there whose method that is."""
        self._holders.append((purpose, weakref.WeakMethod(holds)))

    def held(self, purpose: Purpose) -> int:
        """Bytes held now."""
        asked = (holds() for held_for, holds in self._holders if held_for is purpose)
        return sum(holds() for holds in asked if holds is not None)
