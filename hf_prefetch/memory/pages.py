"""Pages: host memory straight from the system, laid out so that it comes fast, and near the device that reads it.

Everything here makes memory come faster or lie nearer; where the system has no such thing it is left out, and nobody is told.

[Note: why one mapping is many]
Pages of shared memory belong to a file without a name, and whoever brings one in locks that file: sixteen threads are hardly
faster than one. So a block is many such files side by side in one range of addresses, and each thread brings in its own. Huge
pages, where the system gives them to shared memory, make that a matter of a few faults.

[Note: pages that come by writing]
Bringing in a page is a fault and 4 KiB of zeros, which are overwritten next. Whoever knows what the memory is to hold writes it
into the files instead: pages come with their bytes, without either, and several threads need nothing of the
process for that, so that page-locking of other memory goes on beside it. In the end the pages that are there are mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..workers import Workers

__all__ = ["SEGMENT", "Pages", "Put", "bytes_of", "give_back_freed", "node_of"]

# Brings bytes into the memory of a dense tensor.
Put = Callable[[torch.Tensor, memoryview], None]

# Linux's numbers, the same on x86-64 and arm64 but for the call, which libc has no function for.
_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_HUGE = 2 * 2**20
SEGMENT = 16 * _HUGE
_MOST_THREADS = 16
# Files that a block has open while it is written to, and which part of those that a process may have; in a large block they
# are longer. Two blocks can be open, and others need some, too.
_MOST_FILES = 64
_SHARE_OF_FILES = 16


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type] # an ndarray is a Buffer


class Pages:
    """`nbytes` of host memory, page-aligned, nothing of which is there before somebody writes to it.

    Args:
        nbytes: how much; the mapping has whole pages.
        shared: whether forked processes share it; else a child that writes there writes to a copy.
        segment: bytes of each of the files that shared memory consists of; None for one file.
        node: the node of NUMA memory that it should come from, if it matters.
        written: whether all of it is going to be written by `write`; then its files are open until `settle` or `close`.

    Attributes:
        mapped: bytes of whole pages.
        buffer: the memory, from its first byte on. It lives as long as anything refers to this.
    """

    def __init__(
        self, nbytes: int, *, shared: bool, segment: int | None = SEGMENT, node: int | None = None, written: bool = False
    ) -> None:
        self.mapped = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._segment = segment or self.mapped
        self._files: list[FileIO] = []
        if shared and segment is not None and self.mapped > segment and _libc() is not None:
            files = _most_files() if written and not _is_huge_if_advised() else 0
            self._segment = segment * max(1, -(-self.mapped // (files * segment))) if files else segment
            sizes = [min(self._segment, self.mapped - begin) for begin in range(0, self.mapped, self._segment)]
            self._files = _files(sizes) if files else []
            self.buffer, self.offset = _side_by_side(sizes, self._files)
        else:
            self.buffer, self.offset = mmap.mmap(-1, self.mapped) if shared else _private(self.mapped), 0
        if shared:
            with suppress(AttributeError, OSError, ValueError):
                self.buffer.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            self.block = torch.frombuffer(self.buffer, dtype=torch.uint8, count=nbytes, offset=self.offset)
        if node is not None:
            _prefer(self.block.data_ptr(), self.mapped, node)

    @property
    def is_open(self) -> bool:
        """Whether there are files that `write` writes to."""
        return bool(self._files)

    def touch(self) -> None:
        """Bring all pages in, on several threads."""
        address, libc = self.block.data_ptr(), _libc()
        if libc is not None and self.mapped > SEGMENT:

            def bring(begin: int) -> bool:
                nbytes = min(SEGMENT, self.mapped - begin)
                return int(libc.madvise(address + begin, nbytes, _MADV_POPULATE_WRITE)) == 0

            with Workers(_threads()) as workers:
                if all(workers.map(bring, range(0, self.mapped, SEGMENT))):
                    return
        with torch.inference_mode(False):
            self.block.fill_(0)

    def write(self, begin: int, source: memoryview) -> None:
        """Put bytes there, from `begin` on; on several threads if they are many. From whatever thread.

        Raises:
            OSError: the system has no memory for it.
        """
        if self._files:
            self._spread(_write, list(self._spans(begin, source)))
            return
        np.copyto(self.block[begin : begin + len(source)].numpy(), np.frombuffer(source, dtype=np.uint8))

    def settle(self) -> None:
        """Map all pages, once everything is written, and close the files."""
        address, libc = self.block.data_ptr(), _libc()

        def bring(number: int, file: FileIO) -> None:
            begin = number * self._segment
            # Where it fails, pages are mapped when they are needed.
            libc.madvise(address + begin, min(self._segment, self.mapped - begin), _MADV_POPULATE_READ)
            file.close()

        self._spread(bring, list(enumerate(self._files)))
        self.close()

    def close(self) -> None:
        """Close the files. The memory stays. Nobody may be writing. Idempotent."""
        files, self._files = self._files, []
        for file in files:
            file.close()

    def _spread(self, act: Callable[..., None], calls: list[tuple[Any, ...]]) -> None:
        """Make calls on as many threads as help; one alone right here."""
        if len(calls) <= 1:
            for call in calls:
                act(*call)
            return
        with Workers(min(_threads(), len(calls))) as workers:
            workers.map(lambda call: act(*call), calls)

    def _spans(self, begin: int, source: memoryview) -> Iterator[tuple[FileIO, int, memoryview]]:
        """Which bytes go to which file, and where in it."""
        done = 0
        while done < len(source):
            number, at = divmod(begin + done, self._segment)
            count = min(self._segment - at, len(source) - done)
            yield self._files[number], at, source[done : done + count]
            done += count


def _threads() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1


def _write(file: FileIO, at: int, source: memoryview) -> None:
    done = 0
    while done < len(source):
        done += os.pwrite(file.fileno(), source[done:], at + done)


def _most_files() -> int:
    """As many as a block may have open."""
    try:
        import resource
    except ImportError:
        return 0  # nor are there files in memory
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if limit == resource.RLIM_INFINITY else min(_MOST_FILES, limit // _SHARE_OF_FILES)


def _files(sizes: Sequence[int]) -> list[FileIO]:
    """Files in memory, one of each size; none if the system doesn't give all of them."""
    files: list[FileIO] = []
    try:
        for size in sizes:
            files.append(FileIO(os.memfd_create("hf_prefetch"), "r+"))
            os.ftruncate(files[-1].fileno(), size)
    except (AttributeError, OSError):
        for file in files:
            file.close()
        return []
    return files


@cache
def _is_huge_if_advised(system: Path = Path("/sys")) -> bool:
    """Whether shared memory has huge pages where they are asked for. A mapping asks, so whoever writes to files gets none."""
    with suppress(OSError):
        return "[advise]" in (system / "kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    return False


def _side_by_side(sizes: Sequence[int], files: list[FileIO]) -> tuple[mmap.mmap, int]:
    """A range of addresses with shared memory in segments, and where in it that begins: at the start of a huge page.

    `files`: what each segment is of; new memory if there are none.
    """
    nbytes = sum(sizes)
    reserved = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    with torch.inference_mode(False):
        begin = torch.frombuffer(reserved, dtype=torch.uint8, count=1).data_ptr()
    offset, libc = -begin % _HUGE, _libc()
    assert libc is not None, "asked for before"
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED | (0 if files else mmap.MAP_ANONYMOUS)
    wanted = begin + offset
    for number, size in enumerate(sizes):
        if libc.mmap(wanted, size, access, kind, files[number].fileno() if files else -1, 0) != wanted:
            while files:
                files.pop().close()
            # What there is of it goes with the range.
            return mmap.mmap(-1, nbytes), 0
        wanted += size
    return reserved, offset


def _private(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)  # where there is no fork, there is nothing to tell apart
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@cache
def _libc() -> Any:
    """Linux's C library, with the signatures of what is called here; None elsewhere."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.syscall.restype = ctypes.c_long
    return libc


def _prefer(address: int, nbytes: int, node: int) -> None:
    """Have pages come from a node, as long as it has some."""
    number, libc = _MBIND.get(os.uname().machine) if hasattr(os, "uname") else None, _libc()
    if number is None or libc is None:
        return
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    if node < len(mask) * bits:
        mask[node // bits] = 1 << (node % bits)
        most = ctypes.c_ulong(len(mask) * bits)
        libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_ulong(nbytes),
            ctypes.c_int(_MPOL_PREFERRED),
            mask,
            most,
            ctypes.c_uint(0),
        )


def give_back_freed() -> None:
    """Have the C library return to the system what was freed: it keeps what was allocated in pieces of less than 32 MiB."""
    with suppress(AttributeError, OSError):  # there is no such function elsewhere
        libc = _libc()
        if libc is not None:
            libc.malloc_trim(0)


def node_of(pci: str, system: Path = Path("/sys")) -> int | None:
    """The node of NUMA memory that a device is at, such as "0000:65:00.0"; None if the system has one only, or doesn't say."""
    try:
        online = (system / "devices/system/node/online").read_text().strip()
        node = int((system / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 and online != "0" else None
