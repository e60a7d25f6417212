"""What programs for a `FakeDevice` are made of: a slot, an upload that is ordered as it must be, and what raced."""

from __future__ import annotations

import torch

from hf_prefetch.testing import FakeDevice, FakeEvent


def kinds(device: FakeDevice) -> set[str]:
    return {race.kind for race in device.races()}


def slot_of(device: FakeDevice, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return device.allocate(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)


def after_allocation(device: FakeDevice) -> None:
    """Make the copy stream wait for what was allocated on the compute stream."""
    event = device.new_event()
    device.record(event, device.compute_stream())
    device.wait(device.copy_stream(), event)


def upload(device: FakeDevice, slot: torch.Tensor, source: torch.Tensor) -> FakeEvent:
    """A copy with everything around it that it needs; the event still has to be waited for."""
    after_allocation(device)
    device.copy(device.copy_stream(), slot, source)
    ready = device.new_event()
    device.record(ready, device.copy_stream())
    return ready
