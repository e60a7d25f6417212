"""What tests of row caches share: budgets of so many rows, calls of experts modules, and a look into the caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.device.cache import NOTHING, RowCache
from hf_prefetch.discovery import find_banks
from hf_prefetch.memory.store import StoredBank
from hf_prefetch.scheduling.lane import Lane
from hf_prefetch.scheduling.scheduler import PrefetchScheduler
from hf_prefetch.testing.memory import POISON
from models import EXPERTS, TOP_K

# A token's experts and no more, half of all, all.
ROWS = (TOP_K, EXPERTS // 2, EXPERTS)
# Those that compute from the cache itself; eager has a slot for its rows.
REMAPPING = ("batched_mm", "grouped_mm")


def budget(model: nn.Module, rows: int) -> int:
    """The `expert_cache` that is enough for so many rows of each bank and not for one more."""
    return rows * sum(bank.layout.row_nbytes for bank in find_banks(model).banks)


@contextmanager
def cached(model: nn.Module, rows: int, device: Any, *, slots: int = 3, **options: Any) -> Iterator[PrefetchScheduler]:
    """Prefetching with caches of so many rows a bank is on inside and off afterwards, whatever happens."""
    enable_expert_prefetch(model, slots, device=device, expert_cache=budget(model, rows), progress=False, **options)
    try:
        yield model.expert_prefetch
    finally:
        disable_expert_prefetch(model)


def lane_of(scheduler: PrefetchScheduler) -> Lane:
    """The only lane."""
    (lane,) = set(scheduler._lane_of.values())
    return lane


def caches_of(scheduler: PrefetchScheduler) -> list[tuple[RowCache, StoredBank]]:
    """The caches that have been made, each with its bank."""
    caches = lane_of(scheduler).caches
    return [(cache, scheduler.store[bank]) for bank in scheduler.banks if (cache := caches.of(bank.index)) is not None]


def assert_rows_are_right(scheduler: PrefetchScheduler) -> None:
    """Every row that the table knows holds its expert's bytes (invariant 5), and no expert is in two rows.

    A table that somebody was interrupted over counts as empty: the next call empties it.
    """
    for cache, stored in caches_of(scheduler):
        if cache.version == NOTHING:
            continue
        owners = cache.table.expert_of.tolist()
        known = [expert for expert in owners if expert >= 0]
        assert len(set(known)) == len(known), (stored.bank.name, owners)
        there, here = cache.layout.views(cache.buffer), stored.bank.layout.views(stored.block)
        for name, rows in there.items():
            for row, expert in enumerate(owners):
                if expert >= 0:
                    mine, theirs = (t.reshape(-1).view(torch.uint8).cpu() for t in (rows[row], here[name][expert]))
                    assert torch.equal(mine, theirs), f"{stored.bank.name}.{name}: row {row} is not expert {expert}"


def poison_unknown_rows(scheduler: PrefetchScheduler) -> None:
    """Fill with NaN every row that holds no expert, and every slot that holds no bank."""
    _wait_for_device()
    for cache, _ in caches_of(scheduler):
        for rows in cache.layout.views(cache.buffer).values():
            for row, expert in enumerate(cache.table.expert_of.tolist()):
                if expert < 0:
                    rows[row].reshape(-1).view(torch.uint8).fill_(POISON)
    poison_slots(scheduler)


def poison_slots(scheduler: PrefetchScheduler) -> None:
    """Fill with NaN every slot that holds no bank, while nothing else runs."""
    _wait_for_device()
    for slot in lane_of(scheduler).ring._slots:
        if slot.bank is None:
            slot.buffer.fill_(POISON)
    _wait_for_device()


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs_of(
    module: nn.Module, tokens: int, generator: torch.Generator, device: torch.device | str = "cpu", *, top_k: int = TOP_K
) -> Inputs:
    """Hidden states, expert ids and weights of a call with random routing, the same for the same generator."""
    parameter = next(iter(module.parameters()))
    hidden_size = module.config.hidden_size
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(parameter.dtype)
    weights, ids = torch.rand(tokens, module.num_experts, generator=generator).softmax(-1).topk(top_k)
    return hidden.to(device), ids.to(device), weights.to(device, parameter.dtype)
