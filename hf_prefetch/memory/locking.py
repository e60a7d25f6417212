"""PageLocks: which banks' arenas are page-locked, within a budget."""

from __future__ import annotations

from ..streams import StreamDevice
from .pages import SEGMENT
from .pinned import Arena

__all__ = ["PageLocks"]


class PageLocks:
    """Grants page locks and takes them, each bank's as a whole or not at all.

    Args:
        budget: bytes that may be page-locked, None for as many as there are.

    Attributes:
        refusals: why the system refused to page-lock, if it did.
    """

    def __init__(self, budget: int | None) -> None:
        self._budget = budget
        self.refusals: list[str] = []
        # Of banks that are page-locked, or will be: bytes, by index.
        self._granted: dict[int, int] = {}
        self._segments: dict[StreamDevice, int | None] = {}

    def arena(self, index: int, nbytes: int, device: StreamDevice, *, written: bool) -> Arena | None:
        """Memory for a bank that may be page-locked: the device can, the budget has room, and the system hasn't refused before.

        What it refused once it will refuse again: asking for each bank would only repeat the message. `written`: whether the
        bank is put there byte for byte, see `Pages`.
        """
        within = self._budget is None or sum(self._granted.values()) + nbytes <= self._budget
        if not (device.can_pin and within) or self.refusals:
            return None
        if nbytes > SEGMENT and device not in self._segments:
            self._segments[device] = SEGMENT if Arena.can_have_segments(device) else None
        arena = Arena(nbytes, segment=self._segments.get(device, SEGMENT), node=device.numa_node(), written=written)
        self._granted[index] = nbytes
        return arena

    def lock(self, index: int, arena: Arena, device: StreamDevice) -> None:
        """Page-lock a bank's arena, in which its pages are. On whatever thread."""
        arena.settle()
        refusal = None if self.refusals else arena.pin(device)
        if refusal is not None:
            self.refusals.append(refusal)
        if not arena.is_pinned:
            self.withdraw(index)

    def withdraw(self, index: int) -> None:
        """A bank is not page-locked, or not any more. Idempotent."""
        self._granted.pop(index, None)
