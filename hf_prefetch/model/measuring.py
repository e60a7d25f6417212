"""Measures, in a fraction of a second, what decides whether packing pays: the link to a device, and the kernel that unpacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..device.rows import triton_is_there
from ..memory.packing import BLOCK, pack
from ..memory.pinned import Arena
from ..scheduling.packing import Rates, packing_pays
from ..streams import StreamDevice

__all__ = ["chooses_packing", "measure"]

# Bytes that are copied, and weights that are unpacked, at a time: enough for the full rate of either.
_COPY = 32 * 2**20
_ROWS, _WEIGHTS = 8, 1024 * BLOCK
_TIMES = 4


def chooses_packing(devices: Iterable[StreamDevice], *, pins: bool) -> bool:
    """Whether packed experts are faster on all of these devices. Where no kernel can unpack them they are not.

    Args:
        devices: that compute with experts from host memory.
        pins: whether these are page-locked.
    """
    devices = list(devices)
    if not devices or not triton_is_there() or any(device.device.type != "cuda" for device in devices):
        return False
    try:
        return all(packing_pays(measure(device, pins=pins)) for device in devices)
    except torch.OutOfMemoryError:
        # What there is no room to measure is not done.
        for device in devices:
            device.trim()
        return False


def measure(device: StreamDevice, *, pins: bool) -> Rates:
    """The best of a few rounds each. What it allocates is free again when it returns."""
    from ..device.unpacking import unpack_rows

    generator = torch.Generator(device.device).manual_seed(0)
    rows = torch.randn(_ROWS, _WEIGHTS, generator=generator, device=device.device, dtype=torch.bfloat16).mul_(0.02)
    packed = pack(rows)
    arena, there = Arena(_COPY), device.allocate(_COPY)
    arena.touch()
    try:
        if pins:
            arena.pin(device)
        # What `there` held before may still be read, and the copy stream waits for nobody.
        device.settle()
        stream = device.copy_stream()
        copy = _seconds(device, stream, lambda: device.copy(stream, there, arena.block))
        unpack = _seconds(device, device.compute_stream(), lambda: unpack_rows(packed, rows))
    finally:
        device.settle()
        arena.unpin()
    return Rates(link=_COPY / copy, unpack=rows.numel() * 2 / unpack)


def _seconds(device: StreamDevice, stream: Any, action: Callable[[], object]) -> float:
    """What an action takes on a stream, without the first round, in which a kernel may be compiled."""
    marks = []
    for _ in range(1 + _TIMES):
        begin = device.mark(stream)
        action()
        marks.append((begin, device.mark(stream)))
    device.settle()
    return min(device.elapsed(*pair) or float("inf") for pair in marks[1:])
