"""enable_expert_prefetch and disable_expert_prefetch: the whole public surface on a transformers model."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from .banks.bank import ExpertBank
from .config import DEFAULT_SLOTS, PrefetchConfig
from .discovery import Discovery, find_banks
from .hooks import ExpertPrefetchHook, announce, attach, detach
from .memory.shortage import memory_for
from .memory.store import HostStore
from .memory.values import Load, copy_value
from .model.enabled import Enabled, between_calls, enabled_on, forget, free_orphans, refuse_foreign, remember
from .model.ending import end_with
from .model.gate import behind_gate, busy
from .model.guards import guard
from .model.homes import Device, Homes, choose_homes
from .model.kept import IN_MEMORY, Files, Kept, check_offloading
from .model.measuring import chooses_packing
from .model.packed import laid_out, pack_bank, unpack_bank
from .model.placement import DeviceMap, Placement, TakenHooks
from .model.telling import tell
from .model.undo import Undo
from .model.unready import unready
from .progress import byte_progress
from .scheduling.remedies import OF_MODELS
from .scheduling.scheduler import PrefetchScheduler
from .streams import StreamDevice

__all__ = ["disable_expert_prefetch", "enable", "enable_expert_prefetch"]

Model = TypeVar("Model", bound=nn.Module)

_log = logging.getLogger("hf_prefetch")
# What memory is for on the way back, and what to do if there is none.
_BACK = "experts as they were", "Free some and call disable_expert_prefetch(model): what is left to undo is undone then."


def enable_expert_prefetch(
    model: Model,
    slots: int = DEFAULT_SLOTS,
    *,
    device: Device | None = None,
    n_cpu_moe: int | None = None,
    gpu_memory: int | str | None = None,
    expert_cache: int | str | float | None = None,
    pin_memory: int | str | None = None,
    host_memory: int | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    pack: bool | str | None = None,
    progress: bool | None = None,
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
        n_cpu_moe: keep the experts of the first `n_cpu_moe` layers that have some in host memory, those of the others on the
            device.
        gpu_memory: device memory for weights, in bytes or as "20GiB": what is not an expert, the slots, and the experts of as
            many layers as then fit. Leave room beside it for the KV cache and activations.
        expert_cache: device memory in which the experts that decoding uses stay from token to token, in bytes or as "4GiB", or
            as a share of `gpu_memory` such as 0.5, of whose budget it is a part. None is no cache.
        pin_memory: host memory that may be page-locked, in bytes or as "40GiB"; None or "auto" is all they take, 0 none.
            Page-locked memory can't be paged out or used otherwise. Experts beyond it go through a small page-locked buffer.
        host_memory: host memory for experts, in bytes or as "40GiB". Those of layers beyond it are kept in files and read ahead
            of use, as fast as the disk is. Experts that accelerate has offloaded to disk stay where they are.
        offload_folder: where other experts beyond `host_memory` are written to; given with it or not at all. The files take no
            space any more when the model is disabled or gone.
        pack: keep bfloat16 experts packed: in three quarters of their bytes, without the loss of a bit, in host memory and on
            the way to the device. They are unpacked there for each call, in memory that takes the place of one slot. "auto"
            measures for a moment whether that is faster here; it never is without a GPU and Triton. None, the default, leaves
            them as they are: packed if they come from a packed checkpoint (see `save_packed`).
        progress: show a progress bar while weights are moved; None shows one in terminals and notebooks.

    Returns:
        The same object, with `model.expert_prefetch`, its `PrefetchScheduler`. A model that is enabled already is
        disabled first.

    Raises:
        TypeError, ValueError, RuntimeError: `model` or an option can't be used, or another thread is at it; the message says
            why, and the model is unchanged.
        MemoryError: the system has no host memory for experts; the message names the layer and says what would do.
        OSError: `offload_folder` can't be written to, or is a file; or experts that accelerate keeps on disk can't be read. The
            model is unchanged, but for one that was enabled and is disabled, if that comes up when work has begun.

    Example:
        >>> from hf_prefetch import enable_expert_prefetch
        >>> from hf_prefetch.demo import load_demo_model
        >>> model = enable_expert_prefetch(load_demo_model(), slots=3)
        >>> model.expert_prefetch.report().slots
        3
    """
    config = PrefetchConfig(
        slots=slots,
        n_cpu_moe=n_cpu_moe,
        gpu_memory=gpu_memory,
        expert_cache=expert_cache,
        pin_memory=pin_memory,
        host_memory=host_memory,
        offload_folder=offload_folder,
        pack=pack,
        progress=progress,
    )
    _check_model(model)
    if config.slots == 0:
        return disable_expert_prefetch(model)
    return enable(model, config, device)


def enable(
    model: Model,
    config: PrefetchConfig,
    device: Device | None,
    load: Load = copy_value,
    files: Files = IN_MEMORY,
) -> Model:
    """Enable a model.

    Args:
        load: writes a Parameter's value to where it goes, from wherever it is: it may still be in a file.
        files: says of Parameters which those are.
    """

    def look(enabled: Enabled) -> tuple[Enabled, Discovery, Homes]:
        # In the middle of a call a module's weights are what was sent for it.
        found = find_banks(model)
        if (reason := unready(model)) is not None:
            raise ValueError(f"{reason} The model is unchanged.")
        homes = choose_homes(model, found.banks, device, config)
        refuse_foreign(model, (*homes.host, *homes.resident))
        if enabled:
            # Otherwise all that was done is undone when it fails.
            check_offloading(tuple(homes.host), config, files)
        return enabled, found, homes

    enabled, found, homes = between_calls(model, look)
    modules = {module for bank in (*homes.host, *homes.resident) for module in bank.modules}
    undo = Undo()

    def work() -> Model:
        _disable(model, enabled)
        try:
            with memory_for("what this model's weights need on the way", OF_MODELS.host):
                scheduler = _install(model, config, _laid_out(homes), undo, load, files)
            tell(scheduler, found, homes, config, is_new=not enabled)
            return model
        except BaseException:
            _take_back(model, undo)
            raise

    try:
        return behind_gate(modules.union(*(undo.modules for _, undo in enabled)), work)
    except BaseException:
        # Once more, for an interrupt that came when all was done but the gate still closed.
        _take_back(model, undo)
        raise


def _take_back(model: nn.Module, undo: Undo) -> None:
    """Undo what was done, or let `disable_expert_prefetch` do it later."""
    try:
        with memory_for(*_BACK):
            undo.run()
    except BaseException:
        if not undo.is_done:
            remember(model, None, undo)
        raise


def _laid_out(homes: Homes) -> Homes:
    """With banks as they are now: what was packed when it was found may be unpacked since."""
    host, resident = ({laid_out(bank): home for bank, home in kind.items()} for kind in (homes.host, homes.resident))
    return replace(homes, host=host, resident=resident)


def disable_expert_prefetch(model: Model) -> Model:
    """Undo `enable_expert_prefetch`: weights, forwards, hooks and devices as they were, slots and page locks given back.

    A model that is not enabled is left alone.

    Raises:
        TypeError: `model` is not a model.
        RuntimeError: called from inside a forward of the model's experts, or another thread is enabling or disabling it.
            From elsewhere in a forward it is no error: the rest of that computes without prefetching.
    """
    _check_model(model)
    enabled = enabled_on(model)
    behind_gate({module for _, undo in enabled for module in undo.modules}, lambda: _disable(model, enabled))
    return model


def _disable(model: nn.Module, expected: Enabled) -> None:
    """Disable what is enabled on a model, if it is still what it was before the gate was closed."""

    def work(enabled: Enabled) -> None:
        if enabled != expected:
            raise busy()
        with memory_for(*_BACK):
            for _, undo in enabled:
                undo.run()

    between_calls(model, work)
    free_orphans(model)


def _install(model: nn.Module, config: PrefetchConfig, homes: Homes, undo: Undo, load: Load, files: Files) -> PrefetchScheduler:
    """Enable a model.

    The way back from each step is added to `undo` before the step is taken, so an error or an interrupt in the middle of
    any of them leaves nothing behind. `undo` refers to the model, so it is kept by the model and not by the scheduler,
    which must not keep its model alive.
    """
    undo.modules = tuple(module for bank in (*homes.host, *homes.resident) for module in bank.modules)
    # The last step: until then disabling can be called again, and nobody may move what is left.
    undo.add(forget, model, weakref.WeakSet(model.modules()))
    if config.pack == "auto":
        pays = chooses_packing({*homes.host.values()}, pins=config.pin_budget != 0)
        _log.info("hf_prefetch: packing experts %s here", "pays" if pays else "does not pay")
        config = replace(config, pack=True if pays else None)
    banks, store = tuple(homes.host), HostStore(config.pin_budget)
    taken = {module: TakenHooks(module) for bank in (*banks, *homes.resident) for module in bank.owners}
    kept = Kept(banks, config, load, files)
    stay = {id(parameter) for bank in banks for parameter in bank.parameters.values()}
    placement = Placement(model, stay, load)
    undo.add(placement.restore)
    for bank, home in homes.resident.items():
        for module in bank.owners:
            undo.add(taken[module].give_back)
            taken[module].take()
        bank.rebind()
        unpack_bank(bank, load)
        placement.send(bank.parameters.values(), home.device)
    host: dict[ExpertBank, StreamDevice] = {}
    with _bar(banks, "experts to host memory", config, load) as bar, store.one_after_the_other():
        for found, home in homes.host.items():
            for module in found.owners:
                undo.add(taken[module].give_back)
                taken[module].take(leave_in_files=found in kept)
            found.rebind()
            bank = found
            with memory_for(f"the experts of {found.name}", OF_MODELS.host, found.nbytes):
                if found in kept:
                    undo.add(store.give_back, found)
                    store.leave(found, kept.source(found), kept.wants_back)
                else:
                    for module in found.owners:
                        # What accelerate gets back has to be what it can compute with.
                        undo.add(taken[module].share, found)
                    origins = {name: parameter.device for name, parameter in found.parameters.items()}
                    bank = _as_asked(found, home, config, undo, load)
                    undo.add(store.give_back, bank)
                    store.adopt(bank, home, load, origins)
                    for module in bank.owners:
                        taken[module].share(bank)
            host[bank] = home
            bar.update(found.nbytes)
    homes, banks = replace(homes, host=host), tuple(host)
    if homes.rest is not None:
        placement.move(homes.rest.device)
    device_map = DeviceMap(model)
    undo.add(device_map.restore)
    device_map.claim(homes.host, (home.device for home in homes.host.values()))
    undo.add(_forget_compiled_call, model)
    _forget_compiled_call(model)
    for home in homes.devices:
        home.trim()
    scheduler = PrefetchScheduler(config, store, homes.host, resident=len(homes.resident))
    undo.add(scheduler.stop)
    for bank, home in homes.host.items():
        for module in bank.modules:
            undo.add(detach, module)
            attach(module, ExpertPrefetchHook(scheduler, bank, home.device))
    handles: list[RemovableHandle] = []
    undo.add(_remove, handles)
    announce(scheduler, min((*banks, *homes.resident), key=lambda bank: bank.index), handles)
    guard(model, scheduler, {bank: home.device for bank, home in homes.host.items()})
    scheduler.finalizer = end_with(model, scheduler)
    undo.add(_detach, scheduler)
    for bank in banks if load is not copy_value else ():
        # Whoever reads from files has nothing to go back to when that fails, and no use for weights that are unpacked.
        undo.add_below(unpack_bank, bank)
    remember(model, scheduler, undo)
    return scheduler


def _bar(banks: Iterable[ExpertBank], what: str, config: PrefetchConfig, load: Load) -> Any:
    """A bar over the bytes of banks. Whoever reads weights from files shows one of all of them, so there is none here."""
    return byte_progress(sum(bank.nbytes for bank in banks), what, config.progress if load is copy_value else False)


def _as_asked(bank: ExpertBank, home: StreamDevice, config: PrefetchConfig, undo: Undo, load: Load) -> ExpertBank:
    """A bank that goes to host memory, packed or not, as is asked for. Of a packed checkpoint it is packed already."""
    if bank.has_packed and config.pack is False:
        return unpack_bank(bank, load)
    if not (bank.has_packed or config.pack):
        return bank
    if load is copy_value:
        undo.add(unpack_bank, bank)
    return bank if bank.has_packed else pack_bank(bank, home, load)


def _forget_compiled_call(model: nn.Module) -> None:
    """transformers keeps what it has compiled for `generate`; it was compiled around other hooks."""
    model.__dict__.pop("_compiled_call", None)


def _detach(scheduler: PrefetchScheduler) -> None:
    """What is left to do at the model's end: nothing, unless graphs still know the memory."""
    if not scheduler.is_leased:
        scheduler.finalizer.detach()


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _check_model(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    hint = f" Load it first: AutoModelForCausalLM.from_pretrained({model!r})." if isinstance(model, str) else ""
    raise TypeError(f"Expected a transformers model (a torch.nn.Module), got an object of type {type(model).__name__}.{hint}")
