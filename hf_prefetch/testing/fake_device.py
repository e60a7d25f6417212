"""FakeDevice: a device with streams on the CPU, which runs its queues in whatever order hurts most.

Every tensor is a real one, so wrong orders give wrong numbers. What is enqueued may run at once, late, or in between
what others do: that is the policy's choice, within what the waits of the program allow. Memory that nobody may read
yet holds poison, which is NaN in every floating-point format.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from ..streams import StreamDevice
from .log import HOST, ByteRange, Kind, LogEntry
from .memory import POISON, FakeMemory, halves
from .policies import PolicyLike, as_policy
from .queues import FakeEvent, FakeMark, FakeStream, Operation, Queues, quietly
from .race_checker import Race, RaceChecker
from .watcher import Watcher

__all__ = ["FakeDevice"]

Touched = Iterable["torch.Tensor | ByteRange"]


class FakeDevice(StreamDevice):
    """One device over CPU memory.

    The device can't see what a model computes on its memory by itself: run models inside `with device.watching():`. Outside
    of it a forward reads what has not come yet, under every policy but "eager", and gives wrong results or errors.

    Args:
        policy: "eager", "lazy", a seed, a `random.Random`, a `Policy`, or a function that gets the runnable operations
            and returns the index of one, or None for none now.
        memory_limit: bytes on the device; None for no limit. Can be changed later, as `memory.memory_limit`.
        pin_limit: bytes of host memory that can be page-locked; None for no limit.
        refuse_pinning: whether the system refuses to page-lock anything.
        assume_pinned: treat all host memory as page-locked. Copies from pageable memory hold the host and so leave the
            policy little to choose; this is for tests of ordering that have no page-locked memory at hand.
        clock: seconds, for `mark`; None for a clock without jitter that advances 1 microsecond per operation run.

    Attributes:
        log: what was asked for, in the order of asking, whenever it ran. Never shorten it: orderings would be lost.
        memory: what lies where.
        pageable_copies: how many copies had a source that is not page-locked.
    """

    device = torch.device("cpu")
    overlaps = True
    can_pin = True

    def __init__(
        self,
        policy: PolicyLike = "eager",
        *,
        memory_limit: int | None = None,
        pin_limit: int | None = None,
        refuse_pinning: bool = False,
        assume_pinned: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.name = "fake device"
        self.log: list[LogEntry] = []
        self.memory = FakeMemory(memory_limit, pin_limit, refuse_pinning)
        self.pageable_copies = 0
        self._assume_pinned = assume_pinned
        self._queues = Queues(as_policy(policy))
        self._clock = clock
        self._events = itertools.count(1)
        self._lock = threading.RLock()
        self._current = threading.local()

    # -- streams and events ---------------------------------------------------------------------------------------

    def stream(self, name: str) -> FakeStream:
        """The stream of that name, made on first use."""
        with self._lock:
            return self._queues.stream(name)

    def compute_stream(self) -> FakeStream:
        current: FakeStream | None = getattr(self._current, "stream", None)
        return current or self.stream("compute")

    def copy_stream(self) -> FakeStream:
        return self.stream("copy")

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[FakeStream]:
        """Make `stream` this thread's compute stream for a while."""
        before = self.compute_stream()
        self._current.stream = stream
        try:
            yield stream
        finally:
            self._current.stream = before

    def new_event(self) -> FakeEvent:
        return FakeEvent(next(self._events))

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        with self._lock:
            self._note("record", stream.name, event=event.id)
            # A wait enqueued from now on captures this record; one enqueued earlier keeps the one it has.
            event.latest = Operation("record", stream, f"event {event.id}")
            self._queues.enqueue(event.latest)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            self._note("wait", stream.name, event=event.id)
            self._queues.enqueue(Operation("wait", stream, f"event {event.id}", after=event.latest))

    def synchronize(self, event: FakeEvent) -> None:
        with self._lock:
            self._note("synchronize", HOST, event=event.id)
            if event.latest is not None:
                self._queues.run_until(event.latest)

    def settle(self) -> None:
        with self._lock:
            for stream in self._queues.streams():
                event = self.new_event()
                self.record(event, stream)
                self.synchronize(event)

    def mark(self, stream: FakeStream) -> FakeMark:
        point = FakeMark()

        def stamp() -> None:
            point.time = self._queues.steps * 1e-6 if self._clock is None else self._clock()

        with self._lock:
            self._note("mark", stream.name)
            self._queues.enqueue(Operation("mark", stream, run=stamp))
        return point

    def elapsed(self, begin: FakeMark, end: FakeMark) -> float | None:
        return None if begin.time is None or end.time is None else end.time - begin.time

    # -- work -----------------------------------------------------------------------------------------------------

    def copy(self, stream: FakeStream, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy in two halves, so that a reader in between sees one; the destination is poisoned first.

        Raises:
            ValueError: shapes or dtypes differ, or the destination is not on the device.
            RuntimeError: the source lies partly inside a registration, which a device refuses as an invalid argument.
        """
        if destination.shape != source.shape or destination.dtype != source.dtype:
            raise ValueError(
                f"a copy needs the same shape and dtype on both sides, got {tuple(source.shape)} {source.dtype} into "
                f"{tuple(destination.shape)} {destination.dtype}"
            )
        if destination.numel() == 0:
            return
        with self._lock:
            region = self.memory.region_of(destination)
            if region is None or not region.on_device:
                raise ValueError("the destination of a copy must lie in memory that this device allocated")
            pageable = not self.memory.is_known(source) and not self._assume_pinned
            label = f"{destination.numel() * destination.element_size():,} bytes{' from pageable memory' * pageable}"
            reads, writes = self._ranges([source]), self._ranges([destination])
            self._note("copy", stream.name, reads, writes, label=label)
            into, out_of = self.memory.raw(destination), self.memory.raw(source.detach())
            (first, second), (first_source, second_source) = halves(into), halves(out_of)

            def begin() -> None:
                into.fill_(POISON)
                first.copy_(first_source)

            for half, run in (("first half", begin), ("second half", lambda: second.copy_(second_source))):
                operation = Operation("copy", stream, f"{half} of {label}", quietly(run), reads=reads, writes=writes)
                self._queues.enqueue(operation)
            if pageable:
                # The host is held until the source was read, which is after everything that stands before it.
                self.pageable_copies += 1
                self._queues.run_until(operation)

    def launch(
        self,
        function: Callable[[], object],
        reads: Touched = (),
        writes: Touched = (),
        stream: FakeStream | None = None,
        label: str = "",
    ) -> None:
        """Enqueue a kernel: `function` runs some time later, without grad, and touches no more than it says here."""
        stream = stream or self.compute_stream()
        read, written = self._ranges(reads), self._ranges(writes)
        with self._lock:
            self._note("kernel", stream.name, read, written, label=label)
            run = quietly(function, inference=torch.is_inference_mode_enabled())
            self._queues.enqueue(Operation("kernel", stream, label, run, deferred=True, reads=read, writes=written))

    def poison(self, tensor: torch.Tensor, stream: FakeStream | None = None) -> None:
        """Enqueue an overwrite of a tensor with NaN, for memory that nobody should read from here on."""
        stream = stream or self.compute_stream()
        with self._lock:
            self._enqueue_poison("poison", stream, tensor, self._ranges([tensor]))

    @contextmanager
    def computing(self, reads: Touched = (), writes: Touched = (), label: str = "") -> Iterator[None]:
        """Around something that the host computes at once and a device would run on its current compute stream.

        For what `watching` can't see. See [Note: what the host computes].
        """
        read, written = self._ranges(reads), self._ranges(writes)
        with self._lock:
            if self.memory.any_on_device((*read, *written)):
                stream = self.compute_stream()
                self._note("kernel", stream.name, read, written, label=label)
                self._queues.drain(stream)
            else:
                self._note("access", HOST, read, written, label=label)
            self._queues.progress()
        try:
            yield
        finally:
            with self._lock:
                self._queues.progress()

    def watching(self) -> Watcher:
        """A context in which every torch operator on the device's memory is run as `computing` says, and logged."""
        return Watcher(self)

    # -- running --------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether an operation of a queue is running right now."""
        return self._queues.running

    @property
    def pending(self) -> list[Operation]:
        """What has not run to its end, stream by stream."""
        with self._lock:
            return list(self._queues.pending())

    def drain(self, stream: FakeStream | None = None) -> None:
        """Run a stream (the current compute stream) to its end, and elsewhere only what it waits for."""
        with self._lock:
            self._queues.drain(stream or self.compute_stream())

    def finish(self) -> None:
        """Run everything that is left, in an order that the policy chooses. Orders nothing in the log."""
        with self._lock:
            self._queues.finish()

    def races(self) -> list[Race]:
        """What `RaceChecker` finds in the log so far."""
        with self._lock:
            self._reap()
            return RaceChecker().check(self.log)

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers of which a tensor is left."""
        with self._lock:
            self._reap()
            return self.memory.allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that `allocated_bytes` ever was."""
        return self.memory.peak_bytes

    @property
    def registered_bytes(self) -> int:
        """Bytes of host memory that are page-locked now."""
        return self.memory.registered_bytes

    def room(self) -> int | None:
        limit = self.memory.memory_limit
        return None if limit is None else limit - self.allocated_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            self._reap()
            if nbytes == 0:
                with torch.inference_mode(False):
                    return torch.empty(0, dtype=torch.uint8, device="cpu")
            stream = self.compute_stream()
            tensor, region = self.memory.allocate(nbytes, stream.name)
            # Enqueued, not done here: kernels of this stream may still use what the memory held before.
            self._enqueue_poison("allocate", stream, tensor, (region.everything,))
            return tensor

    def fail_allocations(self, after: int | None = 0) -> None:
        """Let `after` more allocations succeed and every later one fail; None ends that."""
        self.memory.fail_after(after)

    def register(self, address: int, nbytes: int) -> str | None:
        with self._lock:
            region = self.memory.register(address, nbytes)
            if isinstance(region, str):
                return region
            self._note("register", HOST, label=f"{nbytes:,} bytes as {region.storage}")
            return None

    def unregister(self, address: int) -> None:
        """Undo `register`.

        Raises:
            AssertionError: nothing is registered at `address`, or something enqueued still uses the memory.
        """
        with self._lock:
            region = self.memory.find(address)
            if region is None or region.on_device or region.base != address:
                raise AssertionError(f"no host memory is registered at {address:#x}")
            for operation in self._queues.pending():
                if any(touched.overlaps(region.everything) for touched in (*operation.reads, *operation.writes)):
                    raise AssertionError(f"{region.storage} is unregistered while it is used by a pending {operation}")
            self._note("unregister", HOST, (), (region.everything,), label=region.storage)
            self.memory.unregister(region)

    def trim(self) -> None:
        with self._lock:
            self._reap()
            self.memory.trim()

    def holds_host(self, *, pinned: bool) -> bool:
        return not (pinned or self._assume_pinned)

    def range_of(self, tensor: torch.Tensor) -> ByteRange | None:
        """Where a tensor lies, as the log has it; None outside of this device's and page-locked memory."""
        with self._lock:
            return self.memory.range_of(tensor)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _ranges(self, touched: Touched) -> tuple[ByteRange, ...]:
        found = (item if isinstance(item, ByteRange) else self.range_of(item) for item in touched)
        return tuple(item for item in found if item is not None)

    def _enqueue_poison(self, kind: Kind, stream: FakeStream, tensor: torch.Tensor, writes: tuple[ByteRange, ...]) -> None:
        raw = self.memory.raw(tensor)
        self._note(kind, stream.name, (), writes, label=f"{tensor.numel() * tensor.element_size():,} bytes")
        self._queues.enqueue(Operation(kind, stream, "", quietly(lambda: raw.fill_(POISON)), writes=writes))

    def _reap(self) -> None:
        for region in self.memory.reap():
            assert region.owner is not None
            self.log.append(LogEntry("free", region.owner, writes=(region.everything,), label=region.storage))

    def _note(
        self,
        kind: Kind,
        stream: str,
        reads: tuple[ByteRange, ...] = (),
        writes: tuple[ByteRange, ...] = (),
        *,
        event: int | None = None,
        label: str = "",
    ) -> None:
        self._reap()
        self.log.append(LogEntry(kind, stream, event, reads, writes, label))
