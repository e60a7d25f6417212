"""Streams, events, copies and page-locking of one device: the only user of torch's stream and event API.

Everything above speaks to a `StreamDevice`. There are three: `AcceleratorDevice` (CUDA, ROCm, XPU: whatever torch's
generic stream API covers), `InOrderDevice` (the CPU stand-in, and devices without streams), and, for tests,
`hf_prefetch.testing.FakeDevice`, which keeps a queue per stream and runs them in adversarial orders.

[Note: the contract of events]
An event is recorded on a stream after the work it stands for, and waited for by the stream that must come after. As
on CUDA, a wait covers the *latest record made before the wait was enqueued*: waiting for an event that was never
recorded, or whose last record belongs to an earlier use, passes without any error. Nobody below checks for that, so
whoever waits must know that the record was made in this use (invariant 2 of the design).

[Note: pools of memory]
Whoever captures a graph, or runs code once before its capture (`torch.compile(mode="reduce-overhead")`), has all that its
thread allocates come from the graph's own pool, and insists that nothing in there outlives the run. What we keep is allocated
by another thread, so it never comes from there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

import torch

from .memory.pages import node_of
from .workers import Workers

__all__ = ["AcceleratorDevice", "InOrderDevice", "StreamDevice", "default_device", "stream_device"]


class StreamDevice(ABC):
    """One device as the scheduler sees it.

    Attributes:
        device: the torch device on which buffers live and modules compute.
        overlaps: whether copies can run beside compute; without it every call takes the plain path.
        can_pin: whether host memory can be page-locked for it.
        name: what reports call the device.
    """

    device: torch.device
    overlaps: bool
    can_pin: bool = True
    name: str

    @abstractmethod
    def compute_stream(self) -> Any:
        """The stream on which the caller's kernels run *now*: asked for at each call, never kept."""

    @abstractmethod
    def copy_stream(self) -> Any:
        """The device's one stream for uploads, created on first use."""

    @abstractmethod
    def new_event(self) -> Any:
        """An event that was never recorded. Events are reused: see [Note: the contract of events]."""

    @abstractmethod
    def record(self, event: Any, stream: Any) -> None:
        """Mark in `event` all the work enqueued on `stream` so far."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Hold back work enqueued on `stream` from here on until `event`'s latest record is reached."""

    @abstractmethod
    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy of `source` (host) into `destination` (device): same shape, same dtype.

        From pageable memory the host may be held until the source has been read; the order on the stream is the same.
        """

    @abstractmethod
    def synchronize(self, event: Any) -> None:
        """Hold the host until `event`'s latest record is reached. For teardown only, never for ordering."""

    @abstractmethod
    def settle(self) -> None:
        """Hold the host until all that was given to the device is done, on whatever stream. For teardown only."""

    @abstractmethod
    def mark(self, stream: Any) -> Any:
        """A point in time on `stream`, for `elapsed`."""

    @abstractmethod
    def elapsed(self, begin: Any, end: Any) -> float | None:
        """Seconds on the device between two marks, or None while one of them has not been reached."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A buffer of `nbytes` uint8 on the device, owned by the current compute stream, for as long as somebody holds it.

        Whatever outlives a call must come from here: see [Note: pools of memory].

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        # A buffer first made under inference_mode could not be written to outside it later.
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def room(self) -> int | None:
        """Bytes that can still be allocated on the device by this process, or None where nobody knows."""
        return None

    @abstractmethod
    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock host memory for fast copies. Returns None on success, else why the system refused."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`. The caller has made sure that no copy still reads the memory."""

    def numa_node(self) -> int | None:
        """The node of host memory that is nearest to the device; None where there is one only, or nobody knows."""
        return None

    def holds_host(self, *, pinned: bool) -> bool:
        """Whether a copy from such memory keeps the host from enqueuing anything else meanwhile."""
        return not pinned

    @abstractmethod
    def trim(self) -> None:
        """Give cached memory that nothing uses back to the system."""

    def is_capturing(self) -> bool:
        """Whether the current stream is recording a graph."""
        return False


class AcceleratorDevice(StreamDevice):
    """A device with streams and events, through torch's device-generic API."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.accelerator.current_device_index()
        self.device = torch.device(device.type, index)
        self._module = torch.get_device_module(self.device)
        self.can_pin = hasattr(self._module, "cudart")
        describe = getattr(self._module, "get_device_name", None)
        self.name = f"{describe(self.device)} ({self.device})" if describe else str(self.device)
        self._copy_stream: torch.Stream | None = None
        # Fail here, before anything was touched, on devices that have no such API.
        torch.Event(device=self.device)
        torch.Stream(device=self.device)

    def compute_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def copy_stream(self) -> torch.Stream:
        if self._copy_stream is None:
            self._copy_stream = torch.Stream(device=self.device)
        return self._copy_stream

    def new_event(self) -> torch.Event:
        return torch.Event(device=self.device)

    def record(self, event: torch.Event, stream: torch.Stream) -> None:
        event.record(stream)

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        stream.wait_event(event)

    def allocate(self, nbytes: int) -> torch.Tensor:
        stream, here = self.compute_stream(), super().allocate

        def there() -> torch.Tensor:
            with stream:
                return here(nbytes)

        with Workers(1) as workers:
            return workers.submit(there)()

    def copy(self, stream: torch.Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        # An object of this call's own: it is the object that keeps what is to be current again, and not the thread that enters
        # it. Threads that copied at the same time would come back to each other's streams.
        with torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type):
            destination.copy_(source, non_blocking=True)

    def synchronize(self, event: torch.Event) -> None:
        event.synchronize()

    def settle(self) -> None:
        torch.accelerator.synchronize(self.device)

    def mark(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(stream)
        return event

    def elapsed(self, begin: torch.Event, end: torch.Event) -> float | None:
        # Either may be the later one, where threads compute on streams of their own, and CUDA refuses what is not there yet.
        return begin.elapsed_time(end) / 1000.0 if end.query() and begin.query() else None

    def room(self) -> int | None:
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device)
        allowed = torch.cuda.get_per_process_memory_fraction(self.device) * total - held
        return held - torch.cuda.memory_allocated(self.device) + max(min(free, int(allowed)), 0)

    def register(self, address: int, nbytes: int) -> str | None:
        if not self.can_pin:
            return f"torch offers no page-locking of existing memory on {self.device.type}"
        runtime, portable_and_mapped = self._module.cudart(), 1 | 2
        # A thread that is new has device 0, and this would take memory there for a context that nobody wants.
        with self._module.device(self.device):
            code = runtime.cudaHostRegister(address, nbytes, portable_and_mapped)
        if int(code) == 0:
            return None
        self._forget_last_error()
        return f"cudaHostRegister of {nbytes:,} bytes gave error {int(code)} ({runtime.cudaGetErrorString(code)})"

    def unregister(self, address: int) -> None:
        if not self.can_pin:
            return
        with self._module.device(self.device):
            code = self._module.cudart().cudaHostUnregister(address)
        if int(code) != 0:
            self._forget_last_error()

    def numa_node(self) -> int | None:
        if self.device.type != "cuda":
            return None
        found: Any = torch.cuda.get_device_properties(self.device)
        if not hasattr(found, "pci_bus_id"):
            return None
        return node_of(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")

    def trim(self) -> None:
        self._module.empty_cache()

    def is_capturing(self) -> bool:
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        return bool(capturing and capturing())

    def _forget_last_error(self) -> None:
        # The runtime keeps a refused call's error and the next kernel launch would report it as its own.
        with suppress(RuntimeError):
            torch.zeros(1, dtype=torch.float32, device=self.device).add_(1)


class InOrderDevice(StreamDevice):
    """Work runs at once, in the order it is given: the CPU stand-in, and any device without streams.

    On the CPU it claims to overlap, so that the whole scheduler can be tried anywhere; it gains nothing there.
    """

    can_pin = False
    _STREAM = "in-order"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.overlaps = device.type == "cpu"
        self.name = "CPU stand-in" if device.type == "cpu" else str(device)

    def compute_stream(self) -> str:
        return self._STREAM

    def copy_stream(self) -> str:
        return self._STREAM

    def new_event(self) -> None:
        return None

    def record(self, event: None, stream: str) -> None:
        """Nothing to mark: all the work before is done."""

    def wait(self, stream: str, event: None) -> None:
        """Nothing to wait for."""

    def copy(self, stream: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def synchronize(self, event: None) -> None:
        """Nothing to wait for."""

    def settle(self) -> None:
        """Nothing to wait for."""

    def register(self, address: int, nbytes: int) -> str:
        return f"{self.name} has no page-locking"

    def unregister(self, address: int) -> None:
        """Nothing was registered."""

    def holds_host(self, *, pinned: bool) -> bool:
        # Every copy does, so there is nothing to gain from putting one off.
        return False

    def trim(self) -> None:
        """Nothing is cached."""

    def mark(self, stream: str) -> float:
        return time.perf_counter()

    def elapsed(self, begin: float, end: float) -> float:
        return end - begin


def default_device() -> torch.device:
    """The accelerator that torch would use, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


def stream_device(device: torch.device | str | int | StreamDevice | None) -> StreamDevice:
    """The `StreamDevice` for a torch device; one that is given already is returned as it is.

    Raises:
        TypeError, RuntimeError: `device` is not a device, or torch can't use it here.
    """
    if isinstance(device, StreamDevice):
        return device
    try:
        device = default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device={device!r} is no device of torch: give 'cuda', 'cuda:1', 'xpu', 'cpu' or leave it out."
        ) from error
    if device.type == "meta":
        raise ValueError("device='meta' holds no data, so nothing can compute there. Name an accelerator or 'cpu'.")
    if device.type == "cpu":
        return InOrderDevice(torch.device("cpu"))
    module = torch.get_device_module(device)
    if not module.is_available() or (device.index or 0) >= module.device_count():
        raise RuntimeError(f"device='{device}' was asked for, but torch {torch.__version__} sees no such device here.")
    try:
        return AcceleratorDevice(device)
    except (NotImplementedError, AttributeError, TypeError, RuntimeError):
        return InOrderDevice(device)
