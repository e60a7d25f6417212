"""Triton kernels that unpack what `memory/packing.py` has packed. Imported only where they run.

One program unpacks some blocks of a row: it reads three quarters of what it writes, both in runs. Two weights are worked on at
a time, side by side in a word of 32 bits. What a program has written it writes over with its own blocks' escapes, so one launch
does it all.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from ..memory.packing import BLOCK, BLOCK_BYTES, HEADER, PackedRows
from .table import Assignment

__all__ = ["unpack_rows"]

# In words of two bytes, as blocks are read here: a block, its header, its codes (and each half of its rests).
_STRIDE, _CODES, _HALF = (tl.constexpr(size // 2) for size in (BLOCK_BYTES, HEADER, BLOCK // 2))
# Blocks that a program unpacks, and its warps: the fastest of scripts/bench_unpack.py on an H200.
_BLOCKS, _WARPS = 4, 8
# Escapes that a program writes at a time.
_CHUNK = 128


@triton.jit
def _two(pairs):  # type: ignore[no-untyped-def]
    """Two bytes as the low bytes of two halves of a word."""
    pairs = pairs.to(tl.int32) & 0xFFFF
    return (pairs | (pairs << 8)) & 0x00FF00FF


@triton.jit
def _weights(codes, rests, base):  # type: ignore[no-untyped-def]
    """Two weights, side by side, of two of each; `base` is there twice too. Nothing carries from one half into the other."""
    has_code = (codes + 0x000F000F) & 0x00100010
    exponents = (codes + base) & ((has_code << 4) - (has_code >> 4))
    return ((rests & 0x00800080) << 8) | (exponents << 7) | (rests & 0x007F007F)


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(  # type: ignore[no-untyped-def]
    blocks, escapes, destination, lists, per_row, width, words, LISTED: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr
):
    """Unpack some blocks: program 1 is the row, or its place in the list, 0 the place of the blocks in it."""
    row = tl.program_id(1).to(tl.int64)
    if LISTED:
        # Nothing, behind the end of the list.
        row = tl.where(row < tl.load(lists), tl.load(lists + 1 + row), -1)
    if row >= 0:
        begin = tl.program_id(0) * BLOCKS
        end = tl.minimum(begin + BLOCKS, per_row)
        blocks += row * per_row * _STRIDE
        number = (begin + tl.arange(0, BLOCKS)).to(tl.int64)[:, None]
        block = blocks + number * _STRIDE
        place = tl.arange(0, _HALF)[None, :]
        word = number * (2 * _HALF) + place
        base = tl.load(block, mask=number < end, other=0).to(tl.int32) * 0x00010001
        codes = _two(tl.load(block + _CODES + place, mask=word < words, other=0))
        rests = block + _CODES + _HALF + place
        low = _two(tl.load(rests, mask=word < words, other=0))
        high = _two(tl.load(rests + _HALF, mask=word + _HALF < words, other=0))
        out = destination + row * words + word
        tl.store(out, _weights(codes & 0x000F000F, low, base), mask=word < words)
        tl.store(out + _HALF, _weights((codes >> 4) & 0x000F000F, high, base), mask=word + _HALF < words)
        # Headers say which of the row's escapes are theirs.
        first = _first_escape(blocks + begin.to(tl.int64) * _STRIDE)
        last = blocks + (end - 1).to(tl.int64) * _STRIDE
        count = _first_escape(last) + tl.load(last + 1).to(tl.int32) - first
        if count > 0:
            # Not before what other threads of this program have written to the same places.
            tl.debug_barrier()
            weights = destination.to(tl.pointer_type(tl.int16)) + row * words * 2
            # Whatever a file says that somebody else has made, nothing beyond the row is read or written.
            count = tl.minimum(count, width - 1 - first) * (first >= 0).to(tl.int32)
            for start in range(0, count, CHUNK):
                listed = start + tl.arange(0, CHUNK)
                escape = tl.load(escapes + row * width + 1 + first + listed, mask=listed < count, other=0)
                position = escape & 0xFFFFFFFF
                # Divided, and not compared with twice as many words: that may be more than an int32 holds.
                inside = (listed < count) & (position // 2 < words)
                tl.store(weights + position, (escape >> 32).to(tl.int16), mask=inside)


@triton.jit
def _first_escape(block):  # type: ignore[no-untyped-def]
    """The place of a block's first escape among those of its row."""
    return (tl.load(block + 2).to(tl.int32) & 0xFFFF) | (tl.load(block + 3).to(tl.int32) << 16)


def unpack_rows(
    packed: PackedRows,
    destination: torch.Tensor,
    found: Assignment | None = None,
    *,
    blocks: int = _BLOCKS,
    warps: int = _WARPS,
) -> None:
    """Unpack rows on the current stream: the same bits as `unpack`.

    Args:
        packed: on the device, or in page-locked host memory, which the kernel then reads itself. Rows of an even number of
            weights.
        destination: bfloat16 (rows, weights) on the device, contiguous.
        found: the rows to unpack, each once; all if it is not given. Nothing is looked at of the others.
        blocks: how many a program unpacks, a power of two.
        warps: of a program.

    Raises:
        ValueError: rows have an odd number of weights.
    """
    if packed.weights % 2:
        raise ValueError(f"only rows of an even number of weights can be unpacked by a kernel, not of {packed.weights}")
    rows, per_row, _ = packed.blocks.shape
    count, lists = (rows, packed.escapes) if found is None else (found.most, found.lists)
    if not (rows and count and per_row):
        return
    # Triton launches on the current device, which with several of them need not be this one.
    elsewhere = destination.is_cuda and torch.cuda.current_device() != destination.device.index
    with torch.cuda.device(destination.device) if elsewhere else nullcontext():
        _unpack[(triton.cdiv(per_row, blocks), count)](
            packed.blocks.view(torch.int16), packed.escapes, destination.view(torch.int32), lists, per_row,
            packed.escapes.shape[1], packed.weights // 2, LISTED=found is not None, BLOCKS=blocks, CHUNK=_CHUNK,
            num_warps=warps,
        )  # fmt: skip
