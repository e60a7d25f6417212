"""from_pretrained: a checkpoint goes straight from its files to where its weights stay while the model is enabled."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..api import disable_expert_prefetch, enable
from ..config import DEFAULT_SLOTS, PrefetchConfig
from ..discovery import find_banks
from ..memory.loading import Reader, Unread
from ..memory.shortage import memory_for
from ..model.homes import Device
from ..model.packed import PackedWeights, unpack_bank
from ..scheduling.remedies import OF_MODELS
from .deferring import load_deferred, packed_folder
from .explaining import explained

__all__ = ["deferred_model", "from_pretrained", "load_enabled", "load_unpacked"]

_log = logging.getLogger("hf_prefetch")
# Ways to distribute a model that exclude placing it here.
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
            `host_memory` are written once; given with it or not at all. The next time they are found there.
        progress: show one progress bar over all bytes; None shows it in terminals and notebooks.
        kwargs: whatever `AutoModelForCausalLM.from_pretrained` takes: dtype, revision, subfolder, trust_remote_code,
            attn_implementation, config and others, but not `device_map`.

    Returns:
        The enabled model, in eval mode. With `output_loading_info=True` the pair that transformers gives.

    Raises:
        ValueError, TypeError, RuntimeError: an option or the model can't be used; or the checkpoint is broken or does not fit,
            and the message names the file and the key.
        MemoryError: the system has no host memory for the weights; the message says what would do.
        OSError: there is no such checkpoint, or a file of it is missing or can't be read; or `offload_folder` can't be written
            to, or is a file.

        Nothing stays page-locked or on the device after an error.

    Example:
        >>> from hf_prefetch import from_pretrained
        >>> from hf_prefetch.demo import demo_model_path
        >>> model = from_pretrained(demo_model_path(), slots=3)
        >>> model.expert_prefetch.report().slots
        3
    """
    if not isinstance(pretrained_model_name_or_path, str | os.PathLike):
        raise TypeError(
            "pretrained_model_name_or_path must be the path of a folder with a checkpoint, or the name of a model on the Hub, "
            f"got {pretrained_model_name_or_path!r} of type {type(pretrained_model_name_or_path).__name__}."
        )
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
        if packed_folder(name, kwargs) is not None:
            return load_unpacked(name, config.progress, **kwargs)
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    model, unread = None, None
    try:
        with Reader(config.progress) as reader:
            result, why_not = load_deferred(name, kwargs, reader)
            model = result[0] if isinstance(result, tuple) else result
            if why_not is not None:
                _log.warning(
                    "hf_prefetch: transformers loads this model itself, since %s; after that its experts are moved. It takes "
                    "longer than reading them into their places, and as much memory as transformers needs.",
                    why_not,
                )
            with memory_for(f"the weights of {name}", OF_MODELS.host, sum(each.nbytes for each in model.parameters())):
                unread = Unread(model, reader, PackedWeights)
                with explained(model):
                    enable(model, config, device, unread.load, unread)
                unread.load_rest()
        return result
    except BaseException:
        # Whoever keeps the traceback keeps the model, and must not keep page-locked or any other memory with it.
        try:
            if model is not None:
                disable_expert_prefetch(model)
        finally:
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
        result, _ = load_deferred(name, kwargs, reader)
        unread = Unread(result[0] if isinstance(result, tuple) else result, reader, PackedWeights)
        try:
            yield result, unread
        except BaseException:
            unread.abandon()
            raise


def _refuse_placement(kwargs: dict[str, Any]) -> None:
    given = [name for name in _PLACEMENT if kwargs.get(name) is not None]
    if given:
        raise ValueError(
            f"{given[0]}={kwargs[given[0]]!r} can't be given here: hf_prefetch.from_pretrained decides where weights go. Leave "
            "it out; device= says where to compute, and gpu_memory= or n_cpu_moe= how much of the experts stays there. To "
            f"dispatch the model yourself, call AutoModelForCausalLM.from_pretrained(..., {given[0]}=...) and then "
            "enable_expert_prefetch(model)."
        )
