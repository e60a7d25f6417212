"""The testing room: streams without a GPU, and proof that a program waits for all that it must wait for.

`FakeDevice` is a `StreamDevice` over CPU memory that runs its streams in adversarial orders: eager, lazy, seeded at
random, or as a chooser says. Its log holds what was enqueued in program order, and `RaceChecker` finds in it every two
accesses that no wait orders, whichever way the run went. A kernel that forgets to wait for its copy:

    >>> import torch
    >>> from hf_prefetch.testing import FakeDevice
    >>> device = FakeDevice("lazy", assume_pinned=True)
    >>> slot, weights = device.allocate(16).view(torch.float32), torch.ones(4)
    >>> allocated, seen = device.new_event(), []
    >>> device.record(allocated, device.compute_stream())
    >>> device.wait(device.copy_stream(), allocated)
    >>> device.copy(device.copy_stream(), slot, weights)
    >>> device.launch(lambda: seen.append(slot.clone()), reads=[slot])
    >>> device.finish()
    >>> seen[0]
    tensor([nan, nan, nan, nan])
    >>> print(*(race.kind for race in device.races()))
    read after write

Models run as they are: inside `with device.watching():` every torch operator on the device's memory is a kernel too.
"""

from __future__ import annotations

from .fake_device import FakeDevice
from .log import HOST, ByteRange, LogEntry
from .policies import Chosen, Eager, Lazy, Policy, Seeded
from .queues import DeadlockError, FakeEvent, FakeMark, FakeStream, Operation
from .race_checker import Race, RaceChecker

__all__ = [
    "HOST",
    "ByteRange",
    "Chosen",
    "DeadlockError",
    "Eager",
    "FakeDevice",
    "FakeEvent",
    "FakeMark",
    "FakeStream",
    "Lazy",
    "LogEntry",
    "Operation",
    "Policy",
    "Race",
    "RaceChecker",
    "Seeded",
]
