"""The banks that are made of packed weights: which Parameters are packed, and how they become what they were again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..banks.bank import ExpertBank
from ..banks.forms import is_plain, parts_of
from ..banks.layout import BankLayout
from ..banks.swapping import swap
from ..device.uploads import uploaded
from ..memory.packing import PART_NBYTES, PackedRows, pack
from ..memory.values import Load, copy_value
from ..streams import StreamDevice
from .packed_weights import PackedWeights

__all__ = ["PackedWeights", "laid_out", "pack_bank", "packed_rows", "suits", "unpack_bank", "unsuited", "worth_it"]

# Packing has to leave no more than this share of the bytes, or the weights stay as they are.
_WORTH_IT = 0.9
# So many more escapes each expert has room for at least, for what may be written over it.
_LEAST_ROOM = 8


def suits(weights: torch.Tensor) -> bool:
    """Whether the weights of experts, (experts, ...), can be packed: kernels unpack two of them at a time."""
    if not is_plain(weights) or weights.dtype is not torch.bfloat16 or weights.dim() != 3:
        return False
    return weights.is_contiguous() and weights.shape[1:].numel() % 2 == 0


def worth_it(packed_nbytes: int, nbytes: int) -> bool:
    """Whether weights that take so many bytes packed are kept so."""
    return packed_nbytes <= _WORTH_IT * nbytes


def unsuited(bank: ExpertBank) -> str | None:
    """Why nothing of a bank can be packed, whatever its values are: what follows "its experts". None if something can."""
    parameters = list(bank.parameters.values())
    if bank.has_packed or (bank.layout.has_rows and any(map(suits, parameters))):
        return None
    if not bank.is_plain:
        return "are quantized, and only bfloat16 is packed"
    dtypes = {parameter.dtype for parameter in parameters}
    if torch.bfloat16 not in dtypes:
        formats = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"are {formats}, and only bfloat16 is packed"
    if bank.layout.has_rows:
        return "are not contiguous, or have an odd number of weights, which kernels can't unpack"
    if all(parameter.dim() > 1 and parameter.shape[0] == bank.num_experts for parameter in parameters):
        return "are called without their ids, and only experts that calls name by ids are packed"
    return "don't lie in tensors with a row for each of them, and only such tensors are packed"


def packed_rows(weights: torch.Tensor, device: StreamDevice) -> PackedRows | None:
    """Experts, packed, or None if they can't be or it would not be worth it.

    Args:
        weights: (experts, ...).
        device: packs them if it is a GPU, where they stay then. It needs room for them packed.
    """
    if not suits(weights):
        return None
    rows = weights.view(weights.shape[0], -1)
    packed = _on_gpu(rows, device) if weights.is_cpu and device.device.type == "cuda" else None
    packed = pack(rows) if packed is None else packed
    return packed if worth_it(packed.nbytes, rows.nbytes) else None


def _on_gpu(rows: torch.Tensor, device: StreamDevice) -> PackedRows | None:
    """Packed there, unless there is no room."""
    try:
        return pack(rows, lambda parts: uploaded(device, parts, min(PART_NBYTES, rows.nbytes)))
    except torch.OutOfMemoryError:
        device.trim()
        return None


def pack_bank(bank: ExpertBank, home: StreamDevice, load: Load) -> ExpertBank:
    """Pack those Parameters of a bank that get smaller by it. They stay the same objects.

    Args:
        bank: whose rows are experts; of another one nothing is packed, see `unsuited`.
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
            if not suits(parameter):
                continue
            load(parameter, parameter.data)
            packed = packed_rows(parameter.data, home)
            if packed is not None:
                _become_packed(parameter, _with_room(packed))
    return laid_out(bank)


def _with_room(packed: PackedRows) -> PackedRows:
    """The same with lists that are somewhat longer: what an adapter makes of weights, say, may have a few escapes more."""
    most = packed.escapes.shape[1] - 1
    return replace(packed, escapes=nn.functional.pad(packed.escapes, (0, max(_LEAST_ROOM, most // 8))))


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
                _become_ordinary(parameter)
    return laid_out(bank)


def _become_packed(parameter: nn.Parameter, packed: PackedRows) -> None:
    wrapper = PackedWeights(packed.blocks, packed.escapes, parameter.shape)
    other, attributes = nn.Parameter(wrapper, requires_grad=parameter.requires_grad), dict(parameter.__dict__)
    swap(parameter, other)
    assert isinstance(parameter, PackedWeights), "it was swapped"
    parameter.__dict__.update({name: value for name, value in attributes.items() if name not in PackedWeights.OWN})
    # What is made under inference_mode can't have memory of the other kind, nor a gradient.
    if not other.is_inference():
        parameter.put_aside(other)


def _become_ordinary(parameter: PackedWeights) -> None:
    ordinary = parameter.ordinary
    kept = {name: value for name, value in ordinary.__dict__.items() if name in PackedWeights.OWN}
    now = {name: value for name, value in parameter.__dict__.items() if name not in PackedWeights.OWN}
    ordinary.data = parameter.unpacked()
    try:
        swap(parameter, ordinary)
    except BaseException:
        parameter.put_aside(ordinary)
        raise
    # What was packed is this object now, which would keep itself, and all that was packed, until the collector runs.
    ordinary.__dict__.pop("_aside", None)
    parameter.__dict__.clear()
    parameter.__dict__.update(kept | now)
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to(parameter.device)
