"""Triton kernels that unpack what `memory/packing.py` has packed. Imported only where they run.

One program unpacks one block: it reads three quarters of what it writes, both in one run. Escapes are written over by a second
launch behind the first, one program a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..memory.packing import BLOCK, BLOCK_BYTES, HEADER, PackedRows
from .table import Assignment

__all__ = ["unpack_rows"]

_BLOCK, _BLOCK_BYTES, _HEADER = tl.constexpr(BLOCK), tl.constexpr(BLOCK_BYTES), tl.constexpr(HEADER)
# Escapes that a program writes at a time.
_CHUNK = 256


@triton.jit
def _weights(codes, rests, base):  # type: ignore[no-untyped-def]
    """Sixteen bits of each weight."""
    exponents = tl.where(codes == 0, 0, (codes + base) & 0xFF)
    return (((rests & 0x80) << 8) | (exponents << 7) | (rests & 0x7F)).to(tl.int16)


@triton.jit  # type: ignore[untyped-decorator]
def _row(lists, LISTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of program 0: that number, or what the list has there; -1 behind its end."""
    row = tl.program_id(0).to(tl.int64)
    if LISTED:
        row = tl.where(row < tl.load(lists), tl.load(lists + 1 + row), -1)
    return row


@triton.jit
def _unpack_block(blocks, destination, per_row, weights, row):  # type: ignore[no-untyped-def]
    number = tl.program_id(1).to(tl.int64)
    block = blocks + (row * per_row + number) * _BLOCK_BYTES
    base = tl.load(block).to(tl.int32)
    place = tl.arange(0, _BLOCK // 2)
    pairs = tl.load(block + _HEADER + place).to(tl.int32)
    rests = block + _HEADER + _BLOCK // 2 + place
    low = _weights(pairs & 0xF, tl.load(rests).to(tl.int32), base)
    high = _weights(pairs >> 4, tl.load(rests + _BLOCK // 2).to(tl.int32), base)
    first = number * _BLOCK + place
    out = destination + row * weights + first
    tl.store(out, low, mask=first < weights)
    tl.store(out + _BLOCK // 2, high, mask=first + _BLOCK // 2 < weights)


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(blocks, destination, lists, per_row, weights, LISTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Unpack a block: program 0 is the row, or its place in the list, 1 the block in it."""
    row = _row(lists, LISTED)
    if row >= 0:
        _unpack_block(blocks, destination, per_row, weights, row)


@triton.jit  # type: ignore[untyped-decorator]
def _patch_row(escapes, destination, width, weights, row, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    listed = escapes + row * width
    count = tl.load(listed)
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        inside = place < count
        escape = tl.load(listed + 1 + place, mask=inside, other=0)
        tl.store(destination + row * weights + (escape & 0xFFFFFFFF), (escape >> 32).to(tl.int16), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _patch(escapes, destination, lists, width, weights, LISTED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the escapes of a row to their places."""
    row = _row(lists, LISTED)
    if row >= 0:
        _patch_row(escapes, destination, width, weights, row, CHUNK)


def unpack_rows(packed: PackedRows, destination: torch.Tensor, found: Assignment | None = None) -> None:
    """Unpack rows on the current stream: the same bits as `unpack`.

    Args:
        packed: on the device, or in page-locked host memory, which the kernels then read themselves.
        destination: bfloat16 (rows, weights) on the device, contiguous.
        found: the rows to unpack, each once; all if it is not given. Nothing is looked at of the others.
    """
    rows, per_row, _ = packed.blocks.shape
    count, lists = (rows, packed.escapes) if found is None else (found.most, found.lists)
    if not rows or not count:
        return
    out, width, listed = destination.view(torch.int16), packed.escapes.shape[1], found is not None
    _unpack[(count, per_row)](packed.blocks, out, lists, per_row, packed.weights, LISTED=listed)
    if width > 1:
        _patch[(count,)](packed.escapes, out, lists, width, packed.weights, LISTED=listed, CHUNK=_CHUNK)
