"""Homes: which bank computes where, and which of them live in host memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ..banks.bank import ExpertBank
from ..config import PrefetchConfig
from ..scheduling.residency import NoRoomError, choose_host_banks, first_banks
from ..sizes import at_least, shown
from ..streams import StreamDevice, stream_device
from .placement import is_dispatched, offload_device

__all__ = ["Device", "Homes", "banks_beyond", "choose_homes"]

Device = torch.device | str | int | StreamDevice


@dataclass(frozen=True)
class Homes:
    """Where everything goes.

    Attributes:
        host: the banks that live in host memory, and the device on which each computes.
        resident: the banks that stay on a device, or go there.
        rest: where what is not an expert goes; None for a dispatched model, which stays as it is.
    """

    host: dict[ExpertBank, StreamDevice]
    resident: dict[ExpertBank, StreamDevice]
    rest: StreamDevice | None

    @property
    def devices(self) -> set[StreamDevice]:
        """Every device that computes something."""
        return {*self.host.values(), *self.resident.values()}


def choose_homes(model: nn.Module, banks: tuple[ExpertBank, ...], device: Device | None, config: PrefetchConfig) -> Homes:
    """Decide it, touching nothing.

    Raises:
        TypeError, ValueError, RuntimeError: `device` or `gpu_memory` can't be had; the message says why.
    """
    dispatched = is_dispatched(model)
    if dispatched and device is not None:
        raise ValueError(
            "This model was dispatched by accelerate, which decides where it computes; leave device= out, or load the "
            "model without device_map."
        )
    offloaded = {bank for bank in banks if offload_device(bank) is not None}
    _refuse_meta(banks, offloaded, dispatched)
    homes = _devices(model, banks, device, dispatched)
    if config.n_cpu_moe is not None:
        host = {banks[index] for index in first_banks(config.n_cpu_moe, len(banks))}
    elif config.device_budget is not None:
        host = _within_budget(model, homes, config, dispatched)
    else:
        # Of a dispatched model only what was sent away from its device is ours to bring there.
        host = offloaded or set(banks)
    return Homes(
        host={bank: home for bank, home in homes.items() if bank in host},
        resident={bank: home for bank, home in homes.items() if bank not in host},
        rest=None if dispatched else next(iter(homes.values())),
    )


def _devices(
    model: nn.Module, banks: tuple[ExpertBank, ...], device: Device | None, dispatched: bool
) -> dict[ExpertBank, StreamDevice]:
    """The device on which each bank computes."""
    present = _accelerators(model, banks)
    if dispatched:
        places = {bank: offload_device(bank) or next(iter(bank.parameters.values())).device for bank in banks}
        if all(place.type == "cpu" for place in places.values()) and present:
            places = dict.fromkeys(banks, present[0])
        known = {place: stream_device(place) for place in set(places.values())}
        return {bank: known[place] for bank, place in places.items()}
    home = stream_device(device if device is not None or not present else present[0])
    if any(place != home.device for place in present):
        raise ValueError(
            f"The model is on {', '.join(map(str, present))}, but device='{home.device}' was asked for. Leave device= out to "
            "compute where the model is, or move it with model.to(...) first."
        )
    return dict.fromkeys(banks, home)


def _within_budget(
    model: nn.Module, homes: dict[ExpertBank, StreamDevice], config: PrefetchConfig, dispatched: bool
) -> set[ExpertBank]:
    """The banks that don't fit into the budget of each device beside the slots, the cache and what is not an expert."""
    experts = {id(parameter) for bank in homes for parameter in bank.parameters.values()}
    rest = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in experts}
    host: set[ExpertBank] = set()
    for home in set(homes.values()):
        dense = sum(
            tensor.numel() * tensor.element_size()
            for tensor in rest.values()
            if not tensor.is_meta and (tensor.device == home.device or not dispatched)
        )
        host.update(banks_beyond([bank for bank, place in homes.items() if place is home], home, config, dense))
    return host


def banks_beyond(banks: list[ExpertBank], home: StreamDevice, config: PrefetchConfig, dense: int) -> list[ExpertBank]:
    """Of the banks that compute on one device those that `gpu_memory` has no room for; `dense` bytes are not experts.

    Raises:
        ValueError: not even the slots fit. The message says what would do.
    """
    budget, cache, slots = config.device_budget or 0, config.cache_budget, config.slots
    try:
        # What stays on the device is not packed there.
        sizes = [bank.weight_nbytes if bank.has_packed else bank.nbytes for bank in banks]
        # Where all of them fit there is nothing to cache.
        left = budget - dense if sum(sizes) <= budget - dense else budget - dense - cache
        return [banks[index] for index in choose_host_banks(sizes, left, slots)]
    except NoRoomError as error:
        least = dense + slots * max(sizes)
        # A cache that is a share of the budget grows with it.
        share = config.expert_cache if isinstance(config.expert_cache, float) else 0.0
        least = math.ceil((least if share else least + cache) / (1 - share))
        # Where all of them fit there is nothing to cache, so that is enough in any case.
        least = min(least, dense + sum(sizes))
        takes, smaller = (f" and {shown(cache)} to expert_cache", ", a smaller expert_cache") if cache else ("", "")
        raise ValueError(
            f"gpu_memory={shown(budget)} is too little on {home.name}: {shown(dense)} of it go to what is not an expert"
            f"{takes}, {error}. Give at least {at_least(least)}{smaller}, or take fewer slots."
        ) from error


def _accelerators(model: nn.Module, banks: tuple[ExpertBank, ...]) -> list[torch.device]:
    """The devices other than the CPU that hold parts of the model, those that hold something besides experts first."""
    experts = {id(parameter) for bank in banks for parameter in bank.parameters.values()}
    ordered = sorted(model.parameters(), key=lambda parameter: id(parameter) in experts)
    return list(dict.fromkeys(parameter.device for parameter in ordered if parameter.device.type not in ("cpu", "meta")))


def _refuse_meta(banks: tuple[ExpertBank, ...], offloaded: set[ExpertBank], dispatched: bool) -> None:
    for bank in banks:
        if bank not in offloaded and any(parameter.is_meta for parameter in bank.parameters.values()):
            raise ValueError(
                f"{bank.name} is on the meta device: it has no weights here. "
                + (
                    "They are offloaded by a hook of another module (preload_module_classes?); load the model without that."
                    if dispatched
                    else "Load the checkpoint first: AutoModelForCausalLM.from_pretrained(...)."
                )
            )
