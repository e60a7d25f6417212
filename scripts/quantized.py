"""Quantized experts with random weights, as transformers has them, and kernels for them.

transformers gets the kernels of fine-grained fp8 and of MXFP4 from the Hub. Where it is out of reach they are imported from a
folder with the packages `finegrained_fp8` and `gpt_oss_triton_kernels`, or torch does the same arithmetic in their place: all
of a layer's weights become bfloat16 in device memory, and are multiplied there.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Mxfp4Config
from transformers.integrations import finegrained_fp8, hub_kernels, mxfp4
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

__all__ = ["BUILDERS", "Storage", "TritonTensor", "fp8", "mxfp4_experts", "torch_mxfp4"]


# -- fine-grained fp8 ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def fp8(model: nn.Module, device: torch.device, kernels: Path | None) -> str:
    """Put fp8 experts with scales of blocks in the place of a model's own. Returns what multiplies them."""
    if kernels is not None:
        # What the Hub's builder adds to a package: its operators' names.
        names = ModuleType("finegrained_fp8._ops")
        names.__dict__.update(ops=torch.ops.finegrained_fp8, add_op_namespace_prefix=lambda name: f"finegrained_fp8::{name}")
        sys.modules[names.__name__] = names
        package = _package(kernels, "finegrained_fp8")
        entry = SimpleNamespace(batched_matmul=package.matmul_batched, grouped_matmul=package.matmul_grouped)
    else:
        entry = SimpleNamespace(batched_matmul=_batched, grouped_matmul=_grouped)
    finegrained_fp8.load_finegrained_fp8_kernel = lambda: entry
    decorated = use_experts_implementation(type("FP8", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    generator = torch.Generator(device).manual_seed(7)
    for name in [name for name, _ in model.named_modules() if name.endswith(".experts")]:
        # Scales of 128 x 128 where these divide the matrices.
        own = model.get_submodule(name)
        edges = [own.gate_up_proj.shape[2], own.down_proj.shape[2]]
        edge = next(size for size in (128, 64, 32, 16) if not any(width % size for width in edges))
        model.set_submodule(name, nn.Module())
        del own
        with device:
            experts = decorated(config=model.config, block_size=(edge, edge))
        for key, parameter in experts.named_parameters():
            parameter.requires_grad_(False)
            if "scale" in key:
                parameter.uniform_(0.015, 0.025, generator=generator)
            else:
                for row in parameter:
                    row.copy_(torch.randn(row.shape, device=device, generator=generator))
        model.set_submodule(name, experts)
    return "finegrained-fp8" if kernels is not None else "torch in its place"


def _unpacked(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values (experts, rows, columns) in bfloat16; each scale is for a block of them."""
    values = weight.to(torch.bfloat16)
    (count, rows, columns), (_, high, wide) = weight.shape, scales.shape
    values.view(count, high, rows // high, wide, columns // wide).mul_(scales[:, :, None, :, None].to(torch.bfloat16))
    return values


def _batched(
    given: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, expert_ids: torch.Tensor, **_: Any
) -> torch.Tensor:
    values = _unpacked(weight[expert_ids], scales[expert_ids])
    return torch.bmm(values.to(given.dtype), given[:, :, None])[:, :, 0]


def _grouped(
    given: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, offsets: torch.Tensor, **_: Any
) -> torch.Tensor:
    return _by_expert(given, _unpacked(weight, scales).mT, offsets)


def _by_expert(given: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows in the order of their experts, each times its expert's matrix (inputs, outputs)."""
    if given.is_cuda:
        return torch._grouped_mm(given, values, offs=offsets.to(torch.int32))
    ends = [0, *offsets.tolist()]
    parts = [given[begin:end] @ matrix for begin, end, matrix in zip(ends, ends[1:], values.to(given.dtype), strict=False)]
    return torch.cat(parts)


# -- MXFP4 --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def mxfp4_experts(model: nn.Module, device: torch.device, kernels: Path | None) -> str:
    """Put experts for the kernels of MXFP4 in the place of gpt-oss's own. Returns what multiplies them."""
    package = torch_mxfp4() if kernels is None else _package(kernels, "gpt_oss_triton_kernels")
    hub_kernels.get_kernel = lambda *_, **__: package
    mxfp4.replace_with_mxfp4_linear(model, quantization_config=Mxfp4Config())
    generator = torch.Generator(device).manual_seed(7)
    for experts in [module for module in model.modules() if isinstance(module, mxfp4.Mxfp4GptOssExperts)]:
        experts.to_empty(device=device)
        for name, columns in (("gate_up_proj", experts.hidden_size), ("down_proj", experts.intermediate_size)):
            bias = getattr(experts, f"{name}_bias")
            bias.normal_(0, 0.02, generator=generator)
            size = (*bias.shape, columns // 32)
            blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, device=device, generator=generator)
            scales = torch.randint(119, 122, size, dtype=torch.uint8, device=device, generator=generator)
            mxfp4.swizzle_mxfp4_convertops(blocks, scales, experts, name, device, package)
            # Where there is an accelerator it takes them there, whatever device is asked for.
            for holder in (getattr(experts, name), getattr(experts, f"{name}_precision_config").weight_scale):
                holder.storage.data = holder.storage.data.to(device)
    return "gpt-oss-triton-kernels" if kernels is not None else "torch in its place"


@dataclass
class Storage:
    """Bytes (experts, inputs / 2, outputs), two values in each, or scales (experts, inputs / 32, outputs)."""

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
    """Tokens sorted by expert: which they are, where each expert's end, and the weight of each."""

    order: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor
    gate_scal: torch.Tensor
    top_k: int


def _route(logits: torch.Tensor, top_k: int) -> tuple[Routing, None, None]:
    weights, ids = logits.topk(top_k)
    experts, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(logits.shape[1], device=logits.device), right=True)
    return Routing(order, experts, ends, weights.softmax(-1).flatten()[order], top_k), None, None


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
    """Each token times its experts' weights, through the activation; or what comes of that, summed with its weights."""
    blocks, scales = weight.storage.data.mT, precision_config.weight_scale.storage.data.mT
    # Two values for each byte.
    values = torch.tensor(mxfp4.FP4_VALUES, dtype=torch.bfloat16, device=given.device)
    byte = torch.arange(256, device=given.device)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), 1).view(torch.int32)[:, 0]
    matrices = pairs[blocks.int()].view(torch.bfloat16)
    matrices.unflatten(2, (scales.shape[2], 32)).mul_((scales.float() - 127).exp2().to(torch.bfloat16)[..., None])
    if fused_activation is not None:
        given = given[routing.order // routing.top_k]
    product = _by_expert(given, matrices.mT, routing.ends) + bias[routing.experts].to(given.dtype)
    if fused_activation is not None:
        alpha, limit = fused_activation
        gate, up = product[:, ::2].clamp(max=limit), product[:, 1::2].clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    assert gammas is not None
    product *= gammas[:, None].to(product.dtype)
    return torch.empty_like(product).index_copy_(0, routing.order, product).unflatten(0, (-1, routing.top_k)).sum(1)


def torch_mxfp4() -> Any:
    """What transformers asks of the package of kernels."""
    return SimpleNamespace(
        matmul_ogs=SimpleNamespace(
            matmul_ogs=_multiply,
            PrecisionConfig=Precision,
            FlexCtx=lambda **_: None,
            InFlexData=lambda: None,
            FnSpecs=lambda *_: None,
            FusedActivation=lambda specs, arguments, reduction: arguments,
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


BUILDERS = {"fp8": fp8, "mxfp4": mxfp4_experts}


def _package(folder: Path, name: str) -> Any:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)
