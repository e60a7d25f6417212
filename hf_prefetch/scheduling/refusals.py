"""What a lane can't do, said with the remedy."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..bank import ExpertBank
from ..streams import StreamDevice

__all__ = ["raise_no_room", "raise_not_warm"]


def raise_not_warm(bank: ExpertBank) -> NoReturn:
    """A graph is captured before the memory that it needs is there."""
    raise RuntimeError(
        f"A CUDA graph is being captured over the experts of {bank.name}, whose memory on the device is not there yet. Run the "
        "same step once without capture first, on the same model."
    )


def raise_no_room(device: StreamDevice, bank: ExpertBank, error: Exception) -> NoReturn:
    """Not one slot fits."""
    raise torch.OutOfMemoryError(
        f"{bank.name} needs {bank.nbytes / 2**20:,.0f} MiB on {device.name} for one slot, and there is no room for it. "
        "Free device memory (a shorter prompt, a smaller batch, an offloaded KV cache, other processes) or run the model on "
        "another device with enable_expert_prefetch(model, device=...)."
    ) from error
