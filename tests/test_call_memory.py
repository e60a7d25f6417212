"""What a call has allocated ends with it: whoever captures graphs of compiled code sees to that, see `hf_prefetch.streams`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caching import budget
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from models import EXPERTS, build, prompt
from test_guarded import WIDTH, Experts, Gathers, model_of


def storage_of(value: Any) -> torch.UntypedStorage | None:
    try:
        return value.untyped_storage() if isinstance(value, torch.Tensor) else None
    except RuntimeError:
        return None  # it has none of its own


def every_storage() -> set[int]:
    """What is there now, by address."""
    found = (storage_of(value) for value in gc.get_objects() if type(value) in (torch.Tensor, nn.Parameter))
    return {storage._cdata for storage in found if storage is not None}


class Allocations(TorchDispatchMode):
    """Weak references to all memory that operators make inside."""

    def __init__(self) -> None:
        super().__init__()
        self._before = every_storage()
        self._made: list[tuple[str, StorageWeakRef]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for storage in map(storage_of, tree_leaves(result)):
            if storage is not None and storage._cdata not in self._before:
                self._made.append((str(function), StorageWeakRef(storage)))
        return result

    def left(self) -> list[str]:
        """By which operators that was made which is still there."""
        gc.collect()
        return [name for name, reference in self._made if not reference.expired()]


@torch.no_grad()
def check(model: nn.Module, calls: tuple[torch.Tensor, ...]) -> None:
    """Each call once to have on the device what stays there, and once more."""
    for _ in range(2):
        for given in calls:
            model(given)
    for given in calls:
        with Allocations() as allocations:
            result = model(given)
        assert allocations.left(), "the result is there"
        del result
        assert allocations.left() == []
    disable_expert_prefetch(model)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("rows", [0, EXPERTS // 2])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_experts_whose_rows_are_known(implementation: str, rows: int, pack: bool) -> None:
    """Prompts and tokens, from slots and from caches."""
    model = build("qwen3_moe", torch.bfloat16)
    model.set_experts_implementation(implementation)
    cache = budget(model, rows) if rows else None
    enable_expert_prefetch(model, device="cpu", expert_cache=cache, pack=pack, progress=False)
    # Without the cache of keys and values, which stays.
    model.config.use_cache = False
    check(model, (prompt(1), prompt(20), prompt(2)))


@pytest.mark.parametrize("kind", [Experts, Gathers])
def test_experts_of_which_nothing_is_known(kind: type[Experts]) -> None:
    """What shows which rows they read knows the ids."""
    model = model_of(kind)
    enable_expert_prefetch(model, device="cpu", progress=False)
    check(model, (torch.randn(1, WIDTH), torch.randn(40, WIDTH)))
