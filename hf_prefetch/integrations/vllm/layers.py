"""What stands before the layers of an engine that asks for prefetching. Imported only where vLLM is.

[Note: which layers are found]
An experts layer (`RoutedExperts`, or a class of a model's own beneath it) is held by a runner (`MoERunner`, or again another).
vLLM lets plugins put a class in the place of each of the two by its name, so one of ours is met unless a model brings classes
of its own for both. Of vLLM's own models those of its transformers backend do, whose runner has a class of ours as well. That
others bring both, or that there are no experts at all, shows where a model makes its logits: that layer is the last one that
almost any model has, and in its place is one of ours too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import vllm
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.transformers.moe import TransformersMoERunner

from ...config import PrefetchConfig
from ...report import Report
from ...scheduling.scheduler import PrefetchScheduler
from .banks import stacks
from .engine import prefetch_layers
from .hook import LayerHook
from .metrics import publish
from .options import options_of
from .refusals import LEAVE_OUT, refuse, refuse_config, refuse_layer, warn_untried
from .versions import unsupported

__all__ = ["LAYERS", "Stand", "stands_of", "worker_report"]

# Of RoutedExperts.forward_modular.
_ARGUMENTS = ("x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")


class PrefetchedRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """`RoutedExperts` that is prefetched, if its engine asks for that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _take(self)


class PrefetchedMoERunner(MoERunner):  # type: ignore[misc]
    """`MoERunner` whose experts are prefetched, if its engine asks for that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _take(self.routed_experts)


class PrefetchedTransformersMoERunner(TransformersMoERunner):  # type: ignore[misc]
    """The same of vLLM's transformers backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _take(self.routed_experts)


class WatchfulLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    """`LogitsProcessor` that sees to it that an engine that asks for prefetching has layers that are prefetched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = get_current_vllm_config()
        if options_of(engine.additional_config) is None:
            return
        if not stands_of(engine) and not engine.model_config.is_moe:
            refuse([f"{engine.model_config.model} has no experts: {LEAVE_OUT}"])

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Only now are all layers there: some models make this one first. Other workers may have layers that this one lacks.
            if not stands_of(engine) and engine.parallel_config.pipeline_parallel_size == 1:
                refuse([f"{engine.model_config.model} has shown vLLM no experts layers: {LEAVE_OUT}"])
            del self.forward
            return self.forward(*args, **kwargs)

        self.forward = forward


# Ours, each in the place of the class of vLLM's that it derives from.
LAYERS = (PrefetchedRoutedExperts, PrefetchedMoERunner, PrefetchedTransformersMoERunner, WatchfulLogitsProcessor)


def _take(layer: Any) -> None:
    """Stand before a layer, if the engine that is being made asks for prefetching. Idempotent.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: it asks for what can't be had; the message says why.
    """
    engine = get_current_vllm_config()
    options = options_of(engine.additional_config)
    if options is None or hasattr(layer, "prefetching"):
        return
    reason = unsupported(vllm.__version__)
    if reason is not None:
        raise RuntimeError(f"hf_prefetch: {reason}.")
    refuse_config(engine, layer.moe_config.moe_parallel_config)
    refuse_layer(layer)
    Stand(layer, engine, options)


class Stand:
    """Stands before the forwards of one layer, from the moment it is made.

    Attributes:
        layer: a `RoutedExperts`, which has this as its `prefetching`.
        hook: runs its calls, once its engine has been set up, if its experts live in host memory.
    """

    def __init__(self, layer: Any, engine: Any, options: PrefetchConfig) -> None:
        self.layer = layer
        self.hook: LayerHook | None = None
        self._forward, self._options = layer.forward_modular, options
        self._engine: Any = engine
        self._leads: PrefetchScheduler | None = None
        # The device has never more of them than one layer's: weights are loaded into host memory, and vLLM brings a layer back
        # there when it has made of its weights what kernels want.
        for _, parameter in stacks(layer):
            parameter.data = torch.empty_like(parameter.data, device="cpu")
        layer.prefetching = self
        layer.forward_modular, layer.forward_monolithic = self.forward_modular, self.forward_monolithic

    def forward_modular(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts, as vLLM does."""
        arguments = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if self._engine is not None:
            _set_up(self._engine, self._options, arguments["x"].device)
        if self._leads is not None:
            publish(self._leads)
            if self.hook is None:
                self._leads.begin_pass(arguments["topk_ids"].numel())
        if self.hook is None:
            return self._forward(**arguments)
        _begin_serving(self.hook.scheduler)
        return self.hook.forward(self.layer, self._forward, arguments)

    def forward_monolithic(self, *args: Any, **kwargs: Any) -> Any:
        """Say that a kernel of this kind can't be prefetched for."""
        refuse_layer(self.layer)

    def begin(self, hook: LayerHook | None, leads: PrefetchScheduler | None) -> None:
        """Its engine has been set up.

        Args:
            hook: None if its experts stay on the device.
            leads: the scheduler of the engine, if this is its first layer and there is one.
        """
        self.hook, self._engine, self._leads = hook, None, leads
        if hook is not None:
            for parameter in hook.bank.parameters.values():
                # vLLM's own keeps the layer, and whoever keeps a bank must not.
                parameter.weight_loader = functools.partial(_refuse_weights, hook.bank.name)  # type: ignore[attr-defined]
            # Where vLLM loads into new Parameters with the loaders of old, and has the kernel's form of them written here.
            self.layer.quant_method.process_weights_after_loading = functools.partial(_refuse_weights, hook.bank.name)


def _refuse_weights(name: str, *args: Any, **kwargs: Any) -> None:
    """In the place of what loads a weight."""
    refuse([f"weights of {name} can't be loaded again once it is in use: make a new engine."])


def stands_of(engine: Any) -> list[Stand]:
    """What stands before the layers of an engine (`VllmConfig`) in this worker, in the order in which these were made.

    Raises:
        NotImplementedError: there are layers that nothing stands before.
    """
    known = engine.compilation_config.static_forward_context
    layers = [known[name].routed_experts for name in engine.compilation_config.static_all_moe_layers]
    for layer in layers:
        if not hasattr(layer, "prefetching"):
            kind = type(layer).__name__
            refuse([f"{layer.layer_name} and its runner are of classes of the model's own ({kind}): {LEAVE_OUT}"])
    return [layer.prefetching for layer in layers]


def worker_report(worker: Any) -> Report | None:
    """What prefetching did in a worker, for `llm.collective_rpc`; None before its first forward and where there is nothing."""
    hooks = (stand.hook for stand in stands_of(worker.model_runner.vllm_config))
    return next((hook.scheduler.report() for hook in hooks if hook is not None), None)


def _set_up(engine: Any, options: PrefetchConfig, device: torch.device) -> None:
    """Have all layers of an engine prefetched."""
    stands = stands_of(engine)
    warn_untried(engine)
    mode = engine.compilation_config.cudagraph_mode
    graphs = device.type == "cuda" and mode is not None and mode.name != "NONE"
    hooks = prefetch_layers([stand.layer for stand in stands], options, device, graphs=graphs)
    of = {hook.bank.name: hook for hook in hooks}
    for number, stand in enumerate(stands):
        stand.begin(of.get(stand.layer.layer_name), hooks[0].scheduler if number == 0 and hooks else None)


def _begin_serving(scheduler: PrefetchScheduler) -> None:
    """At the first call with requests in it: what was seen before, of made-up tokens that are all alike, is no guide.

    Calls that vLLM makes before it captures a graph, to warm up, look like calls with requests. So this comes once more after
    each of these, and not in a capture, which would replay it.
    """
    if not scheduler.is_new or not is_forward_context_available() or get_forward_context().attn_metadata is None:
        return
    if not scheduler.is_capturing():
        scheduler.begin_anew()
