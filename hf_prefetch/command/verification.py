"""What packing makes of the experts of a checkpoint: bytes, and whether every bit comes back. Reads files, writes none.

Of a packed checkpoint it is whether every byte is the one that was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..banks.bank import ExpertBank
from ..checkpoints.loading import deferred_model
from ..checkpoints.saving import NOTHING_SMALLER, file_groups, refuse_quantized
from ..discovery import find_banks
from ..memory.checkpoint import StoredTensor, read_headers
from ..memory.packed_files import damaged_tensors, is_packed
from ..memory.packing import PackedRows, pack, unpack
from ..model.packed import suits, worth_it
from ..model.packed_weights import PackedWeights
from ..progress import byte_progress
from ..sizes import shown

__all__ = ["Checked", "Verification", "verify"]

# Weights that are packed and compared at a time, if a row has no more.
_AT_ONCE = 2**24
# A path with `expert` or `experts` in it as a whole word, as checkpoints name what belongs to single experts.
_EXPERTS = re.compile(r"(^|\.)experts?(\.|$)")
# Kinds of weights beside which the exponents' information is counted: sign and mantissa.
_OTHER_BITS = 8.0


@dataclass(frozen=True)
class Verification:
    """What was found. Prints as a table.

    Attributes:
        name: of the checkpoint.
        tensors: tensors of experts in bfloat16 as the model has them, each with all experts of a layer. If the config alone
            makes no model, as the files have them.
        packed: how many of these are kept packed, because they get smaller enough by it.
        others: tensors of experts that can't be packed, and are left as they are.
        layers: how many layers of the model have experts that it keeps packed, and how many have experts at all; None if the
            config alone makes no model.
        nbytes: bytes of those in bfloat16, and `packed_nbytes` when some are packed and the others left as they are.
        weights_nbytes: bytes of all weights of the model, and `written_nbytes` of what `--out` makes of them; 0 if the config
            alone makes no model.
        escapes: weights that are kept whole in what packing makes of these tensors.
        bits: of information in a weight, if its exponents are coded without loss one by one.
        wrong: tensors of which not every bit came back.
    """

    name: str
    tensors: int
    packed: int
    others: int
    layers: tuple[int, int] | None
    nbytes: int
    packed_nbytes: int
    weights_nbytes: int
    written_nbytes: int
    escapes: int
    bits: float
    wrong: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Bytes after packing, as a share of those before."""
        return self.packed_nbytes / max(self.nbytes, 1)

    def __str__(self) -> str:
        others = f"; {self.others:,} more, which can't be packed, stay as they are" if self.others else ""
        ratio = f"{self.ratio:.4f} of it, {16 * self.ratio:.2f} bits a weight"
        few = f"; {self.tensors - self.packed:,} tensors stay as they are, for they would hardly get smaller"
        few = few if self.packed < self.tensors else ""
        same = f"NOT the same in {', '.join(self.wrong[:3])}" if self.wrong else "the same after packing and unpacking"
        if self.layers is None:
            about = [
                ("experts", f"{self.tensors:,}", f"tensors in bfloat16 in {self.name}, by their names{others}"),
                (
                    "layers",
                    "?",
                    "which of them a model keeps packed is not known: the config alone makes no model; --out says it",
                ),
            ]
            packed, written = f"{ratio}, each tensor packed by itself, which a model may join to others{few}", []
        else:
            share = self.written_nbytes / max(self.weights_nbytes, 1)
            about = [
                ("experts", f"{self.tensors:,}", f"tensors in bfloat16, as a model has those of {self.name}{others}"),
                ("layers", "{} of {}".format(*self.layers), "whose experts a model keeps packed"),
            ]
            packed = f"{ratio}{few}"
            what = f"what --out writes: {share:.4f} of all weights, which are {shown(self.weights_nbytes)}"
            written = [("written", shown(self.written_nbytes), what)]
        rows = [
            *about,
            ("before", shown(self.nbytes), "16 bits a weight"),
            ("packed", shown(self.packed_nbytes), packed),
            *written,
            ("escapes", f"{self.escapes:,}", f"weights kept whole, {2e4 * self.escapes / max(self.nbytes, 1):.2f} of 10,000"),
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
    """Pack and unpack the experts' weights of a checkpoint, one tensor at a time, and compare every bit.

    A tensor is what the model has, as it is for `save_packed` and for an enabled model: files may have experts one by one and
    in other parts, and how much smaller they get depends on how many weights a row has. If the config alone makes no model, a
    tensor is what the files have, and which are experts' is seen by their names: by `expert` or `experts` as a part of them.
    Of a packed checkpoint everything is read and compared with its checksums.

    Args:
        folder: with safetensors files.
        name: what to call it.
        device: where to pack.
        progress: show a bar over the bytes; None shows it in terminals.

    Raises:
        FileNotFoundError: there are no safetensors files.
        ValueError: a file is broken, or there are no experts that a model could keep packed, or none that get smaller by it.
    """
    if is_packed(folder):
        return _checked(folder, name, progress)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{name} holds no safetensors files, and --verify reads no others; --out FOLDER packs whatever can be loaded"
        )
    stored = read_headers(files)
    banks = _banks(folder)
    if banks is None:
        return _by_names(stored, name, device, progress)
    return _of_model(folder, banks, name, device, progress)


def _banks(folder: Path) -> tuple[ExpertBank, ...] | None:
    """The experts of the model that a config describes, made without weights. None if the config alone makes none.

    Raises:
        ValueError: it is quantized.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        banks = find_banks(model).banks
    except Exception:  # noqa: BLE001 - whatever code and configs of others raise, then it is not known
        return None
    refuse_quantized(model)
    return banks


def _of_model(
    folder: Path, banks: tuple[ExpertBank, ...], name: str, device: torch.device, progress: bool | None
) -> Verification:
    compared, layers = _Compared(device), 0
    with deferred_model(folder, False, dtype="auto") as (model, unread):
        groups = file_groups(model)
        experts = [{key: tensor for key, tensor in group.items() if suits(tensor)} for group, is_bank in groups if is_bank]
        total = sum(tensor.nbytes for group in experts for tensor in group.values())
        with byte_progress(total, "experts packed and compared", progress) as bar:
            for group in experts:
                before = compared.packed
                for key, parameter in group.items():
                    weights = unread.value(parameter)
                    compared.add(key, weights.view(weights.shape[0], -1))
                    bar.update(weights.nbytes)
                layers += compared.packed > before
        weights_nbytes = sum(tensor.nbytes for group, _ in groups for tensor in group.values())
    if not layers and not compared.wrong:
        raise ValueError(f"{NOTHING_SMALLER}: they would come to {compared.all_packed / compared.nbytes:.4f} of their bytes.")
    others = sum(len(bank.parameters) for bank in banks) - compared.tensors
    return compared.result(name, others, (layers, len(banks)), weights_nbytes)


def _by_names(tensors: Mapping[str, StoredTensor], name: str, device: torch.device, progress: bool | None) -> Verification:
    experts = [stored for key, stored in tensors.items() if _EXPERTS.search(key) and len(stored.shape) > 1]
    suited = [stored for stored in experts if stored.dtype is torch.bfloat16]
    if not suited:
        kinds = ", ".join(sorted({str(stored.dtype).removeprefix("torch.") for stored in experts}))
        if kinds:
            raise ValueError(f"{name} has no experts in bfloat16 to pack; its experts are {kinds}")
        raise ValueError(
            f"{name} has no weights whose names have 'expert' or 'experts' as a part, and where the config alone makes no "
            "model with experts --verify goes by names. --out packs what the model itself has as experts, and says how many "
            "tensors that were; --verify of what was written checks it."
        )
    compared = _Compared(device)
    with byte_progress(sum(stored.nbytes for stored in suited), "experts packed and compared", progress) as bar:
        for stored, tensor in _tensors(suited):
            compared.add(stored.key, tensor.reshape(tensor.shape[0] if tensor.dim() == 3 else 1, -1))
            bar.update(stored.nbytes)
    return compared.result(name, len(experts) - len(suited), None, 0)


class _Compared:
    """What comes together while tensors are packed and compared, one after the other.

    Attributes:
        tensors: how many there were, of which `packed` get smaller enough to be kept so.
        nbytes: their bytes, `packed_nbytes` with those packed that are kept so, and `all_packed` with all of them packed.
        wrong: those of which not every bit came back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._exponents = torch.zeros(256, dtype=torch.int64, device="cpu")
        self._escapes = 0
        self.tensors, self.packed = 0, 0
        self.nbytes, self.packed_nbytes, self.all_packed = 0, 0, 0
        self.wrong: list[str] = []

    def add(self, name: str, rows: torch.Tensor) -> None:
        """Pack a tensor, bfloat16 (rows, weights of a row), a few rows at a time, and compare what comes back."""
        nbytes, longest, is_same = 0, 0, True
        for some in torch.split(rows, max(1, _AT_ONCE // max(rows.shape[1], 1))):
            there = some.to(self._device)
            packed = pack(there)
            nbytes += packed.blocks.nbytes
            longest = max(longest, packed.escapes.shape[1])
            self._escapes += int(packed.escapes[:, 0].sum())
            bits = there.view(torch.int16)
            # In bytes the sign falls off.
            self._exponents += torch.bincount((bits >> 7).to(torch.uint8).flatten(), minlength=256).cpu()
            is_same = is_same and torch.equal(_unpacked(packed).view(torch.int16), bits)
        # Packed in one go, all rows have lists as long as the longest.
        nbytes += rows.shape[0] * longest * torch.int64.itemsize
        is_kept = worth_it(nbytes, rows.nbytes)
        self.tensors, self.packed = self.tensors + 1, self.packed + is_kept
        self.nbytes, self.all_packed = self.nbytes + rows.nbytes, self.all_packed + nbytes
        self.packed_nbytes += nbytes if is_kept else rows.nbytes
        if not is_same:
            self.wrong.append(name)

    def result(self, name: str, others: int, layers: tuple[int, int] | None, weights_nbytes: int) -> Verification:
        """All of it. `weights_nbytes`: of all weights of the model; 0 if there is none."""
        shares = self._exponents[self._exponents > 0].double() / self._exponents.sum()
        return Verification(
            name=name,
            tensors=self.tensors,
            packed=self.packed,
            others=others,
            layers=layers,
            nbytes=self.nbytes,
            packed_nbytes=self.packed_nbytes,
            weights_nbytes=weights_nbytes,
            written_nbytes=weights_nbytes and weights_nbytes - self.nbytes + self.packed_nbytes,
            escapes=self._escapes,
            bits=_OTHER_BITS - float((shares * shares.log2()).sum()),
            wrong=tuple(self.wrong),
        )


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
