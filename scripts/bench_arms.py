"""The arms of the benchmark: ways in which one model's experts can reach the device that computes.

An arm is a context manager around the same model object. `enter` prepares it and returns what that cost; `leave` undoes
it and may keep the experts wherever they are: every arm puts them where it wants them.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import nn

from bench_models import Subject
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch

__all__ = ["Arm", "HostMemory", "PinnedBlock", "check_names", "make_arm"]

_ALIGNMENT = 256


class HostMemory:
    """Host memory that belongs to this process: anonymous and shared pages, not files that are mapped."""

    STATUS = Path("/proc/self/status")

    @classmethod
    def now(cls) -> int | None:
        """Bytes held, or None where the system doesn't say."""
        try:
            fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", cls.STATUS.read_text(), re.MULTILINE))
        except OSError:
            return None
        names = ("RssAnon", "RssShmem") if "RssAnon" in fields else ("VmRSS",)
        return sum(int(fields.get(name, 0)) for name in names) * 1024 or None

    @classmethod
    def during(cls, action: Callable[[], Any]) -> dict[str, int | None]:
        """Bytes held before, at the most while, and after `action` ran: looked at every few milliseconds."""
        before = cls.now()
        highest, ended = [before or 0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.004):
                highest.append(max(highest.pop(), cls.now() or 0))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            action()
        finally:
            ended.set()
            watcher.join()
        after = cls.now()
        return {"before": before, "peak": max(highest[0], after or 0) if before else None, "after": after}


class PinnedBlock:
    """Bytes in host memory that are page-locked by one registration, as fast to copy from as such memory gets.

    On a machine without an accelerator it is ordinary memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8).zero_()
        self._registered = device.type == "cuda"
        if self._registered:
            code = _runtime().cudaHostRegister(self.bytes.data_ptr(), nbytes, 0)
            if int(code) != 0:
                self._registered = False
                raise RuntimeError(f"cudaHostRegister of {nbytes:,} bytes gave error {int(code)}")

    def release(self) -> None:
        """End the registration; the memory stays readable. No copy from it may be under way."""
        if self._registered:
            self._registered = False
            _runtime().cudaHostUnregister(self.bytes.data_ptr())


def _runtime() -> Any:
    get: Any = torch.cuda.cudart
    return get()


class Arm(ABC):
    """One way to run the model.

    Attributes:
        name: what tables call it.
        slow: seconds a token: it gets fewer lengths and fewer repeats.
        looks_ahead: it is the package's own, so the contract's bounds are checked.
    """

    slow = False
    looks_ahead = False

    def __init__(self, name: str, subject: Subject) -> None:
        self.name = name
        self.subject = subject
        self.entered: dict[str, Any] = {}

    @abstractmethod
    def enter(self) -> dict[str, Any]:
        """Prepare the model. Returns what there is to say about that."""

    @abstractmethod
    def leave(self) -> None:
        """Undo `enter`, also after it failed half-way: no hook of this arm is left, and the model has its own weights."""

    def moved(self) -> int | None:
        """Bytes of experts sent to the device since `enter`, or None where nobody counts."""
        return None

    def report(self) -> dict[str, Any]:
        """What the arm itself has counted since `enter`."""
        return {}

    def __enter__(self) -> Arm:
        try:
            self.entered = self.enter()
        except BaseException:
            self.leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()
        self.subject.tidy()


class Resident(Arm):
    """Everything on the device: what the others are compared with."""

    def enter(self) -> dict[str, Any]:
        self.subject.place_experts(self.subject.device)
        return {}

    def leave(self) -> None:
        """Nothing to undo."""

    def moved(self) -> int:
        return 0


class Accelerate(Arm):
    """accelerate's own offloading, as `device_map` gives it: experts "cpu", everything else on the device."""

    slow = True

    def __init__(self, name: str, subject: Subject) -> None:
        super().__init__(name, subject)
        self._handles: list[Any] = []
        self._moved = 0

    def enter(self) -> dict[str, Any]:
        subject = self.subject
        subject.place_experts(torch.device("cpu"))
        for name, nbytes in subject.bank_bytes.items():
            # Every call sends every expert of the module.
            self._handles.append(subject.experts[name].register_forward_pre_hook(functools.partial(self._count, nbytes)))
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

    def _count(self, nbytes: int, *_: Any) -> None:
        self._moved += nbytes

    def moved(self) -> int:
        return self._moved

    def leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        remove_hook_from_submodules(self.subject.model)
        self.subject.model.__dict__.pop("hf_device_map", None)


class PinnedSerial(Arm):
    """Experts in page-locked memory, each bank copied whole right before its module runs: no overlap, nothing else."""

    def __init__(self, name: str, subject: Subject) -> None:
        super().__init__(name, subject)
        self._blocks: list[PinnedBlock] = []
        self._handles: list[Any] = []
        self._moved = 0

    def enter(self) -> dict[str, Any]:
        subject = self.subject
        subject.place_experts(torch.device("cpu"))
        buffer = torch.empty(max(map(self._block_bytes, subject.experts.values())), dtype=torch.uint8, device=subject.device)
        begin = time.perf_counter()
        for module in subject.experts.values():
            block = PinnedBlock(self._block_bytes(module), subject.device)
            self._blocks.append(block)
            host, sent = self._views(module, block.bytes), self._views(module, buffer)
            for name, parameter in subject.weights(module).items():
                with torch.no_grad():
                    parameter.data = host[name].copy_(parameter)
            own = subject.weights(module)
            there = {name: nn.Parameter(view, requires_grad=False) for name, view in sent.items()}
            self._handles += self._hook(module, own, there, block.bytes, buffer)
        return {"seconds": time.perf_counter() - begin}

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

    def _block_bytes(self, module: nn.Module) -> int:
        sizes = (parameter.numel() * parameter.element_size() for parameter in self.subject.weights(module).values())
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)

    def _views(self, module: nn.Module, block: torch.Tensor) -> dict[str, torch.Tensor]:
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
        while self._blocks:
            self._blocks.pop().release()

    def moved(self) -> int:
        return self._moved


class Prefetch(Arm):
    """This package through its public functions, on weights that are in host memory already."""

    looks_ahead = True

    def __init__(self, name: str, subject: Subject, slots: int) -> None:
        super().__init__(name, subject)
        self.slots = slots

    def enter(self) -> dict[str, Any]:
        subject, seconds = self.subject, [0.0]
        subject.place_experts(torch.device("cpu"))
        if subject.device.type == "cuda":
            # What the first copy and the first registration of a process set up is not the experts' cost.
            PinnedBlock(1 << 20, subject.device).release()

        def enable() -> None:
            begin = time.perf_counter()
            enable_expert_prefetch(subject.model, slots=self.slots, device=subject.device, progress=False)
            seconds[0] = time.perf_counter() - begin

        host = HostMemory.during(enable)
        held = sum(subject.bank_bytes.values())
        rest = host["before"] - held if host["before"] is not None else None
        return {
            "slots": self.slots,
            "seconds": seconds[0],
            "gb_per_s": held / seconds[0] / 1e9,
            "host_bytes": host,
            "experts_host_bytes": None if rest is None else {key: (host[key] or 0) - rest for key in ("peak", "after")},
        }

    def leave(self) -> None:
        disable_expert_prefetch(self.subject.model)

    def moved(self) -> int:
        return int(self.subject.model.expert_prefetch.report().bytes_to_device)

    def report(self) -> dict[str, Any]:
        return dataclasses.asdict(self.subject.model.expert_prefetch.report())


class Broken(Arm):
    """An arm that fails, for testing the benchmark itself."""

    def enter(self) -> dict[str, Any]:
        raise RuntimeError("this arm fails on purpose")

    def leave(self) -> None:
        """Nothing to undo."""


_ARMS: dict[str, type[Arm]] = {
    "resident": Resident,
    "accelerate": Accelerate,
    "pinned-serial": PinnedSerial,
    "broken": Broken,
}
_PREFETCH = re.compile(r"prefetch-([2-4])")


def check_names(names: list[str]) -> list[str]:
    """Sort the resident arm to the front: the others are compared with it.

    Raises:
        ValueError: an arm of this name doesn't exist, or is named twice.
    """
    for name in names:
        if name not in _ARMS and not _PREFETCH.fullmatch(name):
            known = ", ".join([*(known for known in _ARMS if known != "broken"), "prefetch-2", "prefetch-3", "prefetch-4"])
            raise ValueError(f"there is no arm {name!r}; there are {known}")
    if len(set(names)) != len(names):
        raise ValueError(f"an arm is named twice: {', '.join(names)}")
    return sorted(names, key=lambda name: name != "resident")


def make_arm(name: str, subject: Subject) -> Arm:
    """The arm of this name, not entered yet."""
    if match := _PREFETCH.fullmatch(name):
        return Prefetch(name, subject, int(match[1]))
    return _ARMS[name](name, subject)
