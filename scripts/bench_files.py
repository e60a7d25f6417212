"""Reading files for the benchmark of host memory: cold, which is verified, and in several ways."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

__all__ = ["evict", "read_all", "read_by_threads", "resident_pages"]

_BUFFER = 16 * 2**20
# Pages that are on their way to the disk, or in a list of another CPU, are not dropped at once.
_ATTEMPTS = 3


def evict(files: list[Path]) -> float:
    """Have the system drop files from its cache. Returns the share of its pages that the worst of them still has there.

    That is looked at, file by file: some systems (containers) take the request and do nothing, or don't say.
    """
    worst = 0.0
    for file in files:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            os.fsync(stream.fileno())
            for _ in range(_ATTEMPTS):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                here, pages = resident_pages(stream.fileno(), size)
                if not here:
                    break
            worst = max(worst, here / max(pages, 1))
    return worst


def resident_pages(descriptor: int, nbytes: int) -> tuple[int, int]:
    """Pages of a file in the page cache, and in all (mincore). Where the system doesn't say, all are taken to be there."""
    pages = -(-nbytes // mmap.PAGESIZE)
    if not pages:
        return 0, 0
    vector = np.zeros(pages, dtype=np.uint8)
    with mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        begin = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        known = libc.mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(nbytes), vector.ctypes) == 0
        del begin  # or it could not be unmapped
    return int((vector & 1).sum(dtype=np.int64)) if known else pages, pages


def read_all(files: list[Path]) -> int:
    """Plain sequential reads: each file from its first byte to its last into one buffer. Returns the bytes."""
    buffer, total = memoryview(bytearray(_BUFFER)), 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                total += count
    return total


def read_by_threads(files: list[Path], threads: int, piece: int, direct: bool) -> int:
    """The same by several threads, in pieces."""
    buffers = threading.local()

    def read(job: tuple[int, int, int]) -> int:
        descriptor, offset, size = job
        if not hasattr(buffers, "pages"):
            buffers.pages = memoryview(mmap.mmap(-1, piece))
        done = 0
        while done < min(piece, size - offset):
            count = os.preadv(descriptor, [buffers.pages[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    opened = [os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files]
    try:
        sizes = [file.stat().st_size for file in files]
        jobs = [(fd, offset, size) for fd, size in zip(opened, sizes, strict=True) for offset in range(0, size, piece)]
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(read, jobs))
    finally:
        for descriptor in opened:
            os.close(descriptor)
