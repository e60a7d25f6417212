"""Where a model's tensors were before it was enabled, and the way back there.

Three things are moved: the experts go to host memory (the store does that), accelerate's offloading of those experts is
taken over, and everything else goes to the device that computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeGuard

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, remove_hook_from_module
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from torch import nn

from ..banks.bank import ExpertBank
from ..hooks import all_or_nothing, flatten, put_on
from ..memory.checkpoint import StoredTensor, read_headers
from ..memory.deferred import Stored
from ..memory.disk import OnDisk, replace_parameter
from ..memory.store import send_parameter
from ..memory.values import Load, copy_value

__all__ = ["DeviceMap", "Placement", "TakenHooks", "is_dispatched", "offload_device"]

# Where a module keeps the hook that was taken off it: it still says how the model was dispatched.
_TAKEN = "_hf_prefetch_taken"


class Placement:
    """Moves the tensors of a model that are on the CPU to a device, and back."""

    def __init__(self, model: nn.Module, stay: Collection[int], load: Load = copy_value) -> None:
        """`stay`: ids of Parameters that are not touched. `load`: brings a value into memory that is there for it."""
        self._model = model
        self._stay = stay
        self._load = load
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[tuple[nn.Module, str]] = []

    def move(self, device: torch.device) -> None:
        """Move every Parameter and buffer on the CPU to `device`, in place: Parameters keep their identity."""
        self.send((parameter for parameter in self._model.parameters() if id(parameter) not in self._stay), device)
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "cpu" and device.type != "cpu":
                    self._buffers.append((module, name))
                    with torch.inference_mode(False):
                        module._buffers[name] = buffer.to(device)

    def send(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        """Move some Parameters from the CPU to a device of their own."""
        for parameter in parameters:
            if parameter.device.type == "cpu":
                self._load(parameter, parameter.data)
            if parameter.device.type == "cpu" and device.type != "cpu":
                self._parameters.append(parameter)
                send_parameter(parameter, device)

    def restore(self) -> None:
        """Move back what `move` has moved. Idempotent."""
        while self._parameters:
            send_parameter(self._parameters[-1], torch.device("cpu"))
            self._parameters.pop()
        while self._buffers:
            module, name = self._buffers[-1]
            buffer = module._buffers.get(name)
            if buffer is not None:
                with torch.inference_mode(False):
                    module._buffers[name] = buffer.to("cpu")
            self._buffers.pop()


class DeviceMap:
    """What a dispatched model says about itself (`hf_device_map`).

    transformers does not compile a decoding step of a model that has parts on the CPU or on disk. The experts that were
    taken over are prefetched and no longer offloaded, so the map says that they are on the device that computes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, object] | None = None

    def claim(self, banks: Iterable[ExpertBank], devices: Iterable[torch.device]) -> None:
        """Enter the devices of banks that the map names by themselves. What is named with more around it stays as it is."""
        before = self._model.__dict__.get("hf_device_map")
        if not isinstance(before, dict):
            return
        names = {module: name for name, module in self._model.named_modules()}
        after = dict(before)
        numbers = any(isinstance(place, int) for place in before.values())
        for bank, device in zip(banks, devices, strict=True):
            for name in map(names.get, (*bank.modules, *bank.owners)):
                if name in after and device.type != "cpu":
                    after[name] = device.index if numbers else str(device)
        if after != before:
            self._before = before
            self._model.__dict__["hf_device_map"] = after

    def restore(self) -> None:
        """Put the map back. Idempotent."""
        if self._before is not None:
            self._model.__dict__["hf_device_map"], self._before = self._before, None


def is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate decides where this model's modules are."""
    return any(isinstance(hook, AlignDevicesHook) for module in model.modules() for hook in _hooks(module))


def offload_device(bank: ExpertBank) -> torch.device | None:
    """Where accelerate would compute a bank that it has offloaded, or None if it has not."""
    for module in bank.owners:
        for hook in _hooks(module):
            if _offloads(hook):
                return torch.device(hook.execution_device)
    return None


def _hooks(module: nn.Module) -> list[ModelHook]:
    """The hooks of a module, with those that are taken off while it is enabled."""
    return [*flatten(module.__dict__.get("_hf_hook")), *flatten(module.__dict__.get(_TAKEN))]


def _offloads(hook: ModelHook | None) -> TypeGuard[AlignDevicesHook]:
    return isinstance(hook, AlignDevicesHook) and bool(hook.offload)


class TakenHooks:
    """accelerate's offloading of one module, set aside while its bank is prefetched. Other hooks stay on the module.

    Attributes:
        hook: what the module had, an offloading hook in it; None if nothing has to be taken.
    """

    def __init__(self, module: nn.Module) -> None:
        hook = module.__dict__.get("_hf_hook")
        self.module = module
        self.hook: ModelHook | None = hook if any(map(_offloads, flatten(hook))) else None
        self._others = [inner for inner in flatten(self.hook) if not _offloads(inner)]
        self._left_on: list[ModelHook] = []
        self._devices: dict[AlignDevicesHook, dict[str, torch.device]] = {}

    def take(self, *, leave_in_files: bool = False) -> None:
        """Take the offloading off; the weights come back as the module's own, on the CPU.

        accelerate leaves weights that it keeps on disk on the meta device. They are read into memory here, or stay in their
        files, if they shall.
        """
        if self.hook is None:
            return
        self.module.__dict__[_TAKEN] = self.hook
        offloading = [hook for hook in flatten(self.hook) if _offloads(hook)]
        if leave_in_files:
            for hook in offloading:
                before = self._devices[hook] = hook.original_devices
                # What was elsewhere before, it would read.
                meta = {name: torch.device("meta") for name in before if _recipe(hook.weights_map, name) is not None}
                hook.original_devices = before | meta
        remove_hook_from_module(self.module)
        for hook in offloading:
            for name, parameter in self.module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    recipe = _recipe(hook.weights_map, name) if leave_in_files else None
                    if recipe is not None:
                        read = partial(hook.weights_map.__getitem__, name)
                        self.module._parameters[name] = _in_files(parameter, recipe, read)
                    else:
                        value = hook.weights_map[name]
                        self.module._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        put_on(self.module, self._others)
        self._left_on = self._others

    def share(self, bank: ExpertBank) -> None:
        """Let accelerate's own map of weights refer to the bank's memory, or it would keep a second copy of it alive."""
        for holder in bank.modules:
            for owner, own, name in bank.places(holder):
                for offloading in filter(_offloads, flatten(self.hook) if owner is self.module else ()):
                    _replace(offloading.weights_map, own, bank.parameters[name].data)

    def give_back(self) -> None:
        """Put back what `take` took: the same hook, unless others have changed the module's hooks meanwhile. Idempotent."""
        self.module.__dict__.pop(_TAKEN, None)
        present = flatten(self.module.__dict__.get("_hf_hook"))
        if self.hook is None or any(map(_offloads, present)):
            return
        if all(hook in present for hook in self._left_on):
            back = [self.hook, *(hook for hook in present if hook not in self._others)]
        else:
            back = [*filter(_offloads, flatten(self.hook)), *present]
        with all_or_nothing(self.module):
            remove_hook_from_module(self.module)
            put_on(self.module, back)
        for hook, devices in self._devices.items():
            hook.original_devices = devices


def _in_files(parameter: nn.Parameter, recipe: Stored, read: Callable[[], torch.Tensor]) -> nn.Parameter:
    """A Parameter that stays in its file."""
    made = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="cpu"), requires_grad=parameter.requires_grad)
    replace_parameter(made, OnDisk.of(parameter, read))
    made.recipe = recipe  # type: ignore[attr-defined]
    return made


def _recipe(weights: object, name: str) -> Stored | None:
    """Where accelerate keeps a weight, if that is a file which can be read as it is."""
    if isinstance(weights, PrefixedDataset):
        return _recipe(weights.dataset, weights.prefix + name)
    if not isinstance(weights, OffloadedWeightsLoader) or name in weights.state_dict or name not in weights.index:
        return None
    about = weights.index[name]
    if about.get("safetensors_file") is not None:
        stored = read_headers([about["safetensors_file"]])[about.get("weight_name", name)]
        return Stored(stored, getattr(torch, about["dtype"]) if "dtype" in about else stored.dtype)
    dtype = getattr(torch, about["dtype"])
    shape = tuple(about["shape"])
    file = Path(weights.save_folder, f"{name}.dat")
    return Stored(StoredTensor(file, name, dtype, shape, 0, prod(shape) * dtype.itemsize), dtype)


def _replace(weights: object, name: str, value: torch.Tensor) -> None:
    if isinstance(weights, PrefixedDataset):
        _replace(weights.dataset, weights.prefix + name, value)
    elif isinstance(weights, OffloadedWeightsLoader):
        if name in weights.state_dict:
            weights.state_dict[name] = value
    elif isinstance(weights, dict) and name in weights:
        weights[name] = value
