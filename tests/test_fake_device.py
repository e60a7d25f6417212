"""FakeDevice: right programs come out right under every policy, wrong ones come out wrong and are reported."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection

import pytest
import torch

from fake_programs import kinds, slot_of, upload
from hf_prefetch.streams import StreamDevice
from hf_prefetch.testing import DeadlockError, FakeDevice, FakeEvent, Seeded

torch.set_num_threads(1)

POLICIES = ["eager", "lazy", *range(8)]


# -- a ring of slots: the program that this is all for -------------------------------------------------------------


def run_ring(device: FakeDevice, slots: int = 3, steps: int = 12, without: Collection[str] = ()) -> list[list[float]]:
    """Stream `steps` banks through `slots` slots; what each step's kernel saw. `without` leaves out orderings."""
    size = 8
    banks = [torch.full((size,), float(step)) for step in range(steps)]
    ring = [slot_of(device, size) for _ in range(slots)]
    ready, free = ([device.new_event() for _ in range(slots)] for _ in range(2))
    compute, copy = device.compute_stream(), device.copy_stream()
    seen: list[list[float]] = []
    for event in free:
        device.record(event, compute)

    def fill(step: int) -> None:
        if step < steps:
            if "free" not in without:
                device.wait(copy, free[step % slots])
            device.copy(copy, ring[step % slots], banks[step])
            if "record" not in without or step < slots:
                device.record(ready[step % slots], copy)

    for step in range(slots - 1):
        fill(step)
    for step in range(steps):
        fill(step + slots - 1)
        slot = ring[step % slots]
        if "ready" not in without:
            device.wait(compute, ready[step % slots])
        device.launch(lambda slot=slot: seen.append(slot.tolist()), reads=[slot], label=f"step {step}")
        device.record(free[step % slots], compute)
    device.finish()
    return seen


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_correct_ring_is_the_same_under_every_policy(policy, slots) -> None:
    device = FakeDevice(policy, assume_pinned=True)
    assert run_ring(device, slots) == [[float(step)] * 8 for step in range(12)]
    assert device.races() == []
    assert device.pending == []


def test_without_the_ready_wait_a_lazy_copy_is_too_late() -> None:
    device = FakeDevice("lazy", assume_pinned=True)
    seen = torch.tensor(run_ring(device, without={"ready"}))
    assert seen[0].isnan().all()
    assert "read after write" in kinds(device)


def test_without_the_free_wait_an_eager_copy_is_too_early() -> None:
    device = FakeDevice("eager", assume_pinned=True)
    seen = run_ring(device, without={"free"})
    assert seen[0] == [9.0] * 8  # the last bank that went through the slot
    assert {"write after read", "write after write"} <= kinds(device)  # the second: its allocation


def test_a_stale_record_lets_the_reader_through() -> None:
    device = FakeDevice("lazy", assume_pinned=True)
    assert run_ring(device, without={"record"})[3] != [3.0] * 8
    assert any("stale record" in race.missing for race in device.races())


@pytest.mark.parametrize("without", ["ready", "free", "record"])
@pytest.mark.parametrize("policy", POLICIES)
def test_races_are_reported_whichever_way_the_run_went(policy, without) -> None:
    device = FakeDevice(policy, assume_pinned=True)
    run_ring(device, without={without})
    assert device.races()


def test_same_seed_same_run() -> None:
    runs = [run_ring(FakeDevice(seed, assume_pinned=True), without={"ready"}) for seed in (5, 5, random.Random(5))]
    assert str(runs[0]) == str(runs[1]) == str(runs[2])
    others = {str(run_ring(FakeDevice(Seeded(seed), assume_pinned=True), without={"ready"})) for seed in range(8)}
    assert len(others) > 1


# -- streams, events, copies ----------------------------------------------------------------------------------------


def test_it_is_a_stream_device() -> None:
    device = FakeDevice()
    assert isinstance(device, StreamDevice)
    assert (device.device, device.overlaps, device.can_pin, device.name) == (
        torch.device("cpu"),
        True,
        True,
        "fake device",
    )
    assert device.compute_stream() is device.stream("compute")
    assert device.copy_stream() is device.stream("copy") is not device.compute_stream()
    assert not device.is_capturing()


def test_use_switches_the_compute_stream_of_this_thread_only() -> None:
    device, elsewhere = FakeDevice(), []
    with device.use(device.stream("side")) as side:
        assert device.compute_stream() is side
        with device.use(device.stream("inner")):
            assert device.compute_stream().name == "inner"
        thread = threading.Thread(target=lambda: elsewhere.append(device.compute_stream().name))
        thread.start()
        thread.join()
        assert device.compute_stream() is side
    assert device.compute_stream().name == "compute"
    assert elsewhere == ["compute"]


def test_torn_copy_shows_half_poison() -> None:
    halfway = FakeDevice(
        lambda runnable: next((i for i, op in enumerate(runnable) if "second half" not in op.label), None),
        assume_pinned=True,
    )
    slot, seen = slot_of(halfway, 8), []
    upload(halfway, slot, torch.ones(8))
    halfway.launch(lambda: seen.extend(slot.tolist()), reads=[slot])
    assert seen[:4] == [1.0] * 4
    assert torch.tensor(seen[4:]).isnan().all()
    assert kinds(halfway) == {"read after write"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_is_nan(dtype) -> None:
    device = FakeDevice()
    slot = slot_of(device, 6, dtype=dtype)
    assert slot.isnan().all()
    slot.zero_()
    device.poison(slot[2:4])
    assert slot.isnan().tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("shape", "prepare"),
    [
        ((), lambda t: t),
        ((1,), lambda t: t),
        ((3, 4), lambda t: t),
        ((4, 3), torch.t),
        ((1, 5), lambda t: t),
        ((2, 3, 4), lambda t: t.transpose(0, 2)),
    ],
)
def test_copies_are_exact_for_any_strides(shape, prepare) -> None:
    device = FakeDevice("lazy", assume_pinned=True)
    source = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32).view(torch.float32)  # odd NaNs too
    slot = slot_of(device, *shape) if shape else slot_of(device, 1)[0]
    ready = upload(device, prepare(slot), prepare(source))
    device.synchronize(ready)
    assert torch.equal(slot.view(torch.int32), source.view(torch.int32))
    assert device.races() == []


def test_what_a_copy_refuses() -> None:
    device = FakeDevice()
    slot = slot_of(device, 4)
    with pytest.raises(ValueError, match="same shape and dtype"):
        device.copy(device.copy_stream(), slot, torch.ones(5))
    with pytest.raises(ValueError, match="same shape and dtype"):
        device.copy(device.copy_stream(), slot, torch.ones(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="this device allocated"):
        device.copy(device.copy_stream(), torch.ones(4), torch.ones(4))
    device.copy(device.copy_stream(), slot[:0], torch.ones(0))


def test_wait_for_an_event_never_recorded_passes_and_is_reported() -> None:
    device = FakeDevice("lazy")
    event = device.new_event()
    device.wait(device.compute_stream(), event)
    device.synchronize(event)
    device.drain()
    assert [race.kind for race in device.races()] == ["unrecorded wait", "unrecorded wait"]


def test_wait_captures_the_record_of_its_time() -> None:
    device, order = FakeDevice("lazy"), []
    side, event = device.stream("side"), device.new_event()
    device.record(event, side)
    device.wait(device.compute_stream(), event)
    device.launch(lambda: order.append("side"), stream=side)
    device.record(event, side)  # too late for the wait above
    device.launch(lambda: order.append("compute"))
    device.drain()
    assert order == ["compute"]


def test_synchronize_and_drain_run_only_what_is_needed() -> None:
    device, order = FakeDevice("lazy"), []
    for name in ("a", "b", "c"):
        device.launch(lambda name=name: order.append(name), stream=device.stream(name))
    event = device.new_event()
    device.record(event, device.stream("a"))
    device.launch(lambda: order.append("a later"), stream=device.stream("a"))
    device.wait(device.stream("b"), event)
    device.synchronize(event)
    assert order == ["a"]
    device.drain(device.stream("b"))
    assert order == ["a", "b"]
    device.finish()
    assert sorted(order) == ["a", "a later", "b", "c"]


def test_long_lazy_chains_are_no_problem() -> None:
    device, count = FakeDevice("lazy"), []
    event = device.new_event()
    device.record(event, device.copy_stream())
    for step in range(3000):
        stream = (device.compute_stream(), device.copy_stream())[step % 2]
        device.wait(stream, event)
        device.launch(lambda: count.append(1), stream=stream)
        device.record(event, stream)
    device.synchronize(event)
    assert len(count) == 3000


def test_marks_measure_the_stream_and_not_the_host() -> None:
    device = FakeDevice("lazy")
    begin = device.mark(device.copy_stream())
    device.launch(lambda: None, stream=device.copy_stream())
    end = device.mark(device.copy_stream())
    assert device.elapsed(begin, end) is None
    device.finish()
    assert device.elapsed(begin, end) == pytest.approx(2e-6)
    ticks = iter([10.0, 12.5])
    device = FakeDevice(clock=lambda: next(ticks))
    assert device.elapsed(device.mark(device.compute_stream()), device.mark(device.compute_stream())) == 2.5


def test_kernel_that_fails_does_so_when_it_runs_and_once() -> None:
    device = FakeDevice("lazy")
    device.launch(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        device.drain()
    device.finish()
    assert device.pending == []


def test_policies_by_name_and_their_mistakes() -> None:
    with pytest.raises(ValueError, match="'hasty'"):
        FakeDevice("hasty")
    with pytest.raises(IndexError, match="operation 1 of 1"):
        FakeDevice(lambda runnable: len(runnable)).allocate(4)


# -- deadlocks ------------------------------------------------------------------------------------------------------


def test_kernel_that_waits_for_itself() -> None:
    device, event = FakeDevice("lazy"), FakeEvent(0)
    device.launch(lambda: device.synchronize(event), label="selfish")
    device.record(event, device.compute_stream())
    with pytest.raises(DeadlockError, match=r"selfish.*running"):
        device.finish()


def test_kernel_that_waits_for_itself_through_another_stream() -> None:
    device = FakeDevice("lazy")
    here, there = device.new_event(), device.new_event()
    device.launch(lambda: device.synchronize(there), label="selfish")
    device.record(here, device.compute_stream())
    device.wait(device.copy_stream(), here)
    device.record(there, device.copy_stream())
    with pytest.raises(DeadlockError, match=r"copy.*which waits for.*compute.*selfish"):
        device.finish()


def test_cycle_of_waits() -> None:
    # Enqueueing can't build one (see queues.py), so this one is bent by hand.
    device = FakeDevice("lazy")
    one, two = device.new_event(), device.new_event()
    device.wait(device.stream("a"), one)
    device.record(one, device.stream("a"))
    device.wait(device.stream("b"), one)
    device.record(two, device.stream("b"))
    device.pending[0].after = two.latest
    with pytest.raises(DeadlockError, match="a cycle"):
        device.synchronize(two)
    with pytest.raises(DeadlockError, match="none of the streams can go on"):
        device.finish()
