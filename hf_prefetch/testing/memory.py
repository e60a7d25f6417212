"""FakeMemory: which bytes are the device's, which are page-locked, and which tensor lies where.

[Note: memory that is gone for the program but not for its stragglers]
A caching allocator hands freed memory out again at once, although copies on other streams may still write to it. Here
too: the tensors that callers get own a lease on a block and not the block itself, so the block is free as soon as the
last tensor is gone, and the next buffer of that size on that stream gets the same bytes. Queued operations reach the
block through tensors of their own (`raw`), so a late copy does hit its new owner, as it would on a real device.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .log import ByteRange

__all__ = ["POISON", "FakeMemory", "Region", "halves"]

POISON = 0xFF
"""Bytes of poison: NaN as float32, float64, bfloat16 and float16; -1 as a signed integer."""

_POOL = 32
"""Freed blocks kept for the next buffer of their size."""


@dataclass(eq=False, slots=True)
class Region:
    """A piece of memory that the device knows.

    Attributes:
        storage: its name in the log.
        base: address of its first byte.
        nbytes: its length in bytes.
        owner: name of the stream that the buffer belongs to; None for page-locked host memory.
        mapping: the pages of a buffer; None for host memory, which callers keep alive themselves.
        block: the same as a tensor, for operations in the queues.
    """

    storage: str
    base: int
    nbytes: int
    owner: str | None = None
    mapping: mmap.mmap | None = None
    block: torch.Tensor | None = None

    @property
    def on_device(self) -> bool:
        return self.owner is not None

    @property
    def everything(self) -> ByteRange:
        return ByteRange(self.storage, 0, self.nbytes)


class FakeMemory:
    """The memory of one device, and the host memory that is page-locked for it.

    Args:
        memory_limit: bytes on the device; None for as many as the machine has.
        pin_limit: bytes that can be page-locked; None for no limit.
        refuse_pinning: whether every registration is refused, as in a container without the right to lock memory.
    """

    def __init__(self, memory_limit: int | None, pin_limit: int | None, refuse_pinning: bool) -> None:
        self.memory_limit = memory_limit
        self.pin_limit = pin_limit
        self.refuse_pinning = refuse_pinning
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.registered_bytes = 0
        self._until_failure: int | None = None
        self._regions: list[Region] = []  # sorted by base; they never overlap
        self._pool: list[Region] = []
        # Filled by finalizers, which may run in the middle of anything; emptied by `reap`.
        self._dropped: deque[Region] = deque()
        self._device_storages: set[str] = set()
        self._registrations = 0

    # -- where a tensor lies --------------------------------------------------------------------------------------

    def find(self, address: int) -> Region | None:
        """The region that holds the byte at `address`, if any."""
        at = bisect.bisect_right(self._regions, address, key=_base) - 1
        if at < 0 or address >= self._regions[at].base + self._regions[at].nbytes:
            return None
        return self._regions[at]

    def region_of(self, tensor: torch.Tensor) -> Region | None:
        """The region that a tensor lies in, if any. Tensors without bytes of their own lie nowhere."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.numel() == 0:
            return None
        return self.find(tensor.data_ptr())

    def range_of(self, tensor: torch.Tensor) -> ByteRange | None:
        """From a tensor's first to its last byte, or None outside of all regions.

        A strided tensor counts with the gaps between its elements: the columns of a matrix are the matrix.
        """
        region = self.region_of(tensor)
        if region is None:
            return None
        begin = tensor.data_ptr() - region.base
        return ByteRange(region.storage, begin, begin + _extent(tensor))

    def is_known(self, source: torch.Tensor) -> bool:
        """Whether a tensor lies in one region, so that a copy from it need not hold the host.

        Raises:
            RuntimeError: it lies there partly, which a device refuses as an invalid argument.
        """
        begin, nbytes = source.data_ptr(), _extent(source)
        region = self.overlapping(begin, nbytes)
        if region is None:
            return False
        if begin < region.base or begin + nbytes > region.base + region.nbytes:
            raise RuntimeError(
                f"invalid argument: the source of a copy ({nbytes:,} bytes at {begin:#x}) lies partly inside and "
                f"partly outside of {region.storage} ({region.nbytes:,} bytes at {region.base:#x})"
            )
        return True

    def any_on_device(self, ranges: Iterable[ByteRange]) -> bool:
        """Whether one of the ranges lies in a buffer, and not in host memory."""
        return any(touched.storage in self._device_storages for touched in ranges)

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of a tensor as uint8 with one dimension more; in a buffer, without holding the caller's lease."""
        region = self.region_of(tensor)
        storage, base = tensor.untyped_storage(), tensor.untyped_storage().data_ptr()
        if region is not None and region.block is not None:
            storage, base = region.block.untyped_storage(), region.base
        size = tensor.element_size()
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=torch.uint8, device="cpu").set_(
                storage, tensor.data_ptr() - base, (*tensor.shape, size), (*(s * size for s in tensor.stride()), 1)
            )

    # -- buffers on the device ------------------------------------------------------------------------------------

    def fail_after(self, count: int | None) -> None:
        """Let `count` more allocations succeed and every later one fail; None ends that."""
        self._until_failure = count

    def allocate(self, nbytes: int, owner: str) -> tuple[torch.Tensor, Region]:
        """A buffer on the device, at least 4 KiB aligned, and where it lies.

        Raises:
            torch.OutOfMemoryError: the limit is reached, or `fail_after` said so.
        """
        if self._until_failure is not None:
            if self._until_failure == 0:
                raise torch.OutOfMemoryError(f"fake device: an allocation of {nbytes:,} bytes was made to fail")
            self._until_failure -= 1
        if self.memory_limit is not None and self.allocated_bytes + nbytes > self.memory_limit:
            raise torch.OutOfMemoryError(
                f"fake device out of memory: {nbytes:,} bytes asked for, {self.allocated_bytes:,} of "
                f"{self.memory_limit:,} bytes in use"
            )
        region = self._recycled(nbytes, owner) or self._mapped(nbytes, owner)
        self._insert(region)
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        assert region.mapping is not None
        # One level between tensor and mapping, whose end tells that the last tensor is gone.
        lease = (ctypes.c_ubyte * region.nbytes).from_buffer(region.mapping)
        weakref.finalize(lease, self._dropped.append, region).atexit = False
        # A buffer first made under inference_mode could not be written to outside it later.
        with torch.inference_mode(False):
            return torch.frombuffer(lease, dtype=torch.uint8), region

    def reap(self) -> list[Region]:
        """Take back the buffers whose last tensor is gone since the last call, and name them."""
        gone = [self._dropped.popleft() for _ in range(len(self._dropped))]
        for region in gone:
            self._regions.remove(region)
            self.allocated_bytes -= region.nbytes
            self._pool.append(region)
        del self._pool[:-_POOL]
        return gone

    def trim(self) -> None:
        """Give freed blocks back to the system."""
        self._pool.clear()

    def _recycled(self, nbytes: int, owner: str) -> Region | None:
        for at in reversed(range(len(self._pool))):
            if (self._pool[at].nbytes, self._pool[at].owner) == (nbytes, owner):
                return self._pool.pop(at)
        return None

    def _mapped(self, nbytes: int, owner: str) -> Region:
        mapping = mmap.mmap(-1, nbytes)
        with torch.inference_mode(False):
            block = torch.frombuffer(mapping, dtype=torch.uint8)
        storage = f"buffer {len(self._device_storages) + 1}"
        self._device_storages.add(storage)
        return Region(storage, block.data_ptr(), nbytes, owner, mapping, block)

    # -- page-locked host memory ----------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> Region | str:
        """Page-lock host memory, or say why not."""
        if self.refuse_pinning:
            return "fake device: this system refuses to page-lock memory"
        if nbytes <= 0:
            return f"fake device: {nbytes} bytes can't be page-locked"
        other = self.overlapping(address, nbytes)
        if other is not None:
            return f"fake device: {nbytes:,} bytes at {address:#x} overlap {other.storage}, which is registered already"
        if self.pin_limit is not None and self.registered_bytes + nbytes > self.pin_limit:
            return (
                f"fake device: {nbytes:,} bytes more than the {self.registered_bytes:,} page-locked ones would pass "
                f"the limit of {self.pin_limit:,}"
            )
        self._registrations += 1
        region = Region(f"host {self._registrations}", address, nbytes)
        self._insert(region)
        self.registered_bytes += nbytes
        return region

    def unregister(self, region: Region) -> None:
        """Undo `register`."""
        self._regions.remove(region)
        self.registered_bytes -= region.nbytes

    def overlapping(self, address: int, nbytes: int) -> Region | None:
        """A region that shares at least one byte with `nbytes` bytes at `address`, if any."""
        at = bisect.bisect_left(self._regions, address + nbytes, key=_base) - 1
        if at >= 0 and self._regions[at].base + self._regions[at].nbytes > address:
            return self._regions[at]
        return None

    def _insert(self, region: Region) -> None:
        bisect.insort(self._regions, region, key=_base)


def halves(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of `FakeMemory.raw` cut in two, along the first of its dimensions that can be cut."""
    dimension = next((d for d, size in enumerate(raw.shape) if size > 1), 0)
    middle = raw.shape[dimension] // 2
    return raw.narrow(dimension, 0, middle), raw.narrow(dimension, middle, raw.shape[dimension] - middle)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last one of a tensor that is not empty, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def _base(region: Region) -> int:
    return region.base
