"""Models for the benchmark: published shapes with random weights, or a checkpoint; and the machine that they run on.

A random model costs what a trained one costs as long as whole expert banks travel; what its router prefers does not,
so nothing that depends on routing (hit rates, distinct experts) should be read off one.
"""

from __future__ import annotations

import gc
import os
import platform
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hf_prefetch

__all__ = ["DEFAULT_LAYERS", "SHAPES", "Shape", "Subject", "build", "describe_machine", "describe_settings"]

DEFAULT_LAYERS = 16
# The biggest piece that `checksum` looks at at once, in int64: what it needs beside the weights is a few times that.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Shape:
    """A published configuration: its model type, what differs from that type's defaults, and how it attends."""

    model_type: str
    config: dict[str, Any]
    layers: int
    attention: str = "sdpa"


def _rope(theta: float) -> dict[str, Any]:
    # Rotary scaling for long contexts is left out: it changes numbers, not time.
    return {"rope_type": "default", "rope_theta": theta}


SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": Shape(
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1e6),
        },
        layers=48,
    ),
    "mixtral-8x7b": Shape(
        "mixtral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1e6),
            "sliding_window": None,
        },
        layers=32,
    ),
    # transformers has no SDPA for its attention sinks, so the scores of a long prompt are whole matrices.
    "gpt-oss-20b": Shape(
        "gpt_oss",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rope_parameters": _rope(150000.0),
        },
        layers=24,
        attention="eager",
    ),
    "olmoe": Shape(
        "olmoe",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1e4),
        },
        layers=16,
    ),
    "deepseek-v2-lite": Shape(
        "deepseek_v2",
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 163840,
            "rope_parameters": _rope(1e4),
        },
        layers=27,
    ),
    "tiny": Shape(
        "qwen3_moe",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1e4),
        },
        layers=5,
    ),
}


@dataclass
class Subject:
    """The one model object that goes through every arm.

    Attributes:
        model: a causal language model; everything but its experts is on `device`.
        device: where it computes.
        experts: the experts modules by name, in the order in which a forward calls them.
    """

    model: Any
    device: torch.device
    experts: dict[str, nn.Module]

    def weights(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """A module's own Parameters *now*: accelerate replaces the objects when it attaches or detaches a hook."""
        return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}

    @property
    def bank_bytes(self) -> dict[str, int]:
        """Size of each experts module's weights."""
        return {
            name: sum(parameter.numel() * parameter.element_size() for parameter in self.weights(module).values())
            for name, module in self.experts.items()
        }

    @property
    def num_experts(self) -> int:
        """Experts of one module."""
        return int(next(iter(self.weights(next(iter(self.experts.values()))).values())).shape[0])

    def place_experts(self, device: torch.device) -> None:
        """Move all experts to `device`, one tensor at a time; in host memory, to ordinary memory of their own."""
        for module in self.experts.values():
            for parameter in self.weights(module).values():
                if parameter.device != device or device.type == "cpu":
                    with torch.no_grad():
                        parameter.data = _to(parameter.data, device)
        self.tidy()

    def tidy(self) -> None:
        """Give back what nothing uses any more, on the host and on the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    @torch.no_grad()
    def checksum(self) -> list[int]:
        """Two sums over every byte of the experts, modulo 2**64, one weighted by position: the same on any device."""
        plain = weighted = 0
        for module in self.experts.values():
            for parameter in self.weights(module).values():
                flat = parameter.data.contiguous().view(-1)
                whole = flat.numel() * flat.element_size() % 8 == 0
                words = flat.view(torch.int64) if whole else flat.view(torch.uint8).to(torch.int64)
                position = torch.arange(min(_CHUNK, words.numel()), device=words.device).mul_(2).add_(1)
                for chunk in torch.split(words, _CHUNK):
                    plain = (plain + int(chunk.sum())) % 2**64
                    weighted = (3 * weighted + int((chunk * position[: chunk.numel()]).sum())) % 2**64
        return [plain, weighted]


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return tensor.to(device)
    # What one arm leaves may lie in memory of a special kind, so it is copied also where it is on the host already.
    # Pages are brought in on all threads first: a copy that meets fresh ones waits for each.
    target = torch.empty_like(tensor, device=device)
    return target.zero_().copy_(tensor)


def build(name: str, layers: int | None, checkpoint: str | None, device: torch.device, seed: int = 0) -> Subject:
    """Make the model: random weights in bf16 straight on the device, or a checkpoint whose experts stay in host memory."""
    auto: Any = AutoModelForCausalLM
    if checkpoint is not None:
        model = auto.from_pretrained(checkpoint, dtype="auto", attn_implementation=_attention_of(checkpoint))
        subject = Subject(model.eval(), device, _find_experts(model))
        stay = {id(parameter) for module in subject.experts.values() for parameter in module.parameters(recurse=False)}
        _move_rest(model, stay, device)
        return subject
    shape = SHAPES[name]
    count = layers or min(shape.layers, DEFAULT_LAYERS)
    config = AutoConfig.for_model(shape.model_type, **shape.config, num_hidden_layers=count, tie_word_embeddings=False)
    torch.manual_seed(seed)
    with device:
        model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation=shape.attention)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Biases start at zero, which would hide one that never arrives.
            if parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.02)
    return Subject(model.eval(), device, _find_experts(model))


def _attention_of(checkpoint: str) -> str:
    kind = AutoConfig.from_pretrained(checkpoint).model_type
    return next((shape.attention for shape in SHAPES.values() if shape.model_type == kind), "sdpa")


def _find_experts(model: nn.Module) -> dict[str, nn.Module]:
    def stacks(module: nn.Module) -> int:
        return sum(parameter is not None and parameter.dim() == 3 for parameter in module._parameters.values())

    experts = {name: module for name, module in model.named_modules() if stacks(module) >= 2}
    if not experts:
        raise ValueError(f"{type(model).__name__} has no modules with stacked experts, so there is nothing to measure.")
    return experts


def _move_rest(model: nn.Module, stay: set[int], device: torch.device) -> None:
    for parameter in model.parameters():
        if id(parameter) not in stay:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    memory = Path("/proc/meminfo")
    total = int(memory.read_text().split()[1]) * 1024 if memory.exists() else None
    cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "device": device.type,
        "name": cuda.name if cuda else "CPU stand-in",
        "device_bytes": cuda.total_memory if cuda else None,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "hf_prefetch": hf_prefetch.__version__,
    }


def describe_settings(subject: Subject, options: Namespace) -> dict[str, Any]:
    """Everything that may decide about a last bit or a millisecond."""
    config = subject.model.config
    backends = ("flash", "mem_efficient", "math", "cudnn")
    return {
        "attention": config._attn_implementation,
        "experts_prefill": config._experts_implementation,
        "experts_decode": "batched_mm" if subject.device.type != "cpu" else config._experts_implementation,
        "cache": "DynamicCache, a new one in each pass",
        "grad_mode": "no_grad",
        "logits": "last position",
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sdp_backends": [name for name in backends if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()],
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "threads": torch.get_num_threads(),
        "seed": 0,
        "warmups": options.warmups,
        "repeats": options.repeats,
        "slow_repeats": options.slow_repeats,
        "decode_prompt": options.decode_prompt,
    }
