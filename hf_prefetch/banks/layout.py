"""BankLayout: where each tensor of an expert bank lies in one block of bytes.

A host arena and a device slot use the same layout, so a bank travels as one copy and arrives with the strides that its
module's parameters have (invariant 5 of the design).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

__all__ = ["ALIGNMENT", "BankLayout", "TensorSpec", "is_dense"]

# The kernels that read experts want 16 bytes; torch's own allocators give 256 and more, and so do slots and arenas.
ALIGNMENT = 256


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a bank: `offset` and `nbytes` in bytes, `stride` in elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """This tensor inside `block`, a flat uint8 tensor that holds the whole bank."""
        flat = block[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class BankLayout:
    """All tensors of a bank, and the size of the block that holds them, in bytes.

    Layouts that say the same are the same object: they are looked up at every call.
    """

    specs: tuple[TensorSpec, ...]
    nbytes: int
    stacked: bool = True

    @staticmethod
    def of(tensors: Iterable[tuple[str, torch.Tensor]], *, stacked: bool = True) -> BankLayout:
        """Lay tensors one after the other, each at a multiple of `ALIGNMENT`.

        `stacked`: whether the first dimension of each is the expert.
        """
        specs, offset = [], 0
        for name, tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            specs.append(TensorSpec(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return _the_one(tuple(specs), offset, stacked)

    def with_rows(self, rows: int) -> BankLayout:
        """The same tensors with `rows` rows each. A row must be one run of bytes in every tensor, see `has_rows`."""
        specs, offset = [], 0
        for spec in self.specs:
            nbytes = spec.nbytes // spec.shape[0] * rows
            specs.append(replace(spec, shape=(rows, *spec.shape[1:]), offset=offset, nbytes=nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return _the_one(tuple(specs), offset, True)

    @cached_property
    def has_rows(self) -> bool:
        """Whether each expert's weights are one run of bytes in every tensor."""
        return self.stacked and all(spec.shape[0] * spec.stride[0] * spec.dtype.itemsize == spec.nbytes for spec in self.specs)

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of one expert in all tensors."""
        return sum(spec.nbytes // spec.shape[0] for spec in self.specs)

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every tensor inside `block`, by name."""
        return {spec.name: spec.view(block) for spec in self.specs}


@cache
def _the_one(specs: tuple[TensorSpec, ...], nbytes: int, stacked: bool) -> BankLayout:
    return BankLayout(specs, nbytes, stacked)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
