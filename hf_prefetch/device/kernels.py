"""Triton kernels. Imported only where they run; the same work is done by `device/rows.py` with copies elsewhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import BankLayout

__all__ = ["gather_rows"]

# Words of 8 bytes keep the link busy; 16 programs a row saturate it, and more do no harm.
_WORDS = 1024
_PROGRAMS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    ids, sent, source, destination, rows, words, offset, PADDED: tl.constexpr, WORDS: tl.constexpr, COUNTS: tl.constexpr
):
    """Copy the row that `ids[program 0]` names, unless an earlier id names it too; program 1 is a part of the row."""
    position = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(ids + position)
    before = tl.arange(0, PADDED)
    earlier = tl.load(ids + before, mask=before < position, other=-1)
    again = tl.sum((earlier == row).to(tl.int32), axis=0)
    # Ids beyond the last row are an expert-parallel model's way of saying "not here".
    if (again == 0) & (row >= 0) & (row < rows):
        first = offset + row.to(tl.int64) * words
        for start in range(part * WORDS, words, tl.num_programs(1) * WORDS):
            word = start + tl.arange(0, WORDS)
            inside = word < words
            tl.store(destination + first + word, tl.load(source + first + word, mask=inside), mask=inside)
        if COUNTS:  # noqa: SIM102 - one is decided when the kernel is compiled, the other when it runs
            if part == 0:
                tl.atomic_add(sent, 1)


def gather_rows(
    layout: BankLayout, rows: int, ids: torch.Tensor, source: torch.Tensor, destination: torch.Tensor, sent: torch.Tensor
) -> None:
    """Copy the rows that `ids` names from page-locked host memory to the same places in a slot, on the current stream.

    Args:
        layout: of both blocks; every tensor in it has `rows` rows of whole 8-byte words.
        ids: expert ids on the device, in any shape; an id may come more than once.
        source: the bank's block in page-locked host memory, which the kernel reads itself.
        destination: the slot's buffer.
        sent: an int64 on the device to which the number of distinct rows is added.
    """
    flat = ids.reshape(-1)
    count = flat.numel()
    for number, spec in enumerate(layout.specs):
        _gather[(count, _PROGRAMS)](
            flat,
            sent,
            source.view(torch.int64),
            destination.view(torch.int64),
            rows,
            spec.nbytes // rows // 8,
            spec.offset // 8,
            PADDED=triton.next_power_of_2(max(count, 2)),
            WORDS=_WORDS,
            COUNTS=number == 0,
        )
