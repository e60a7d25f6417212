"""Tensors that a module keeps among its attributes and not among its Parameters: as they are, or in objects.

Kernels of their own want weights in objects of their own (a Triton tensor with its storage and layout, say). Such a tensor is
named by its path: `gate_up_proj.storage.data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["place_of", "tensors_beside"]

# A weight in its storage in its tensor in what a kernel wants to know of it is the deepest that there is.
_DEPTH = 4


def tensors_beside(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors among a module's attributes by their paths, without Parameters, buffers, and what other modules hold."""
    return dict(_look(vars(module), "", _DEPTH))


def _look(attributes: Mapping[str, Any], prefix: str, depth: int) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for name, value in attributes.items():
        if name.startswith("_"):
            continue
        if isinstance(value, torch.Tensor):
            found.append((prefix + name, value))
        elif depth > 1 and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value):
            found += _look(vars(value), f"{prefix}{name}.", depth - 1)
    return found


def place_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict in which a module keeps a tensor of its own, and its key there: Parameters, or attributes of an object.

    Where there is no such object any more the dict is an empty one.
    """
    parameters: dict[str, Any] = module._parameters
    if name in parameters:
        return parameters, name
    inside: Any = module
    *path, last = name.split(".")
    for step in path:
        inside = getattr(inside, "__dict__", {}).get(step)
    if not path and last not in vars(module):
        return parameters, name
    return getattr(inside, "__dict__", {}), last
