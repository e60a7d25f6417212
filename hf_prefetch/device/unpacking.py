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


@triton.jit
def _unpack(blocks, destination, per_row, weights):  # type: ignore[no-untyped-def]
    """Unpack a block: program 0 is the row, 1 the block in it."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
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
def _patch(escapes, destination, width, weights, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the escapes of a row to their places."""
    row = tl.program_id(0).to(tl.int64)
    listed = escapes + row * width
    count = tl.load(listed)
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        inside = place < count
        escape = tl.load(listed + 1 + place, mask=inside, other=0)
        tl.store(destination + row * weights + (escape & 0xFFFFFFFF), (escape >> 32).to(tl.int16), mask=inside)


def unpack_rows(packed: PackedRows, destination: torch.Tensor) -> None:
    """Unpack rows on the current stream: the same bits as `unpack`.

    Args:
        packed: on the device, or in page-locked host memory, which the kernels then read themselves.
        destination: bfloat16 (rows, weights) on the device, contiguous.
    """
    count, per_row, _ = packed.blocks.shape
    if not count:
        return
    out = destination.view(torch.int16)
    _unpack[(count, per_row)](packed.blocks, out, per_row, packed.weights)
    width = packed.escapes.shape[1]
    if width > 1:
        _patch[(count,)](packed.escapes, out, width, packed.weights, CHUNK=_CHUNK)
