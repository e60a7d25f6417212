"""From the layers of one engine in one worker to a scheduler: what `api.enable` is for a transformers model.

It happens at the first forward. By then all weights are loaded and in the form that kernels want, and have been sent back to
host memory layer by layer; and it is still before vLLM measures what is left for the KV cache, so that this counts slots and
caches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...config import PrefetchConfig
from ...memory.ledger import Purpose
from ...memory.shortage import memory_for
from ...memory.store import HostStore, send_parameter
from ...memory.values import copy_value
from ...model.ending import end_with
from ...model.homes import banks_beyond
from ...model.measuring import chooses_packing
from ...model.packed import pack_bank
from ...progress import byte_progress
from ...scheduling.residency import first_banks
from ...scheduling.scheduler import PrefetchScheduler
from ...sizes import shown
from ...streams import StreamDevice, stream_device
from .banks import LayerBank, bank_of
from .hook import LayerHook
from .refusals import REMEDIES, refuse, refuse_layer

__all__ = ["prefetch_layers"]

# One for graphs, one that is read, one that is refilled meanwhile.
_LEAST_WITH_GRAPHS = 3

_log = logging.getLogger("vllm.hf_prefetch")


def prefetch_layers(layers: Sequence[Any], config: PrefetchConfig, device: torch.device, *, graphs: bool) -> list[LayerHook]:
    """Move the experts of an engine's layers to host memory, and have them prefetched.

    Args:
        layers: the engine's `RoutedExperts` of this worker, in the order in which they are called.
        config: what to do.
        device: where they compute.
        graphs: whether vLLM is going to capture CUDA graphs.

    Returns:
        A hook for each layer whose experts live in host memory now.

    Raises:
        NotImplementedError, ValueError, RuntimeError: it can't be done; the message says why.
    """
    for layer in layers:
        refuse_layer(layer)
    home = stream_device(device)
    if config.pack == "auto":
        config = replace(config, pack=chooses_packing({home}, pins=config.pin_budget != 0))
    # Whatever is made here outlives the call, which runs under inference_mode.
    with torch.inference_mode(False), torch.no_grad():
        banks = [bank_of(index, layer) for index, layer in enumerate(layers)]
        _check_cache(banks, config)
        host = _in_host_memory(banks, config, home)
        for bank in banks:
            if bank not in host:
                for parameter in bank.parameters.values():
                    send_parameter(parameter, home.device)
        store = HostStore(config.pin_budget)
        try:
            prefetched = _move(host, store, config, home)
            resident = len(banks) - len(host)
            scheduler = PrefetchScheduler(config, store, dict.fromkeys(prefetched, home), resident=resident, remedies=REMEDIES)
        except BaseException:
            store.close()
            raise
        home.trim()
        scheduler.finalizer = end_with(layers[0], scheduler)
        if graphs:
            _check_graphs(scheduler, prefetched)
        scheduler.reserve()
    _say(scheduler, home)
    return [LayerHook(scheduler, bank, home.device) for bank in prefetched]


def _in_host_memory(banks: list[LayerBank], config: PrefetchConfig, home: StreamDevice) -> list[LayerBank]:
    if config.n_cpu_moe is not None:
        return [banks[index] for index in first_banks(config.n_cpu_moe, len(banks))]
    if config.device_budget is None:
        return banks
    # All that is there now are weights, and experts are not among them.
    dense = torch.accelerator.memory_allocated(home.device) if home.device.type != "cpu" else 0
    chosen = banks_beyond(list(banks), home, config, dense)
    return [bank for bank in banks if bank in chosen]


def _move(banks: list[LayerBank], store: HostStore, config: PrefetchConfig, home: StreamDevice) -> list[LayerBank]:
    """Pack banks, if that is asked for, and put them into the store: never is more than one of them there twice."""
    moved = []
    nbytes = sum(bank.nbytes for bank in banks)
    with byte_progress(nbytes, "experts to host memory", config.progress) as bar, store.one_after_the_other():
        for bank in banks:
            with memory_for(f"the experts of {bank.name}", REMEDIES.host, bank.nbytes):
                packed = pack_bank(bank, home, copy_value) if config.pack else bank
                assert isinstance(packed, LayerBank), "packing changes the layout alone"
                store.adopt(packed, home)
            moved.append(packed)
            bar.update(bank.nbytes)
    return moved


def _check_cache(banks: list[LayerBank], config: PrefetchConfig) -> None:
    """A cache that calls can't be read from would be memory for nothing."""
    wrong = [bank.name for bank in banks if config.cache_budget and not bank.takes_other_ids]
    if wrong:
        refuse(
            [
                f"expert_cache can't be had for {wrong[0]}: with expert parallelism, or a kernel that keeps scales of the "
                "experts in a form of its own, experts can't be numbered otherwise. Leave expert_cache out."
            ]
        )


def _check_graphs(scheduler: PrefetchScheduler, banks: list[LayerBank]) -> None:
    """What can't be captured has to be known before vLLM begins to capture."""
    if banks and scheduler.config.slots < _LEAST_WITH_GRAPHS:
        raise ValueError(
            f"slots={scheduler.config.slots} is too few with CUDA graphs, which keep one slot for themselves: what is left for "
            f"prompts could not be refilled while it is read. Take slots={_LEAST_WITH_GRAPHS} or 4, or pass enforce_eager=True."
        )
    if not all(map(scheduler.can_be_captured, banks)):
        why = scheduler.store.refusals[0] if scheduler.store.refusals else "some of the experts are not in page-locked memory"
        refuse(
            [
                f"CUDA graphs need all experts in page-locked memory, and Triton: {why}. Pass enforce_eager=True, or make room "
                "for page locks (ulimit -l, a container's memlock, a larger pin_memory)."
            ]
        )


def _say(scheduler: PrefetchScheduler, home: StreamDevice) -> None:
    ledger = scheduler.store.ledger
    held, pinned = ledger.held(Purpose.BANKS), ledger.held(Purpose.PINNED)
    _log.info(
        "hf_prefetch: the experts of %d layers are in host memory (%s, %s of it page-locked), those of %d on %s; %d slots.",
        len(scheduler.banks), shown(held), shown(pinned), scheduler.resident, home.name, scheduler.config.slots,
    )  # fmt: skip
    if pinned < held and home.can_pin:
        why = scheduler.store.refusals[0] if scheduler.store.refusals else "pin_memory= allows no more"
        _log.warning(
            "hf_prefetch: %s of experts are not page-locked (%s): they are copied several times more slowly, with the same "
            "output.", shown(held - pinned), why,
        )  # fmt: skip
