"""Where a model's tensors were before it was enabled, and the way back there.

Three things are moved: the experts go to host memory (the store does that), accelerate's offloading of those experts is
taken over, and everything else goes to the device that computes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from torch import nn

from .discovery import ExpertBank
from .hooks import flatten

__all__ = ["Placement", "TakenHooks", "is_dispatched", "offload_device", "take_hooks"]


class Placement:
    """Moves the tensors of a model that are on the CPU to a device, and back."""

    def __init__(self, model: nn.Module, stay: Collection[int]) -> None:
        """`stay`: ids of Parameters that are not touched."""
        self._model = model
        self._stay = stay
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[tuple[nn.Module, str]] = []

    def move(self, device: torch.device) -> None:
        """Move every Parameter and buffer on the CPU to `device`, in place: Parameters keep their identity."""
        for parameter in self._model.parameters():
            if parameter.device.type == "cpu" and id(parameter) not in self._stay and device.type != "cpu":
                _send(parameter, device)
                self._parameters.append(parameter)
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "cpu" and device.type != "cpu":
                    module._buffers[name] = buffer.to(device)
                    self._buffers.append((module, name))

    def restore(self) -> None:
        """Move back what `move` has moved. Idempotent."""
        while self._parameters:
            _send(self._parameters.pop(), torch.device("cpu"))
        while self._buffers:
            module, name = self._buffers.pop()
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to("cpu")


def _send(parameter: nn.Parameter, device: torch.device) -> None:
    with torch.no_grad():
        parameter.data = parameter.data.to(device)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(device)


def is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate decides where this model's modules are."""
    return any(
        isinstance(hook, AlignDevicesHook) for module in model.modules() for hook in flatten(module.__dict__.get("_hf_hook"))
    )


def offload_device(bank: ExpertBank) -> torch.device | None:
    """Where accelerate would compute a bank that it has offloaded, or None if it has not."""
    for module in bank.modules:
        for hook in flatten(module.__dict__.get("_hf_hook")):
            if isinstance(hook, AlignDevicesHook) and hook.offload:
                return torch.device(hook.execution_device)
    return None


@dataclass(frozen=True)
class TakenHooks:
    """The accelerate hook that a module had, taken off so that its weights are its own; None if it had none."""

    module: nn.Module
    hook: ModelHook | None

    def share(self, bank: ExpertBank) -> None:
        """Let the hook's own map of weights refer to the bank's memory, or it would keep a second copy of it alive."""
        for hook in flatten(self.hook):
            if isinstance(hook, AlignDevicesHook) and hook.offload:
                for name, parameter in bank.parameters.items():
                    _replace(hook.weights_map, name, parameter.data)

    def give_back(self) -> None:
        """Put the hook on the module again."""
        if self.hook is not None:
            add_hook_to_module(self.module, self.hook)


def take_hooks(module: nn.Module) -> TakenHooks:
    """Take accelerate's hook off a module; offloaded weights come back as the module's own, on the CPU.

    accelerate leaves weights that it keeps on disk on the meta device; they are read into memory here.
    """
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        remove_hook_from_module(module)
    for inner in flatten(hook):
        if isinstance(inner, AlignDevicesHook) and inner.offload:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    value = inner.weights_map[name]
                    module._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return TakenHooks(module, hook)


def _replace(weights: object, name: str, value: torch.Tensor) -> None:
    if isinstance(weights, PrefixedDataset):
        _replace(weights.dataset, weights.prefix + name, value)
    elif isinstance(weights, OffloadedWeightsLoader):
        if name in weights.state_dict:
            weights.state_dict[name] = value
    elif isinstance(weights, dict) and name in weights:
        weights[name] = value
