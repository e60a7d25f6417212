"""save_packed: a model's weights on disk with its experts packed, from where `from_pretrained` reads them as they are."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from torch import nn

from ..banks.forms import is_plain
from ..discovery import find_banks
from ..memory.packed_files import PackedFiles, is_packed
from ..memory.packing import PackedRows
from ..model.packed import PackedWeights, packed_rows, unsuited
from ..model.placement import is_dispatched
from ..progress import byte_progress
from ..scheduling.scheduler import PrefetchScheduler
from ..sizes import shown
from ..streams import StreamDevice, stream_device
from ..workers import holding
from .comparing import unlike
from .loading import deferred_model

__all__ = ["NOTHING_SMALLER", "Written", "file_groups", "pack_checkpoint", "refuse_quantized", "save_packed"]

NOTHING_SMALLER = "There is nothing to pack: none of this model's experts would get a tenth smaller by it"
# What is not an expert goes into files of about this size, in bytes.
_FILE = 2 * 2**30
# What belongs to a checkpoint besides weights and what the model itself writes: tokenizers, templates, code, licenses.
_BESIDES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.md", "LICENSE*", "NOTICE*")


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        nbytes: bytes of all weights of the model, and `written_nbytes` of what they are in the files.
        packed: how many tensors were packed.
    """

    nbytes: int
    written_nbytes: int
    packed: int

    def __str__(self) -> str:
        share = self.written_nbytes / max(self.nbytes, 1)
        sizes = f"{shown(self.nbytes)} of weights in {shown(self.written_nbytes)}, {share:.4f} of it"
        return f"{sizes}; {self.packed:,} tensors are packed"


def save_packed(model: nn.Module, folder: str | os.PathLike[str], *, progress: bool | None = None) -> Written:
    """Write a model with its bfloat16 experts packed: in three quarters of their bytes, without the loss of a bit.

    `hf_prefetch.from_pretrained(folder)` reads them as they are, without packing anything again. transformers itself finds no
    weights in such a folder. Experts that are in another format, or would hardly get smaller, are written as they are.

    Args:
        model: a transformers model, enabled or not. What is packed already is not packed again.
        folder: where to write; made if it is not there. A packed checkpoint that it holds is replaced once the new one is
            whole, and may be the one that the model was loaded from. Until then there has to be room for both.
        progress: show a bar over the bytes; None shows it in terminals and notebooks.

    Raises:
        TypeError: it is no transformers model, or `folder` is no path.
        ValueError: it has no experts that can be packed, or some of its weights are not here, or are in a quantized format; or
            it is not what `from_pretrained` would make of its config; or the name of the folder is empty.
        RuntimeError: called from inside a forward of the model.
        FileExistsError, NotADirectoryError: the folder holds an ordinary checkpoint, or is a file.
        BlockingIOError: another process or thread is writing there.
        OSError: there is no room, or the folder can't be written to.

    Example:
        >>> import tempfile
        >>> from hf_prefetch import from_pretrained, save_packed
        >>> from hf_prefetch.demo import load_demo_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = save_packed(load_demo_model(), folder)
        ...     model = from_pretrained(folder)
        >>> written.packed
        14
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"a transformers model can be saved packed, not a {type(model).__name__}")
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be a path, got {folder!r} of type {type(folder).__name__}.")
    if not os.fspath(folder):
        raise ValueError("The name of the folder is empty. Give '.' for the current one.")
    known = (module.__dict__.get("expert_prefetch") for module in model.modules())
    found = [scheduler for scheduler in known if isinstance(scheduler, PrefetchScheduler)]
    if any(scheduler.is_in_a_call() for scheduler in found):
        raise RuntimeError("A model can't be saved packed from inside a forward of it. Do it when that has returned.")

    def write() -> Written:
        return _write(model, Path(folder), lambda parameter: parameter.detach(), progress, stream_device(None))

    # While another thread is in a call, the model's own Parameters are what was sent for that.
    return holding([scheduler.lock for scheduler in found], write)


def pack_checkpoint(source: Path, folder: Path, device: StreamDevice, *, progress: bool | None = None) -> Written:
    """Write the packed form of a checkpoint, one layer's experts at a time: no more than these are ever in memory.

    Args:
        source: a folder with an ordinary checkpoint. What it holds besides weights is copied.
        folder: where to write.
        device: packs, if it is a GPU.
        progress: show a bar over the bytes; None shows it in terminals.

    Raises:
        FileExistsError, BlockingIOError, ValueError, RuntimeError: as `save_packed` and `from_pretrained`.
    """
    if is_packed(source):
        raise ValueError(f"{source} holds a packed checkpoint already")
    beside = [file for pattern in _BESIDES for file in sorted(source.glob(pattern)) if not file.name.endswith(".index.json")]
    with deferred_model(source, False, dtype="auto") as (model, unread):
        return _write(model, folder, unread.value, progress, device, beside)


def _write(
    model: Any,
    folder: Path,
    value: Callable[[torch.Tensor], torch.Tensor],
    progress: bool | None,
    device: StreamDevice,
    beside: Sequence[Path] = (),
) -> Written:
    groups = file_groups(model)
    _refuse_other_weights(model)
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in group.values()) for group, _ in groups]
    after, count = 0, 0
    with (
        PackedFiles(folder, len(groups)) as files,
        byte_progress(sum(sizes), "writing packed weights", progress) as bar,
    ):
        for (group, is_bank), size in zip(groups, sizes, strict=True):
            plain: dict[str, torch.Tensor] = {}
            packed: dict[str, tuple[PackedRows, torch.Size]] = {}
            for name, tensor in group.items():
                rows = tensor.rows if isinstance(tensor, PackedWeights) else None
                there = value(tensor) if rows is None else tensor
                rows = packed_rows(there, device) if is_bank and rows is None else rows
                if rows is None:
                    plain[name] = there
                else:
                    packed[name] = rows, tensor.shape
            after += files.write(plain, packed)
            count += len(packed)
            bar.update(size)
        if not count:
            raise ValueError(f"{NOTHING_SMALLER}. save_pretrained writes it as it is.")
        with files.writing():
            model.config.save_pretrained(files.unfinished)
            if model.can_generate() and model.generation_config is not None:
                model.generation_config.save_pretrained(files.unfinished)
            for file in beside:
                if not (files.unfinished / file.name).exists() and (files.replaces or not (folder / file.name).exists()):
                    copyfile(file, files.unfinished / file.name)
        files.finish(model=type(model).__name__, dtype=str(model.dtype).removeprefix("torch."))
        files.put_in_place()
    return Written(sum(sizes), after, count)


def _refuse_other_weights(model: Any) -> None:
    """Raises ValueError for a model that has other weights than what would be loaded again, be it more, fewer or others."""
    from transformers import AutoModelForCausalLM

    if type(model.config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"This {type(model).__name__} could not be loaded again: AutoModelForCausalLM knows no class for a "
            f"{type(model.config).__name__}. save_pretrained writes it; from_pretrained(..., pack=True) packs while it loads."
        )
    with torch.device("meta"):
        other: Any = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))  # type: ignore[no-untyped-call]
    remedy = "Save a model as AutoModelForCausalLM loads it, or write this one with save_pretrained."
    if type(model) is not type(other):
        if _package(model) == "transformers_modules" and _package(other) == "transformers":
            raise ValueError(
                f"This {type(model).__name__} comes with code of its own, and transformers has a {type(other).__name__} for "
                "its config, which a packed checkpoint would be loaded as. Keep the ordinary one: from_pretrained(..., "
                "pack=True) packs it while it loads, and slots=0 leaves it to transformers."
            )
        if type(getattr(other, other.base_model_prefix, None)) is type(model):
            raise ValueError(
                f"A {type(model).__name__} could not be loaded again: AutoModelForCausalLM makes a {type(other).__name__} of "
                f"its config, which has more than that. {remedy}"
            )
    tensors, wanted = (dict(_tensors(each)) for each in (model, other))
    shapes, expected = ({name: tensor.shape for name, tensor in each.items()} for each in (tensors, wanted))
    # A weight that has several names may be written under each of them.
    unknown = shapes.keys() - other.state_dict().keys()
    if unknown and type(model) is not type(other):
        # Of such a model a part may be loaded, under names that only transformers' loading knows.
        lacking, unknown = unlike(other, tensors, wanted)
    else:
        lacking = {name for name, shape in expected.items() if shapes.get(name) != shape}
    wrong = sorted(lacking) or sorted(unknown)
    if wrong:
        name = wrong[0]
        has = f"has {tuple(shapes[name])}" if name in shapes else "has nothing, or shares it with another module"
        makes = f"has {tuple(expected[name])}" if name in expected else "has nothing"
        what, why = "This model", "since it is not what its config describes"
        if type(model) is not type(other):
            what, why = f"A {type(model).__name__}", f"since AutoModelForCausalLM makes a {type(other).__name__} of its config"
        raise ValueError(
            f"{what} could not be loaded again, {why}: of {name!r} it {has}, and what the config describes {makes}. {remedy}"
        )


def _package(model: nn.Module) -> str:
    return type(model).__module__.partition(".")[0]


def refuse_quantized(model: nn.Module) -> None:
    """Raises ValueError for a model that is quantized, or will be when its weights are loaded."""
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            "This model is quantized, so its experts are in another format than bfloat16. save_pretrained writes it."
        )


def file_groups(model: nn.Module) -> list[tuple[dict[str, torch.Tensor], bool]]:
    """What goes into each file, and whether it is a bank whose experts can be packed.

    Raises:
        ValueError: nothing of it can be packed, or not all of it can be saved.
    """
    if is_dispatched(model):
        raise ValueError(
            "Some of this model's weights are where accelerate has put them. Load it without device_map to save it packed."
        )
    refuse_quantized(model)
    found = find_banks(model).banks
    banks = [bank for bank in found if bank.layout.has_rows]
    reasons = [unsuited(bank) for bank in found]
    if None not in reasons:
        raise ValueError(
            f"There is nothing to pack: this model's experts {'; '.join(map(str, dict.fromkeys(reasons)))}. save_pretrained "
            "writes it as it is."
        )
    bank_of = {id(parameter): number for number, bank in enumerate(banks) for parameter in bank.parameters.values()}
    groups: list[tuple[dict[str, torch.Tensor], bool]] = [({}, True) for _ in banks]
    rest: list[tuple[dict[str, torch.Tensor], bool]] = []
    room = 0
    for name, tensor in _tensors(model):
        if tensor.is_meta or not (is_plain(tensor) or isinstance(tensor, PackedWeights)):
            why = "has no value here" if tensor.is_meta else f"is a {type(tensor.data).__name__}, in a format of its own"
            raise ValueError(f"This model can't be saved packed: {name} {why}.")
        if id(tensor) in bank_of:
            groups[bank_of[id(tensor)]][0][name] = tensor
            continue
        if tensor.nbytes > room:
            rest.append(({}, False))
            room = _FILE
        rest[-1][0][name] = tensor
        room -= tensor.nbytes
    return [*groups, *rest]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a model that a state dict would have, once, however many names it has."""
    yield from model.named_parameters()
    seen = set()
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{path}.{name}" if path else name, buffer
