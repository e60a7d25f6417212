"""Deferred: a tensor that still lies in the files of a checkpoint, and can say where each of its bytes comes from.

transformers' loader takes these in place of tensors. What it does to them while it merges experts (stack, concatenate,
cast) is only noted down, so that later every tensor of the checkpoint is read straight into its place in the result.
Anything else that somebody computes with one reads it first and goes on with an ordinary tensor, as if it had been read all
the time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .checkpoint import StoredTensor, runs

__all__ = ["LOOKS", "Deferred", "Joined", "NotDeferrableError", "Packed", "Piece", "Recipe", "Stored", "pieces", "stored_in"]


class NotDeferrableError(Exception):
    """Somebody writes to a tensor that was not read yet: what is written would be lost."""


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint, cast to `dtype`."""

    tensor: StoredTensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Joined:
    """Tensors side by side along `dim`: each takes one index if `sizes` is None, else so many."""

    parts: tuple[Recipe, ...]
    dim: int
    sizes: tuple[int, ...] | None


@dataclass(frozen=True)
class Packed:
    """A tensor in bfloat16 of this shape, packed: see `memory/packing.py`."""

    blocks: StoredTensor
    escapes: StoredTensor
    shape: torch.Size


Recipe = Stored | Joined | Packed


@dataclass(frozen=True)
class Piece:
    """Bytes to read: `nbytes` from `offset` of the tensor's file, into `destination`, whose type may be another.

    `checksum`: the CRC-32 that they must have; None where nobody knows.
    """

    source: StoredTensor
    offset: int
    nbytes: int
    destination: torch.Tensor
    checksum: int | None = None


def pieces(recipe: Recipe, destination: torch.Tensor) -> Iterator[Piece]:
    """What has to be read where, to make the tensor in `destination` (the same shape and type), part by part: its `runs`."""
    if isinstance(recipe, Joined):
        begin = 0
        for index, part in enumerate(recipe.parts):
            if recipe.sizes is None:
                yield from pieces(part, destination.select(recipe.dim, index))
            else:
                yield from pieces(part, destination.narrow(recipe.dim, begin, recipe.sizes[index]))
                begin += recipe.sizes[index]
        return
    assert isinstance(recipe, Stored), "what is packed is read as the two that it is made of"
    source = recipe.tensor
    for number, (begin, end) in enumerate(runs(source.shape, source.nbytes)):
        checksum = source.checksums[number] if source.checksums else None
        if end - begin < source.nbytes:
            # Rows of the first dimension lie one after the other, in the file as in the destination.
            row = source.nbytes // source.shape[0]
            place = destination.narrow(0, begin // row, (end - begin) // row)
        else:
            place = destination
        yield Piece(source, source.offset + begin, end - begin, place, checksum)


def stored_in(recipe: Recipe) -> Iterator[StoredTensor]:
    """The tensors of the checkpoint that a recipe reads."""
    if isinstance(recipe, Stored):
        yield recipe.tensor
    elif isinstance(recipe, Packed):
        yield from (recipe.blocks, recipe.escapes)
    else:
        for part in recipe.parts:
            yield from stored_in(part)


class Deferred(torch.Tensor):
    """Looks like a tensor on the CPU: shape, type and what else is known without its values.

    Attributes:
        recipe: how to make it.
        materialize: reads a recipe into a new tensor.
    """

    recipe: Recipe
    materialize: Callable[[Deferred], torch.Tensor]

    @staticmethod
    def of(tensor: torch.Tensor, recipe: Recipe, materialize: Callable[[Deferred], torch.Tensor]) -> Deferred:
        """A deferred tensor that looks like `tensor`, which is on the meta device."""
        deferred = tensor.as_subclass(Deferred)
        deferred.recipe, deferred.materialize = recipe, materialize
        return deferred

    @staticmethod
    def stored(stored: StoredTensor, materialize: Callable[[Deferred], torch.Tensor]) -> Deferred:
        """A tensor as it is in the checkpoint."""
        looks = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        return Deferred.of(looks, Stored(stored, stored.dtype), materialize)

    @property
    def stored_tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors of the checkpoint that it is made of."""
        return tuple(stored_in(self.recipe))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            return _KNOWN[func](*args, **kwargs)
        name = func.__name__
        if func in LOOKS or name == "__set__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        target = args[0] if in_place and args else kwargs.get("out")
        if isinstance(target, Deferred):
            raise NotDeferrableError(name)
        args, kwargs = tree_map_only(Deferred, lambda deferred: deferred.materialize(deferred), (args, kwargs))
        return func(*args, **kwargs)


def _plainly(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _read(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return func(*tree_map_only(Deferred, lambda deferred: deferred.materialize(deferred), args), **kwargs)


def _same(tensor: Deferred, *args: Any, **kwargs: Any) -> Deferred:
    return Deferred.of(_plainly(torch.Tensor.detach, tensor), tensor.recipe, tensor.materialize)


def _item(tensor: Deferred, index: Any) -> Any:
    return _same(tensor) if index is Ellipsis else _read(torch.Tensor.__getitem__, tensor, index)


def _to(tensor: Deferred, *args: Any, **kwargs: Any) -> Any:
    looks = _plainly(torch.Tensor.to, tensor, *args, **{**kwargs, "device": "meta"} if "device" in kwargs else kwargs)
    device = torch.device(kwargs.get("device") or "cpu")
    recipe = _cast(tensor.recipe, looks.dtype)
    if device.type != "cpu" or args or recipe is None:
        return _read(torch.Tensor.to, tensor, *args, **kwargs)
    return Deferred.of(looks.detach(), recipe, tensor.materialize)


def _cast(recipe: Recipe, dtype: torch.dtype) -> Recipe | None:
    """The same in another type, or None where that is more than one cast of what is stored."""
    if isinstance(recipe, Packed):
        return recipe if dtype is torch.bfloat16 else None
    if isinstance(recipe, Stored):
        return replace(recipe, dtype=dtype) if dtype == recipe.dtype or recipe.dtype == recipe.tensor.dtype else None
    parts = [_cast(part, dtype) for part in recipe.parts]
    return replace(recipe, parts=tuple(part for part in parts if part is not None)) if None not in parts else None


def _join(func: Callable[..., torch.Tensor], tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    tensors = list(tensors)
    deferred = [tensor for tensor in tensors if isinstance(tensor, Deferred)]
    alike = len(deferred) == len(tensors) and len({tensor.dtype for tensor in deferred}) <= 1
    if not alike or kwargs or any(isinstance(tensor.recipe, Packed) for tensor in deferred):
        return _read(func, tensors, dim, **kwargs)
    try:
        looks = _plainly(func, tensors, dim)
    except RuntimeError as error:
        raise ValueError(_odd_one(deferred)) from error
    dim = dim % looks.dim()
    sizes = None if func is torch.stack else tuple(tensor.shape[dim] for tensor in deferred)
    return Deferred.of(looks, Joined(tuple(tensor.recipe for tensor in deferred), dim, sizes), deferred[0].materialize)


def _missing_one(few: Sequence[StoredTensor], many: Sequence[StoredTensor]) -> str:
    """Of two kinds of tensors one is there for fewer experts."""
    numbers = [{found[-1] for stored in part if (found := re.findall(r"\d+", stored.key))} for part in (few, many)]
    missing = sorted(numbers[1] - numbers[0], key=int)
    which = f"; it is missing for {', '.join(missing[:4])}{' and others' if missing[4:] else ''}" if missing else ""
    return f"there are {len(many)} tensors such as {many[0]}, but {len(few)} such as {few[0]}{which}"


def _odd_one(tensors: list[Deferred]) -> str:
    """Which of tensors that should go together doesn't fit the others."""
    (usual, _), *_ = Counter(tensor.shape for tensor in tensors).most_common()
    odd = next(tensor for tensor in tensors if tensor.shape != usual)
    fits = next(tensor for tensor in tensors if tensor.shape == usual)
    if len(odd.stored_tensors) != len(fits.stored_tensors):
        return _missing_one(*sorted((odd.stored_tensors, fits.stored_tensors), key=len))
    return (
        f"{odd.stored_tensors[0]} has shape {tuple(odd.shape)}, which does not go together with {fits.stored_tensors[0]} "
        f"of shape {tuple(fits.shape)}."
    )


def _on_cpu(tensor: Deferred) -> torch.device:
    return torch.device("cpu")


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_KNOWN: dict[Any, Callable[..., Any]] = {
    torch.stack: lambda *args, **kwargs: _join(torch.stack, *args, **kwargs),
    torch.cat: lambda *args, **kwargs: _join(torch.cat, *args, **kwargs),
    torch.Tensor.__getitem__: _item,
    torch.Tensor.to: _to,
    torch.Tensor.detach: _same,
    torch.Tensor.contiguous: _same,
    _getter("data"): _same,
    _getter("device"): _on_cpu,
    _getter("is_meta"): lambda tensor: False,
}
# What can be told without the values.
LOOKS = {
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.nelement,
    torch.Tensor.numel,
    torch.Tensor.requires_grad_,
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    *map(_getter, ("shape", "dtype", "ndim", "itemsize", "nbytes", "layout", "is_sparse", "is_quantized")),
    *map(_getter, ("requires_grad", "grad", "grad_fn", "is_leaf", "_version")),
}
