"""What may be done to an enabled model as a whole: moves are let through or refused, copies and pickles are refused.

`model.to(device)` walks over every module and would carry the experts along. The guards keep them where they are when
the move leads to the device that they compute on anyway (`pipeline(model=..., device="cuda")` does that), and refuse any
other move before a single tensor has been touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import nn

from .discovery import ExpertBank
from .scheduling.scheduler import PrefetchScheduler

__all__ = ["guard", "unguard"]

_GUARDED = ("_apply", "__deepcopy__", "__reduce_ex__")


def guard(model: nn.Module, scheduler: PrefetchScheduler, devices: dict[ExpertBank, torch.device]) -> None:
    """Guard a model and its expert banks."""
    inside = weakref.ref(model)

    def apply_to_model(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for bank, device in devices.items():
            _check(function, bank, device)
        guarded = inside()
        assert guarded is not None, "a method outlived its model"
        return _unguarded_apply(guarded, function, recurse)

    for bank, device in devices.items():
        for module in bank.modules:
            _guard(module, _stay(module, bank, device), scheduler)
    _guard(model, apply_to_model, scheduler)


def unguard(model: nn.Module, banks: tuple[ExpertBank, ...]) -> None:
    """Take the guards off. Idempotent."""
    for module in (model, *(module for bank in banks for module in bank.modules)):
        for name in _GUARDED:
            module.__dict__.pop(name, None)


def _guard(module: nn.Module, apply: Callable[..., nn.Module], scheduler: PrefetchScheduler) -> None:
    # `copy` and `pickle` ask the object, not its type, so these may live on the instance.
    guards = (apply, scheduler.__deepcopy__, scheduler.__reduce_ex__)
    module.__dict__.update(zip(_GUARDED, guards, strict=True))


def _stay(module: nn.Module, bank: ExpertBank, device: torch.device) -> Callable[..., nn.Module]:
    """An `_apply` that leaves a bank on the host and treats the rest of its module as usual."""
    inside = weakref.ref(module)

    def apply_to_bank(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        _check(function, bank, device)
        guarded = inside()
        assert guarded is not None, "a method outlived its module"
        stay = {id(parameter) for parameter in bank.parameters.values()}
        return _unguarded_apply(guarded, lambda tensor: tensor if id(tensor) in stay else function(tensor), recurse)

    return apply_to_bank


def _unguarded_apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> nn.Module:
    return type(module)._apply(module, function, recurse)  # type: ignore[no-any-return, no-untyped-call]


def _check(function: Callable[[torch.Tensor], torch.Tensor], bank: ExpertBank, device: torch.device) -> None:
    """Try a move on an empty tensor of the bank's kind, and refuse it if it leads elsewhere or changes the dtype."""
    for dtype in {parameter.dtype for parameter in bank.parameters.values()}:
        with torch.no_grad():
            moved = function(torch.empty(0, dtype=dtype))
        if moved.device != device:
            _refuse(f"moved to {moved.device}", f"its experts are prefetched to {device} and must stay there")
        if moved.dtype != dtype:
            _refuse(f"converted to {moved.dtype}", f"its experts are prefetched as {dtype}")


def _refuse(what: str, why: str) -> NoReturn:
    raise RuntimeError(
        f"This model can't be {what} while expert prefetching is enabled: {why}. "
        "Call disable_expert_prefetch(model) first; afterwards enable_expert_prefetch(model, device=...) takes it anywhere."
    )
