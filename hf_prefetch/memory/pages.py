"""Pages: host memory straight from the system, laid out so that it comes fast, and near the device that reads it.

Everything here makes memory come faster or lie nearer; where the system has no such thing it is left out, and nobody is told.

[Note: why one mapping is many]
Pages of shared memory belong to a file without a name, and whoever brings one in locks that file: sixteen threads are hardly
faster than one. So a block is many such files side by side in one range of addresses, and each thread brings in its own. Huge
pages, where the system gives them to shared memory, make that a matter of a few faults.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..workers import Workers

__all__ = ["SEGMENT", "Pages", "give_back_freed", "node_of"]

# Linux's numbers, the same on x86-64 and arm64 but for the call, which libc has no function for.
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_HUGE = 2 * 2**20
SEGMENT = 16 * _HUGE
_MOST_THREADS = 16


class Pages:
    """`nbytes` of host memory, page-aligned, nothing of which is there before somebody writes to it.

    Args:
        nbytes: how much; the mapping has whole pages.
        shared: whether forked processes share it; else a child that writes there writes to a copy.
        segment: bytes of each of the files that shared memory consists of; None for one file.
        node: the node of NUMA memory that it should come from, if it matters.

    Attributes:
        mapped: bytes of whole pages.
        buffer: the memory, from its first byte on. It lives as long as anything refers to this.
    """

    def __init__(self, nbytes: int, *, shared: bool, segment: int | None = SEGMENT, node: int | None = None) -> None:
        self.mapped = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if shared and segment is not None and self.mapped > segment and _libc() is not None:
            self.buffer, self.offset = _segments(self.mapped, segment)
        else:
            self.buffer, self.offset = mmap.mmap(-1, self.mapped) if shared else _private(self.mapped), 0
        if shared:
            with suppress(AttributeError, OSError, ValueError):
                self.buffer.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            self.block = torch.frombuffer(self.buffer, dtype=torch.uint8, count=nbytes, offset=self.offset)
        if node is not None:
            _prefer(self.block.data_ptr(), self.mapped, node)

    def touch(self) -> None:
        """Bring all pages in, on several threads."""
        address, libc = self.block.data_ptr(), _libc()
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1
        if libc is not None and self.mapped > SEGMENT:

            def bring(begin: int) -> bool:
                nbytes = min(SEGMENT, self.mapped - begin)
                return int(libc.madvise(address + begin, nbytes, _MADV_POPULATE_WRITE)) == 0

            with Workers(threads) as workers:
                if all(workers.map(bring, range(0, self.mapped, SEGMENT))):
                    return
        with torch.inference_mode(False):
            self.block.fill_(0)


def _segments(nbytes: int, segment: int) -> tuple[mmap.mmap, int]:
    """A range of addresses with shared memory in segments, and where in it that begins: at the start of a huge page."""
    reserved = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    with torch.inference_mode(False):
        begin = torch.frombuffer(reserved, dtype=torch.uint8, count=1).data_ptr()
    offset, libc = -begin % _HUGE, _libc()
    assert libc is not None, "asked for before"
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for at in range(offset, offset + nbytes, segment):
        wanted = begin + at
        if libc.mmap(wanted, min(segment, offset + nbytes - at), access, kind, -1, 0) != wanted:
            # What there is of it goes with the range.
            return mmap.mmap(-1, nbytes), 0
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
