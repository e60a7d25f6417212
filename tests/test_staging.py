"""Banks that are not page-locked go through the staging ring: the same bits, errors where they belong, nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.memory.store import StoredBank
from hf_prefetch.streams import InOrderDevice
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import GATE, bank_bytes, build, experts_of, prompt
from threads import staging_threads


def enabled(model: PreTrainedModel, device: Any, **options: Any) -> PreTrainedModel:
    return enable_expert_prefetch(model, device=device, progress=False, **{"pin_memory": 0, **options})


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("policy", ["eager", "lazy", 0, 1])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_is_not_page_locked_goes_through_the_ring(share: float, policy: str | int, slots: int) -> None:
    """No copy comes from pageable memory, prefill looks ahead as ever, and the report says what it costs."""
    model, ids, device = build("qwen3_moe"), prompt(GATE), FakeDevice(policy)
    layers, size = len(experts_of(model)), bank_bytes(model) // len(experts_of(model))
    locked = int(share * layers)
    expected = logits(model, ids)
    enabled(model, device, slots=slots, pin_memory=locked * size)
    assert not staging_threads(), "nothing is started before it is needed"
    for _ in range(3):
        with device.watching():
            assert torch.equal(logits(model, ids), expected)
    report = model.expert_prefetch.report()
    assert device.pageable_copies == 0
    assert report.staged_bytes == 3 * (layers - locked) * size
    assert 0 < report.staging_bytes < size
    assert (report.pinned_bytes, report.fallbacks) == (locked * size, 0)
    assert report.lookahead_hits == 3 * (layers - 1)
    assert "went to the device, read at" in str(report)
    RaceChecker().assert_clean(device.log)
    disable_expert_prefetch(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    assert not staging_threads()


def test_a_system_that_locks_nothing_gets_plain_copies() -> None:
    """Chunks that are not page-locked would gain nothing over memory that is not."""
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice(refuse_pinning=True)
    expected = logits(model, ids)
    with pytest.warns(RuntimeWarning, match="could not be page-locked"):
        enable_expert_prefetch(model, device=device, progress=False)
    assert torch.equal(logits(model, ids), expected)
    report = model.expert_prefetch.report()
    assert (report.staging_bytes, report.staged_bytes, device.pageable_copies) == (0, 0, len(experts_of(model)))
    assert not staging_threads()
    disable_expert_prefetch(model)


def test_without_page_locking_nothing_is_staged() -> None:
    """From the CPU's memory to the CPU's memory a detour gains nothing."""
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    enabled(model, InOrderDevice(torch.device("cpu")))
    assert torch.equal(logits(model, ids), expected)
    assert model.expert_prefetch.report().staged_bytes == 0
    disable_expert_prefetch(model)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, BaseException | None], None]:
    """Have reads of one bank fail, or of none."""
    read, fails = StoredBank.read, {}

    def sometimes(self: StoredBank, begin: int, destination: torch.Tensor) -> None:
        if self.bank.index in fails:
            raise fails[self.bank.index]
        read(self, begin, destination)

    def choose(index: int, error: BaseException | None) -> None:
        fails.clear()
        if error is not None:
            fails[index] = error

    monkeypatch.setattr(StoredBank, "read", sometimes)
    return choose


@pytest.mark.parametrize("index", range(5))
def test_an_error_of_the_thread_reaches_whoever_needs_the_bank(
    index: int, failing: Callable[[int, BaseException | None], None]
) -> None:
    """And nobody else; the next call tries again."""
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice(index)
    expected = logits(model, ids)
    enabled(model, device)
    for _ in range(2):
        error = OSError(5, "the disk is gone")
        failing(index, error)
        calls = model.expert_prefetch.report().calls
        with pytest.raises(OSError, match="the disk is gone") as caught:
            logits(model, ids)
        assert caught.value is error
        assert model.expert_prefetch.report().calls == calls + index
        del caught
        error.__traceback__ = None
        failing(index, None)
        with device.watching():
            assert torch.equal(logits(model, ids), expected)
    assert device.races() == []
    disable_expert_prefetch(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    assert not staging_threads()


def test_an_error_keeps_nothing_alive(failing: Callable[[int, BaseException | None], None]) -> None:
    """It refers to the frames through which it came, and so to the model."""
    model, device = build("mixtral"), FakeDevice()
    enabled(model, device)
    failing(2, OSError(5, "the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        logits(model, prompt(GATE))
    failing(2, None)
    del model
    gc.collect()
    assert not staging_threads()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_an_interrupt_while_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way is given up, and the next call is right."""
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    expected = logits(model, ids)
    enabled(model, device)
    lane = next(iter(model.expert_prefetch._lane_of.values()))
    synchronize, left = lane.staging.synchronize, [2]

    def interrupted(upload: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        synchronize(upload)

    monkeypatch.setattr(lane.staging, "synchronize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids)
    assert torch.equal(logits(model, ids), expected)
    assert device.races() == []
    disable_expert_prefetch(model)
    assert not staging_threads()


def test_a_deleted_model_leaves_no_thread() -> None:
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    enabled(model, device)
    logits(model, ids)
    assert staging_threads()
    del model
    gc.collect()
    assert not staging_threads()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_a_model_that_is_collected_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may come in any thread. This one can't wait for itself."""
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    enabled(model, device)
    logits(model, ids)
    lane = next(iter(model.expert_prefetch._lane_of.values()))
    gc.disable()
    try:
        del model
        lane.staging._pool.submit(gc.collect).result()
    finally:
        gc.enable()
    for _ in range(1000):
        if not staging_threads() and device.registered_bytes == 0:
            break
        time.sleep(0.01)
    assert not staging_threads()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


class Locking(InOrderDevice):
    """The stand-in, as if memory could be page-locked for it."""

    can_pin = True

    def register(self, address: int, nbytes: int) -> None:  # type: ignore[override]
        return None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_ring_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an upload under way that its thread would have to finish, if it had one, and a lock that nobody gives back."""
    model, ids, read = build("mixtral"), prompt(GATE), StoredBank.read
    expected = logits(model, ids)
    enabled(model, Locking(torch.device("cpu")))
    assert torch.equal(logits(model, ids), expected)
    scheduler = model.expert_prefetch
    ring = next(iter(scheduler._lane_of.values())).staging
    assert ring.nbytes == bank_bytes(model)

    def slowly(self: StoredBank, begin: int, destination: torch.Tensor) -> None:
        time.sleep(0.05)
        read(self, begin, destination)

    monkeypatch.setattr(StoredBank, "read", slowly)
    assert scheduler.prefetch(scheduler.banks[0])
    with ring._changed:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if torch.equal(logits(model, ids), expected) else 2
            finally:
                os._exit(status)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    assert not staging_threads()
