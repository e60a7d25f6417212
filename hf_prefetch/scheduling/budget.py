"""CacheBudget: which banks have a row cache on a device, within the memory given for them, and less when memory is short."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..banks.bank import ExpertBank
from ..device.cache import RowCache, RowCaches
from ..device.rows import RowSender
from ..memory.store import HostStore
from ..report import Counters
from ..streams import StreamDevice
from .refusals import raise_not_warm, warn_no_cache, warn_shrunk_cache, warn_small_cache
from .remedies import Remedies
from .residency import cache_rows

__all__ = ["LEAST_ROOM", "CacheBudget"]

# Device memory below which row caches make room for what else may grow, in bytes, and how many passes may go by unwatched.
LEAST_ROOM = 256 * 2**20
_PASSES_PER_LOOK = 8


class CacheBudget:
    """What the row caches of one device may take. Whatever it says to the user it says once.

    Args:
        device: the device.
        banks: the banks that compute there.
        store: where their bytes are.
        counters: what was said already.
        sender: brings experts into the caches.
        decay: see `RowCaches`.
        nbytes: device memory for them, in bytes; 0 for no caches.
        remedies: what to tell users.

    Attributes:
        caches: those that there are.
    """

    def __init__(
        self,
        device: StreamDevice,
        banks: Sequence[ExpertBank],
        store: HostStore,
        counters: Counters,
        sender: RowSender,
        decay: float,
        *,
        nbytes: int,
        remedies: Remedies,
    ) -> None:
        sizes = [bank.layout.row_nbytes for bank in banks if bank.layout.has_rows]
        rows = min(cache_rows(sizes, nbytes), max(bank.num_experts for bank in banks))
        self.caches = RowCaches(device, sender, rows, decay)
        self._device = device
        self._store = store
        self._counters = counters
        self._nbytes = nbytes
        self._row_nbytes = sum(sizes)
        self._remedies = remedies
        self._passes = 0

    def cache_of(self, bank: ExpertBank) -> RowCache | None:
        """A bank's cache, made now if it is not there; None if there is no room for one.

        Raises:
            RuntimeError: a CUDA graph is being captured, and it is not there.
        """
        cache = self.caches.of(bank.index)
        if cache is not None and self.caches.rows > 0:
            return cache
        wanting = self.caches.rows > 0 and not self.caches.is_full
        if wanting and self._device.is_capturing():
            raise_not_warm(bank)
        while self.caches.rows > 0:
            cache = self.caches.of(bank.index) if self.caches.is_full else self._prepare(bank)
            if cache is not None or self.caches.is_full:
                return cache
        return None

    def _prepare(self, bank: ExpertBank) -> RowCache | None:
        try:
            return self.caches.prepare(self._store[bank])
        except torch.OutOfMemoryError:
            if not self.give_up():
                # Graphs know the others, or a forward that is under way reads them: they stay, and no more are made.
                self.caches.is_full = True
            return None

    def check(self, bank: ExpertBank, ids: torch.Tensor) -> None:
        """Give up caches that can't hold the experts of one token, saying what would do."""
        needed = min(ids.shape[-1], bank.num_experts)
        if not self._nbytes or self.caches.rows >= needed:
            return
        least = self._nbytes if self._row_nbytes == 0 else needed * self._row_nbytes
        if not self._counters.shrunk:
            warn_small_cache(self._nbytes, self.caches.rows, needed, least)
        self._nbytes = 0
        self.caches.rows = 0

    def say_unused(self, bank: ExpertBank) -> None:
        """Experts that can't be given other ids have nothing of a cache that no prompt has filled."""
        told = self._counters.unused_cache or self._counters.shrunk
        if self.caches.rows > 0 and self.caches.of(bank.index) is None and not told:
            self._counters.unused_cache = True
            warn_no_cache(bank, self._remedies)

    def begin_pass(self) -> None:
        """A pass begins: look now and then whether memory is about to run out, because a KV cache grows, and give up some."""
        self._passes += 1
        if self._passes % _PASSES_PER_LOOK == 0 and self.caches.held():
            room = self._device.room()
            if room is not None and room < LEAST_ROOM:
                self.give_up()

    def give_up(self) -> bool:
        """Halve the caches, because memory is short. Returns whether that gave memory back."""
        if self._device.is_capturing() or not self.caches.can_shrink:
            return False
        rows = self.caches.rows
        if not self._counters.shrunk:
            warn_shrunk_cache(self._device, rows, rows // 2)
        self._counters.shrunk = True
        self._counters.fallbacks += 1
        self.caches.shrink(rows // 2)
        return True
