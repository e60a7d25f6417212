"""Uploads: every part arrives as it was, whatever the schedule, and a buffer is written only when nobody reads it any more."""

from __future__ import annotations

import pytest
import torch

from hf_prefetch.device.uploads import uploaded
from hf_prefetch.memory.packing import pack
from hf_prefetch.testing import FakeDevice, RaceChecker


@pytest.mark.parametrize("policy", ["eager", "lazy", 0, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_part_arrives(count: int, policy: str | int) -> None:
    device = FakeDevice(policy)
    parts = [torch.arange(64 * number, 64 * number + 8 * (number % 3 + 1), dtype=torch.int16) for number in range(count)]
    arrived = []
    for there in uploaded(device, parts, 256):
        with device.computing(reads=(there,), label="pack"):
            arrived.append(there.clone())
        del there
    assert len(arrived) == count
    assert all(map(torch.equal, arrived, parts))
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    RaceChecker().assert_clean(device.log)


def test_packed_on_the_way() -> None:
    """Rows that are brought in parts give what they give where they are; what is left half done holds nothing."""
    rows = (torch.randn(5, 3 * 2048 + 6, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    device = FakeDevice("eager")
    there = pack(rows, lambda parts: (part.clone() for part in uploaded(device, parts, rows.nbytes)))
    here = pack(rows)
    assert torch.equal(there.blocks, here.blocks)
    assert torch.equal(there.escapes, here.escapes)

    def broken() -> object:
        yield torch.zeros(8, dtype=torch.int16)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(uploaded(device, broken(), 256))  # type: ignore[arg-type]
    next(uploaded(device, [torch.zeros(4)] * 5, 256))
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
