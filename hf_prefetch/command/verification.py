"""What packing makes of the experts of a checkpoint: bytes, and whether every bit comes back. Reads files, writes none.

Of a packed checkpoint it is whether every byte is the one that was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..discovery import find_banks
from ..memory.checkpoint import StoredTensor, read_headers
from ..memory.packed_files import damaged_tensors, is_packed
from ..memory.packing import PackedRows, pack, unpack
from ..model.packed import unsuited
from ..model.packed_weights import PackedWeights
from ..progress import byte_progress
from ..sizes import shown

__all__ = ["Checked", "Verification", "verify"]

# A path with `expert` or `experts` in it as a whole word, as checkpoints name what belongs to single experts.
_EXPERTS = re.compile(r"(^|\.)experts?(\.|$)")
# Kinds of weights beside which the exponents' information is counted: sign and mantissa.
_OTHER_BITS = 8.0


@dataclass(frozen=True)
class Verification:
    """What was found. Prints as a table.

    Attributes:
        name: of the checkpoint.
        tensors: tensors of experts in bfloat16.
        others: tensors of experts in other formats, which are left as they are.
        nbytes: bytes of those in bfloat16, and `packed_nbytes` after packing.
        escapes: weights that are kept whole.
        layers: how many layers of the model that the config describes have experts that can be packed, and how many have
            experts at all; None if the config alone makes no model.
        bits: of information in a weight, if its exponents are coded without loss one by one.
        wrong: tensors of which not every bit came back.
    """

    name: str
    tensors: int
    others: int
    layers: tuple[int, int] | None
    nbytes: int
    packed_nbytes: int
    escapes: int
    bits: float
    wrong: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Bytes after packing, as a share of those before."""
        return self.packed_nbytes / self.nbytes

    def __str__(self) -> str:
        others = f", {self.others:,} more in other formats stay as they are" if self.others else ""
        same = f"NOT the same in {', '.join(self.wrong[:3])}" if self.wrong else "the same after packing and unpacking"
        layers = ("?", "which of them a model keeps packed is not known: the config alone makes no model; --out says it")
        if self.layers is not None:
            layers = ("{} of {}".format(*self.layers), "whose experts a model keeps packed")
        rows = [
            ("experts", f"{self.tensors:,}", f"tensors in bfloat16 in {self.name}{others}"),
            ("layers", *layers),
            ("before", shown(self.nbytes), "16 bits a weight"),
            ("packed", shown(self.packed_nbytes), f"{self.ratio:.4f} of it, {16 * self.ratio:.2f} bits a weight"),
            ("escapes", f"{self.escapes:,}", f"weights kept whole, {2e4 * self.escapes / self.nbytes:.2f} of 10,000"),
            ("information", f"{self.bits:.2f}", "bits a weight: what a code of single exponents could reach"),
            ("every bit", "no" if self.wrong else "yes", same),
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {meaning}" for name, value, meaning in rows)


@dataclass(frozen=True)
class Checked:
    """What was found in a packed checkpoint. Prints as a line.

    Attributes:
        name: of the checkpoint.
        tensors: how many were read, with `nbytes` bytes in the files.
        wrong: those whose checksums are not the ones that were written, with their files.
    """

    name: str
    tensors: int
    nbytes: int
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        found = f"DAMAGED: {', '.join(self.wrong[:3])}" if self.wrong else "all checksums are right"
        return f"{self.name} is packed already; {self.tensors:,} tensors, {shown(self.nbytes)}, were read: {found}"


def verify(folder: Path, name: str, device: torch.device, *, progress: bool | None = None) -> Verification | Checked:
    """Pack and unpack each expert's weights of a checkpoint, one tensor at a time, and compare every bit.

    Which weights are experts' is seen by their names, since no model is made: by `expert` or `experts` as a part of them. Of a
    packed checkpoint everything is read and compared with its checksums.

    Args:
        folder: with safetensors files.
        name: what to call it.
        device: where to pack.
        progress: show a bar over the bytes; None shows it in terminals.

    Raises:
        FileNotFoundError: there are no safetensors files.
        ValueError: a file is broken, or there are no experts in bfloat16, or none that a model could keep packed.
    """
    if is_packed(folder):
        return _checked(folder, name, progress)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{name} holds no safetensors files, and --verify reads no others; --out FOLDER packs whatever can be loaded"
        )
    experts = [stored for key, stored in read_headers(files).items() if _EXPERTS.search(key) and len(stored.shape) > 1]
    suited = [stored for stored in experts if stored.dtype is torch.bfloat16]
    if not suited:
        kinds = ", ".join(sorted({str(stored.dtype).removeprefix("torch.") for stored in experts}))
        if kinds:
            raise ValueError(f"{name} has no experts in bfloat16 to pack; its experts are {kinds}")
        raise ValueError(
            f"{name} has no weights whose names have 'expert' or 'experts' as a part, and --verify goes by names. --out packs "
            "what the model itself has as experts, and says how many tensors that were; --verify of what was written checks it."
        )
    reasons = _reasons(folder)
    if reasons and None not in reasons:
        why = "; ".join(map(str, dict.fromkeys(reasons)))
        raise ValueError(f"{name} has nothing to pack, whatever its weights are: its experts {why}")
    packed_nbytes, escapes, wrong = 0, 0, []
    counts = torch.zeros(256, dtype=torch.int64, device="cpu")
    with byte_progress(sum(stored.nbytes for stored in suited), "experts packed and compared", progress) as bar:
        for stored, tensor in _tensors(suited):
            rows = tensor.to(device).reshape(tensor.shape[0] if tensor.dim() == 3 else 1, -1)
            packed = pack(rows)
            packed_nbytes += min(packed.nbytes, stored.nbytes)
            escapes += int(packed.escapes[:, 0].sum())
            bits = rows.view(torch.int16)
            counts += torch.bincount((bits.flatten().int() >> 7) & 0xFF, minlength=256).cpu()
            if not torch.equal(_unpacked(packed).view(torch.int16), bits):
                wrong.append(stored.key)
            bar.update(stored.nbytes)
    shares = counts[counts > 0].double() / counts.sum()
    information = _OTHER_BITS - float((shares * shares.log2()).sum())
    nbytes = sum(stored.nbytes for stored in suited)
    others, layers = len(experts) - len(suited), (reasons.count(None), len(reasons)) if reasons else None
    return Verification(name, len(suited), others, layers, nbytes, packed_nbytes, escapes, information, tuple(wrong))


def _reasons(folder: Path) -> list[str | None]:
    """Of each layer with experts of the model that a config describes, why these can't be packed. Empty if there is no model.

    Whether they can is not in the files: it depends on how a model holds and calls them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        return [unsuited(bank) for bank in find_banks(model).banks]
    except Exception:  # noqa: BLE001 - whatever code and configs of others raise, then it is not known
        return []


def _checked(folder: Path, name: str, progress: bool | None) -> Checked:
    count, nbytes, wrong = 0, 0, []
    total = sum(file.stat().st_size for file in folder.glob("packed-*.safetensors"))
    with byte_progress(total, "checksums compared", progress) as bar:
        for stored, is_damaged in damaged_tensors(folder):
            count, nbytes = count + 1, nbytes + stored.nbytes
            if is_damaged:
                wrong.append(str(stored))
            bar.update(stored.nbytes)
    return Checked(name, count, nbytes, tuple(wrong))


def _unpacked(packed: PackedRows) -> torch.Tensor:
    """The weights, as a model's calls unpack them: on a GPU by the kernel, which takes rows of an even number of weights."""
    if packed.weights % 2:
        return unpack(packed)
    size = torch.Size((packed.blocks.shape[0], packed.weights))
    return PackedWeights.opened({"blocks": packed.blocks, "escapes": packed.escapes}, size, None)


def _tensors(tensors: list[StoredTensor]) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """The tensors file by file, each read when it is asked for."""
    for file in dict.fromkeys(stored.file for stored in tensors):
        with safe_open(file, framework="pt") as opened:
            for stored in tensors:
                if stored.file == file:
                    yield stored, opened.get_tensor(stored.key)
