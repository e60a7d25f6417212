"""Values: how what a Parameter holds gets to where it stays, from memory or from wherever else it still is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .pages import Put, bytes_of

__all__ = ["Load", "copy_value"]


# Writes a Parameter's value, or a part's, into a tensor on the CPU of its shape and type, which may be its own memory.
Load = Callable[[torch.Tensor, torch.Tensor], None]


def copy_value(parameter: torch.Tensor, destination: torch.Tensor, put: Put | None = None) -> None:
    """The `Load` of what holds its value already. Its bytes are handed to `put`, if that is given and can be."""
    if destination.data_ptr() == parameter.data_ptr():
        return
    with torch.no_grad():
        if put is None or not _has_bytes_of(parameter, destination):
            destination.copy_(parameter)
        else:
            # A bank's tensors have no gaps, in whatever order their dimensions are.
            put(destination, bytes_of(parameter.detach().as_strided((parameter.numel(),), (1,))))


def _has_bytes_of(parameter: torch.Tensor, destination: torch.Tensor) -> bool:
    """Whether two tensors that have the same values have the same bytes in memory."""
    return (
        type(parameter) in (nn.Parameter, torch.Tensor)
        and parameter.device.type == "cpu"
        and parameter.dtype == destination.dtype
        and parameter.stride() == destination.stride()
        and not (parameter.is_neg() or parameter.is_conj())
    )
