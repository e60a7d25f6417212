"""GuardedRows: a stack of which only some rows are there, for a forward of which nobody knows which rows it reads.

Most that loop over the experts of a call take one row after the other out of each stack. That much can be seen: such a row is
handed out if it is there. Whatever else is done with the stack brings the others first, so it computes the same. What stands
for it has no memory to be looked at past torch: whoever tries gets an error, and whoever handed it out calls again with whole
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["GuardedRows", "Present"]


class Present:
    """Which rows of a bank are there.

    Args:
        ids: int64 in any shape, those that were sent for; ids beyond the last row stand for that.
        count: how many rows there are.
        complete: brings the others.

    Attributes:
        is_whole: whether it had to.
    """

    def __init__(self, ids: torch.Tensor, count: int, complete: Callable[[], object]) -> None:
        # A forward may change its ids in place before it reads a row.
        self._ids = ids.clone()
        self._count = count
        self._complete = complete
        self.is_whole = False

    @cached_property
    def _rows(self) -> set[int]:
        # Waits for the router, as a loop over experts does anyway.
        return {min(row, self._count - 1) for row in self._ids.flatten().tolist() if row >= 0}

    def need(self, row: int | None = None) -> None:
        """Have a row there, or all."""
        if not self.is_whole and (row is None or row % self._count not in self._rows):
            self.is_whole = True
            self._complete()


class GuardedRows(torch.Tensor):
    """One tensor of a bank whose rows may not all be there. What comes of it is an ordinary tensor."""

    stack: torch.Tensor
    present: Present

    @staticmethod
    def __new__(cls: type[GuardedRows], stack: torch.Tensor, present: Present) -> GuardedRows:
        made: GuardedRows = torch.Tensor._make_wrapper_subclass(
            cls, stack.shape, strides=stack.stride(), dtype=stack.dtype, device=stack.device
        )
        made.stack, made.present = stack, present
        # An error, where an extension would take a null pointer to a kernel.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function is torch.Tensor.__getitem__ and isinstance(args[0], GuardedRows):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if index and _is_row(index[0]):
                row = int(index[0])
                args[0].present.need(row)
                return args[0].stack[row][index[1:]]
        return _on_whole(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Whatever has got past the above."""
        return _on_whole(function, args, kwargs)


# What is asked of a tensor without a look at its values.
_ABOUT = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape")
    ),
    *(getattr(torch.Tensor, name) for name in ("dim", "element_size", "is_contiguous", "numel", "size", "stride", "__len__")),
}


def _is_row(index: object) -> bool:
    """Whether it is one number, not a choice by truth, as uint8 is to torch."""
    if isinstance(index, torch.Tensor):
        return index.dim() == 0 and index.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    return isinstance(index, int) and not isinstance(index, bool)


def _on_whole(function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map_only(GuardedRows, _whole, (args, kwargs or {}))
    return function(*args, **kwargs)


def _whole(guarded: GuardedRows) -> torch.Tensor:
    guarded.present.need()
    return guarded.stack
