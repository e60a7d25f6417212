"""What goes through the staging ring: uploads, the chunks that their parts lie in, and a meter of what was read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..memory.pinned import Arena
from ..memory.store import StoredBank
from ..timeline import Timeline

__all__ = ["Chunk", "Meter", "Upload"]


@dataclass(eq=False)
class Upload:
    """A bank on its way to a slot.

    Attributes:
        stored: the bank.
        destination: where it goes, as many bytes.
        ready: recorded on the copy stream behind its last copy.
        timeline: where the copy is noted, if anybody records them.
        is_done: whether `ready` was recorded.
        is_cancelled: whether nobody wants it any more.
        error: what went wrong.
        process: where it was sent: a fork's child has to send it again.
        begin: a mark in front of its first copy, where there is a timeline.
        asked_for: how many of its bytes have been given a chunk.
        chunks: how many of these are not copied yet.
    """

    stored: StoredBank
    destination: torch.Tensor
    ready: Any
    timeline: Timeline | None = None
    is_done: bool = False
    is_cancelled: bool = False
    error: BaseException | None = None
    process: int = 0
    begin: Any = None
    asked_for: int = 0
    chunks: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether there is more to do for it."""
        return not (self.is_done or self.is_cancelled or self.error)


@dataclass(eq=False)
class Chunk:
    """Host memory, and the part of an upload that is in it.

    Attributes:
        free: recorded on the copy stream behind the chunk's last copy, if it `was_copied`.
    """

    arena: Arena
    free: Any
    was_copied: bool = False
    upload: Upload | None = None
    begin: int = 0
    nbytes: int = 0
    reads: list[Future[None]] = field(default_factory=list)


class Meter:
    """Counts bytes, and the time during which at least one thread was reading."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._reading = 0
        self._since = 0.0

    @contextmanager
    def reading(self, nbytes: int) -> Iterator[None]:
        """So many bytes are read inside."""
        with self._lock:
            if self._reading == 0:
                self._since = time.perf_counter()
            self._reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1
                self.nbytes += nbytes
                if self._reading == 0:
                    self.seconds += time.perf_counter() - self._since
