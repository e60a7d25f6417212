"""What can't be done, said with the remedy."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch

from ..banks.bank import ExpertBank
from ..sizes import at_least, shown
from ..streams import StreamDevice
from .remedies import Remedies

__all__ = ["NeverCopied", "raise_no_room", "raise_not_warm", "warn_no_cache", "warn_shrunk_cache", "warn_small_cache"]


class NeverCopied:
    """Belongs to a model and a process."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy()


def _refuse_copy() -> NoReturn:
    raise TypeError(
        "A model with expert prefetching enabled can't be copied or pickled: its streams, slots and page-locked memory "
        "belong to this process. Call disable_expert_prefetch(model) first, and enable_expert_prefetch on each copy; "
        "model.save_pretrained(...) works while it is enabled."
    )


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


def warn_shrunk_cache(device: StreamDevice, before: int, rows: int) -> None:
    """Each layer's cache has `rows` experts from now on, because memory is short."""
    warnings.warn(
        f"hf_prefetch: device memory is short on {device.name}, so the expert cache gets smaller than asked for: "
        f"{rows} experts a layer instead of {before}, and fewer if that doesn't do. Decoding gets slower, with the "
        "same output. Take a smaller expert_cache to have room for the KV cache.",
        RuntimeWarning,
        stacklevel=2,
    )
