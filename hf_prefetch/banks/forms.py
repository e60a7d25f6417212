"""What a Parameter is made of. Most are one tensor; a quantized one may be several in a wrapper: values, scales, zero points.

Such a wrapper is a tensor subclass that takes itself apart and puts itself together by torch's own protocol
(`__tensor_flatten__`, `__tensor_unflatten__`). What travels are its parts, each like a tensor of its own, and around what has
arrived the same wrapper is put again: so scales can't get apart from the weights that they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .layout import is_dense
from .swapping import swap

__all__ = ["can_open", "can_take_apart", "is_plain", "made_of", "opened", "parts", "parts_of", "replace_parts", "unfit"]


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether it is one tensor."""
    return type(parameter) in (nn.Parameter, torch.Tensor) or getattr(type(parameter), "is_one_tensor", False)


def parts(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that it is made of, by their names: its own, or `name.part`."""
    if is_plain(parameter):
        return {name: parameter}
    inner, _ = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
    return {f"{name}.{part}": getattr(parameter, part) for part in inner}


def parts_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that several Parameters are made of."""
    return {key: part for name, parameter in parameters.items() for key, part in parts(name, parameter).items()}


def made_of(name: str, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> nn.Parameter:
    """A Parameter like this one, made of other tensors, which are named as its parts are.

    Args:
        name: of the Parameter.
        parameter: what it is like.
        tensors: its parts, all of them with as many rows as one another, not necessarily as many as `parameter` has.
    """
    if is_plain(parameter):
        tensor = tensors[name]
        return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    inner, context, size = _inner(name, parameter, tensors)
    whole = type(parameter).__tensor_unflatten__(inner, context, size, parameter.stride())  # type: ignore[attr-defined]
    return nn.Parameter(whole, requires_grad=False)


def can_open(parameter: torch.Tensor) -> bool:
    """Whether it has to be opened: see there."""
    return hasattr(type(parameter), "opened")


def opened(name: str, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor], found: Any) -> nn.Parameter:
    """The same to compute with, by a call that reads the rows that were found (an `Assignment`), or all, if it is None.

    A type of tensor that can't be computed with as it is has a function `opened`, which makes an ordinary one of it.
    """
    if not can_open(parameter):
        return made_of(name, parameter, tensors)
    inner, _, size = _inner(name, parameter, tensors)
    return nn.Parameter(type(parameter).opened(inner, size, found), requires_grad=False)  # type: ignore[attr-defined]


def _inner(
    name: str, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], Any, torch.Size]:
    """Parts by the wrapper's own names, its context, and its size with as many rows as they have."""
    names, context = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {part: tensors[f"{name}.{part}"].detach() for part in names}
    before, after = getattr(parameter, names[0]), inner[names[0]]
    rows = after.shape[0] if before.shape[0] == parameter.shape[0] else parameter.shape[0]
    return inner, context, torch.Size((rows, *parameter.shape[1:]))


def replace_parts(name: str, parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Have a Parameter made of these tensors from now on. It stays the same object.

    Raises:
        RuntimeError: it is a wrapper, and something else holds on to it.
    """
    if is_plain(parameter):
        parameter.data = tensors[name]
    elif any(tensor is not tensors[part] for part, tensor in parts(name, parameter).items()):
        other = made_of(name, parameter, tensors).requires_grad_(parameter.requires_grad)
        # With the attributes that others have given it.
        other.__dict__.update(parameter.__dict__ | other.__dict__)
        swap(parameter, other)


def can_take_apart(parameter: torch.Tensor) -> bool:
    """Whether a wrapper says what it is made of, and how to put it together again."""
    return hasattr(type(parameter), "__tensor_flatten__") and hasattr(type(parameter), "__tensor_unflatten__")


def unfit(name: str, parameter: nn.Parameter) -> str | None:
    """Why it can't be moved as bytes, if so."""
    # A kind of Parameter may keep more than its data.
    kind = next((type(each).__name__ for each in (parameter.data, parameter) if type(each) is not torch.Tensor), "Tensor")
    # Shards of a tensor know of each other.
    of_shards = type(parameter).__module__.startswith("torch.distributed")
    if not is_plain(parameter) and (of_shards or not can_take_apart(parameter)):
        return f"{name} is a {kind}, a tensor type that can't be taken apart and put together again"
    for tensor in parts(name, parameter).values():
        if not is_plain(tensor):
            return f"{name} is a {kind} around a {type(tensor).__name__}, which can't be moved as bytes"
        if tensor.layout != torch.strided or tensor.is_quantized or not is_dense(tensor):
            return f"{name} is not a dense strided tensor"
    return None
