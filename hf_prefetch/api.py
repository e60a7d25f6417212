"""enable_expert_prefetch and disable_expert_prefetch: the whole public surface on a transformers model."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import nn

from .config import DEFAULT_SLOTS, PrefetchConfig
from .discovery import Discovery, ExpertBank, find_banks
from .guards import guard, unguard
from .hooks import ExpertPrefetchHook, attach, detach, hook_of
from .memory.ledger import Purpose
from .memory.store import HostStore
from .placement import Placement, TakenHooks, is_dispatched, offload_device
from .progress import byte_progress
from .scheduling.scheduler import PrefetchScheduler
from .streams import StreamDevice, stream_device

__all__ = ["disable_expert_prefetch", "enable_expert_prefetch"]

Model = TypeVar("Model", bound=nn.Module)
Device = torch.device | str | int | StreamDevice

_log = logging.getLogger("hf_prefetch")
# Where an enabled model keeps the way back.
_UNDO = "_expert_prefetch_undo"


def enable_expert_prefetch(
    model: Model, slots: int = DEFAULT_SLOTS, *, device: Device | None = None, progress: bool | None = None
) -> Model:
    """Keep a model's experts in host memory and send each layer's to the device ahead of use.

    The model computes what it computed before, bit for bit; everything but the experts is moved to the device. Experts
    that accelerate has offloaded to the CPU are taken over and the rest of such a model stays as it was dispatched.

    Args:
        model: a transformers Mixture-of-Experts model, on the CPU, on an accelerator, or dispatched by accelerate.
        slots: device buffers that the layers' experts rotate through, each as large as the largest layer's experts:
            3 is recommended, 2 and 4 work, 0 is off (an enabled model is disabled).
        device: where to compute; the accelerator that torch finds if not given. On a machine without one the same
            machinery runs on the CPU, where it gains nothing.
        progress: show a progress bar while weights are moved; None shows one in terminals and notebooks.

    Returns:
        The same object, with `model.expert_prefetch`, its `PrefetchScheduler`. A model that is enabled already is
        disabled first.

    Raises:
        TypeError, ValueError: `slots`, `device` or `model` can't be used; the message says why, and the model is
            unchanged.

    Example:
        >>> from hf_prefetch import enable_expert_prefetch
        >>> from hf_prefetch.demo import load_demo_model
        >>> model = enable_expert_prefetch(load_demo_model(), slots=3)
        >>> model.expert_prefetch.report().slots
        3
    """
    config = PrefetchConfig(slots=slots, progress=progress)
    _check_model(model)
    if config.slots == 0:
        return disable_expert_prefetch(model)
    found = find_banks(model)
    homes = _choose_devices(model, found.banks, device)
    _refuse_foreign_hooks(model, homes)
    disable_expert_prefetch(model)
    undo = ExitStack()
    try:
        scheduler = _install(model, config, homes, undo)
        _say(scheduler, found, homes)
        return model
    except BaseException:
        undo.close()
        raise


def disable_expert_prefetch(model: Model) -> Model:
    """Undo `enable_expert_prefetch`: weights, forwards, hooks and devices as they were, slots and page locks given back.

    A model that is not enabled is left alone.

    Raises:
        TypeError: `model` is not a model.
    """
    _check_model(model)
    for scheduler, undo in _enabled(model):
        with scheduler.lock:
            undo.close()
    return model


def _enabled(model: nn.Module) -> list[tuple[PrefetchScheduler, ExitStack]]:
    """What is enabled on a model or on parts of it, and how to undo it."""
    found = []
    for module in model.modules():
        scheduler, undo = module.__dict__.get("expert_prefetch"), module.__dict__.get(_UNDO)
        if isinstance(scheduler, PrefetchScheduler) and isinstance(undo, ExitStack):
            found.append((scheduler, undo))
    return found


def _install(
    model: nn.Module, config: PrefetchConfig, homes: dict[ExpertBank, StreamDevice], undo: ExitStack
) -> PrefetchScheduler:
    """Enable a model.

    Each step is announced to `undo` before it is taken, so an error or an interrupt in the middle of any of them leaves
    nothing behind. `undo` refers to the model, so it is kept by the model and not by the scheduler, which must not keep
    its model alive.
    """
    banks, store = tuple(homes), HostStore()
    device, dispatched = next(iter(homes.values())).device, is_dispatched(model)
    replaced: dict[nn.Module, TakenHooks] = {module: TakenHooks(module) for bank in banks for module in bank.modules}
    placement = Placement(model, stay={id(parameter) for bank in banks for parameter in bank.parameters.values()})
    undo.callback(placement.restore)
    with byte_progress(sum(bank.nbytes for bank in banks), "experts to host memory", config.progress) as bar:
        for bank in banks:
            for module in bank.modules:
                undo.callback(replaced[module].give_back)
                replaced[module].take()
            bank.rebind()
            undo.callback(store.give_back, bank)
            store.adopt(bank, homes[bank])
            for module in bank.modules:
                replaced[module].share(bank)
            bar.update(bank.nbytes)
    if not dispatched:
        placement.move(device)
    for home in set(homes.values()):
        home.trim()
    scheduler = PrefetchScheduler(config, store, homes)
    undo.callback(scheduler.stop)
    for bank in banks:
        for module in bank.modules:
            undo.callback(detach, module)
            attach(module, ExpertPrefetchHook(scheduler, bank, homes[bank].device, replaced[module].hook))
    undo.callback(unguard, weakref.WeakSet(model.modules()))
    guard(model, scheduler, {bank: home.device for bank, home in homes.items()})
    scheduler.finalizer = weakref.finalize(model, _end, scheduler, os.getpid())
    undo.callback(scheduler.finalizer.detach)
    for name, value in (("expert_prefetch", scheduler), (_UNDO, undo)):
        undo.callback(model.__dict__.pop, name, None)
        model.__dict__[name] = value
    return scheduler


def _end(scheduler: PrefetchScheduler, owner: int) -> None:
    """The model is gone, or the interpreter exits: give memory back, unless this is a fork of the process that took it."""
    if os.getpid() == owner:
        scheduler.close()


def _check_model(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    hint = " Load it first: AutoModelForCausalLM.from_pretrained(...)." if isinstance(model, str) else ""
    raise TypeError(f"Expected a transformers model (a torch.nn.Module), got {model!r} of type {type(model).__name__}.{hint}")


def _choose_devices(model: nn.Module, banks: tuple[ExpertBank, ...], device: Device | None) -> dict[ExpertBank, StreamDevice]:
    """The banks to prefetch and where each computes."""
    dispatched = is_dispatched(model)
    if dispatched and device is not None:
        raise ValueError(
            "This model was dispatched by accelerate, which decides where it computes; leave device= out, or load the "
            "model without device_map."
        )
    offloaded = {bank: place for bank in banks if (place := offload_device(bank)) is not None}
    if offloaded:
        known = {place: stream_device(place) for place in set(offloaded.values())}
        return {bank: known[place] for bank, place in offloaded.items()}
    for bank in banks:
        if any(parameter.is_meta for parameter in bank.parameters.values()):
            raise ValueError(
                f"{bank.name} is on the meta device: it has no weights here. "
                + (
                    "They are offloaded by a hook of another module (preload_module_classes?); load the model without that."
                    if dispatched
                    else "Load the checkpoint first: AutoModelForCausalLM.from_pretrained(...)."
                )
            )
    present = _accelerators(model, banks)
    if dispatched and len(present) > 1:
        places = {bank: next(iter(bank.parameters.values())).device for bank in banks}
        known = {place: stream_device(place) for place in set(places.values())}
        return {bank: known[place] for bank, place in places.items()}
    home = stream_device(device if device is not None or not present else present[0])
    if any(place != home.device for place in present):
        raise ValueError(
            f"The model is on {', '.join(map(str, present))}, but device='{home.device}' was asked for. Leave device= out to "
            "compute where the model is, or move it with model.to(...) first."
        )
    return dict.fromkeys(banks, home)


def _accelerators(model: nn.Module, banks: tuple[ExpertBank, ...]) -> list[torch.device]:
    """The devices other than the CPU that hold parts of the model, those that hold something besides experts first."""
    experts = {id(parameter) for bank in banks for parameter in bank.parameters.values()}
    ordered = sorted(model.parameters(), key=lambda parameter: id(parameter) in experts)
    return list(dict.fromkeys(parameter.device for parameter in ordered if parameter.device.type not in ("cpu", "meta")))


def _refuse_foreign_hooks(model: nn.Module, homes: dict[ExpertBank, StreamDevice]) -> None:
    own = [scheduler for scheduler, _ in _enabled(model)]
    for bank in homes:
        hooks = filter(None, map(hook_of, bank.modules))
        if any(hook.scheduler not in own for hook in hooks):
            raise ValueError(
                f"The experts in {bank.name} are already prefetched through another object that holds the same modules. "
                "Call disable_expert_prefetch on that one first."
            )


def _say(scheduler: PrefetchScheduler, found: Discovery, homes: dict[ExpertBank, StreamDevice]) -> None:
    """Tell the user, once, what is not as they may expect."""
    if found.refusals:
        left = "; ".join(map(str, found.refusals))
        warnings.warn(f"hf_prefetch: left where they are, since they can't be prefetched: {left}.", stacklevel=3)
    ledger, refusals = scheduler.store.ledger, scheduler.store.refusals
    pageable = ledger.held(Purpose.BANKS) - ledger.held(Purpose.PINNED)
    if refusals:
        warnings.warn(
            f"hf_prefetch: {pageable / 2**20:,.0f} of {ledger.held(Purpose.BANKS) / 2**20:,.0f} MiB of experts could not be "
            f"page-locked: {refusals[0]}. They are copied from pageable memory: several times slower, with the same output. "
            "Raise the limit on locked memory (ulimit -l; a container's memlock) and enable it again.",
            RuntimeWarning,
            stacklevel=3,
        )
    for home in set(homes.values()):
        if home.device.type == "cpu" and not home.can_pin:
            _log.warning(
                "hf_prefetch: there is no accelerator here, so experts are 'sent' from the CPU to the CPU. Everything works "
                "as it would on a GPU; nothing gets faster."
            )
        elif not home.overlaps:
            _log.warning("hf_prefetch: %s has no streams that torch can drive, so every bank is copied when needed.", home.name)
