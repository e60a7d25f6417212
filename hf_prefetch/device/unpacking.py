"""Triton kernels that unpack what `memory/packing.py` has packed. Imported only where they run.

One program unpacks one block: it reads three quarters of what it writes, both in one run. Escapes are written over by a second
launch behind the first, one program a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..memory.packing import BLOCK, BLOCK_BYTES, HEADER, PackedRows

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
def _row(ids, rows, LISTED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of program 0; -1 for none, and if an id before it has named the row. Ids beyond the last row count as that."""
    number = tl.program_id(0)
    row = number.to(tl.int64)
    if LISTED:
        row = tl.load(ids + number)
        row = tl.where(row < rows, row, rows - 1)
        for start in range(0, number, CHUNK):
            place = start + tl.arange(0, CHUNK)
            other = tl.load(ids + place, mask=place < number, other=-1)
            other = tl.where(other < rows, other, rows - 1)
            row = tl.where(tl.max((other == row).to(tl.int32), axis=0) > 0, -1, row)
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
def _unpack(  # type: ignore[no-untyped-def]
    blocks, destination, ids, rows, per_row, weights, LISTED: tl.constexpr, CHUNK: tl.constexpr
):
    """Unpack a block: program 0 is the row, or its place among the ids, 1 the block in it."""
    row = _row(ids, rows, LISTED, CHUNK)
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
def _patch(  # type: ignore[no-untyped-def]
    escapes, destination, ids, rows, width, weights, LISTED: tl.constexpr, CHUNK: tl.constexpr
):
    """Write the escapes of a row to their places."""
    row = _row(ids, rows, LISTED, CHUNK)
    if row >= 0:
        _patch_row(escapes, destination, width, weights, row, CHUNK)


def unpack_rows(packed: PackedRows, destination: torch.Tensor, ids: torch.Tensor | None = None) -> None:
    """Unpack rows on the current stream: the same bits as `unpack`.

    Args:
        packed: on the device, or in page-locked host memory, which the kernels then read themselves.
        destination: bfloat16 (rows, weights) on the device, contiguous.
        ids: int64 in any shape: the rows to unpack, all if not given. A row may come more than once; ids beyond the last row
            count as that, and negative ones as none.
    """
    rows, per_row, _ = packed.blocks.shape
    listed = packed.escapes if ids is None else ids.reshape(-1)
    count = rows if ids is None else listed.numel()
    if not rows or not count:
        return
    out, width = destination.view(torch.int16), packed.escapes.shape[1]
    some = {"LISTED": ids is not None, "CHUNK": _CHUNK}
    _unpack[(count, per_row)](packed.blocks, out, listed, rows, per_row, packed.weights, **some)
    if width > 1:
        _patch[(count,)](packed.escapes, out, listed, rows, width, packed.weights, **some)
