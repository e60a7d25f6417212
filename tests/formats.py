"""Experts in the number formats of quantized checkpoints: what transformers puts in the place of a model's own, made here.

Their kernels come from the Hub and want a GPU. Here torch does the same arithmetic in their place, on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Mxfp4Config, PreTrainedModel
from transformers.integrations import finegrained_fp8, hub_kernels, mxfp4
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

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
        width = min(blocks.shape[2], given.shape[1])
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


# -- MXFP4: weights in objects as Triton's kernels have them ----------------------------------------------------------------


@dataclass
class Storage:
    """Bytes, two values in each, or a scale in each."""

    data: torch.Tensor


@dataclass
class TritonTensor:
    """What a kernel is given."""

    storage: Storage
    shape: Any = None


@dataclass
class Precision:
    """What goes with a weight."""

    weight_scale: TritonTensor
    flex_ctx: Any = None


@dataclass
class Routing:
    """Which experts each token goes to, and with what weights."""

    ids: torch.Tensor
    gate_scal: torch.Tensor


def _route(logits: torch.Tensor, top_k: int) -> tuple[Routing, None, None]:
    weights, ids = logits.topk(top_k)
    return Routing(ids, weights.softmax(-1)), None, None


def _multiply(
    given: torch.Tensor,
    weight: TritonTensor,
    bias: torch.Tensor,
    routing: Routing,
    *,
    precision_config: Precision,
    gammas: torch.Tensor | None,
    fused_activation: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Each token with its experts' weights; after the second product their sum."""
    blocks, scales = weight.storage.data, precision_config.weight_scale.storage.data
    values = torch.tensor(mxfp4.FP4_VALUES)[torch.stack((blocks & 15, blocks >> 4), 2).flatten(1, 2).long()]
    values *= (scales.float() - 127).exp2().repeat_interleave(values.shape[1] // scales.shape[1], 1)
    assert values.shape == weight.shape
    rows = given.float().repeat_interleave(routing.ids.shape[1], 0) if gammas is None else given.float()
    ids = routing.ids.flatten()
    product = torch.stack([row @ values[e] + bias[e] for row, e in zip(rows, ids.tolist(), strict=True)])
    if fused_activation is not None:
        return (product[:, ::2].sigmoid() * product[:, 1::2]).to(given.dtype)
    assert gammas is not None
    return (product.view(*gammas.shape, -1) * gammas[..., None]).sum(1).to(given.dtype)


_MXFP4_KERNELS = SimpleNamespace(
    matmul_ogs=SimpleNamespace(
        matmul_ogs=_multiply,
        PrecisionConfig=Precision,
        FlexCtx=lambda **_: None,
        InFlexData=lambda: None,
        FnSpecs=lambda *_: None,
        FusedActivation=lambda *_: "swiglu",
    ),
    routing=SimpleNamespace(routing=_route),
    swiglu=SimpleNamespace(swiglu_fn=None),
    tensor=SimpleNamespace(
        FP4=None,
        wrap_torch_tensor=lambda tensor, **_: tensor,
        convert_layout=lambda tensor, *_, **__: TritonTensor(Storage(tensor)),
    ),
    tensor_details=SimpleNamespace(
        layout=SimpleNamespace(StridedLayout=None, make_default_matmul_mxfp4_w_layout=lambda mx_axis: (None, {}))
    ),
)


def mxfp4_model(patch: Callable[..., None]) -> PreTrainedModel:
    """A small gpt-oss as transformers loads it for the kernels of MXFP4, with torch in their place."""
    patch(hub_kernels, "get_kernel", lambda *_, **__: _MXFP4_KERNELS)
    patch(mxfp4, "triton_kernels_hub", _MXFP4_KERNELS, raising=False)
    model = build("gpt_oss", torch.bfloat16)
    mxfp4.replace_with_mxfp4_linear(model, quantization_config=Mxfp4Config())
    generator = torch.Generator().manual_seed(7)
    for experts in experts_of(model).values():
        experts.to_empty(device="cpu")
        for name in ("gate_up_proj", "down_proj"):
            bias = getattr(experts, f"{name}_bias")
            bias.copy_(torch.randn(bias.shape, generator=generator))
            columns = experts.hidden_size if name == "gate_up_proj" else experts.intermediate_size
            size = (*bias.shape, columns // 32)
            blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, size, dtype=torch.uint8, generator=generator)
            mxfp4.swizzle_mxfp4_convertops(blocks, scales, experts, name, torch.device("cpu"), _MXFP4_KERNELS)
    return model.eval()
