"""What a user is told when a model has been enabled, as warnings and in the log."""

from __future__ import annotations

import logging
import sys
import warnings
from functools import cache
from pathlib import Path

from ..banks.bank import ExpertBank
from ..config import PrefetchConfig
from ..discovery import Discovery, one_of_each
from ..memory.ledger import Purpose
from ..scheduling.scheduler import PrefetchScheduler
from .homes import Homes
from .packed import unsuited

__all__ = ["tell"]

_log = logging.getLogger("hf_prefetch")
_PACKAGE = str(Path(__file__).parent.parent)


def tell(scheduler: PrefetchScheduler, found: Discovery, homes: Homes, config: PrefetchConfig, *, is_new: bool) -> None:
    """Tell the user, once, what is not as they may expect. `is_new`: the model was not enabled before."""
    if found.refusals:
        left = "; ".join(map(str, one_of_each(found.refusals)))
        warnings.warn(f"hf_prefetch: left where they are, since they can't be prefetched: {left}.", stacklevel=_outside())
    if config.pack is True:
        kept = [bank for bank in scheduler.banks if not bank.has_packed]
        for why in dict.fromkeys(map(_why_unpacked, kept)):
            banks = [bank for bank in kept if _why_unpacked(bank) == why]
            warnings.warn(
                f"hf_prefetch: pack=True packs nothing of {len(banks):,} of {len(scheduler.banks):,} expert banks "
                f"({banks[0].name or 'this module'}): their experts {why}. They stay as they are, with the same output.",
                stacklevel=_outside(),
            )
    ledger, refusals = scheduler.store.ledger, scheduler.store.refusals
    pageable = ledger.held(Purpose.BANKS) - ledger.held(Purpose.PINNED)
    if refusals:
        warnings.warn(
            f"hf_prefetch: {pageable / 2**20:,.0f} of {ledger.held(Purpose.BANKS) / 2**20:,.0f} MiB of experts could not be "
            f"page-locked: {refusals[0]}. They reach the device more slowly, with the same output. "
            "Raise the limit on locked memory (ulimit -l; a container's memlock) and enable it again.",
            RuntimeWarning,
            stacklevel=_outside(),
        )
    for home in set(homes.host.values()):
        if is_new and home.device.type == "cpu" and home.overlaps and not home.can_pin:
            _tell_of_the_cpu()
        elif not home.overlaps:
            _log.warning("hf_prefetch: %s has no streams that torch can drive, so every bank is copied when needed.", home.name)


@cache
def _tell_of_the_cpu() -> None:
    """Once in a process: it is about the machine, and not about the model."""
    _log.warning(
        "hf_prefetch: this computes on the CPU, so experts are 'sent' from its memory to its memory. Everything works as it "
        "would on a GPU; nothing gets faster."
    )


def _why_unpacked(bank: ExpertBank) -> str:
    return unsuited(bank) or "would hardly get smaller"


def _outside() -> int:
    """How many frames up from whoever asks the code is that has called the package: a warning is of that line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
