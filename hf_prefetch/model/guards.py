"""What may be done to an enabled model as a whole: moves are let through or refused, copies and pickles are refused.

`model.to(device)` walks over every module and would carry the experts along. The guards keep them where they are when
the move leads to the device that they compute on anyway (`pipeline(model=..., device="cuda")` does that), and refuse any
other move before a single tensor has been touched. `load_state_dict` writes to host memory, so it waits for the copies that
a forward has left under way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from ..banks.bank import ExpertBank
from ..memory.disk import OnDisk
from ..scheduling.scheduler import PrefetchScheduler
from .packed import PackedWeights

__all__ = ["guard", "unguard"]

_GUARDED = ("_apply", "__deepcopy__", "__reduce_ex__", "_load_from_state_dict", "_save_to_state_dict")


def guard(model: nn.Module, scheduler: PrefetchScheduler, devices: dict[ExpertBank, torch.device]) -> None:
    """Guard a model, its expert banks, and whatever lies in between: a part may be moved as well."""
    owned: dict[nn.Module, dict[str, tuple[ExpertBank, str]]] = {}
    for bank in devices:
        for holder in bank.modules:
            for owner, name, key in bank.places(holder):
                owned.setdefault(owner, {})[name] = bank, key
    holders = {module: (bank,) for bank in devices for module in bank.modules}
    for module in model.modules():
        banks: dict[ExpertBank, torch.device] = {}
        for inner in module.modules():
            inside = (bank for bank, _ in owned.get(inner, {}).values())
            banks |= {bank: devices[bank] for bank in (*inside, *holders.get(inner, ()))}
        if banks:
            move = _stay(module, set(owned[module]), banks) if module in owned else _check_first(module, banks)
            # `copy` and `pickle` ask the object, not its type, so these may live on the instance.
            guards = (
                move,
                scheduler.__deepcopy__,
                scheduler.__reduce_ex__,
                _settle_first(module, scheduler),
                _save_from_host(module, scheduler, owned.get(module, {})),
            )
            module.__dict__.update(zip(_GUARDED, guards, strict=True))


def unguard(modules: Iterable[nn.Module]) -> None:
    """Take the guards off. Idempotent."""
    for module in modules:
        for name in _GUARDED:
            module.__dict__.pop(name, None)


def _check_first(module: nn.Module, devices: dict[ExpertBank, torch.device]) -> Callable[..., nn.Module]:
    """An `_apply` that refuses, before anything is touched, what one of the banks inside would refuse."""
    inside = weakref.ref(module)

    def apply_to_module(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for bank, device in devices.items():
            _check(function, bank, device)
        return _unguarded_apply(_alive(inside), function, recurse)

    return apply_to_module


def _settle_first(module: nn.Module, scheduler: PrefetchScheduler) -> Callable[..., None]:
    """A `_load_from_state_dict` that does not write over what a copy is still reading, and nothing if it can't write all."""
    inside = weakref.ref(module)

    def load(state: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        scheduler.settle()
        guarded = _alive(inside)
        # The outermost module is asked first, before anything is written.
        in_files = scheduler.store.in_files and [
            name for name, value in guarded.named_parameters() if isinstance(value, OnDisk) and prefix + name in state
        ]
        if in_files:
            raise RuntimeError(
                f"{in_files[0]} and {len(in_files) - 1} more weights of experts stay in files, and can't be written to: "
                "nothing was loaded. Call disable_expert_prefetch(model) first, which reads them into memory, and enable it "
                "again afterwards."
            )
        type(guarded)._load_from_state_dict(guarded, state, prefix, *args, **kwargs)

    return load


def _save_from_host(
    module: nn.Module, scheduler: PrefetchScheduler, owned: dict[str, tuple[ExpertBank, str]]
) -> Callable[..., None]:
    """A `_save_to_state_dict` that gives what is in host memory, as ordinary tensors.

    While a call is under way the module's own Parameters are what was sent for it: a part of the experts, say. Other threads
    wait for its end; whoever asks from inside gets the host's all the same.
    """
    inside = weakref.ref(module)

    def save(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        guarded, in_a_call = _alive(inside), scheduler.is_in_a_call()
        with scheduler.lock:
            type(guarded)._save_to_state_dict(guarded, destination, prefix, keep_vars)
            for name, (bank, key) in owned.items():
                value = bank.parameters[key]
                if prefix + name not in destination:
                    continue  # somebody has put something else in its place
                if isinstance(value, OnDisk):
                    destination[prefix + name] = value.read()
                elif isinstance(value, PackedWeights):
                    destination[prefix + name] = value.unpacked()
                elif in_a_call:
                    destination[prefix + name] = value if keep_vars else value.detach()

    return save


def _stay(module: nn.Module, names: set[str], devices: dict[ExpertBank, torch.device]) -> Callable[..., nn.Module]:
    """An `_apply` that leaves the Parameters of banks on the host and treats the rest of their owner as usual."""
    inside = weakref.ref(module)

    def apply_to_bank(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for bank, device in devices.items():
            _check(function, bank, device)
        guarded = _alive(inside)
        everything = guarded._parameters
        try:
            # Out of sight: even handing a Parameter back as it is may replace it or move its gradient.
            guarded.__dict__["_parameters"] = {k: p for k, p in everything.items() if k not in names}
            return _unguarded_apply(guarded, function, recurse)
        finally:
            everything.update(guarded._parameters)
            guarded.__dict__["_parameters"] = everything

    return apply_to_bank


def _alive(inside: weakref.ref[nn.Module]) -> nn.Module:
    module = inside()
    assert module is not None, "a method outlived its module"
    return module


def _unguarded_apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> nn.Module:
    return type(module)._apply(module, function, recurse)  # type: ignore[no-any-return, no-untyped-call]


def _check(function: Callable[[torch.Tensor], torch.Tensor], bank: ExpertBank, device: torch.device) -> None:
    """Try a move on an empty tensor of the bank's kind, and refuse it if it leads elsewhere or changes the dtype."""
    for dtype in {parameter.dtype for parameter in bank.parameters.values()}:
        with torch.no_grad():
            moved = function(torch.empty(0, dtype=dtype, device="cpu"))
        if moved.device != device:
            _refuse(f"moved to {moved.device}", f"its experts are prefetched to {device} and must stay there")
        if moved.dtype != dtype:
            _refuse(f"converted to {moved.dtype}", f"its experts are prefetched as {dtype}")


def _refuse(what: str, why: str) -> NoReturn:
    raise RuntimeError(
        f"This model can't be {what} while expert prefetching is enabled: {why}. "
        "Call disable_expert_prefetch(model) first; afterwards enable_expert_prefetch(model, device=...) takes it anywhere."
    )
