"""RowCaches: experts of each bank that stay on the device from call to call, within a budget.

[Note: the orderings of a cache]
A cache is read and written on compute streams only. `hold` makes the current one wait for `free`, which whoever used the cache
last recorded in `release`, on whatever stream that was; `_make` records it too, since the allocator may hand out memory that
older kernels still use. While a CUDA graph is captured neither is possible: a graph is replayed on a stream of its user's
choice, after what comes before it there, as all its other inputs ask for.

[Note: leases]
A graph that was captured over a cache knows its address. From then on the cache keeps its size (invariant 9).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..banks.layout import BankLayout
from ..memory.store import StoredBank
from ..streams import StreamDevice
from .rows import RowCounter, RowSender
from .table import RowTable

__all__ = ["RowCache", "RowCaches"]

# No bank's bytes have this version.
NOTHING = (-1,)


@dataclass(eq=False)
class RowCache:
    """The cache of one bank.

    Attributes:
        layout: of `buffer`: the bank's tensors with as many rows as the cache has.
        buffer: flat uint8 on the device.
        tensors: the same as the module's parameters.
        free: recorded by the compute stream when it is allocated and in `release`; waited for in `hold`.
        version: of the bank's bytes that are here, see `StoredBank.version`; NOTHING while the table is ahead of the bytes, so
            that whoever comes after an interrupt in between starts with an empty table.
        is_held: whether a forward reads it.
        is_leased: whether a CUDA graph knows its address.
    """

    layout: BankLayout
    buffer: torch.Tensor
    tensors: dict[str, nn.Parameter]
    table: RowTable
    free: Any
    version: tuple[int, ...]
    is_held: bool = False
    is_leased: bool = False

    @property
    def nbytes(self) -> int:
        """Device memory that it takes, in bytes."""
        return self.buffer.numel() + self.table.nbytes


class RowCaches:
    """The caches of the banks that compute on one device.

    Args:
        device: where.
        sender: brings experts there.
        rows: how many each bank gets; 0 for no caches.
        decay: what a call leaves of a score, see `RowTable`.

    Attributes:
        rows: as above; less once memory was short.
        is_full: whether no more caches are made, because there is no room for them.
    """

    def __init__(self, device: StreamDevice, sender: RowSender, rows: int, decay: float) -> None:
        self.device = device
        self.rows = rows
        self.is_full = False
        self._sender = sender
        self._decay = decay
        self._caches: dict[int, RowCache] = {}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory of all caches."""
        return [cache.buffer for cache in self._caches.values()]

    def held(self) -> int:
        """Device memory held, in bytes."""
        return sum(cache.nbytes for cache in self._caches.values())

    def fits(self, ids: int, experts: int) -> bool:
        """Whether a call of so many ids is sure to find room for all of its experts."""
        return min(ids, experts) <= self.rows

    def of(self, bank: int) -> RowCache | None:
        """A bank's cache, if it has been made."""
        return self._caches.get(bank)

    def prepare(self, stored: StoredBank) -> RowCache:
        """A bank's cache, made now if it is not there.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        cache = self._caches.get(stored.bank.index)
        if cache is None:
            cache = self._caches[stored.bank.index] = self._make(stored)
        return cache

    def _make(self, stored: StoredBank) -> RowCache:
        bank = stored.bank
        layout = bank.layout.with_rows(min(self.rows, bank.num_experts))
        # Rows that hold no expert yet are multiplied with weights of zero where ids say "not here" (expert parallelism).
        buffer = self.device.allocate(layout.nbytes).zero_()
        table = RowTable(self.device, bank.num_experts, layout.specs[0].shape[0], self._decay)
        with torch.inference_mode(False):
            # As in slots, they count what a forward writes into them, and nothing else.
            tensors = {name: nn.Parameter(view.data, requires_grad=False) for name, view in layout.views(buffer).items()}
        self._sender.prepare(stored, layout)
        free = self.device.new_event()
        self.device.record(free, self.device.compute_stream())
        return RowCache(layout, buffer, tensors, table, free, stored.version)

    def hold(self, stored: StoredBank) -> RowCache:
        """Make the compute stream wait for a bank's cache, which must be there; what is in it is current from here on."""
        cache = self._caches[stored.bank.index]
        if self.device.is_capturing():
            cache.is_leased = True
        else:
            self.device.wait(self.device.compute_stream(), cache.free)
            if cache.version != stored.version:
                cache.table.clear()
                cache.version = stored.version
        cache.is_held = True
        return cache

    def fetch(self, stored: StoredBank, ids: torch.Tensor, counter: RowCounter) -> torch.Tensor:
        """Bring the experts that `ids` names into the cache, which is held. Returns the row of each, in the shape of `ids`."""
        cache = self._caches[stored.bank.index]
        # That of `hold`: what is written while rows are sent comes at the next one.
        version, cache.version = cache.version, NOTHING
        rows = self._sender.send_to_cache(stored, cache.table, cache.layout, cache.buffer, ids, counter)
        cache.version = version
        return rows

    def keep(self, stored: StoredBank, slot: torch.Tensor, ids: torch.Tensor, weights: tuple[float, float]) -> None:
        """Fill the cache, which is held, from a slot that holds the whole bank, with the experts worth keeping after a prompt.

        Args:
            stored: the bank.
            slot: the slot's buffer, readable on the compute stream.
            ids: those of the prompt's last tokens.
            weights: see `RowTable.assign_prompt`.
        """
        cache = self._caches[stored.bank.index]
        version, cache.version = cache.version, NOTHING
        found = cache.table.assign_prompt(ids, *weights)
        self._sender.keep(stored, slot, cache.layout, cache.buffer, found)
        cache.version = version

    def release(self, bank: int) -> None:
        """The forward that read a cache is enqueued. Idempotent."""
        cache = self._caches.get(bank)
        if cache is not None and cache.is_held:
            if not self.device.is_capturing():
                self.device.record(cache.free, self.device.compute_stream())
            cache.is_held = False

    @property
    def can_shrink(self) -> bool:
        """Whether some of the memory could be given back."""
        return self.rows > 0 and not any(cache.is_held or cache.is_leased for cache in self._caches.values())

    def shrink(self, rows: int) -> None:
        """Have `rows` rows a bank from now on, none of which holds anything yet. The memory is free when it returns."""
        self.settle()
        self._caches.clear()
        self.rows, self.is_full = rows, False

    def forget(self) -> None:
        """Forget what is in the caches: the banks' bytes are about to change. Graphs that know the caches notice it too."""
        self.settle()
        for cache in self._caches.values():
            cache.table.clear()
            self.device.record(cache.free, self.device.compute_stream())

    def settle(self) -> None:
        """Hold the host until no kernel uses a cache or reads a bank's host memory for one."""
        if any(cache.is_leased for cache in self._caches.values()):
            # Replays leave no event behind.
            self.device.settle()
        for cache in self._caches.values():
            self.device.synchronize(cache.free)

    def close(self) -> None:
        """Free all of them, after the last kernel that uses them has ended. Idempotent."""
        self.shrink(0)
