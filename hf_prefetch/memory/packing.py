"""Packing of bfloat16 weights in three quarters of their bytes, without the loss of a bit: the reference, in torch.

A bfloat16 is a sign, eight bits of exponent and seven of mantissa. Signs and mantissas of weights look random; their exponents
are a handful of neighbours. So a row of weights is cut into blocks of `BLOCK`, and a block is

    header   16 bytes     `base`, a 0, how many escapes the block has (two bytes), and how many the blocks of its row before it
                          have (four bytes); the others are 0. Numbers begin with their low byte
    codes    BLOCK / 2    four bits a weight: 0 for the exponent 0, 1 to 14 for the exponents `base` + 1 to `base` + 14, 15 for
                          all others; byte j has the codes of the weights j (low bits) and j + BLOCK / 2 (high bits)
    rests    BLOCK        a byte a weight: its sign and its mantissa

Whatever has code 15 is an *escape*: it is kept whole in a list of its row, with its position, in the order of positions.
Infinities, NaNs with all their payloads, denormals and both zeros are bits like others. `base` is chosen for each block to have
the fewest escapes.

Blocks have one size, so each row can be addressed, and a block can be unpacked by itself. Rows have room for as many escapes as
the row with the most has. `device/unpacking.py` does the same as `unpack` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["BLOCK", "BLOCK_BYTES", "HEADER", "PART_NBYTES", "Bring", "PackedRows", "pack", "unpack"]

# Weights of a block, bytes of its header, and all of its bytes.
BLOCK = 2048
HEADER = 16
BLOCK_BYTES = HEADER + BLOCK // 2 + BLOCK
_ESCAPE = 15
# Exponents that have a code, besides 0.
_WINDOW = 14
# Weights that are worked on at a time: what that takes on the way is about 20 bytes for each. A GPU wants many, or it waits for
# the next launch more than it works; a CPU no more than what its caches hold.
_AT_ONCE, _AT_ONCE_ON_CPU = 2**24, 2**19
PART_NBYTES = 2 * _AT_ONCE
# Brings parts of rows to another device, one after the other.
Bring = Callable[[Iterator[torch.Tensor]], Iterator[torch.Tensor]]


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


def pack(rows: torch.Tensor, bring: Bring | None = None) -> PackedRows:
    """Pack rows of weights, on the device where they are, or where they are brought to.

    Args:
        rows: bfloat16 (rows, weights of a row), contiguous.
        bring: is given parts of them, of `PART_NBYTES` at most, and gives each on the device that packs.

    Raises:
        TypeError: it is something else.
    """
    if rows.dtype is not torch.bfloat16 or rows.dim() != 2 or not rows.is_contiguous():
        raise TypeError(f"rows of bfloat16 can be packed, not {rows.dtype} of shape {tuple(rows.shape)}")
    count, weights = rows.shape
    per_row = -(-weights // BLOCK)
    slices, blocks = list(_slices(count, per_row, on_cpu=bring is None and rows.is_cpu)), None
    parts = (rows.view(torch.int16)[some, part.start * BLOCK : part.stop * BLOCK] for some, part in slices)
    places, values = [], []
    for (some, part), bits in zip(slices, parts if bring is None else bring(parts), strict=True):
        if blocks is None:
            blocks = torch.zeros(count, per_row, BLOCK_BYTES, dtype=torch.uint8, device=bits.device)
        padding = (part.stop - part.start) * BLOCK - bits.shape[1]
        whole = (nn.functional.pad(bits, (0, padding)) if padding else bits).reshape(-1, BLOCK)
        found = _pack_blocks(whole, blocks[some, part])
        places.append(found + (some.start * per_row + part.start) * BLOCK)
        values.append(whole.flatten()[found])
    if blocks is None:
        blocks = torch.zeros(count, per_row, BLOCK_BYTES, dtype=torch.uint8, device=rows.device)
        return PackedRows(weights, blocks, torch.zeros(count, 1, dtype=torch.int64, device=rows.device))
    return PackedRows(weights, blocks, _list_escapes(blocks, torch.cat(places), torch.cat(values)))


def unpack(packed: PackedRows) -> torch.Tensor:
    """The weights: bfloat16 (rows, weights), bit by bit those that were packed."""
    count, per_row, _ = packed.blocks.shape
    rows = torch.empty(count, per_row * BLOCK, dtype=torch.int16, device=packed.blocks.device)
    for some, part in _slices(count, per_row, on_cpu=rows.is_cpu):
        blocks = packed.blocks[some, part]
        rows[some, part.start * BLOCK : part.stop * BLOCK] = _unpack_blocks(blocks.reshape(-1, BLOCK_BYTES)).view(
            blocks.shape[0], -1
        )
    listed = torch.arange(packed.escapes.shape[1] - 1, device=rows.device) < packed.escapes[:, :1]
    escapes = packed.escapes[:, 1:][listed]
    row = listed.nonzero()[:, 0]
    rows[row, escapes & 0xFFFFFFFF] = _signed(escapes >> 32)
    return rows[:, : packed.weights].contiguous().view(torch.bfloat16)


def _slices(count: int, per_row: int, *, on_cpu: bool) -> Iterator[tuple[slice, slice]]:
    """Rows, and blocks of each of these, that are worked on at a time."""
    at_once = max((_AT_ONCE_ON_CPU if on_cpu else _AT_ONCE) // BLOCK, 1)
    rows = max(at_once // max(per_row, 1), 1)
    for row in range(0, count, rows):
        for block in range(0, per_row, at_once):
            yield slice(row, min(row + rows, count)), slice(block, min(block + at_once, per_row))


def _pack_blocks(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Pack blocks, int16 (blocks, BLOCK), into `out`, (rows, blocks of a row, BLOCK_BYTES). Returns the places of escapes."""
    # In bytes: what does not fit falls off, as it should.
    exponents = (bits >> 7).to(torch.uint8)
    base = _bases(exponents)
    # Codes below 1 wrap around: whatever is outside of the window is the escape.
    codes = (exponents - base).sub_(1).clamp_(max=_WINDOW).add_(1).masked_fill_(exponents == 0, 0)
    is_escape = codes == _ESCAPE
    rests = (bits >> 8).to(torch.uint8).bitwise_and_(0x80).bitwise_or_(bits.to(torch.uint8).bitwise_and_(0x7F))
    half, whole = BLOCK // 2, out.is_contiguous()
    packed = out.view(-1, BLOCK_BYTES) if whole else torch.zeros_like(out).view(-1, BLOCK_BYTES)
    packed[:, :1] = base
    packed[:, 2:4] = is_escape.sum(1, dtype=torch.int16).unsqueeze(1).view(torch.uint8)
    packed[:, HEADER : HEADER + half] = (codes[:, half:] << 4).bitwise_or_(codes[:, :half])
    packed[:, HEADER + half :] = rests
    if not whole:
        out.copy_(packed.view(out.shape))
    return is_escape.flatten().nonzero().flatten()


def _bases(exponents: torch.Tensor) -> torch.Tensor:
    """For each block the `base` whose window has most of its exponents: uint8 (blocks, 1)."""
    counts = torch.zeros(exponents.shape[0], 256, dtype=torch.int32, device=exponents.device)
    counts.scatter_add_(1, exponents.long(), counts.new_ones(1).expand(exponents.shape))
    # Exponents up to each; that of exponent 0 has a code of its own.
    up_to = counts.cumsum(1)
    return (up_to[:, _WINDOW:] - up_to[:, :-_WINDOW]).argmax(1, keepdim=True).to(torch.uint8)


def _list_escapes(blocks: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The lists of all rows, of escapes at these places among all blocks; blocks are told where theirs begin."""
    count, per_row, _ = blocks.shape
    counts = blocks[:, :, 2:4].contiguous().view(torch.int16)[:, :, 0].long()
    totals = counts.sum(1)
    blocks[:, :, 4:8] = (counts.cumsum(1) - counts).int().unsqueeze(-1).contiguous().view(torch.uint8)
    table = torch.zeros(count, 1 + int(totals.max()), dtype=torch.int64, device=blocks.device)
    table[:, 0] = totals
    row, position = places // (per_row * BLOCK), places % (per_row * BLOCK)
    rank = torch.arange(places.numel(), device=blocks.device) - (totals.cumsum(0) - totals)[row]
    table[row, 1 + rank] = position | ((values.long() & 0xFFFF) << 32)
    return table


def _unpack_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """int16 (blocks, BLOCK)."""
    half = BLOCK // 2
    pairs, rests = blocks[:, HEADER : HEADER + half], blocks[:, HEADER + half :].to(torch.int16)
    codes = torch.cat([pairs & 0xF, pairs >> 4], dim=1)
    # An escape's exponent is whatever comes out: it is written over.
    exponents = (codes + blocks[:, :1]).masked_fill_(codes == 0, 0).to(torch.int16)
    return (rests & 0x80).bitwise_left_shift_(8).bitwise_or_(exponents.bitwise_left_shift_(7)).bitwise_or_(rests & 0x7F)


def _signed(bits: torch.Tensor) -> torch.Tensor:
    """Sixteen bits as int16."""
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).short()
