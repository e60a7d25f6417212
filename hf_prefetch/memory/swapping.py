"""Exchanging what two tensors are, so that a Parameter becomes another kind of tensor and stays the same object."""

from __future__ import annotations

import torch

__all__ = ["swap"]


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange them: values, gradients, hooks, attributes, classes.

    `torch.utils.swap_tensors` leaves the lists of hooks with the objects, so that the next one that is registered on either
    replaces those that its tensor has.

    Raises:
        RuntimeError: something else holds on to one of them: a view, an unfinished backward, a weak reference.
    """
    with torch._C.DisableTorchFunctionSubclass():
        lists = [
            (name, getattr(one, name), getattr(other, name)) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
        torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]
        for name, mine, theirs in lists:
            if mine is not None or theirs is not None:
                setattr(one, name, theirs)
                setattr(other, name, mine)
