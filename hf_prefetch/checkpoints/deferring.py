"""transformers' own loading, with tensors that are still in their files in the place of those that it would read.

What it does with them (renaming, merging experts, changing types) is noted and done when somebody says where a weight goes.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..memory.checkpoint import StoredTensor, UnknownDtypeError, read_headers
from ..memory.deferred import Deferred, NotDeferrableError, Packed
from ..memory.loading import Reader
from ..memory.packed_files import INDEX, Index, is_packed, read_index, read_packed
from .explaining import FROM_HUB, explain_json, explain_quantized, method_of

__all__ = ["DeferredStep", "load_deferred", "packed_folder"]

# The step of transformers' loading that is given other tensors than it would open itself: a static method of its models.
_STEP = "_load_pretrained_model"
_NOT_ITS_OWN = "its code is not transformers' own"
_STEP_TAKES = ("model", "state_dict", "checkpoint_files", "load_config")


def packed_folder(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> Path | None:
    """Where a packed checkpoint is, if it is one. Raises ValueError where that can't be said, see `is_packed`."""
    folder = Path(name, kwargs.get("subfolder") or "")
    return folder if is_packed(folder) else None


def _naming_packed_files(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with which transformers looks for the files of a packed checkpoint: their index is named in the config."""
    from transformers import AutoConfig, PreTrainedConfig

    config, others = kwargs.get("config"), {key: value for key, value in kwargs.items() if key != "config"}
    if not isinstance(config, PreTrainedConfig):
        given = {key: others.pop(key) for key in ("dtype", "torch_dtype", "quantization_config") if key in others}
        config, others = AutoConfig.from_pretrained(config or name, return_unused_kwargs=True, **others)
        others |= given | {key: kwargs[key] for key in FROM_HUB if key in kwargs}
    config = copy.deepcopy(config)
    for inner in (config, config.get_text_config()):
        inner.transformers_weights = INDEX
    return {**others, "config": config}


def load_deferred(
    name: str | os.PathLike[str], kwargs: dict[str, Any], reader: Reader, *, reads: bool = False, registers: bool = True
) -> tuple[Any, str | None]:
    """What transformers gives for a checkpoint, with deferred tensors in it; and why there are none, if it has to be so.

    `reads`: what is not packed is read at once. `registers`: code that comes with the model may have to be loaded first.
    """
    from transformers import AutoModelForCausalLM

    packed = packed_folder(name, kwargs)
    given = kwargs
    index = None
    if packed is not None:
        index = read_index(packed)
        kwargs = _naming_packed_files(name, kwargs)
    step = DeferredStep(reader, index, reads=reads)
    classes = _Classes(AutoModelForCausalLM._model_mapping, step, again=packed is not None and registers)
    auto: Any = type(AutoModelForCausalLM.__name__, (AutoModelForCausalLM,), {"_model_mapping": classes})
    try:
        result = auto.from_pretrained(name, **kwargs)
    except _RegisteredError:
        return load_deferred(name, given, reader, reads=reads, registers=False)
    except NotDeferrableError as error:
        # Raised where transformers would draw missing weights, after the step.
        if packed is not None and reads:
            raise ValueError(
                f"{name} holds a packed checkpoint of a model that writes to its experts while it loads."
            ) from error
        if packed is not None:
            return load_deferred(name, given, reader, reads=True, registers=registers)
        return AutoModelForCausalLM.from_pretrained(name, **kwargs), f"it writes to weights while it loads ({error})"
    except json.JSONDecodeError as error:
        explain_json(name, error)
        raise
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        if step.problem is not None:
            raise step.problem from None
        explain_quantized(name, kwargs, error)
        raise
    model = result[0] if isinstance(result, tuple) else result
    step.give_class_back(model)
    if packed is not None and index is not None:
        if step.why_not is not None:
            own = " Leave out trust_remote_code to load it with that code." if step.why_not == _NOT_ITS_OWN else ""
            raise ValueError(f"{name} holds a packed checkpoint, which can't be loaded in this way: {step.why_not}.{own}")
        _refuse_incomplete(step.info, packed, index, model)
        # It says where these weights were found, not where those that will be saved are.
        for config in (model.config, model.config.get_text_config()):
            config.__dict__.pop("transformers_weights", None)
    return result, step.why_not


class DeferredStep:
    """The step of transformers' loading in which files are opened, with deferred tensors instead.

    Attributes:
        why_not: why transformers has to read the files itself; None if it has not.
        problem: what is wrong with the checkpoint, in words that name the file and the key.
        info: what transformers says of a packed checkpoint.
    """

    def __init__(self, reader: Reader, packed: Index | None, *, reads: bool) -> None:
        self._reader = reader
        self._packed = packed
        self._reads = reads
        self._originals: dict[type[nn.Module], type[nn.Module]] = {}
        self.why_not: str | None = _NOT_ITS_OWN
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
            stored, packed = read_packed(files, self._packed)
        except (OSError, ValueError) as error:
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


def _refuse_incomplete(info: Any, folder: Path, index: Index, model: nn.Module) -> None:
    """A packed checkpoint was written from a whole model, so where something is missing that was another one."""
    if info.missing_keys:
        made = type(model).__name__
        other = "has other weights" if made == index.model else f"is a {made}"
        raise ValueError(
            f"The packed checkpoint in {folder} lacks {min(info.missing_keys)!r}: it was written from a {index.model}, and "
            f"what its config.json makes {other}. The config belongs to another model, or parts of the model were replaced or "
            "shared before it was written. Write it from a model as AutoModelForCausalLM loads it, with the config.json of "
            "that model."
        )


def _why_not(model: nn.Module, state_dict: object, files: list[str] | None, load_config: Any) -> str | None:
    """Why a checkpoint has to be read by transformers itself, or None."""
    from transformers import integrations

    quantizer = load_config.hf_quantizer
    if quantizer is not None:
        return f"it is quantized ({method_of(quantizer.quantization_config)})"
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


class _RegisteredError(Exception):
    """A class that comes with a model is in the table now."""


class _Classes(Mapping[Any, Any]):
    """transformers' table of model classes, each with the step that defers.

    `again`: a class that is entered is to be looked up here, which transformers does only when it loads the next time.
    """

    def __init__(self, classes: Any, step: DeferredStep, *, again: bool) -> None:
        self._classes = classes
        self._step = step
        self._again = again

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
        if self._again:
            raise _RegisteredError


@contextmanager
def _without_transformers_bar() -> Iterator[None]:
    """transformers would count tensors that are only looked at."""
    from transformers.utils import logging as transformers_logging

    previous = transformers_logging.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
