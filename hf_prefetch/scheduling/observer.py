"""Observer: notes on the device what calls take, and reads it when the device has got there. The host never waits for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from ..streams import StreamDevice
from .experience import Experience

__all__ = ["Observer"]

# Of calls of one size so many are looked at, and afterwards one in so many: routing drifts slowly.
_CLOSELY = 64
_NOW_AND_THEN = 61
# Single experts of fewer bytes than this in a call say more about launches than about the link.
_LEAST_BYTES = 8 * 2**20


class Observer:
    """Collects what one device's calls show, for its `Experience`."""

    def __init__(self, device: StreamDevice) -> None:
        self.experience = Experience()
        self._device = device
        self._seen: Counter[int] = Counter()
        self._unread: deque[tuple[Any, Any, Callable[[float], None]]] = deque(maxlen=4096)
        self._last: tuple[int, Any] | None = None

    def wants(self, ids: int) -> bool:
        """Whether this call of so many ids is to be looked at. Counts it."""
        self._seen[ids] += 1
        return self._seen[ids] <= _CLOSELY or self._seen[ids] % _NOW_AND_THEN == 0

    def note_copy(self, nbytes: int, begin: Any, end: Any) -> None:
        """Between two marks a bank of `nbytes` bytes is copied."""
        self._unread.append((begin, end, lambda seconds: self.experience.saw_copy(nbytes, seconds)))

    def note_experts(self, totals: torch.Tensor, count: Callable[[], None], ids: int, experts: int, row_nbytes: int) -> None:
        """A call counts its experts into `totals` while `count` runs: keep how many they were, and how long it took.

        Args:
            totals: int64 (2,) on the device: experts needed and sent.
            count: enqueues what counts them.
            ids: of the call.
            experts: of the bank.
            row_nbytes: bytes of each, 0 where none is sent.
        """
        stream = self._device.compute_stream()
        with torch.inference_mode(False):
            there = torch.empty((2, 2), dtype=torch.int64, device="cpu", pin_memory=totals.is_cuda)
        there[0].copy_(totals, non_blocking=True)
        begin = self._device.mark(stream)
        count()
        end = self._device.mark(stream)
        there[1].copy_(totals, non_blocking=True)

        def read(_: float) -> None:
            needed, sent = (there[1] - there[0]).tolist()
            self.experience.saw_experts(ids, experts, needed)
            if sent * row_nbytes >= _LEAST_BYTES:
                self.experience.saw_gather(sent * row_nbytes, self._device.elapsed(begin, end) or 0.0)

        self._unread.append((begin, self._device.mark(stream), read))

    def note_call(self, ids: int, begin: Any, end: Any) -> None:
        """Between two marks a call of so many ids waited for its experts; since the one before, the device had other work."""
        if self._last is not None and self._last[0] == ids:
            self._unread.append((self._last[1], begin, lambda seconds: self.experience.saw_kernels(ids, seconds)))
        self._last = ids, end

    def begin_pass(self) -> None:
        """A pass begins: learn from what the device has got to."""
        self._last = None
        while self._unread:
            begin, end, read = self._unread[0]
            seconds = self._device.elapsed(begin, end)
            if seconds is None:
                return
            self._unread.popleft()
            read(seconds)
