"""Experts in the number formats of quantized checkpoints: what transformers puts in the place of a model's own, made here.

Their kernels come from the Hub and want a GPU. Here torch does the same arithmetic in their place, on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import finegrained_fp8, hub_kernels, mxfp4
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

import quantized
from models import build, experts_of

__all__ = ["FP8", "fp8_model", "gguf_model", "mxfp4_model", "torch_kernels"]

# Scales of blocks, of whole matrices, and as exponents of one byte; scales of inputs besides.
FP8: dict[str, dict[str, Any]] = {
    "blocks": {"block_size": (16, 16)},
    "matrices": {"block_size": None},
    "exponents": {"block_size": (64, 64), "scale_fmt": "ue8m0"},
    "static": {"block_size": None, "activation_scheme": "static"},
}


def fp8_model(kind: str) -> PreTrainedModel:
    """A small Qwen3-MoE whose experts are what transformers makes of a fine-grained fp8 checkpoint."""
    model = build("qwen3_moe", torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    decorated = use_experts_implementation(type("FP8", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    for name in experts_of(model):
        experts = decorated(config=model.config, **FP8[kind])
        for parameter in experts.parameters():
            parameter.requires_grad_(False)
            size = parameter.shape
            value = (
                torch.randn(size, generator=generator) if parameter.dim() == 3 else torch.rand(size, generator=generator) + 0.5
            )
            if "scale" in (key := next(key for key, own in experts.named_parameters() if own is parameter)):
                value = torch.randint(-8, -5, size, generator=generator).float().exp2() if "inv" in key else value
            parameter.copy_(value.to(parameter.dtype))
        model.set_submodule(name, experts)
    return model


def _weights(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values of one expert's matrix; each scale is for a block of it."""
    scales = scales.float()
    for dim in (0, 1):
        scales = scales.repeat_interleave(-(-weight.shape[dim] // scales.shape[dim]), dim)
    return weight.float() * scales[: weight.shape[0], : weight.shape[1]]


def _linear(
    self: FP8Experts, given: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, activation_scale: Any = None
) -> torch.Tensor:
    scale = 1.0 if activation_scale is None else activation_scale
    return nn.functional.linear(given.float() * scale, _weights(weight, scales.reshape(-1, scales.shape[-1]))).to(given.dtype)


def _batched(
    given: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, expert_ids: torch.Tensor, **_: Any
) -> torch.Tensor:
    rows = [nn.functional.linear(row.float(), _weights(weight[e], scales[e])) for row, e in zip(given, expert_ids, strict=True)]
    return torch.stack(rows).to(given.dtype)


def _grouped(
    given: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, offsets: torch.Tensor, **_: Any
) -> torch.Tensor:
    ids = torch.bucketize(torch.arange(len(given)), offsets, right=True)
    return _batched(given, weight, scales, expert_ids=ids)


def torch_kernels(patch: Callable[..., None]) -> None:
    """Have torch do what the kernels do. `patch` is a monkeypatch's setattr."""
    patch(FP8Experts, "linear", _linear)
    patch(
        finegrained_fp8,
        "load_finegrained_fp8_kernel",
        lambda: SimpleNamespace(batched_matmul=_batched, grouped_matmul=_grouped),
    )


def gguf_model(patch: Callable[..., None]) -> PreTrainedModel:
    """A small Qwen3-MoE whose experts stay packed as in a GGUF file. What multiplies them takes bytes for values here."""
    utils = pytest.importorskip("transformers.integrations.gguf.utils")
    if not hasattr(utils, "GgufExperts"):
        pytest.skip("this version of transformers unpacks them")

    def multiply(blocks: torch.Tensor, given: torch.Tensor, ids: torch.Tensor, _: int, __: int) -> torch.Tensor:
        # One operator that is given all of them, whichever it reads.
        blocks, width = blocks.clone(), min(blocks.shape[2], given.shape[1])
        given = given.repeat_interleave(ids.shape[1], 0)[:, :width].float()
        rows = [blocks[expert, :, :width].float() / 255 @ row for row, expert in zip(given, ids.flatten().long(), strict=True)]
        return torch.stack(rows).view(*ids.shape, -1)

    patch(utils, "mul_mat_id", multiply)
    model = build("qwen3_moe", torch.float32)
    generator = torch.Generator().manual_seed(7)
    for name, own in experts_of(model).items():
        experts = utils.GgufExperts(own.num_experts, 64, 256, 8, 12, own.act_fn)  # Q8_0 and Q4_K
        for parameter in experts.parameters():
            parameter.copy_(torch.randint(0, 256, parameter.shape, dtype=torch.uint8, generator=generator))
        model.set_submodule(name, experts)
    return model


def mxfp4_model(patch: Callable[..., None]) -> PreTrainedModel:
    """A small gpt-oss as transformers loads it for the kernels of MXFP4, with torch in their place."""
    patch(hub_kernels, "get_kernel", None)
    patch(mxfp4, "triton_kernels_hub", None, raising=False)
    model = build("gpt_oss", torch.bfloat16)
    quantized.mxfp4_experts(model, torch.device("cpu"), None)
    return model
