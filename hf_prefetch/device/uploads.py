"""Parts of pageable memory on a device, one after the other: each is copied while the one before it is worked on.

Two buffers take turns on either side. The host's are page-locked, so that the copy to the device runs by itself; a thread fills
them.

[Note: the orderings of uploads]
    host buffer      filled by the thread after the copy that read it last has ended: `sent`, for which it waits
    device buffer    written by the copy stream after the compute stream has read it: `free`, recorded when the part after it is
                     asked for; read by the compute stream after `sent`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from ..memory.pinned import Arena
from ..streams import StreamDevice
from ..workers import Workers

__all__ = ["uploaded"]


class _Stage:
    """A buffer on either side, with the events of the note above."""

    def __init__(self, device: StreamDevice, nbytes: int) -> None:
        self.device = device
        # First, since there may be no room: memory that is page-locked must not be left behind.
        self.there = device.allocate(nbytes)
        self.sent, self.free = device.new_event(), device.new_event()
        device.record(self.free, device.compute_stream())
        self.arena = Arena(nbytes)
        self.arena.touch()
        self._is_used = False

    def pin(self) -> None:
        """Page-lock the host's buffer. Where the system refuses, copies are slower and hold the thread."""
        self.arena.pin(self.device)

    def send(self, part: torch.Tensor) -> torch.Tensor:
        """Bring a part to the device. Returns it there; it must not be read before `sent`."""
        if self._is_used:
            self.device.synchronize(self.sent)
        self._is_used = True
        with torch.no_grad():
            here, there = (block[: part.nbytes].view(part.dtype).view(part.shape) for block in (self.arena.block, self.there))
            here.copy_(part)
        stream = self.device.copy_stream()
        self.device.wait(stream, self.free)
        self.device.copy(stream, there, here)
        self.device.record(self.sent, stream)
        return there


def uploaded(device: StreamDevice, parts: Iterable[torch.Tensor], most: int) -> Iterator[torch.Tensor]:
    """The parts on the device, readable on the compute stream. Each is gone when the one after it is asked for.

    Args:
        device: where.
        parts: tensors on the CPU, of at most `most` bytes each.
        most: see above.
    """
    waiting, stages = iter(parts), [_Stage(device, most) for _ in range(2)]
    try:
        for stage in stages:
            stage.pin()
        with Workers(1) as workers:
            part = next(waiting, None)
            ahead = None if part is None else workers.submit(partial(stages[0].send, part))
            while ahead is not None:
                there, stage = ahead(), stages[0]
                stages.reverse()
                part = next(waiting, None)
                ahead = None if part is None else workers.submit(partial(stages[0].send, part))
                device.wait(device.compute_stream(), stage.sent)
                yield there
                device.record(stage.free, device.compute_stream())
    finally:
        device.settle()
        for stage in stages:
            stage.arena.unpin()
