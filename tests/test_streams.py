"""Which device is driven how: accelerators by streams, the CPU as a stand-in, anything else in order and without lookahead."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hf_prefetch import enable_expert_prefetch
from hf_prefetch.streams import AcceleratorDevice, InOrderDevice, default_device, stream_device
from models import build, prompt


class Streamless(InOrderDevice):
    """A device that computes but has no streams, as MPS."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.overlaps = False
        self.name = "a device without streams"


def test_the_cpu_is_a_stand_in() -> None:
    """It claims to overlap, so that everything can be tried, and has nothing to page-lock for."""
    device = stream_device("cpu")
    assert isinstance(device, InOrderDevice)
    assert device.overlaps
    assert not device.can_pin
    assert stream_device(device) is device


def test_a_device_that_is_not_there_is_named() -> None:
    """Before anything is touched, whatever torch would say later."""
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(RuntimeError, match=rf"device='{missing}' was asked for, but torch .* sees no such device here"):
        stream_device(missing)
    with pytest.raises(ValueError, match="holds no data"):
        stream_device("meta")


def test_without_streams_every_way_is_plain_or_routed_and_exact(caplog: pytest.LogCaptureFixture) -> None:
    """Said once; large calls copy their bank when it is needed, small ones their experts."""
    model, long, short = build("mixtral"), prompt(20), prompt(2)
    with torch.no_grad():
        expected = [model(ids).logits for ids in (long, short)]
        with caplog.at_level(logging.WARNING, logger="hf_prefetch"):
            enable_expert_prefetch(model, device=Streamless())
        assert all(torch.equal(model(ids).logits, logits) for ids, logits in zip((long, short), expected, strict=True))
    report = model.expert_prefetch.report()
    assert (report.lookahead_calls, report.routed_calls, report.calls, report.fallbacks) == (0, 5, 10, 0)
    assert not report.looks_ahead
    assert len(caplog.records) == 1
    assert "every bank is copied when needed" in caplog.text


@pytest.mark.gpu
def test_an_accelerator_has_two_streams_and_page_locks(device: torch.device) -> None:
    """A refusal of the driver leaves no error behind for the next kernel to report."""
    found = stream_device(default_device())
    assert isinstance(found, AcceleratorDevice)
    assert found.device == device
    assert found.copy_stream() != found.compute_stream()
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert found.register(memory.data_ptr(), memory.numel()) is None
    refusal = found.register(memory.data_ptr(), memory.numel())
    assert refusal is not None
    assert "712" in refusal
    assert torch.equal(torch.ones(2, device=device) + 1, torch.full((2,), 2.0, device=device))
    found.unregister(memory.data_ptr())
    assert not memory.is_pinned()


def test_the_stream_that_threads_share_is_entered_by_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that can be seen without an accelerator."""
    shared, entered = torch.Stream(stream_id=3, device_index=0, device_type=0), []

    def own(**identity: int) -> Any:
        entered.append(identity)
        return nullcontext()

    here, there = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    monkeypatch.setattr(torch, "Stream", own)
    AcceleratorDevice.copy(AcceleratorDevice.__new__(AcceleratorDevice), shared, there, here)
    assert torch.equal(there, here)
    assert entered == [{"stream_id": 3, "device_index": 0, "device_type": 0}]


def test_a_mark_that_is_not_reached_is_not_asked_for_its_time() -> None:
    """CUDA refuses to say, whichever of the two it is: threads compute on streams of their own."""

    class Mark:
        def __init__(self, *, reached: bool) -> None:
            self.reached = reached

        def query(self) -> bool:
            return self.reached

        def elapsed_time(self, end: Mark) -> float:
            assert self.reached
            assert end.reached, "device not ready"
            return 1500.0

    device = AcceleratorDevice.__new__(AcceleratorDevice)
    for begin in (False, True):
        for end in (False, True):
            seconds = device.elapsed(Mark(reached=begin), Mark(reached=end))  # type: ignore[arg-type]
            assert seconds == (1.5 if begin and end else None)


@pytest.mark.gpu
def test_threads_that_copy_at_the_same_time_keep_their_streams(device: torch.device) -> None:
    """The staging ring's thread does, while a forward sends what is page-locked, on whatever stream it runs."""
    found, side = stream_device(device), torch.cuda.Stream(device)
    there, here = found.allocate(1 << 22), torch.zeros(1 << 22, dtype=torch.uint8)
    stream = found.copy_stream()

    def copies() -> Any:
        for _ in range(300):
            found.copy(stream, there, here)
        return torch.cuda.current_stream(device)

    with ThreadPoolExecutor(1) as pool, torch.cuda.stream(side):
        others = pool.submit(copies)
        assert copies() == side
        assert others.result() == torch.cuda.default_stream(device)
    found.settle()
