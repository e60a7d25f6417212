"""Arms of other makers: accelerate's and diffusers' offloading, and the plainest copies that there can be."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import nn

from bench_arm import Arm
from bench_host import PinnedBlock, empty_host_cache
from bench_models import Subject

__all__ = ["Accelerate", "Diffusers", "DiffusersWhole", "PinnedSerial"]

_ALIGNMENT = 256


class _WholeBanks(Arm):
    """An arm that sends every expert of a module for each of its calls."""

    def __init__(self, name: str, subject: Subject) -> None:
        super().__init__(name, subject)
        self._handles: list[Any] = []
        self._blocks: list[PinnedBlock] = []
        self._moved = 0

    def count_calls(self) -> None:
        """Count the bytes of a bank whenever its module is called."""
        for name, nbytes in self.subject.bank_bytes.items():
            count = functools.partial(self._count, nbytes)
            self._handles.append(self.subject.experts[name].register_forward_pre_hook(count))

    def _count(self, nbytes: int, *_: Any) -> None:
        self._moved += nbytes

    def moved(self) -> int:
        return self._moved

    def lock_experts(self) -> None:
        """Move every bank into a page-locked block of its own."""
        for module in self.subject.experts.values():
            block = PinnedBlock(self.block_bytes(module), self.subject.device)
            self._blocks.append(block)
            host = self.views(module, block.bytes)
            for name, parameter in self.subject.weights(module).items():
                with torch.no_grad():
                    parameter.data = host[name].copy_(parameter)

    def block_bytes(self, module: nn.Module) -> int:
        """Size of a block that holds a bank."""
        sizes = (parameter.numel() * parameter.element_size() for parameter in self.subject.weights(module).values())
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)

    def views(self, module: nn.Module, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """A bank's tensors in a block."""
        views, offset = {}, 0
        for name, parameter in self.subject.weights(module).items():
            size = parameter.numel() * parameter.element_size()
            flat = block[offset : offset + size].view(parameter.dtype)
            views[name] = flat.as_strided(parameter.shape, parameter.stride())
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        return views

    def leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self.subject.device.type == "cuda":
            torch.cuda.synchronize(self.subject.device)
        # While the memory is locked this is fast.
        self.subject.place_experts(self.subject.home)
        while self._blocks:
            self._blocks.pop().release()


class Accelerate(_WholeBanks):
    """accelerate's own offloading, as `device_map` gives it: experts "cpu", everything else on the device."""

    rank = "slow"

    def enter(self) -> dict[str, Any]:
        subject = self.subject
        subject.place_experts(torch.device("cpu"), ordinary=True)
        self.count_calls()
        if subject.device.type == "cpu":
            # dispatch_model offloads nothing where the main device is the CPU.
            for module in subject.experts.values():
                cpu_offload(module, execution_device=subject.device)
            return {"device_map": None}
        device_map: dict[str, int | str] = {}
        self._map(subject.model, "", device_map)
        skip = getattr(subject.model, "_skip_keys_device_placement", None)
        dispatch_model(subject.model, device_map, main_device=subject.device.index, skip_keys=skip)
        return {"device_map": f'{len(subject.experts)} modules "cpu", {len(device_map) - len(subject.experts)} on the device'}

    def _map(self, module: nn.Module, name: str, device_map: dict[str, int | str]) -> None:
        """Give every module that holds no experts its device; descend into those that do."""
        if name in self.subject.experts:
            device_map[name] = "cpu"
        elif not any(inner.startswith(f"{name}." if name else "") for inner in self.subject.experts):
            device_map[name] = self.subject.device.index
        else:
            for child_name, child in module.named_children():
                self._map(child, f"{name}.{child_name}" if name else child_name, device_map)
            for own in module._parameters:
                device_map[f"{name}.{own}" if name else own] = self.subject.device.index

    def leave(self) -> None:
        remove_hook_from_submodules(self.subject.model)
        self.subject.model.__dict__.pop("hf_device_map", None)
        super().leave()


class PinnedSerial(_WholeBanks):
    """Experts in page-locked memory, each bank copied whole right before its module runs: no overlap, nothing else."""

    rank = "side"

    def enter(self) -> dict[str, Any]:
        subject, begin = self.subject, time.perf_counter()
        self.lock_experts()
        seconds = time.perf_counter() - begin
        buffer = torch.empty(max(map(self.block_bytes, subject.experts.values())), dtype=torch.uint8, device=subject.device)
        for module, block in zip(subject.experts.values(), self._blocks, strict=True):
            sent = self.views(module, buffer)
            there = {name: nn.Parameter(view, requires_grad=False) for name, view in sent.items()}
            self._handles += self._hook(module, subject.weights(module), there, block.bytes, buffer)
        return {"seconds": seconds}

    def _hook(
        self,
        module: nn.Module,
        own: dict[str, nn.Parameter],
        there: dict[str, nn.Parameter],
        block: torch.Tensor,
        buffer: torch.Tensor,
    ) -> list[Any]:
        def send(*_: Any) -> None:
            buffer[: block.numel()].copy_(block, non_blocking=True)
            self._moved += block.numel()
            module._parameters.update(there)

        def restore(*_: Any) -> None:
            module._parameters.update(own)

        return [module.register_forward_pre_hook(send), module.register_forward_hook(restore, always_call=True)]


class Diffusers(_WholeBanks):
    """diffusers' group offloading of the experts modules: leaf level, from page-locked memory, on a stream of its own.

    It learns in the first pass which module comes after which, if those modules lie in the module that it was given. So
    it is given one that holds the experts modules and nothing else, and whose forward is the model's.
    """

    rank = "side"

    def __init__(self, name: str, subject: Subject) -> None:
        super().__init__(name, subject)
        self._own_forward: dict[nn.Module, Any] = {}

    def missing(self) -> str | None:
        try:
            importlib.import_module("diffusers.hooks.group_offloading")
        except Exception as error:  # noqa: BLE001 - also where a package that it needs is missing or too old
            return f"diffusers can't be imported: {' '.join(str(error).split())}"
        return None

    def enter(self) -> dict[str, Any]:
        subject = self.subject
        self._own_forward = {module: module.__dict__.get("forward") for module in subject.model.modules()}
        self.count_calls()
        # It would lock them itself, in blocks that torch rounds up to powers of two; what is locked already it takes as it is.
        self.lock_experts()
        offload = importlib.import_module("diffusers.hooks").apply_group_offloading
        offload(
            self.root(),
            onload_device=subject.device,
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            # The stand-in has no streams.
            use_stream=subject.device.type != "cpu",
        )
        return {"diffusers": importlib.import_module("diffusers").__version__}

    def root(self) -> nn.Module:
        """The module that is offloaded."""
        model = self.subject.model
        root = _Around(model.forward, self.subject.experts.values())

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return root(*args, **kwargs)

        model.forward = forward
        return root

    def leave(self) -> None:
        for module, forward in self._own_forward.items():
            module.__dict__.pop("_diffusers_hook", None)
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
        self._own_forward.clear()
        super().leave()


class _Around(nn.Module):
    """Holds some modules, and runs something else."""

    def __init__(self, run: Callable[..., Any], modules: Any) -> None:
        super().__init__()
        self.modules_inside = nn.ModuleList(modules)
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._run(*args, **kwargs)


class DiffusersWhole(Diffusers):
    """The same with the whole model, as its users apply it: whatever has weights is offloaded, the experts among it."""

    # `generate` asks the model's first weight where it is, and takes another experts implementation for the CPU.
    decodes = False

    def root(self) -> nn.Module:
        model: nn.Module = self.subject.model
        return model

    def leave(self) -> None:
        super().leave()
        experts = {id(parameter) for module in self.subject.experts.values() for parameter in module.parameters(recurse=False)}
        for tensor in (*self.subject.model.parameters(), *self.subject.model.buffers()):
            if id(tensor) not in experts and tensor.device != self.subject.device:
                tensor.data = tensor.data.to(self.subject.device)
        self.subject.tidy()
        empty_host_cache()
