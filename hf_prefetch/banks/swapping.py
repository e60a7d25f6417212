"""Exchanging what two tensors are, so that a Parameter becomes another kind of tensor and stays the same object."""

from __future__ import annotations

import weakref

import torch

__all__ = ["swap"]


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange them: values, gradients, hooks, attributes, classes.

    `torch.utils.swap_tensors` leaves the lists of hooks with the objects, so that the next one that is registered on either
    replaces those that its tensor has. And it refuses tensors with weak references, though these are of objects, which stay the
    same: `torch.export` leaves some behind for the life of the process.

    Raises:
        RuntimeError: something else holds on to one of them: a view, or an unfinished backward. Both are as before.
    """
    with torch._C.DisableTorchFunctionSubclass():
        lists = [
            (name, getattr(one, name), getattr(other, name)) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
        try:
            if weakref.getweakrefs(one) or weakref.getweakrefs(other):
                _exchange(one, other)
            else:
                torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(
                "Experts can't be packed, unpacked, or moved into files and back while something else holds on to their "
                "weights: the result of a call that was made without torch.no_grad(), or a view of them. Delete it "
                "(gc.collect() finds what an error has kept) and call this again."
            ) from error
        for name, mine, theirs in lists:
            if mine is not None or theirs is not None:
                setattr(one, name, theirs)
                setattr(other, name, mine)


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """What torch does, whoever has weak references. A graph may not know either of them."""
    if any(tensor._use_count() > 1 for tensor in (one, other)):  # type: ignore[attr-defined]
        raise RuntimeError("a tensor is in use elsewhere")
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
