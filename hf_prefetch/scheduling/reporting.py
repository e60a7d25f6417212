"""The report of a model: what was counted, and what its store and the lanes of its devices hold at this moment."""

from __future__ import annotations

from ..banks.bank import ExpertBank
from ..config import PrefetchConfig
from ..memory.ledger import Purpose
from ..memory.store import HostStore
from ..report import Counters, Report
from .lane import Lane
from .remedies import Remedies

__all__ = ["make_report"]


def make_report(
    config: PrefetchConfig,
    store: HostStore,
    counters: Counters,
    lanes: dict[ExpertBank, Lane],
    remedies: Remedies,
    *,
    resident: int,
) -> Report:
    """What happened since the counters were at zero.

    Args:
        config: the options that the model was enabled with.
        store: where its host-resident banks are.
        counters: what was counted.
        lanes: of the host-resident banks, each with that of the device that it computes on.
        remedies: what to tell users.
        resident: how many banks there are besides.
    """
    held, banks = store.ledger.held, tuple(lanes)
    # None of it is there any more when the model is disabled.
    captures = bool(held(Purpose.PINNED)) and all(lane.can_be_captured(bank) for bank, lane in lanes.items())
    by_device = tuple(dict.fromkeys(lanes.values()))
    return counters.report(
        slots=config.slots,
        unpacks=any(lane.opens for lane in by_device),
        banks=len(banks),
        file_banks=store.in_files,
        resident_banks=resident,
        devices=tuple(lane.device.name for lane in by_device),
        looks_ahead=all(lane.looks_ahead for lane in by_device),
        device_bytes=held(Purpose.SLOTS),
        cache_bytes=held(Purpose.CACHES),
        cache_asked=config.cache_budget,
        host_bytes=held(Purpose.BANKS),
        file_bytes=held(Purpose.FILES),
        pinned_bytes=held(Purpose.PINNED),
        staging_bytes=held(Purpose.STAGING),
        staged_bytes=sum(lane.staging.nbytes for lane in by_device),
        staged_seconds=sum(lane.staging.seconds for lane in by_device),
        unpacked_banks=sum(not bank.has_packed for bank in banks) if config.pack else 0,
        weight_bytes=sum(bank.weight_nbytes for bank in banks),
        faster_steps=remedies.steps if captures else None,
    )
