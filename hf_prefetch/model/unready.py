"""Weights that are not there yet: a model that is loaded compressed may be unpacked at its first forward.

Whoever does that replaces weights, and takes over where modules keep them, when prefetching has them already.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn

__all__ = ["unready"]


def unready(model: nn.Module) -> str | None:
    """Why a model is not ready to be enabled, if so: it has a linear layer that can't be computed with what it holds."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        forward = inspect.unwrap(module.forward)
        if getattr(forward, "__func__", forward) is not nn.Linear.forward or "parametrizations" in module._modules:
            continue
        weight = getattr(module, "weight", None)
        if (
            isinstance(weight, torch.Tensor)
            and weight.dtype.itemsize > 1
            and (weight.is_floating_point() or weight.is_complex())
        ):
            continue
        held = ", ".join(key for key, value in module._parameters.items() if value is not None)
        return (
            f"{name} is a linear layer without a weight that it could multiply (it has {held or 'none'}), so something is to "
            "unpack it at the model's first forward, which replaces what prefetching holds. Load the model dequantized: with "
            "CompressedTensorsConfig(dequantize=True), for example."
        )
    return None
