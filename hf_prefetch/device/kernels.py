"""Triton kernels. Imported only where they run; `device/rows.py` and `device/table.py` do the same work elsewhere.

[Note: one program holds the table]
`_assign` and `_list` are one program each. What a program looks up it has read before it wrote anything, so no look-up
depends on a store of the same launch: within a launch nothing orders them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .table import SMALLEST, Assignment, RowTable

__all__ = ["assign_rows", "gather_rows", "list_experts"]

# Words of 8 bytes keep the link busy; 16 programs a row saturate it, and more do no harm.
_WORDS = 1024
_PROGRAMS = 16
_SMALLEST = tl.constexpr(SMALLEST)
# Columns that the one-program kernels compare at once, and ids from which on they are given the distinct ones only.
_CHUNK = 32
_MANY = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _needs(ids, count, experts, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 for each of `experts` that is among the ids."""
    needed = tl.zeros_like(experts)
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        some = tl.load(ids + place, mask=place < count, other=-1)
        needed = tl.maximum(needed, tl.max((some[None, :] == experts[:, None]).to(tl.int32), axis=1))
    return needed


@triton.jit  # type: ignore[untyped-decorator]
def _row_of(expert_of, rows, experts, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of each of `experts`, -1 for none."""
    found = tl.zeros_like(experts) - 1
    for start in range(0, rows, CHUNK):
        row = start + tl.arange(0, CHUNK)
        owner = tl.load(expert_of + row, mask=row < rows, other=-1)
        here = owner[None, :] == experts[:, None]
        found = tl.maximum(found, tl.max(tl.where(here, row[None, :], -1), axis=1))
    return found


@triton.jit
def _scores(scores, needed, experts, total, decay):  # type: ignore[no-untyped-def]
    """The scores of `experts` after this call. Adding comes first, so that nothing can be fused into one rounding."""
    score = (tl.load(scores + experts, mask=experts < total, other=0.0) + needed.to(tl.float32)) * decay
    return tl.where(score < _SMALLEST, 0.0, score)


@triton.jit  # type: ignore[untyped-decorator]
def _assign(  # type: ignore[no-untyped-def]
    ids, new_ids, lists, most, totals, expert_of, scores, number, total, rows, decay,
    PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One call of `RowTable.assign`."""
    experts = tl.arange(0, PADDED)
    needed = _needs(ids, number, experts, CHUNK) * (experts < total).to(tl.int32)
    row = _row_of(expert_of, rows, experts, CHUNK)
    score = _scores(scores, needed, experts, total, decay)
    missed = ((needed == 1) & (row < 0)).to(tl.int32)
    rank = tl.cumsum(missed, axis=0) - 1
    count = tl.sum(missed, axis=0)
    full = tl.sum((row >= 0).to(tl.int32), axis=0)
    spare = (row >= 0) & (needed == 0)
    # The m-th missed expert takes the m-th empty row, and then the row of the expert that is m-th to be given up.
    taken = tl.where(rank < rows - full, full + rank, -1)
    wanted = rank - (rows - full)
    for start in range(0, PADDED, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_needed = _needs(ids, number, other, CHUNK)
        other_row = _row_of(expert_of, rows, other, CHUNK)
        other_score = _scores(scores, other_needed, other, total, decay)
        other_spare = (other_row >= 0) & (other_needed == 0)
        before = (score[:, None] < other_score[None, :]) | (
            (score[:, None] == other_score[None, :]) & (row[:, None] < other_row[None, :])
        )
        position = tl.sum((before & spare[:, None]).to(tl.int32), axis=0)
        match = other_spare[None, :] & (position[None, :] == wanted[:, None])
        taken = tl.maximum(taken, tl.max(tl.where(match, other_row[None, :], -1), axis=1))
    row = tl.where(missed == 1, taken, row)
    for start in range(0, number, CHUNK):
        place = start + tl.arange(0, CHUNK)
        inside = place < number
        some = tl.load(ids + place, mask=inside, other=-1)
        here = some[:, None] == experts[None, :]
        found = tl.max(tl.where(here, row[None, :], -1), axis=1)
        # Ids beyond the last expert are an expert-parallel model's way of saying "not here".
        beyond = (some < 0) | (some >= total)
        tl.store(new_ids + place, tl.where(beyond, rows, found).to(tl.int64), mask=inside)
    # Other threads of this program may still be reading what is written from here on.
    tl.debug_barrier()
    tl.store(scores + experts, score, mask=experts < total)
    tl.store(expert_of + row, experts, mask=missed == 1)
    tl.store(lists + 1 + rank, experts.to(tl.int64), mask=missed == 1)
    tl.store(lists + 1 + most + rank, row.to(tl.int64), mask=missed == 1)
    tl.store(lists, count.to(tl.int64))
    # Of all calls: the experts that were needed, and those that had to be fetched.
    tl.atomic_add(totals, tl.sum(needed, axis=0).to(tl.int64))
    tl.atomic_add(totals + 1, count.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _list(  # type: ignore[no-untyped-def]
    ids, lists, most, totals, expert_of, number, total, rows, PADDED: tl.constexpr, CHUNK: tl.constexpr
):
    """The distinct experts among the ids in ascending order, and the row of a cache where each of them is, or -1.

    Ids beyond the last expert count as the last: that one's weights are multiplied with weights of zero, so they must be there.
    """
    experts = tl.arange(0, PADDED)
    needed = _needs(ids, number, experts, CHUNK)
    beyond = 0
    for start in range(0, number, CHUNK):
        place = start + tl.arange(0, CHUNK)
        some = tl.load(ids + place, mask=place < number, other=0)
        beyond = tl.maximum(beyond, tl.max((some >= total).to(tl.int32), axis=0))
    needed = tl.where(experts == total - 1, tl.maximum(needed, beyond), needed) * (experts < total).to(tl.int32)
    row = _row_of(expert_of, rows, experts, CHUNK)
    rank = tl.cumsum(needed, axis=0) - 1
    count = tl.sum(needed, axis=0)
    tl.store(lists + 1 + rank, experts.to(tl.int64), mask=needed == 1)
    tl.store(lists + 1 + most + rank, row.to(tl.int64), mask=needed == 1)
    tl.store(lists, count.to(tl.int64))
    tl.atomic_add(totals, count.to(tl.int64))
    tl.atomic_add(totals + 1, tl.sum(needed * (row < 0).to(tl.int32), axis=0).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _mark(ids, marks, count, total, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write every id that is there to its own place; those beyond the last expert are one id."""
    place = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    some = tl.load(ids + place, mask=place < count, other=-1)
    some = tl.minimum(some, total)
    tl.store(marks + some, some, mask=some >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    host, cached, destination, first, in_cache, words, row, TO_ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """Copy this program's part of a row of `words` words, which begins at `first` in the bank, at `in_cache` in the cache."""
    for start in range(tl.program_id(1) * WORDS, words, tl.num_programs(1) * WORDS):
        word = start + tl.arange(0, WORDS)
        inside = word < words
        if TO_ROWS:
            tl.store(destination + in_cache + word, tl.load(host + first + word, mask=inside), mask=inside)
        elif row < 0:
            tl.store(destination + first + word, tl.load(host + first + word, mask=inside), mask=inside)
        else:
            tl.store(destination + first + word, tl.load(cached + in_cache + word, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    lists, most, host, cached, destination, tensors, TO_ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """Copy a part of one tensor of one expert: program 0 is the expert's place in the list, 1 the part, 2 the tensor."""
    position = tl.program_id(0)
    if position < tl.load(lists):
        expert = tl.load(lists + 1 + position)
        row = tl.load(lists + 1 + most + position)
        tensor = tensors + tl.program_id(2) * 3
        size = tl.load(tensor)
        first = tl.load(tensor + 1) + expert * size
        in_cache = tl.load(tensor + 2) + row * size
        if size % 8 == 0:
            _copy(
                host.to(tl.pointer_type(tl.int64)), cached.to(tl.pointer_type(tl.int64)),
                destination.to(tl.pointer_type(tl.int64)), first // 8, in_cache // 8, size // 8, row, TO_ROWS, WORDS,
            )  # fmt: skip
        else:
            # Rows that aren't whole words are short: scales, one an expert.
            _copy(host, cached, destination, first, in_cache, size, row, TO_ROWS, WORDS)


def assign_rows(table: RowTable, ids: torch.Tensor, totals: torch.Tensor) -> Assignment:
    """`RowTable.assign` in one launch on the current stream.

    Args:
        table: on a GPU.
        ids: int64 on the same device, in any shape.
        totals: int64 (2,) to which the number of experts that are needed and of those that are missed is added.
    """
    flat = ids.reshape(-1)
    new_ids = torch.empty_like(flat)
    most = min(flat.numel(), table.rows, table.experts)
    lists = torch.empty(2 * most + 1, dtype=torch.int64, device=ids.device)
    _assign[(1,)](
        flat, new_ids, lists, most, totals, table.expert_of, table.scores, flat.numel(), table.experts, table.rows, table.decay,
        PADDED=_padded(table.experts), CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    return Assignment(new_ids.view(ids.shape), most, lists)


def list_experts(ids: torch.Tensor, experts: int, table: RowTable | None, totals: torch.Tensor | None) -> Assignment:
    """The distinct experts among `ids`, each with its row in a cache or -1; the ids stay as they are.

    Args:
        ids: int64 on a GPU, in any shape.
        experts: how many there are.
        table: of the bank's cache, if it has one.
        totals: as above; None if nobody wants to know.
    """
    flat = ids.reshape(-1)
    most = min(flat.numel(), experts)
    if flat.numel() > _MANY:
        # One program would read them for milliseconds; what it gets here are the distinct ones.
        marks = torch.full((experts + 1,), -1, dtype=torch.int64, device=ids.device)
        _mark[(triton.cdiv(flat.numel(), _WORDS),)](flat, marks, flat.numel(), experts, SPAN=_WORDS)
        flat = marks
    lists = torch.empty(2 * most + 3, dtype=torch.int64, device=ids.device)
    lists, rest = lists[: 2 * most + 1], lists[2 * most + 1 :]
    totals = rest if totals is None else totals
    _list[(1,)](
        flat, lists, most, totals, lists if table is None else table.expert_of, flat.numel(), experts,
        0 if table is None else table.rows, PADDED=_padded(experts), CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    return Assignment(ids, most, lists)


def gather_rows(
    tensors: torch.Tensor,
    found: Assignment,
    host: torch.Tensor,
    cached: torch.Tensor,
    destination: torch.Tensor,
    *,
    to_rows: bool,
) -> None:
    """Copy the rows of a list of experts on the current stream.

    Args:
        tensors: made by `tensor_table`.
        found: the list.
        host: the bank's block in page-locked host memory, which the kernel reads itself.
        cached: the cache's block on the device.
        destination: with `to_rows` the cache, which gets each expert from host memory into its row; otherwise a slot, which
            gets each at its own place, out of the cache where it has a row there.
        to_rows: see above.
    """
    _gather[(found.most, _PROGRAMS, tensors.shape[0])](
        found.lists, found.most, host, cached, destination, tensors, TO_ROWS=to_rows, WORDS=_WORDS
    )


def _padded(experts: int) -> int:
    return max(1 << (experts - 1).bit_length(), _CHUNK)
