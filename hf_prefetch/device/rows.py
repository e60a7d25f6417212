"""RowSender: single experts, from host memory into a slot or a cache.

Where a kernel can read page-locked memory itself nothing is decided on the host, so nothing waits for the router. Elsewhere
the host asks which experts were routed and enqueues a copy for each: slower, with the same bytes in the same places.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from ..banks.layout import BankLayout, TensorSpec
from ..memory.store import StoredBank
from ..streams import StreamDevice
from .table import Assignment, RowTable

__all__ = ["RowCounter", "RowSender", "triton_is_there"]


class RowCounter:
    """How many experts calls have needed, and how many of these were sent; counted on the device where only it knows."""

    def __init__(self, device: StreamDevice) -> None:
        self._device = device
        self._needed = self._sent = 0
        self._on_device: torch.Tensor | None = None

    def add(self, needed: int, sent: int) -> None:
        """The host has sent some."""
        self._needed += needed
        self._sent += sent

    def tensor(self) -> torch.Tensor:
        """int64 (2,): needed and sent, to which kernels add. It stays the same tensor: a CUDA graph may know its address."""
        if self._on_device is None:
            with torch.inference_mode(False):
                self._on_device = self._device.allocate(16).view(torch.int64).zero_()
        return self._on_device

    def reset(self) -> None:
        """Begin at zero."""
        self._needed = self._sent = 0
        if self._on_device is not None:
            self._on_device.zero_()

    def totals(self) -> tuple[int, int]:
        """Experts needed and sent so far. Waits for the device."""
        needed, sent = self._on_device.tolist() if self._on_device is not None else (0, 0)
        return self._needed + int(needed), self._sent + int(sent)


class RowSender:
    """Enqueues, on the compute stream, copies of single experts."""

    def __init__(self, device: StreamDevice) -> None:
        self.device = device
        self._tensors: dict[tuple[BankLayout, BankLayout], torch.Tensor] = {}

    def has_kernels(self, stored: StoredBank) -> bool:
        """Whether kernels do the work, so that nothing is decided on the host."""
        return self.device.device.type == "cuda" and stored.is_pinned and triton_is_there()

    def decides_on_host(self, stored: StoredBank) -> bool:
        """Whether the host has to see the ids, so that no CUDA graph can be captured."""
        return self.device.device.type == "cuda" and not self.has_kernels(stored)

    def prepare(self, stored: StoredBank, layout: BankLayout | None = None) -> None:
        """Have on the device what kernels need to bring a bank's rows to a place of this layout (its own, if none is given)."""
        if self.has_kernels(stored):
            self._table(stored, layout or stored.bank.layout)

    def send_to_slot(
        self,
        stored: StoredBank,
        slot: torch.Tensor,
        ids: torch.Tensor,
        counter: RowCounter,
        cache: tuple[RowTable, BankLayout, torch.Tensor] | None = None,
    ) -> Assignment:
        """Bring the experts that `ids` names to their own places in a slot. Returns the list of them, each once.

        Args:
            stored: the bank.
            slot: the slot's buffer.
            ids: int64 in any shape; an id may come more than once. Ids beyond the last expert (expert parallelism has them)
                count as the last: implementations multiply that one with weights of zero, so it must be there.
            counter: counts them.
            cache: table, layout and buffer of the bank's cache, from which those come that are there.
        """
        table, layout, rows = cache or (None, stored.bank.layout, slot)
        if self.has_kernels(stored):
            from .kernels import gather_rows, list_experts

            where, totals = self._table(stored, layout), counter.tensor()
            with self._launching():
                found = list_experts(ids, stored.bank.num_experts, table, totals)
                gather_rows(where, found, stored.block, rows, slot, to_rows=False)
            return found
        found = _listed(ids, stored.bank.num_experts)
        chosen = [expert for expert, _ in found.moves()]
        places = table.row_of().tolist() if table is not None else [-1] * stored.bank.num_experts
        stream = self.device.compute_stream()
        for expert in chosen:
            for there, here in zip(layout.specs, stored.bank.layout.specs, strict=True):
                place = _place(here, expert)
                if places[expert] < 0:
                    self.device.copy(stream, slot[place], stored.bytes_of(place))
                else:
                    slot[place].copy_(rows[_place(there, places[expert])])
        counter.add(len(chosen), sum(places[expert] < 0 for expert in chosen))
        return found

    def distinct(self, ids: torch.Tensor, rows: int) -> Assignment:
        """The rows that `ids` names, each once, as a list; ids beyond the last row count as that, negative ones as none."""
        if ids.is_cuda and triton_is_there():
            from .kernels import list_experts

            with self._launching():
                return list_experts(ids, rows, None, None)
        return _listed(ids, rows)

    def count(self, experts: int, ids: torch.Tensor, totals: torch.Tensor) -> None:
        """Add the number of distinct experts among `ids` to `totals`, where kernels do the work. Nothing is sent."""
        from .kernels import list_experts

        with self._launching():
            list_experts(ids, experts, None, totals)

    def send_to_cache(
        self,
        stored: StoredBank,
        table: RowTable,
        layout: BankLayout,
        rows: torch.Tensor,
        ids: torch.Tensor,
        counter: RowCounter,
    ) -> torch.Tensor:
        """Bring the experts that `ids` names, and that are not there yet, into the bank's cache.

        Args: as above.

        Returns:
            int64 in the shape of `ids`: the row of each.
        """
        if self.has_kernels(stored):
            from .kernels import assign_rows, gather_rows

            where, totals = self._table(stored, layout), counter.tensor()
            with self._launching():
                found = assign_rows(table, ids, totals)
                gather_rows(where, found, stored.block, rows, rows, to_rows=True)
            return found.ids
        found = table.assign(ids)
        stream = self.device.compute_stream()
        for there, here in _moves(stored, layout, found):
            self.device.copy(stream, rows[there], stored.bytes_of(here))
        needed = len({i for i in ids.reshape(-1).tolist() if 0 <= i < stored.bank.num_experts})
        counter.add(needed, int(found.lists[0]))
        return found.ids

    def keep(self, stored: StoredBank, slot: torch.Tensor, layout: BankLayout, rows: torch.Tensor, found: Assignment) -> None:
        """Copy experts of a whole bank in a slot to their rows in the bank's cache, on the device."""
        if self.has_kernels(stored):
            from .kernels import gather_rows

            where = self._table(stored, layout)
            with self._launching():
                gather_rows(where, found, slot, rows, rows, to_rows=True)
            return
        for there, here in _moves(stored, layout, found):
            rows[there].copy_(slot[here])

    def _launching(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device, which with several of them need not be this one."""
        index = self.device.device.index
        return nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)

    def _table(self, stored: StoredBank, layout: BankLayout) -> torch.Tensor:
        """int64 (tensors, 3), in bytes: the size of a row of each tensor, and where that begins in the bank and in `layout`.

        Made once for each pair of layouts, in `prepare`: sending it holds the host, which no graph may be captured over.
        """
        pair = (stored.bank.layout, layout)
        if pair not in self._tensors:
            table = [
                (spec.nbytes // spec.shape[0], spec.offset, small.offset)
                for spec, small in zip(pair[0].specs, layout.specs, strict=True)
            ]
            with torch.inference_mode(False):
                there = self.device.allocate(24 * len(table)).view(torch.int64).view(-1, 3)
                self._tensors[pair] = there.copy_(torch.tensor(table, dtype=torch.int64, device="cpu"))
        return self._tensors[pair]


def _moves(stored: StoredBank, layout: BankLayout, found: Assignment) -> Iterator[tuple[slice, slice]]:
    """For every tensor of every expert that has to come: its place in the cache, and in the whole bank."""
    for expert, row in found.moves():
        for there, here in zip(layout.specs, stored.bank.layout.specs, strict=True):
            yield _place(there, row), _place(here, expert)


def _listed(ids: torch.Tensor, rows: int) -> Assignment:
    """What `list_experts` does, on the host."""
    named = sorted({min(row, rows - 1) for row in ids.flatten().tolist() if row >= 0})
    lists = torch.tensor([len(named), *named, *([-1] * len(named))], dtype=torch.int64, device=ids.device)
    return Assignment(ids, len(named), lists)


def _place(spec: TensorSpec, row: int) -> slice:
    size = spec.nbytes // spec.shape[0]
    return slice(spec.offset + row * size, spec.offset + (row + 1) * size)


@cache
def triton_is_there() -> bool:
    """Whether kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None
