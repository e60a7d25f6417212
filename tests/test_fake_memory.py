"""FakeDevice's memory: buffers, page-locked host memory, and what becomes of both when they are given back early."""

from __future__ import annotations

import pytest
import torch

from fake_programs import after_allocation, kinds, slot_of, upload
from hf_prefetch.testing import HOST, ByteRange, FakeDevice

torch.set_num_threads(1)


# -- host memory ----------------------------------------------------------------------------------------------------


def test_registration_table() -> None:
    device = FakeDevice(pin_limit=4096)
    block = torch.zeros(8192, dtype=torch.uint8)
    address = block.data_ptr()
    assert device.register(address, 2048) is None
    assert device.registered_bytes == 2048
    for begin, nbytes in [(address, 2048), (address + 2047, 10), (address + 100, 10), (address - 10, 11)]:
        assert "registered already" in str(device.register(begin, nbytes))
    assert "limit of 4,096" in str(device.register(address + 2048, 2049))
    assert device.register(address + 2048, 2048) is None
    device.unregister(address)
    assert device.registered_bytes == 2048
    for wrong in (address, address + 2049):
        with pytest.raises(AssertionError, match="no host memory is registered"):
            device.unregister(wrong)
    refusing = FakeDevice(refuse_pinning=True)
    assert "refuses" in str(refusing.register(address, 16))
    assert refusing.registered_bytes == 0
    assert "can't be" in str(device.register(address, 0))


def test_copy_from_pageable_memory_holds_the_host() -> None:
    device, order = FakeDevice("lazy"), []
    slot = slot_of(device, 4)
    after_allocation(device)
    device.launch(lambda: order.append("before"), stream=device.copy_stream())
    source = torch.ones(4)
    device.copy(device.copy_stream(), slot, source)
    device.launch(lambda: order.append("after"), stream=device.copy_stream())
    source.zero_()  # it has been read
    assert order == ["before"]
    assert slot.tolist() == [1.0] * 4
    assert device.pageable_copies == 1
    assert "pageable" in device.log[-2].label
    assert device.holds_host(pinned=False)
    assert not device.holds_host(pinned=True)
    assert not FakeDevice(assume_pinned=True).holds_host(pinned=False)


def test_copy_from_page_locked_memory_does_not() -> None:
    device, source = FakeDevice("lazy"), torch.ones(8)
    assert device.register(source.data_ptr(), 32) is None
    slot = slot_of(device, 4)
    ready = upload(device, slot, source[2:6])
    assert len(device.pending) == 6
    assert device.pageable_copies == 0
    copied = next(entry for entry in device.log if entry.kind == "copy")
    assert copied.reads == (ByteRange("host 1", 8, 24),)
    with pytest.raises(AssertionError, match="used by a pending copy"):
        device.unregister(source.data_ptr())
    device.synchronize(ready)
    device.unregister(source.data_ptr())
    assert device.races() == []


def test_unregistering_without_having_waited_is_a_race_even_if_it_went_well() -> None:
    device, source = FakeDevice("eager"), torch.ones(4)
    device.register(source.data_ptr(), 16)
    upload(device, slot_of(device, 4), source)
    assert device.pending == []
    device.unregister(source.data_ptr())
    assert "write after read" in kinds(device)


def test_source_partly_inside_a_registration_is_refused() -> None:
    device, source = FakeDevice(), torch.ones(8)
    device.register(source.data_ptr(), 16)
    device.register(source.data_ptr() + 16, 16)
    slot = slot_of(device, 4)
    device.copy(device.copy_stream(), slot, source[4:])
    with pytest.raises(RuntimeError, match="invalid argument"):
        device.copy(device.copy_stream(), slot, source[2:6])
    device.unregister(source.data_ptr())
    with pytest.raises(RuntimeError, match="invalid argument"):
        device.copy(device.copy_stream(), slot, source[2:6])


@pytest.mark.parametrize("waits", [True, False])
def test_host_must_not_reuse_a_bounce_buffer_too_early(waits) -> None:
    device, bounce = FakeDevice("lazy"), torch.zeros(4)
    device.register(bounce.data_ptr(), 16)
    first, second = slot_of(device, 4), slot_of(device, 4)
    with device.watching():
        bounce.fill_(1.0)
        ready = upload(device, first, bounce)
        if waits:
            device.synchronize(ready)
        bounce.fill_(2.0)
        upload(device, second, bounce)
    device.finish()
    assert [entry.stream for entry in device.log if entry.kind == "access"] == [HOST, HOST]
    assert (first.tolist(), second.tolist()) == ([1.0 if waits else 2.0] * 4, [2.0] * 4)
    assert kinds(device) == (set() if waits else {"write after read"})


# -- buffers --------------------------------------------------------------------------------------------------------


def test_buffers_are_ordinary_and_aligned() -> None:
    device = FakeDevice()
    with torch.inference_mode():
        buffer = device.allocate(1000)
    assert (buffer.dtype, buffer.shape, buffer.is_inference()) == (torch.uint8, (1000,), False)
    assert buffer.data_ptr() % 256 == 0
    assert device.allocate(0).numel() == 0
    assert device.range_of(buffer[10:20]) == ByteRange("buffer 1", 10, 20)
    assert device.range_of(torch.ones(3)) is None


def test_accounting_follows_the_last_tensor() -> None:
    device = FakeDevice()
    first, second = device.allocate(1000), device.allocate(24)
    assert device.allocated_bytes == 1024
    view = torch.nn.Parameter(first.view(torch.float32)[10:20], requires_grad=False)
    del first
    assert device.allocated_bytes == 1024
    del view
    assert (device.allocated_bytes, device.peak_bytes) == (24, 1024)
    device.trim()
    del second
    assert device.allocated_bytes == 0
    assert [entry.kind for entry in device.log] == ["allocate", "allocate", "free", "free"]


def test_memory_limit_and_made_up_failures() -> None:
    device = FakeDevice(memory_limit=100)
    kept = device.allocate(60)
    with pytest.raises(torch.OutOfMemoryError, match="41 bytes asked for, 60 of 100 bytes in use"):
        device.allocate(41)
    device.fail_allocations(after=1)
    device.allocate(40)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="made to fail"):
            device.allocate(1)
    device.fail_allocations(None)
    assert device.allocate(40).numel() == 40
    assert kept.numel() == device.allocated_bytes == 60


def test_freed_memory_is_handed_out_again_with_its_stragglers() -> None:
    device = FakeDevice("lazy", assume_pinned=True)
    old = slot_of(device, 4)
    address = old.data_ptr()
    upload(device, old, torch.ones(4))  # nobody waits for it
    del old
    new = slot_of(device, 4)
    assert new.data_ptr() == address
    with device.watching():
        new.zero_()
    device.finish()
    assert new.tolist() == [1.0] * 4  # the old owner's copy
    assert "write after write" in kinds(device)
    assert "free" in str(device.races()[0])


def test_freed_memory_goes_to_its_own_stream_only() -> None:
    device = FakeDevice("lazy")
    old = device.allocate(64)
    address = old.data_ptr()
    del old
    with device.use(device.stream("side")):
        other = device.allocate(64)
    assert other.data_ptr() != address
    assert device.allocate(64).data_ptr() == address


def test_first_write_waits_for_the_kernels_that_used_the_memory_before() -> None:
    for waits, expected in ((True, 7.0), (False, 1.0)):
        device, seen = FakeDevice("eager", assume_pinned=True), []
        old = device.allocate(16)
        raw, where = device.memory.raw(old).flatten(), device.range_of(old)
        assert where is not None
        raw.view(torch.float32).fill_(7.0)
        device.launch(lambda raw=raw, seen=seen: seen.append(raw.view(torch.float32).max().item()), reads=[where])
        del old
        new = slot_of(device, 4)
        if waits:
            after_allocation(device)
        device.copy(device.copy_stream(), new, torch.ones(4))
        device.finish()
        assert seen == [expected]
        assert kinds(device) == (set() if waits else {"write after write"})
