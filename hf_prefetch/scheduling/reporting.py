"""The report of a model: what was counted, and what its store and the lanes of its devices hold at this moment."""

from __future__ import annotations

from collections.abc import Sequence

from ..banks.bank import ExpertBank
from ..config import PrefetchConfig
from ..memory.ledger import Purpose
from ..memory.store import HostStore
from ..report import Counters, Report
from .lane import Lane

__all__ = ["make_report"]


def make_report(
    config: PrefetchConfig,
    store: HostStore,
    counters: Counters,
    banks: Sequence[ExpertBank],
    lanes: Sequence[Lane],
    *,
    resident: int,
) -> Report:
    """What happened since the counters were at zero.

    Args:
        config: the options that the model was enabled with.
        store: where its host-resident banks are.
        counters: what was counted.
        banks: the host-resident ones.
        lanes: those of the devices that they compute on.
        resident: how many banks there are besides.
    """
    held = store.ledger.held
    return counters.report(
        slots=config.slots,
        unpacks=any(lane.opens for lane in lanes),
        banks=len(banks),
        file_banks=store.in_files,
        resident_banks=resident,
        devices=tuple(lane.device.name for lane in lanes),
        looks_ahead=all(lane.looks_ahead for lane in lanes),
        device_bytes=held(Purpose.SLOTS),
        cache_bytes=held(Purpose.CACHES),
        cache_asked=config.cache_budget,
        host_bytes=held(Purpose.BANKS),
        file_bytes=held(Purpose.FILES),
        pinned_bytes=held(Purpose.PINNED),
        staging_bytes=held(Purpose.STAGING),
        staged_bytes=sum(lane.staging.nbytes for lane in lanes),
        staged_seconds=sum(lane.staging.seconds for lane in lanes),
        unpacked_banks=sum(not bank.has_packed for bank in banks) if config.pack else 0,
        weight_bytes=sum(bank.weight_nbytes for bank in banks),
    )
