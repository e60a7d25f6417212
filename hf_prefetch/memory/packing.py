"""Packing of bfloat16 weights in three quarters of their bytes, without the loss of a bit: the reference, in torch.

A bfloat16 is a sign, eight bits of exponent and seven of mantissa. Signs and mantissas of weights look random; their exponents
are a handful of neighbours. So a row of weights is cut into blocks of `BLOCK`, and a block is

    header   16 bytes     the first is `base`, the others are 0
    codes    BLOCK / 2    four bits a weight: 0 for the exponent 0, 1 to 14 for the exponents `base` + 1 to `base` + 14, 15 for
                          all others; byte j has the codes of the weights j (low bits) and j + BLOCK / 2 (high bits)
    rests    BLOCK        a byte a weight: its sign and its mantissa

Whatever has code 15 is an *escape*: it is kept whole in a list of its row, with its position. Infinities, NaNs with all their
payloads, denormals and both zeros are bits like others. `base` is chosen for each block to have the fewest escapes.

Blocks have one size, so each row can be addressed, and a block can be unpacked by itself. Rows have room for as many escapes as
the row with the most has. `device/unpacking.py` does the same as `unpack` on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["BLOCK", "BLOCK_BYTES", "HEADER", "PackedRows", "pack", "unpack"]

# Weights of a block, bytes of its header, and all of its bytes.
BLOCK = 2048
HEADER = 16
BLOCK_BYTES = HEADER + BLOCK // 2 + BLOCK
_ESCAPE = 15
# Exponents that have a code, besides 0.
_WINDOW = 14
# Weights that are packed at a time: what is worked out on the way takes about 60 bytes for each.
_AT_ONCE = 2**22


@dataclass(frozen=True)
class PackedRows:
    """Rows of weights, packed.

    Attributes:
        weights: how many a row has.
        blocks: uint8 (rows, blocks, BLOCK_BYTES); what lies beyond the last weight of a row is 0.
        escapes: int64 (rows, 1 + most): how many escapes the row has, and each of them: its position in the row, and from bit
            32 on its sixteen bits.
    """

    weights: int
    blocks: torch.Tensor
    escapes: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.blocks.numel() + self.escapes.numel() * 8

    @property
    def ratio(self) -> float:
        """The share of the bytes before packing that is left; above 1 where packing makes it more."""
        return self.nbytes / max(2 * self.weights * self.blocks.shape[0], 1)


def pack(rows: torch.Tensor) -> PackedRows:
    """Pack rows of weights, on the device where they are.

    Args:
        rows: bfloat16 (rows, weights of a row), contiguous.

    Raises:
        TypeError: it is something else.
    """
    if rows.dtype is not torch.bfloat16 or rows.dim() != 2 or not rows.is_contiguous():
        raise TypeError(f"rows of bfloat16 can be packed, not {rows.dtype} of shape {tuple(rows.shape)}")
    count, weights = rows.shape
    per_row = -(-weights // BLOCK)
    blocks = torch.zeros(count, per_row, BLOCK_BYTES, dtype=torch.uint8, device=rows.device)
    bits = rows.view(torch.int16)
    lists: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for row, first, last in _slices(count, per_row):
        part = bits[row, first * BLOCK : last * BLOCK].int() & 0xFFFF
        padded = torch.zeros((last - first) * BLOCK, dtype=torch.int32, device=rows.device)
        padded[: part.numel()] = part
        escapes = _pack_blocks(padded.view(-1, BLOCK), blocks[row, first:last])
        lists[row].append(escapes + first * BLOCK)
    return PackedRows(weights, blocks, _escape_table(lists, rows.device))


def unpack(packed: PackedRows) -> torch.Tensor:
    """The weights: bfloat16 (rows, weights), bit by bit those that were packed."""
    count, per_row, _ = packed.blocks.shape
    rows = torch.empty(count, per_row * BLOCK, dtype=torch.int16, device=packed.blocks.device)
    for row, first, last in _slices(count, per_row):
        rows[row, first * BLOCK : last * BLOCK] = _unpack_blocks(packed.blocks[row, first:last]).flatten()
    for row, (number, *_) in enumerate(packed.escapes[:, :1].tolist()):
        escapes = packed.escapes[row, 1 : 1 + number]
        rows[row, escapes & 0xFFFFFFFF] = _signed(escapes >> 32)
    return rows[:, : packed.weights].contiguous().view(torch.bfloat16)


def _slices(count: int, per_row: int) -> Iterator[tuple[int, int, int]]:
    """Row, first and last block of what is worked on at a time."""
    step = max(_AT_ONCE // BLOCK, 1)
    for row in range(count):
        for first in range(0, per_row, step):
            yield row, first, min(first + step, per_row)


def _pack_blocks(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Pack blocks, int32 (blocks, BLOCK), into `out`. Returns their escapes: positions from the first weight on, and bits."""
    exponents = (bits >> 7) & 0xFF
    base = _bases(exponents)
    codes = exponents - base
    codes = torch.where(exponents == 0, 0, torch.where((codes >= 1) & (codes <= _WINDOW), codes, _ESCAPE))
    out[:, 0] = base[:, 0].byte()
    half = BLOCK // 2
    out[:, HEADER : HEADER + half] = (codes[:, :half] | (codes[:, half:] << 4)).byte()
    out[:, HEADER + half :] = (((bits >> 8) & 0x80) | (bits & 0x7F)).byte()
    places = (codes == _ESCAPE).flatten().nonzero().flatten()
    return places | (bits.flatten()[places].long() << 32)


def _bases(exponents: torch.Tensor) -> torch.Tensor:
    """For each block the `base` whose window has most of its exponents: (blocks, 1)."""
    counts = torch.zeros(exponents.shape[0], 257, dtype=torch.int32, device=exponents.device)
    counts.scatter_add_(1, exponents.long() + 1, torch.ones_like(exponents))
    # Exponents below each; that of exponent 0 has a code of its own.
    below = counts.cumsum(1)
    return (below[:, 1 + _WINDOW :] - below[:, 1:-_WINDOW])[:, : 256 - _WINDOW].argmax(1, keepdim=True).int()


def _escape_table(lists: list[list[torch.Tensor]], device: torch.device) -> torch.Tensor:
    joined = [torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device) for parts in lists]
    table = torch.zeros(len(joined), 1 + max((part.numel() for part in joined), default=0), dtype=torch.int64, device=device)
    for row, part in enumerate(joined):
        table[row, 0] = part.numel()
        table[row, 1 : 1 + part.numel()] = part
    return table


def _unpack_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """int16 (blocks, BLOCK)."""
    half = BLOCK // 2
    pairs, rests = blocks[:, HEADER : HEADER + half].int(), blocks[:, HEADER + half :].int()
    codes = torch.cat([pairs & 0xF, pairs >> 4], dim=1)
    # An escape's exponent is whatever comes out: it is written over.
    exponents = torch.where(codes == 0, 0, (codes + blocks[:, :1].int()) & 0xFF)
    return _signed(((rests & 0x80) << 8) | (exponents << 7) | (rests & 0x7F))


def _signed(bits: torch.Tensor) -> torch.Tensor:
    """Sixteen bits as int16."""
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).short()
