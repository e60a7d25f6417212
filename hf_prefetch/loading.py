"""from_pretrained: a checkpoint goes straight from its files to where its weights stay while the model is enabled."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .api import disable_expert_prefetch, enable
from .config import DEFAULT_SLOTS, PrefetchConfig
from .discovery import find_banks
from .homes import Device
from .memory.checkpoint import StoredTensor, UnknownDtypeError, read_headers
from .memory.deferred import Deferred, NotDeferrableError, Packed
from .memory.loading import Reader, Unread
from .memory.packed_files import INDEX, is_packed, read_packed
from .packed import PackedWeights, unpack_bank

__all__ = ["deferred_model", "from_pretrained", "load_enabled", "load_unpacked"]

_log = logging.getLogger("hf_prefetch")
# The step of transformers' loading that is given other tensors than it would open itself: a static method of its models.
_STEP = "_load_pretrained_model"
_STEP_TAKES = ("model", "state_dict", "checkpoint_files", "load_config")
# Ways to distribute a model that exclude placing it here.
_FROM_HUB = ("revision", "subfolder", "cache_dir", "token", "trust_remote_code")
_PLACEMENT = ("device_map", "tp_plan", "tp_size", "device_mesh", "distributed_config")


def from_pretrained(
    pretrained_model_name_or_path: str | os.PathLike[str],
    slots: int = DEFAULT_SLOTS,
    *,
    device: Device | None = None,
    n_cpu_moe: int | None = None,
    gpu_memory: int | str | None = None,
    expert_cache: int | str | float | None = None,
    pin_memory: int | str | None = None,
    host_memory: int | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    pack: bool | str | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Load a Mixture-of-Experts model with its experts in page-locked host memory, and enable prefetching.

    The model is the one that `enable_expert_prefetch(AutoModelForCausalLM.from_pretrained(...))` gives, weight by weight. It
    gets there faster and in less memory: each layer's experts are read from the safetensors files into the place where they
    stay, and everything else goes to the device that computes, so that host memory never holds more than the weights and
    one layer. Checkpoints that store experts one by one are merged as transformers does it.

    Args:
        pretrained_model_name_or_path: a folder with a checkpoint, a packed one too (see `save_packed`), or a model on the Hub.
        slots: device buffers that the layers' experts rotate through, 3 is recommended, see `enable_expert_prefetch`. With 0
            this is transformers' own loading.
        device, n_cpu_moe, gpu_memory, expert_cache, pin_memory, pack: as for `enable_expert_prefetch`.
        host_memory: host memory for experts, in bytes or as "40GiB". Those of layers beyond it stay in the files of the
            checkpoint and are read ahead of use, as fast as the disk is.
        offload_folder: for checkpoints that store experts in another form or type than the model has: where those beyond
            `host_memory` are written once. The next time they are found there.
        progress: show one progress bar over all bytes; None shows it in terminals and notebooks.
        kwargs: whatever `AutoModelForCausalLM.from_pretrained` takes: dtype, revision, subfolder, trust_remote_code,
            attn_implementation, config and others, but not `device_map`.

    Returns:
        The enabled model, in eval mode. With `output_loading_info=True` the pair that transformers gives.

    Raises:
        ValueError, TypeError, RuntimeError: an option or the model can't be used; or the checkpoint is broken or does not fit,
            and the message names the file and the key.
        OSError: there is no such checkpoint, or a file of it is missing or can't be read.

        Nothing stays page-locked or on the device after an error.

    Example:
        >>> from hf_prefetch import from_pretrained
        >>> from hf_prefetch.demo import demo_model_path
        >>> model = from_pretrained(demo_model_path(), slots=3)
        >>> model.expert_prefetch.report().slots
        3
    """
    config = PrefetchConfig(
        slots=slots,
        n_cpu_moe=n_cpu_moe,
        gpu_memory=gpu_memory,
        expert_cache=expert_cache,
        pin_memory=pin_memory,
        host_memory=host_memory,
        offload_folder=offload_folder,
        pack=pack,
        progress=progress,
    )
    return load_enabled(pretrained_model_name_or_path, config, device, **kwargs)


def load_enabled(name: str | os.PathLike[str], config: PrefetchConfig, device: Device | None, /, **kwargs: Any) -> Any:
    """`from_pretrained`, with its own options in one value."""
    _refuse_placement(kwargs)
    if config.slots == 0:
        if _packed_folder(name, kwargs) is not None:
            return load_unpacked(name, config.progress, **kwargs)
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    model, unread = None, None
    try:
        with Reader(config.progress) as reader:
            result, why_not = _load(name, kwargs, reader)
            model = result[0] if isinstance(result, tuple) else result
            if why_not is not None:
                _log.warning(
                    "hf_prefetch: transformers loads this model itself, since %s; after that its experts are moved. It takes "
                    "longer than reading them into their places, and as much memory as transformers needs.",
                    why_not,
                )
            unread = Unread(model, reader, PackedWeights)
            with _explained(model):
                enable(model, config, device, unread.load, unread)
            unread.load_rest()
        return result
    except BaseException:
        # Whoever keeps the traceback keeps the model, and must not keep page-locked or any other memory with it.
        if model is not None:
            disable_expert_prefetch(model)
        if unread is not None:
            unread.abandon()
        raise


def load_unpacked(name: str | os.PathLike[str], progress: bool | None = None, /, **kwargs: Any) -> Any:
    """What transformers would make of a packed checkpoint if it were not packed: an ordinary model on the CPU."""
    with deferred_model(name, progress, **kwargs) as (result, unread):
        for bank in find_banks(result[0] if isinstance(result, tuple) else result).banks:
            unpack_bank(bank, unread.load)
        unread.load_rest()
    return result


@contextmanager
def deferred_model(name: str | os.PathLike[str], progress: bool | None, /, **kwargs: Any) -> Iterator[tuple[Any, Unread]]:
    """What transformers gives for a checkpoint, and what of it is still to be read, while the block runs."""
    with Reader(progress) as reader:
        result, _ = _load(name, kwargs, reader)
        unread = Unread(result[0] if isinstance(result, tuple) else result, reader, PackedWeights)
        try:
            yield result, unread
        except BaseException:
            unread.abandon()
            raise


def _packed_folder(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> Path | None:
    """Where a packed checkpoint is, if it is one."""
    folder = Path(name, kwargs.get("subfolder") or "")
    return folder if is_packed(folder) else None


def _naming_packed_files(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with which transformers looks for the files of a packed checkpoint: their index is named in the config."""
    from transformers import AutoConfig, PreTrainedConfig

    config, others = kwargs.get("config"), {key: value for key, value in kwargs.items() if key != "config"}
    if not isinstance(config, PreTrainedConfig):
        given = {key: others.pop(key) for key in ("dtype", "torch_dtype", "quantization_config") if key in others}
        config, others = AutoConfig.from_pretrained(config or name, return_unused_kwargs=True, **others)
        others |= given | {key: kwargs[key] for key in _FROM_HUB if key in kwargs}
    config = copy.deepcopy(config)
    for inner in (config, config.get_text_config()):
        inner.transformers_weights = INDEX
    return {**others, "config": config}


def _refuse_placement(kwargs: dict[str, Any]) -> None:
    given = [name for name in _PLACEMENT if kwargs.get(name) is not None]
    if given:
        raise ValueError(
            f"{given[0]}={kwargs[given[0]]!r} can't be given here: hf_prefetch.from_pretrained decides where weights go. Leave "
            "it out; device= says where to compute, and gpu_memory= or n_cpu_moe= how much of the experts stays there. To "
            f"dispatch the model yourself, call AutoModelForCausalLM.from_pretrained(..., {given[0]}=...) and then "
            "enable_expert_prefetch(model)."
        )


def _load(
    name: str | os.PathLike[str], kwargs: dict[str, Any], reader: Reader, *, reads: bool = False
) -> tuple[Any, str | None]:
    """What transformers gives for a checkpoint, with deferred tensors in it; and why there are none, if it has to be so.

    `reads`: what is not packed is read at once.
    """
    from transformers import AutoModelForCausalLM

    packed = _packed_folder(name, kwargs)
    given = kwargs
    if packed is not None:
        kwargs = _naming_packed_files(name, kwargs)
    step = _DeferredStep(reader, packed, reads=reads)
    classes = _Classes(AutoModelForCausalLM._model_mapping, step)
    auto: Any = type(AutoModelForCausalLM.__name__, (AutoModelForCausalLM,), {"_model_mapping": classes})
    try:
        result = auto.from_pretrained(name, **kwargs)
    except NotDeferrableError as error:
        # Raised where transformers would draw missing weights, after the step.
        if packed is not None and reads:
            raise ValueError(
                f"{name} holds a packed checkpoint of a model that writes to its experts while it loads."
            ) from error
        if packed is not None:
            return _load(name, given, reader, reads=True)
        return AutoModelForCausalLM.from_pretrained(name, **kwargs), f"it writes to weights while it loads ({error})"
    except json.JSONDecodeError as error:
        _explain_json(name, error)
        raise
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        if step.problem is not None:
            raise step.problem from None
        _explain_quantized(name, kwargs, error)
        raise
    model = result[0] if isinstance(result, tuple) else result
    step.give_class_back(model)
    if packed is not None:
        if step.why_not is not None:
            raise ValueError(f"{name} holds a packed checkpoint, which can't be loaded in this way: {step.why_not}.")
        _refuse_incomplete(step.info, packed, model)
        # It says where these weights were found, not where those that will be saved are.
        for config in (model.config, model.config.get_text_config()):
            config.__dict__.pop("transformers_weights", None)
    return result, step.why_not


class _DeferredStep:
    """The step of transformers' loading in which files are opened, with deferred tensors instead.

    Attributes:
        why_not: why transformers has to read the files itself; None if it has not.
        problem: what is wrong with the checkpoint, in words that name the file and the key.
        info: what transformers says of a packed checkpoint.
    """

    def __init__(self, reader: Reader, packed: Path | None, *, reads: bool) -> None:
        self._reader = reader
        self._packed = packed
        self._reads = reads
        self._originals: dict[type[nn.Module], type[nn.Module]] = {}
        self.why_not: str | None = "its code is not transformers' own"
        self.problem: Exception | None = None
        self.info: Any = None

    def variant(self, model_class: type[nn.Module]) -> type[nn.Module]:
        """A class that is the given one but for this step. A model of it has to be given its own class back."""
        original = inspect.getattr_static(model_class, _STEP, None)
        takes = tuple(inspect.signature(original.__func__).parameters) if isinstance(original, staticmethod) else ()
        if takes[: len(_STEP_TAKES)] != _STEP_TAKES:
            self.why_not = "this version of transformers loads in a way that is not known here"
            return model_class

        def step(model: Any, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run(original.__func__, model, state_dict, files, load_config, *args, **kwargs)

        # Models look at the names of their classes, for their loss and for what they can record.
        looks = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
        variant = type(model_class.__name__, (model_class,), {**looks, _STEP: staticmethod(step)})
        self._originals[variant] = model_class
        return variant

    def give_class_back(self, model: nn.Module) -> None:
        """Make a model of a variant one of the class that it is a variant of."""
        model.__class__ = self._originals.get(type(model), type(model))

    def _run(self, original: Any, model: Any, state_dict: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        self.why_not = _why_not(model, state_dict, files, load_config)
        if self.why_not is not None:
            return original(model, state_dict, files, load_config, *args, **kwargs)
        if self._packed is not None:
            return self._run_packed(original, model, files, load_config, *args, **kwargs)
        try:
            stored = read_headers(files, (load_config.sharded_metadata or {}).get("weight_map"))
        except UnknownDtypeError as error:
            self.why_not = f"it has tensors that can't be read as they lie there ({error})"
            return original(model, state_dict, files, load_config, *args, **kwargs)
        except (OSError, ValueError) as error:
            self.problem = error
            raise
        self._reader.expect(stored.values())
        deferred = {key: Deferred.stored(tensor, self._reader.materialize) for key, tensor in stored.items()}
        with _without_transformers_bar():
            info, index = original(model, deferred, None, load_config, *args, **kwargs)
        errors = list(info.conversion_errors.values())
        if any(NotDeferrableError.__name__ in error for error in errors):
            # Every weight is set anew, so nothing of this attempt is left.
            self.why_not = "its weights are converted in a way that can't be put off"
            return original(model, state_dict, files, load_config, *args, **kwargs)
        self.problem = _what_does_not_fit(info, load_config, stored)
        if self.problem is not None:
            raise self.problem
        return info, index

    def _run_packed(self, original: Any, model: Any, files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        """The same with the files of a packed checkpoint, whose tensors are named as the model's own."""
        assert self._packed is not None, "it is one"
        try:
            stored, packed = read_packed(files, json.loads((self._packed / INDEX).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError) as error:
            self.problem = error
            raise
        self._reader.expect((*stored.values(), *(part for blocks, escapes, _ in packed.values() for part in (blocks, escapes))))
        deferred: dict[str, torch.Tensor] = {}
        for key, tensor in stored.items():
            stands_for = Deferred.stored(tensor, self._reader.materialize)
            deferred[key] = self._reader.materialize(stands_for) if self._reads else stands_for
        for key, parts in packed.items():
            looks = torch.empty(parts[2], dtype=torch.bfloat16, device="meta")
            deferred[key] = Deferred.of(looks, Packed(*parts), self._reader.materialize)
        # Names are the model's own, unless this is only a part of the model that was saved.
        whole = deferred.keys() <= model.state_dict().keys()
        load_config = replace(load_config, weight_mapping=[]) if whole else load_config
        with _without_transformers_bar():
            info, index = original(model, deferred, None, load_config, *args, **kwargs)
        if whole:
            # Saved as others of its kind are: nothing was renamed on the way that would have to be undone.
            model.__dict__.pop("_weight_conversions", None)
        everything = stored | {key: parts[0] for key, parts in packed.items()}
        self.problem = _what_does_not_fit(info, load_config, everything)
        self.info = info
        if self.problem is not None:
            raise self.problem
        return info, index


def _refuse_incomplete(info: Any, folder: Path, model: nn.Module) -> None:
    """A packed checkpoint was written from a whole model, so where something is missing that was another one."""
    if info.missing_keys:
        written = json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"].get("model")
        raise ValueError(
            f"The packed checkpoint in {folder} lacks {min(info.missing_keys)!r}: it was written from a {written}, and its "
            f"config.json makes a {type(model).__name__} whose weights have other names. Write it from a model that "
            "AutoModelForCausalLM loads, with the config.json of that model."
        )


def _why_not(model: nn.Module, state_dict: object, files: list[str] | None, load_config: Any) -> str | None:
    """Why a checkpoint has to be read by transformers itself, or None."""
    from transformers import integrations

    quantizer = load_config.hf_quantizer
    if quantizer is not None:
        return f"it is quantized ({_method(quantizer.quantization_config)})"
    if state_dict is not None or not files:
        return "its weights were given as a state_dict"
    if not all(str(file).endswith(".safetensors") for file in files):
        return "its files are not safetensors"
    if load_config.device_map is not None or load_config.device_mesh is not None:
        return "it is distributed over several devices"
    distributed: Any = integrations
    elsewhere = distributed.is_deepspeed_zero3_enabled() or distributed.is_fsdp_enabled()
    if elsewhere or not all(parameter.is_meta for parameter in model.parameters()):
        return "its weights are not transformers' to place"
    return None


def _what_does_not_fit(info: Any, load_config: Any, stored: Mapping[str, StoredTensor]) -> Exception | None:
    """What is wrong with tensors whose shape is not the one that the model has; transformers itself only names the model's."""
    for target, error in info.conversion_errors.items():
        lines = [line for line in error.splitlines() if line.startswith("ValueError: ")]
        reason = lines[-1].removeprefix("ValueError: ") if lines else error.strip().splitlines()[-1]
        return ValueError(f"The checkpoint does not fit the model at {target}: {reason}")
    if load_config.ignore_mismatched_sizes:
        return None
    for target, has, wanted in info.mismatched_keys:
        source = max(stored.values(), key=lambda tensor: _common_parts(tensor.key, target))
        alone = tuple(has) == source.shape
        looks = f"has shape {source.shape}" if alone else f"and those that go with it make up shape {tuple(has)}"
        return ValueError(
            f"The checkpoint does not fit the model: {source} {looks}, but the model's {target} has {tuple(wanted)}. The "
            "config belongs to another model, or the checkpoint is incomplete."
        )
    return None


def _common_parts(key: str, other: str) -> int:
    """In how many of their dotted parts, from the left, two names agree."""
    pairs = zip(key.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class _Classes(Mapping[Any, Any]):
    """transformers' table of model classes, each with the step that defers."""

    def __init__(self, classes: Any, step: _DeferredStep) -> None:
        self._classes = classes
        self._step = step

    def __getitem__(self, config_class: Any) -> Any:
        found = self._classes[config_class]
        if isinstance(found, list | tuple):
            return tuple(map(self._step.variant, found))
        return self._step.variant(found)

    def __contains__(self, config_class: object) -> bool:
        return config_class in self._classes

    def __iter__(self) -> Iterator[Any]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def register(self, *args: Any, **kwargs: Any) -> None:
        """Enter a class, as transformers does with code that comes with a model."""
        self._classes.register(*args, **kwargs)


@contextmanager
def _without_transformers_bar() -> Iterator[None]:
    """transformers would count tensors that are only looked at."""
    from transformers.utils import logging as transformers_logging

    previous = transformers_logging.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _explain_json(name: str | os.PathLike[str], error: json.JSONDecodeError) -> None:
    """Say which file of a folder is no JSON."""
    for file in sorted(Path(name).glob("*.json")):
        if error.doc == file.read_text(encoding="utf-8", errors="replace"):
            raise ValueError(f"{file} can't be read: it is no JSON ({error}). Download or copy it again.") from error


def _method(quantization: Any) -> str:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else getattr(quantization, "quant_method", None)
    return str(getattr(method, "value", method))


_REMEDY = (
    "Load a checkpoint that is not quantized, or one in a format that transformers can turn back into plain weights: "
    "quantization_config=...(dequantize=True)."
)


def _explain_quantized(name: str | os.PathLike[str], kwargs: dict[str, Any], error: Exception) -> None:
    """Say it if a checkpoint could not be loaded because it is quantized."""
    from transformers import AutoConfig

    given = {key: kwargs[key] for key in _FROM_HUB if key in kwargs}
    config = kwargs.get("config")
    if config is None or isinstance(config, str | os.PathLike):
        try:
            config = AutoConfig.from_pretrained(config or name, **given)
        except (OSError, ValueError):
            return
    quantization = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    if quantization is not None:
        raise RuntimeError(
            f"{name} is quantized ({_method(quantization)}), and transformers can't load it here: {error} {_REMEDY}"
        ) from error


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """An error about a quantized model says that it is one."""
    quantization = getattr(getattr(model, "config", None), "quantization_config", None)
    try:
        yield
    except ValueError as error:
        if quantization is None or getattr(model, "hf_quantizer", None) is None:
            raise
        raise ValueError(f"The checkpoint is quantized ({_method(quantization)}). {error} {_REMEDY}") from error
