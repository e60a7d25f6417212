"""PackedWeights: a stack of matrices that is kept packed, and the banks that are made of such.

While a bank is packed, its Parameters are wrappers around what `memory/packing.py` makes of them: blocks and escapes, each with
a row for every expert. These travel like the parts of any other wrapper (`forms`), and are unpacked on the device for the call
that reads them: only the experts that it uses, if it says which these are. Whoever else reads such a Parameter, in host memory,
gets the weights as they were, unpacked for that one operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .bank import ExpertBank
from .device.rows import triton_is_there
from .device.table import Assignment
from .device.uploads import uploaded
from .forms import is_plain, parts_of
from .layout import BankLayout
from .memory.packing import PART_NBYTES, PackedRows, pack, unpack
from .memory.store import Load, copy_value
from .streams import StreamDevice

__all__ = ["PackedWeights", "laid_out", "pack_bank", "packed_rows", "unpack_bank"]

# Packing has to leave no more than this share of the bytes, or the weights stay as they are.
_WORTH_IT = 0.9


class PackedWeights(torch.Tensor):
    """Bfloat16 (experts, ...), contiguous, packed.

    Attributes:
        blocks, escapes: see `PackedRows`; each expert is a row.
    """

    blocks: torch.Tensor
    escapes: torch.Tensor

    @staticmethod
    def __new__(cls: type[PackedWeights], blocks: torch.Tensor, escapes: torch.Tensor, size: torch.Size) -> PackedWeights:
        made: PackedWeights = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bfloat16, device=blocks.device)
        made.blocks, made.escapes = blocks, escapes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["blocks", "escapes"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], context: None, size: torch.Size, stride: Any) -> PackedWeights:
        return PackedWeights(inner["blocks"], inner["escapes"], size)

    @staticmethod
    def opened(inner: Mapping[str, torch.Tensor], size: torch.Size, found: Assignment | None) -> torch.Tensor:
        """The weights as one tensor of this size, for a call that reads the rows that were found, or all.

        The other rows hold anything, and may have come as anything: nothing of them is looked at.
        """
        packed = PackedRows(size[1:].numel(), inner["blocks"], inner["escapes"])
        whole = torch.empty(size, dtype=torch.bfloat16, device=packed.blocks.device)
        rows = whole.view(size[0], -1)
        if whole.is_cuda and triton_is_there():
            from .device.unpacking import unpack_rows

            unpack_rows(packed, rows, found)
        elif found is None:
            rows.copy_(unpack(packed))
        else:
            chosen = torch.tensor([row for row, _ in found.moves()], dtype=torch.int64, device=whole.device)
            rows[chosen] = unpack(PackedRows(packed.weights, packed.blocks[chosen], packed.escapes[chosen]))
        return whole

    @property
    def rows(self) -> PackedRows:
        """The experts as rows."""
        return PackedRows(self.shape[1:].numel(), self.blocks, self.escapes)

    def unpacked(self) -> torch.Tensor:
        """The weights as an ordinary tensor."""
        return PackedWeights.opened({"blocks": self.blocks, "escapes": self.escapes}, self.shape, None)

    def write(self, values: torch.Tensor) -> None:
        """Pack other values in the place of these.

        Raises:
            RuntimeError: they have more escapes than there is room for.
        """
        packed = pack(values.to(self.blocks.device, torch.bfloat16).reshape(self.shape[0], -1))
        if packed.escapes.shape[1] > self.escapes.shape[1]:
            raise RuntimeError(
                f"These weights can't be written over packed ones: packed, they need room for {packed.escapes.shape[1] - 1} "
                f"weights that are kept whole, and there is room for {self.escapes.shape[1] - 1}. Call "
                "disable_expert_prefetch(model), write them, and enable it again."
            )
        self.blocks.copy_(packed.blocks)
        self.escapes.zero_()
        self.escapes[:, : packed.escapes.shape[1]] = packed.escapes

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return PackedWeights(args[0].blocks, args[0].escapes, args[0].shape)
        if function is torch.ops.aten.copy_.default and isinstance(args[0], PackedWeights):
            args[0].write(_plain(args[1]))
            return args[0]
        named = kwargs or {}
        plain, others = list(map(_plain, args)), {name: _plain(value) for name, value in named.items()}
        result = function(*plain, **others)
        for place, described in enumerate(function._schema.arguments):
            if described.alias_info is None or not described.alias_info.is_write:
                continue
            by_place = place < len(args)
            before = args[place] if by_place else named.get(described.name)
            after = plain[place] if by_place else others.get(described.name)
            _write_back(before, after)
            result = before if result is after else result
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        whole = self.unpacked()
        whole[_plain(index)] = _plain(value)
        self.write(whole)
        # What was sent before is not current any more.
        torch.autograd.graph.increment_version(self)


def _plain(value: Any) -> Any:
    if isinstance(value, PackedWeights):
        return value.unpacked()
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _write_back(before: Any, after: Any) -> None:
    """What an operator has written into unpacked weights goes to where they are packed, or it would be lost."""
    if isinstance(before, PackedWeights):
        before.write(after)
    elif isinstance(before, (list, tuple)):
        for one, other in zip(before, after, strict=True):
            _write_back(one, other)


def _suits(weights: torch.Tensor) -> bool:
    """Whether these can be packed: kernels unpack two weights at a time."""
    if not is_plain(weights) or weights.dtype is not torch.bfloat16 or weights.dim() != 3:
        return False
    return weights.is_contiguous() and weights.shape[1:].numel() % 2 == 0


def packed_rows(weights: torch.Tensor, device: StreamDevice) -> PackedRows | None:
    """Experts, packed, or None if they can't be or it would not be worth it.

    Args:
        weights: (experts, ...).
        device: packs them if it is a GPU, where they stay then. It needs room for them packed.
    """
    if not _suits(weights):
        return None
    rows = weights.view(weights.shape[0], -1)
    packed = _on_gpu(rows, device) if weights.is_cpu and device.device.type == "cuda" else None
    packed = pack(rows) if packed is None else packed
    return packed if packed.ratio <= _WORTH_IT else None


def _on_gpu(rows: torch.Tensor, device: StreamDevice) -> PackedRows | None:
    """Packed there, unless there is no room."""
    try:
        return pack(rows, lambda parts: uploaded(device, parts, PART_NBYTES))
    except torch.OutOfMemoryError:
        device.trim()
        return None


def pack_bank(bank: ExpertBank, home: StreamDevice, load: Load) -> ExpertBank:
    """Pack those Parameters of a bank that get smaller by it. They stay the same objects.

    Args:
        bank: whose rows are experts; of another one nothing is packed.
        home: the device that computes with it, which also packs, if it is a GPU. Then what is packed is there.
        load: writes a Parameter's value to where it goes.

    Returns:
        The bank with a layout of what travels now.
    """
    if not bank.layout.has_rows:
        return bank
    # What is made under inference_mode could never be written to or trained again.
    with torch.inference_mode(False), torch.no_grad():
        for parameter in bank.parameters.values():
            if not _suits(parameter):
                continue
            load(parameter, parameter.data)
            packed = packed_rows(parameter.data, home)
            if packed is not None:
                _swap(parameter, PackedWeights(packed.blocks, packed.escapes, parameter.shape))
    return laid_out(bank)


def laid_out(bank: ExpertBank) -> ExpertBank:
    """The bank with the layout that its Parameters have now."""
    return replace(bank, layout=BankLayout.of(parts_of(bank.parameters).items(), stacked=bank.layout.stacked))


def unpack_bank(bank: ExpertBank, load: Load = copy_value) -> ExpertBank:
    """Have ordinary Parameters again, on the devices where they are. Idempotent.

    Returns:
        The bank with a layout of what travels now.
    """
    with torch.inference_mode(False), torch.no_grad():
        for parameter in bank.parameters.values():
            if isinstance(parameter, PackedWeights):
                for part in (parameter.blocks, parameter.escapes):
                    load(part, part)
                _swap(parameter, parameter.unpacked())
    return laid_out(bank)


def _swap(parameter: nn.Parameter, value: torch.Tensor) -> None:
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError(
            "Experts can't be packed or unpacked while something else holds on to their weights: the result of a call that was "
            "made without torch.no_grad(), or a weak reference. Delete it and call this again."
        ) from error
