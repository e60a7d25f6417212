"""The class that takes the place of vLLM's `RoutedExperts`. Imported only where vLLM is."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ...config import PrefetchConfig
from ...scheduling.scheduler import PrefetchScheduler
from .banks import stacks
from .engine import prefetch_layers
from .hook import LayerHook
from .options import options_of
from .refusals import refuse, refuse_config, refuse_layer
from .versions import unsupported

__all__ = ["PrefetchedRoutedExperts", "engine_layers"]


class PrefetchedRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """`RoutedExperts` whose weights live in host memory, if its engine asks for that; otherwise what vLLM has.

    Attributes:
        prefetch_hook: runs its calls, once its engine has been set up, if its experts live in host memory.
    """

    # Annotations only: values would hide what nn.Module keeps.
    prefetch_hook: LayerHook | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = get_current_vllm_config()
        options = options_of(engine.additional_config)
        self._prefetch_options: PrefetchConfig | None = options
        self._prefetch_engine: VllmConfig | None = None
        self.prefetch_hook = None
        if options is None:
            return
        import vllm

        reason = unsupported(vllm.__version__)
        if reason is not None:
            raise RuntimeError(f"hf_prefetch: {reason}.")
        refuse_config(engine, self.moe_config.moe_parallel_config)
        refuse_layer(self)
        self._prefetch_engine = engine
        # The device has never more of them than one layer's: weights are loaded into host memory, and vLLM brings a layer back
        # there when it has made of its weights what kernels want.
        for _, parameter in stacks(self):
            parameter.data = torch.empty_like(parameter.data, device="cpu")

    def forward_modular(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts, as vLLM does."""
        if self._prefetch_options is None:
            return super().forward_modular(*args, **kwargs)
        names = ("x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if self._prefetch_engine is not None:
            _set_up(self._prefetch_engine, self._prefetch_options, arguments["x"].device)
        if self.prefetch_hook is None:
            return super().forward_modular(**arguments)
        _begin_serving(self.prefetch_hook.scheduler)
        return self.prefetch_hook.forward(self, super().forward_modular, arguments)

    def forward_monolithic(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts, as vLLM does; a kernel of this kind can't be prefetched for."""
        if self._prefetch_options is not None:
            refuse_layer(self)
        return super().forward_monolithic(*args, **kwargs)

    def weight_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Load a weight, as vLLM does, before the first forward."""
        if self.prefetch_hook is not None:
            refuse([f"weights of {self.layer_name} can't be loaded again once it is in use: make a new engine."])
        return super().weight_loader(*args, **kwargs)

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]


def engine_layers(engine: Any) -> list[Any]:
    """The `RoutedExperts` of an engine (`VllmConfig`) in this worker, in the order in which they were made."""
    known = engine.compilation_config.static_forward_context
    return [known[name].routed_experts for name in engine.compilation_config.static_all_moe_layers]


def _set_up(engine: VllmConfig, options: PrefetchConfig, device: torch.device) -> None:
    """Have all layers of an engine prefetched."""
    layers = engine_layers(engine)
    foreign = [layer for layer in layers if not isinstance(layer, PrefetchedRoutedExperts)]
    if foreign:
        kind = type(foreign[0]).__name__
        refuse([f"{foreign[0].layer_name} is a {kind}, a class of the model's own, which vLLM lets nobody take the place of."])
    graphs = bool(engine.compilation_config.cudagraph_mode) and device.type == "cuda"
    hooks = {hook.bank.name: hook for hook in prefetch_layers(layers, options, device, graphs=graphs)}
    for layer in layers:
        layer.prefetch_hook, layer._prefetch_engine = hooks.get(layer.layer_name), None


def _begin_serving(scheduler: PrefetchScheduler) -> None:
    """At the first call with requests in it: what was seen before, of made-up tokens that are all alike, is no guide."""
    if scheduler.is_new and is_forward_context_available() and get_forward_context().attn_metadata is not None:
        scheduler.begin_anew()
