"""Host memory for the benchmark: how much of it this process holds, blocks that fill fast, and page-locked ones."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["HostMemory", "PinnedBlock", "empty_host_cache", "host_block"]


class HostMemory:
    """Host memory that belongs to this process: anonymous and shared pages, not files that are mapped.

    Pages of files in memory that are open count, whether they are mapped or not: those that are count twice, so this is never
    less than is held, and somewhat more while such a file is being mapped.
    """

    STATUS = Path("/proc/self/status")
    FILES = Path("/proc/self/fd")

    @classmethod
    def now(cls) -> int | None:
        """Bytes held, or None where the system doesn't say."""
        try:
            fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", cls.STATUS.read_text(), re.MULTILINE))
        except OSError:
            return None
        names = ("RssAnon", "RssShmem") if "RssAnon" in fields else ("VmRSS",)
        return sum(int(fields.get(name, 0)) for name in names) * 1024 + cls._in_files() or None

    @classmethod
    def _in_files(cls) -> int:
        nbytes = 0
        for link in cls.FILES.iterdir() if cls.FILES.exists() else ():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(link).startswith("/memfd:"):
                    nbytes += os.stat(link).st_blocks * 512
        return nbytes

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


def host_block(nbytes: int) -> torch.Tensor:
    """Zeroed bytes in private memory, in huge pages where the system has them: bringing small ones in takes seconds a GB."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()


class PinnedBlock:
    """Bytes in host memory that are page-locked by one registration, as fast to copy from as such memory gets.

    On a machine without an accelerator it is ordinary memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = host_block(nbytes)
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


def empty_host_cache() -> None:
    """Have torch return the page-locked memory that it keeps for later."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.accelerator.is_available():
        empty()


def _runtime() -> Any:
    get: Any = torch.cuda.cudart
    return get()
