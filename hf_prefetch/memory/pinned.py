"""Arena: page-aligned host memory for one expert bank, page-locked by a single registration."""

from __future__ import annotations

import mmap
import threading

import torch

from ..banks.layout import BankLayout
from ..streams import StreamDevice
from .pages import SEGMENT, Pages

__all__ = ["Arena"]


class Arena:
    """One block of host memory, mapped for this bank alone.

    torch's own pinned allocator rounds a request up to a power of two, which can double a bank, so the pages are
    mapped here and registered with the device. The mapping is *shared* anonymous memory: the pages of a private
    mapping that a device has locked are copied at once in a forked child (a DataLoader's worker, say), and a model's
    worth of memory with them. Memory that is never locked (`shared=False`) is private, so that a forked child that writes
    there writes to a copy. `segment`, `node` and `written` are about how fast it comes and where it lies, see `Pages`.

    The mapping lives as long as any tensor made by `views`; the registration ends in `unpin`, which must come after
    the last copy from it has ended.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        shared: bool = True,
        segment: int | None = SEGMENT,
        node: int | None = None,
        written: bool = False,
    ) -> None:
        self.nbytes = nbytes
        self._pages = Pages(nbytes, shared=shared, segment=segment, node=node, written=written)
        self.block = self._pages.block
        self._pinned_by: StreamDevice | None = None
        self._lock = threading.Lock()
        self._is_over = False

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is page-locked now."""
        return self._pinned_by is not None

    def views(self, layout: BankLayout) -> dict[str, torch.Tensor]:
        """The bank's tensors in this memory, each with a storage of its own.

        Tensors that share a storage would look tied to `save_pretrained`, which then copies or drops them.
        """
        with torch.inference_mode(False):
            return {
                spec.name: torch.frombuffer(
                    self._pages.buffer,
                    dtype=spec.dtype,
                    count=spec.nbytes // spec.dtype.itemsize,
                    offset=self._pages.offset + spec.offset,
                ).as_strided(spec.shape, spec.stride)
                for spec in layout.specs
            }

    def touch(self) -> None:
        """Bring the pages in, on several threads: registering or filling them one by one takes far longer."""
        self._pages.touch()

    @property
    def comes_by_put(self) -> bool:
        """Whether pages come by `put`, so that there is no need to bring them in before."""
        return self._pages.is_open

    def put(self, destination: torch.Tensor, source: memoryview) -> None:
        """Write bytes into a part of the block: `destination` is a dense tensor in it. Pages come by it, see `Pages`."""
        self._pages.write(destination.data_ptr() - self.block.data_ptr(), source)

    def settle(self) -> None:
        """All of it is written: have what there is mapped, so that it can be page-locked at once."""
        self._pages.settle()

    def pin(self, device: StreamDevice) -> str | None:
        """Page-lock the block for `device`. Returns None on success, else why the system refused; then it stays pageable."""
        with self._lock:
            if self.is_pinned or self._is_over:
                return None
            # Noted first: registering takes long enough to be interrupted, and `unpin` has to know that it may have happened.
            self._pinned_by = device
            try:
                refusal = device.register(self.block.data_ptr(), self._pages.mapped)
            except Exception:
                self._pinned_by = None
                raise
            if refusal is not None:
                self._pinned_by = None
            return refusal

    @staticmethod
    def can_have_segments(device: StreamDevice) -> bool:
        """Whether a device takes memory in segments as one registration."""
        probe = Arena(2 * mmap.PAGESIZE, segment=mmap.PAGESIZE)
        try:
            return probe.pin(device) is None
        finally:
            probe.unpin()

    def unpin(self) -> None:
        """Give the page lock back for good; the memory stays readable by the host.

        A thread may be about to lock it, or in the middle of that, if an interrupt came to whoever would have waited for it.
        """
        self._is_over = True
        with self._lock:
            if self._pinned_by is not None:
                self._pinned_by.unregister(self.block.data_ptr())
                self._pinned_by = None
        self._pages.close()
