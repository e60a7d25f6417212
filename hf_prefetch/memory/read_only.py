"""ReadOnly: what was read from files for one operation, and a view of it that somebody keeps. Nobody would see a write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["REFUSAL", "OpenedView", "ReadOnly", "mapped", "run_reading", "written_by"]

REFUSAL = (
    "These weights stay in their files (host_memory=), so they can't be written to. Call disable_expert_prefetch(model) first, "
    "which reads them into memory."
)


def run_reading(function: Callable[..., Any], read: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Call a function of tensors that were read for this alone, `read`. What it returns of their memory can't be written to.

    Raises:
        RuntimeError: it writes to one of them.
    """
    with _Reading(read):
        result = function(*args, **kwargs)
    return tree_map(lambda value: _dressed(value, read), result)


class OpenedView(torch.Tensor):
    """A view of memory that was made for whoever reads weights that are kept otherwise: packed, or in files."""

    def plain(self) -> torch.Tensor:
        """An ordinary view of the same memory, to read from."""
        with torch._C._DisableTorchDispatch():
            return cast(torch.Tensor, torch.ops.aten.alias.default(self))

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return self.plain().__repr__(**options)  # type: ignore[no-untyped-call,no-any-return]

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.plain().tolist()

    def numpy(self, **options: Any) -> Any:
        """As of any tensor, but read-only: nobody could see what is written there."""
        array = self.plain().numpy(**options)
        array.setflags(write=False)
        return array

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary one."""
        memo[id(self)] = copied = self.detach().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An ordinary one is pickled."""
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class ReadOnly(OpenedView):
    """A view of memory that nobody reads again: it can be computed with, but an operator that writes to it is an error."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[ReadOnly], view: torch.Tensor) -> ReadOnly:
        return torch.Tensor._make_subclass(cls, view)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, ReadOnly) for value in written_by(function, args, kwargs)):
            raise RuntimeError(REFUSAL)
        read: list[torch.Tensor] = []

        def plain(value: torch.Tensor) -> torch.Tensor:
            if isinstance(value, ReadOnly):
                value = value.plain()
                read.append(value)
            return value

        result = function(*mapped(plain, args), **{name: mapped(plain, value) for name, value in kwargs.items()})
        return mapped(lambda value: _dressed(value, read), result)


class _Reading(TorchDispatchMode):
    """While a function runs: none of its operators may write to the memory of these tensors."""

    def __init__(self, read: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for value in written_by(function, args, kwargs or {}):
            if isinstance(value, torch.Tensor) and _is_of(value, self._read):
                raise RuntimeError(REFUSAL)
        return function(*args, **(kwargs or {}))


def _dressed(value: Any, read: list[torch.Tensor]) -> Any:
    """What a function has returned, so that what is in the memory of these tensors can't be written to."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    return ReadOnly(value) if type(value) is torch.Tensor and _is_of(value, read) else value


def _is_of(value: torch.Tensor, read: list[torch.Tensor]) -> bool:
    return any(torch._C._is_alias_of(value, one) for one in read)  # type: ignore[attr-defined]


def written_by(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors that an operator writes to."""
    for place, described in enumerate(function._schema.arguments):
        if described.alias_info is not None and described.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(described.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """What operators take and give: tensors, lists of them, and others."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return type(value)([mapped(function, one) for one in value]) if isinstance(value, (list, tuple)) else value
