"""What a forward leaves behind: weights that it has written to, and views of them that it keeps for its next call.

Both would be well if its weights stayed where they are. Those that are prefetched are in memory that is lent for one call: what
is written there is lost, and a view shows another layer's experts later on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from .guarded import GuardedRows

__all__ = ["kept_views", "versions"]

# A view in a pair in a list in an attribute is the deepest that is looked for, and longer lists hold no weights.
_DEPTH = 4
_LONGEST = 4096
_OURS = f"{__name__.partition('.')[0]}."


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each of them was written to; tensors made under inference mode don't count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def kept_views(module: nn.Module, lent: Iterable[torch.Tensor]) -> Iterator[str]:
    """Names of attributes of a module, and of those inside, that hold tensors in the memory of these."""
    places = {_place(tensor) for tensor in lent}
    seen: set[int] = set()
    for prefix, each in module.named_modules():
        for name, tensor in _look(vars(each), seen):
            start, _ = _place(tensor)
            if any(first <= start < end for first, end in places):
                yield f"{prefix}.{name}".strip(".")


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of its memory, and the one behind; nothing, where it has none of its own."""
    if isinstance(tensor, GuardedRows):
        tensor = tensor.stack
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except RuntimeError:
        return 0, 0


def _look(attributes: Mapping[str, Any], seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in attributes.items():
        if name in ("_parameters", "_buffers"):
            yield from ((key, tensor) for key, tensor in value.items() if tensor is not None)
        elif not isinstance(value, _SIMPLE):
            yield from _inside(name, value, _DEPTH, seen)


_SIMPLE = (bool, int, float, str, bytes, type(None), type, nn.Module)


def _inside(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a value: itself, or in lists, dicts and objects, but those of this package."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth == 0 or isinstance(value, _SIMPLE) or id(value) in seen:
        return
    seen.add(id(value))
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):  # other mappings may read a file for each value
        items = ((f"{name}[{key!r}]", each) for key, each in islice(value.items(), _LONGEST))
    elif isinstance(value, list | tuple | set):
        items = ((f"{name}[{index}]", each) for index, each in enumerate(islice(value, _LONGEST)))
    elif hasattr(value, "__dict__") and not callable(value) and not type(value).__module__.startswith(_OURS):
        items = ((f"{name}.{key}", each) for key, each in vars(value).items())
    for key, each in items:
        yield from _inside(key, each, depth - 1, seen)
