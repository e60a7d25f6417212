"""Models for the benchmark: published shapes with random weights, or a checkpoint; and the machine that they run on.

A random model costs what a trained one costs as long as whole expert banks travel; what its router prefers does not,
so nothing that depends on routing (hit rates, distinct experts) should be read off one.
"""

from __future__ import annotations

import gc
import os
import platform
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hf_prefetch
from bench_host import host_block
from bench_shapes import DEFAULT_LAYERS, SHAPES

__all__ = ["Subject", "build", "describe_machine", "describe_settings"]

# The piece that `checksum` looks at at once, in int64. Another size gives other sums.
_CHUNK = 1 << 21
# Threads that fill host memory; each of them uses torch's own threads besides.
_MOVERS = 4


@dataclass
class Subject:
    """The one model object that goes through every arm.

    Attributes:
        model: a causal language model; everything but its experts is on `device`.
        device: where it computes.
        experts: the experts modules by name, in the order in which a forward calls them.
        home: where the experts are between two arms: `device`, or the host if it doesn't hold them.
    """

    model: Any
    device: torch.device
    experts: dict[str, nn.Module]
    home: torch.device

    def weights(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """A module's own Parameters *now*: accelerate replaces the objects when it attaches or detaches a hook."""
        return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}

    @property
    def bank_bytes(self) -> dict[str, int]:
        """Size of each experts module's weights."""
        return {name: sum(map(_size, self.weights(module).values())) for name, module in self.experts.items()}

    @property
    def host_bytes(self) -> int:
        """How much of the experts is in host memory now."""
        return sum(_size(p) for p in self._parameters() if p.device.type == "cpu")

    @property
    def num_experts(self) -> int:
        """Experts of one module."""
        return int(next(iter(self.weights(next(iter(self.experts.values()))).values())).shape[0])

    def place_experts(self, device: torch.device, *, ordinary: bool = False) -> None:
        """Move all experts to `device`, one tensor at a time.

        `ordinary`: to memory as torch allocates it, also what is on the host already: an arm before may have left it in
        memory of a special kind.
        """

        def move(parameter: nn.Parameter) -> None:
            with torch.no_grad():
                parameter.data = _to(parameter.data, device, ordinary)

        moving = [parameter for parameter in self._parameters() if ordinary or parameter.device != device]
        with ThreadPoolExecutor(_MOVERS if device.type == "cpu" else 1) as pool:
            list(pool.map(move, moving))
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
        weights: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for parameter in self._parameters():
            flat = parameter.data.contiguous().view(-1)
            whole = _size(flat) % 8 == 0
            words = flat.view(torch.int64) if whole else flat.view(torch.uint8).to(torch.int64)
            if words.device not in weights:
                position = torch.arange(_CHUNK, device=words.device).mul_(2).add_(1)
                weights[words.device] = position, torch.empty_like(position)
            for chunk in torch.split(words, _CHUNK):
                position, product = (tensor[: chunk.numel()] for tensor in weights[words.device])
                plain = (plain + int(chunk.sum())) % 2**64
                weighted = (3 * weighted + int(torch.mul(chunk, position, out=product).sum())) % 2**64
        return [plain, weighted]

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.experts.values() for parameter in self.weights(module).values()]


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _to(tensor: torch.Tensor, device: torch.device, ordinary: bool) -> torch.Tensor:
    if device.type != "cpu":
        return tensor.to(device)
    # Pages are brought in on all threads first: a copy that meets fresh ones waits for each.
    if ordinary:
        return torch.empty_like(tensor, device=device).zero_().copy_(tensor)
    return host_block(_size(tensor)).view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def build(name: str, layers: int | None, checkpoint: str | None, device: torch.device, seed: int = 0) -> Subject:
    """Make the model: random weights in bf16 straight on the device, or a checkpoint whose experts stay in host memory."""
    auto: Any = AutoModelForCausalLM
    if checkpoint is not None:
        model = auto.from_pretrained(checkpoint, dtype="auto", attn_implementation=_attention_of(checkpoint))
        subject = Subject(model.eval(), device, _find_experts(model), home=torch.device("cpu"))
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
    return Subject(model.eval(), device, _find_experts(model), home=device)


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
        "prefetch_from": options.prefetch_from,
        "cap_bytes": options.cap,
    }
