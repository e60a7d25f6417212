"""LogEntry: one line of what a program asked of a device, in the order in which it asked.

The log is the meeting point of the two halves of the testing room: `FakeDevice` writes it, `RaceChecker` reads it.
It knows nothing of torch, so a log can just as well be written by hand or come from somewhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["HOST", "ByteRange", "Kind", "LogEntry"]

HOST = "host"
"""The `stream` of what the host does itself, at once: touching page-locked memory, waiting for an event."""

Kind = Literal[
    "allocate",  # a buffer is handed out on the stream that owns it; a write, because the memory may be recycled
    "free",  # its last reference is gone; on the stream that owns it, which may recycle it from here on
    "copy",  # an upload
    "kernel",  # whatever computes
    "poison",  # a deliberate overwrite with NaN
    "record",  # an event marks all the work before it on its stream
    "wait",  # work after it on its stream comes after the latest record of its event
    "synchronize",  # the host itself waits for the latest record
    "mark",  # a point in time; orders nothing
    "register",  # host memory becomes page-locked, from here on known under a storage name
    "unregister",  # and stops being so
    "access",  # the host reads or writes page-locked memory
]


class ByteRange(NamedTuple):
    """Bytes `begin` up to but not including `end` of one storage.

    A storage is a piece of memory, not a tensor: when a buffer is freed and its memory handed out again, the new
    buffer has the same storage name. That is what lets a straggler of the old owner be seen.
    """

    storage: str
    begin: int
    end: int

    def overlaps(self, other: ByteRange) -> bool:
        """Whether the two share at least one byte."""
        return self.storage == other.storage and self.begin < other.end and other.begin < self.end

    def __str__(self) -> str:
        return f"{self.storage} bytes [{self.begin:,}:{self.end:,})"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One operation.

    Attributes:
        kind: what it is, see `Kind`.
        stream: the name of the stream on which it was enqueued, or `HOST`.
        event: the id of the event, for `record`, `wait` and `synchronize`.
        reads: the bytes that it reads. What it both reads and writes stands under `writes` only: a write has to come
            after everything that a read has to come after, so nothing is lost.
        writes: the bytes that it writes, or that it takes away.
        label: a few words for people.
    """

    kind: Kind
    stream: str
    event: int | None = None
    reads: tuple[ByteRange, ...] = ()
    writes: tuple[ByteRange, ...] = ()
    label: str = ""

    def __str__(self) -> str:
        event = "" if self.event is None else f" of event {self.event}"
        return f"{self.kind}{event}{f' ({self.label})' if self.label else ''} on {self.stream!r}"
