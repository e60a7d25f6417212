"""What a lane can't do, said with the remedy."""

from __future__ import annotations

import warnings
from typing import NoReturn

import torch

from ..banks.bank import ExpertBank
from ..sizes import at_least, shown
from ..streams import StreamDevice
from .remedies import Remedies

__all__ = ["raise_no_room", "raise_not_warm", "warn_no_cache", "warn_small_cache"]


def raise_not_warm(bank: ExpertBank) -> NoReturn:
    """A graph is captured before the memory that it needs is there."""
    raise RuntimeError(
        f"A CUDA graph is being captured over the experts of {bank.name}, whose memory on the device is not there yet. Run the "
        "same step once without capture first, on the same model."
    )


def raise_no_room(device: StreamDevice, bank: ExpertBank, remedies: Remedies, error: Exception) -> NoReturn:
    """Not one slot fits."""
    raise torch.OutOfMemoryError(
        f"{bank.name} needs {bank.nbytes / 2**20:,.0f} MiB on {device.name} for one slot, and there is no room for it. "
        "Free device memory (a shorter prompt, a smaller batch, an offloaded KV cache, other processes) or "
        f"{remedies.elsewhere}"
    ) from error


def warn_small_cache(budget: int, rows: int, needed: int, least: int) -> None:
    """A budget that is enough for `rows` experts of each layer, where a token uses `needed`; `least` would do."""
    warnings.warn(
        f"hf_prefetch: expert_cache is {shown(budget)}, enough for {rows} experts a layer, and a token uses {needed}: it is "
        f"not used. Give at least {at_least(least)}; half of all experts is a good size.",
        RuntimeWarning,
        stacklevel=2,
    )


def warn_no_cache(bank: ExpertBank, remedies: Remedies) -> None:
    """Experts that can't be given other ids can't be read from a cache."""
    warnings.warn(
        f"hf_prefetch: expert_cache is not used for {bank.name}: only {remedies.cache}",
        RuntimeWarning,
        stacklevel=2,
    )
