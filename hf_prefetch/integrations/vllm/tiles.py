"""The tiles of vLLM's Triton kernels.

They are chosen from the number of rows that the weights have. A cache has fewer rows than the bank, so a call on it would get
others, and with them other bits. Here it gets those that the whole bank would have got.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["tiles_of_all_rows"]


@contextmanager
def tiles_of_all_rows(layer: Any, hidden: torch.Tensor, ids: torch.Tensor) -> Iterator[None]:
    """Inside, a call of a layer whose weights have fewer rows than it has experts takes the tiles that they all would get.

    Args:
        layer: whose weights point to where the call will read them.
        hidden: hidden states (tokens x hidden).
        ids: expert ids (tokens x top-k).
    """
    kernel = layer.quant_method.moe_kernel.fused_experts
    shapes = [(layer.local_num_experts, *getattr(layer, name).shape[1:]) for name in ("w13_weight", "w2_weight")]
    if shapes[0][0] == layer.w13_weight.shape[0] or type(kernel).__name__ != "TritonExperts":
        yield
        return
    from vllm.model_executor.layers.fused_moe import get_config, override_config
    from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

    config = try_get_optimal_moe_config(
        *shapes,
        ids.shape[-1],
        kernel.quant_config.config_name(hidden.dtype),
        hidden.shape[0],
        block_shape=kernel.block_shape,
    )
    overriding = override_config(get_config() or config)
    overriding.__enter__()
    try:
        yield
    finally:
        # vLLM's own does not restore what was there before if there is an error.
        overriding.__exit__(None, None, None)
