"""Experts that are one operator in compiled code, as prefetched ones are, without prefetching.

What the compiler fuses around an operator differs from what it fuses with the experts' own operators, and so do last bits. Off
and on can be compared bit for bit where both have an operator in the same place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from models import experts_of

__all__ = ["experts_as_operators"]

_forwards: list[Callable[..., torch.Tensor]] = []


@torch.library.custom_op("hf_prefetch_tests::experts", mutates_args=())
def _experts(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    return _forwards[number](hidden, ids, weights)


@_experts.register_fake
def _(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


def _forward(number: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.ops.hf_prefetch_tests.experts(hidden, ids, weights, number)


@contextmanager
def experts_as_operators(model: nn.Module) -> Iterator[None]:
    """Inside, each experts module of a model that is not enabled is one operator."""
    modules = list(experts_of(model).values())
    for module in modules:
        _forwards.append(module.forward)
        module.forward = functools.partial(_forward, len(_forwards) - 1)
    try:
        yield
    finally:
        for module in modules:
            del module.forward
