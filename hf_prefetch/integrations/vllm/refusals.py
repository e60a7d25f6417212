"""What prefetching can't be combined with, each by the name of vLLM's option and with the remedy.

All that an engine's config shows is gathered into one error, before any weight is loaded. What only shows on a layer is refused
there: its kernel, an adapter on its experts.
"""

from __future__ import annotations

import logging
from typing import Any

from ...scheduling.remedies import Remedies

__all__ = ["KERNELS", "LEAVE_OUT", "REMEDIES", "refuse", "refuse_config", "refuse_layer", "warn_untried"]

_log = logging.getLogger("vllm.hf_prefetch")

# Kernels that read their weights from the layer at each call, and of these only the rows that are routed to; and that compute a
# row alike wherever it is.
KERNELS = ("TritonExperts", "CPUUnquantizedExperts", "X86CPUUnquantizedExperts", "ArmCPUUnquantizedExperts")
# Drafts that are no models.
_DRAFTS = ("ngram", "ngram_gpu", "suffix")
LEAVE_OUT = "leave hf_prefetch out of additional_config."

REMEDIES = Remedies(
    again="make a new engine with fewer slots, or with more room on the device (a lower gpu_memory_utilization).",
    elsewhere="spread the model over more devices (tensor_parallel_size, pipeline_parallel_size).",
    cache=(
        "experts that may be numbered otherwise can be read from a cache, which those of this layer may not. Leave "
        "expert_cache out."
    ),
    ended="its engine is gone. Keep it for as long as any part of its model is used.",
    captured="a kernel that is given expert ids",
    uncaptured="Pass enforce_eager=True.",
    kernel='take another kernel (moe_backend="triton") or leave hf_prefetch out of additional_config, in a new engine.',
    steps="without enforce_eager they are captured as graphs",
    host="Free some, raise the limit on it (ulimit -v, a container's), or keep more layers on the device (gpu_memory).",
)


def refuse(reasons: list[str]) -> None:
    """Raise one error for all of them, if there are any.

    Raises:
        NotImplementedError: there are.
    """
    if reasons:
        raise NotImplementedError("hf_prefetch can't prefetch experts here:\n" + "\n".join(f"  - {one}" for one in reasons))


def refuse_config(config: Any, parallel: Any) -> None:
    """Refuse what the config of an engine (`VllmConfig`) shows, and that of its experts (`FusedMoEParallelConfig`)."""
    found = [f"{option}: {why} Leave that option out, or {LEAVE_OUT}" for option, why in _conflicts(config, parallel)]
    refuse(found + _compiled_on_cpu(config))


def _conflicts(config: Any, parallel: Any) -> list[tuple[str, str]]:
    found = []
    engine, offload, draft = config.parallel_config, config.offload_config, config.speculative_config
    if engine.enable_eplb or engine.enable_elastic_ep:
        found.append(("enable_eplb", "it moves experts between workers while they run, and their host memory stays."))
    if engine.use_ubatching:
        found.append(("enable_dbo / ubatch_size", "two threads would take turns in the middle of a layer that holds a slot."))
    if config.model_config is not None and config.model_config.enable_sleep_mode:
        found.append(("enable_sleep_mode", "slots and page-locked memory would not sleep."))
    if offload.uva.cpu_offload_gb > 0:
        found.append(("cpu_offload_gb", "vLLM's own offloading would take the same weights."))
    if offload.prefetch.offload_group_size > 0 or offload.offload_backend == "prefetch":
        found.append(("offload_backend=prefetch", "vLLM's own offloading would take the same weights."))
    if draft is not None and draft.method not in _DRAFTS:
        found.append((f"speculative_config (method {draft.method})", "experts of draft models are not prefetched."))
    if parallel.use_all2all_kernels:
        found.append(
            (
                "data or sequence parallelism together with enable_expert_parallel",
                "a worker computes tokens of others, and the layer does not show which experts they use.",
            )
        )
    return found


def warn_untried(config: Any) -> None:
    """Name what an engine's config (`VllmConfig`) asks for that this plugin was built for and has never run with."""
    engine, draft = config.parallel_config, config.speculative_config
    untried = {
        "pipeline_parallel_size": engine.pipeline_parallel_size > 1,
        "data_parallel_size": engine.data_parallel_size > 1,
        "enable_expert_parallel": engine.enable_expert_parallel,
        "enable_lora": config.lora_config is not None,
        f"speculative_config (method {getattr(draft, 'method', None)})": draft is not None,
        f"quantization={config.model_config.quantization}": config.model_config.quantization is not None,
        "CUDA graphs (enforce_eager=False)": config.device_config.device_type != "cpu"
        and not config.model_config.enforce_eager,
    }
    named = [option for option, is_asked_for in untried.items() if is_asked_for]
    if named:
        _log.warning(
            "hf_prefetch: never run yet together with %s. Compare its output with that of an engine without hf_prefetch before "
            "you rely on it.", ", ".join(named),
        )  # fmt: skip


def _compiled_on_cpu(config: Any) -> list[str]:
    """On the CPU vLLM compiles the layers themselves; elsewhere they are operators that nobody looks into."""
    compiles = config.device_config.device_type == "cpu" and not config.model_config.enforce_eager
    return ["compilation on the CPU looks into the layers: pass enforce_eager=True."] if compiles else []


def refuse_layer(layer: Any) -> None:
    """Refuse a `RoutedExperts` that can't be prefetched.

    It may still be without kernel (before its weights are loaded); then its method says which it will be, or nothing is said.

    Raises:
        NotImplementedError: it can't.
    """
    method, name = layer.quant_method, layer.layer_name
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    kind = type(kernel) if kernel is not None else getattr(method, "experts_cls", None)
    told = kind.__name__ if isinstance(kind, type) else type(method).__name__
    if layer.lora_base_layer_prefix:
        refuse([f"LoRA on experts ({name}): keep adapters off them with lora_target_modules (q_proj, k_proj, v_proj, o_proj)."])
    if method.is_monolithic:
        refuse(
            [
                f"{told} ({name}) is a monolithic kernel: it routes by itself and shows nobody which experts a call uses. Take "
                'a modular one with moe_backend="triton".'
            ]
        )
    if kind is not None and told not in KERNELS:
        refuse(
            [
                f"{told} ({name}) is not one of the kernels that are known to read their weights anew at each call "
                f'({", ".join(KERNELS)}). moe_backend="triton" selects one for bf16, fp16 and fp8 weights.'
            ]
        )
