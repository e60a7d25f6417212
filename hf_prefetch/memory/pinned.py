"""Arena: page-aligned host memory for one expert bank, page-locked by a single registration."""

from __future__ import annotations

import mmap

import torch

from ..layout import BankLayout
from ..streams import StreamDevice

__all__ = ["Arena"]


class Arena:
    """One block of host memory, mapped for this bank alone.

    torch's own pinned allocator rounds a request up to a power of two, which can double a bank, so the pages are
    mapped here and registered with the device. The mapping is *shared* anonymous memory: the pages of a private
    mapping that a device has locked are copied at once in a forked child (a DataLoader's worker, say), and a model's
    worth of memory with them. Memory that is never locked (`shared=False`) is private, so that a forked child that writes
    there writes to a copy.

    The mapping lives as long as any tensor made by `views`; the registration ends in `unpin`, which must come after
    the last copy from it has ended.
    """

    def __init__(self, nbytes: int, *, shared: bool = True) -> None:
        self.nbytes = nbytes
        self._mapped = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._mapped) if shared else _private(self._mapped)
        with torch.inference_mode(False):
            self.block = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes)
        self._pinned_by: StreamDevice | None = None

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
                    self._map, dtype=spec.dtype, count=spec.nbytes // spec.dtype.itemsize, offset=spec.offset
                ).as_strided(spec.shape, spec.stride)
                for spec in layout.specs
            }

    def touch(self) -> None:
        """Bring the pages in, on all of torch's threads: registering or filling them one by one takes far longer."""
        with torch.inference_mode(False):
            self.block.fill_(0)

    def pin(self, device: StreamDevice) -> str | None:
        """Page-lock the block for `device`. Returns None on success, else why the system refused; then it stays pageable."""
        if self.is_pinned:
            return None
        # Noted first: registering takes long enough to be interrupted, and `unpin` has to know that it may have happened.
        self._pinned_by = device
        refusal = device.register(self.block.data_ptr(), self._mapped)
        if refusal is not None:
            self._pinned_by = None
        return refusal

    def unpin(self) -> None:
        """Give the page lock back; the memory stays readable by the host."""
        if self._pinned_by is not None:
            self._pinned_by.unregister(self.block.data_ptr())
            self._pinned_by = None


def _private(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)  # where there is no fork, there is nothing to tell apart
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
