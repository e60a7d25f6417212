"""Routed rows: from host memory into a slot go only the experts that a call uses.

Where a kernel can read page-locked memory itself nothing is decided on the host, so nothing waits for the router. Elsewhere
the host asks which experts were routed and enqueues a copy for each: slower, with the same bytes in the same places.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from ..layout import BankLayout
from ..memory.store import StoredBank
from ..streams import StreamDevice

__all__ = ["RowCounter", "has_rows", "send_rows"]


def has_rows(layout: BankLayout) -> bool:
    """Whether each expert's weights are one run of whole 8-byte words in every tensor of a bank."""
    return all(
        spec.shape[0] * spec.stride[0] * spec.dtype.itemsize == spec.nbytes and spec.nbytes // spec.shape[0] % 8 == 0
        for spec in layout.specs
    )


class RowCounter:
    """How many rows were sent; counted on the device where only the device knows."""

    def __init__(self) -> None:
        self._on_host = 0
        self._on_device: torch.Tensor | None = None

    def add(self, rows: int) -> None:
        """The host has sent some."""
        self._on_host += rows

    def tensor(self, device: torch.device) -> torch.Tensor:
        """An int64 to which kernels add what they send."""
        if self._on_device is None:
            with torch.inference_mode(False):
                self._on_device = torch.zeros(1, dtype=torch.int64, device=device)
        return self._on_device

    def total(self) -> int:
        """All rows so far. Waits for the device."""
        return self._on_host + (int(self._on_device.item()) if self._on_device is not None else 0)


def send_rows(device: StreamDevice, stored: StoredBank, buffer: torch.Tensor, ids: torch.Tensor, counter: RowCounter) -> None:
    """Enqueue, on the compute stream, the copy of the rows that `ids` names to their own places in a slot's buffer."""
    rows, layout = stored.bank.num_experts, stored.bank.layout
    if ids.device.type == "cuda" and stored.is_pinned and _triton_is_there():
        from .kernels import gather_rows

        gather_rows(layout, rows, ids, stored.block, buffer[: stored.bank.nbytes], counter.tensor(ids.device))
        return
    stream = device.compute_stream()
    chosen = sorted({row for row in ids.reshape(-1).tolist() if 0 <= row < rows})
    for row in chosen:
        for spec in layout.specs:
            size = spec.nbytes // rows
            place = slice(spec.offset + row * size, spec.offset + (row + 1) * size)
            device.copy(stream, buffer[place], stored.block[place])
    counter.add(len(chosen))


@cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None
