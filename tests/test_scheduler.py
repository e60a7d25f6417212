"""The scheduler on a device that runs its queues in adversarial orders: no kernel may ever see a wrong byte."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch

from hf_prefetch.scheduling import policy
from hf_prefetch.testing import FakeDevice
from streaming import FEW, MANY, Streaming

POLICIES = ["eager", "lazy", 0, 1, 2]


@pytest.mark.parametrize("device_policy", POLICIES)
@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("lookahead", [1, 2])
def test_every_small_case_reads_the_right_bytes(
    slots: int, device_policy: str | int, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Banks 1 to 8, three passes: also where the number of banks is no multiple of the slots."""
    monkeypatch.setattr("hf_prefetch.scheduling.lane.LOOKAHEAD", lookahead)
    monkeypatch.setattr(policy, "LOOKAHEAD", lookahead)
    for banks in range(1, 9):
        streaming = Streaming(banks, slots, FakeDevice(device_policy))
        for _ in range(3):
            streaming.run(range(banks))
        report = streaming.scheduler.report()
        assert report.lookahead_hits == 3 * (banks - 1), "every bank but the first of each pass is sent ahead"
        assert report.copies == 3 * banks
        assert report.bytes_to_device == 3 * sum(bank.nbytes for bank in streaming.banks)
        assert report.unused_copies == 0
        assert report.fallbacks == 0
        streaming.close()


@pytest.mark.parametrize("device_policy", POLICIES)
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_any_order_reads_the_right_bytes(slots: int, device_policy: str | int) -> None:
    """Backwards, prefixes, skips, repeats, at random, with calls of few and of many tokens mixed."""
    choose = random.Random(f"{slots} {device_policy}")
    streaming = Streaming(5, slots, FakeDevice(device_policy), widths=[8, 24, 4, 16, 8])
    orders = [[4, 3, 2, 1, 0], [0, 1, 2], [0, 2, 4], [1, 1, 1], [0, 1, 2, 3, 4], [3], [2, 2, 4, 0]]
    orders += [[choose.randrange(5) for _ in range(12)] for _ in range(4)]
    for order in orders:
        for index in order:
            streaming.use(index, choose.choice([FEW, MANY, None]))
    assert streaming.scheduler.report().fallbacks == 0
    streaming.close()


def test_all_orders_of_three_banks_twice() -> None:
    """Every first pass followed by every second pass, under the two extreme schedules of the device."""
    orders = [list(order) for size in (1, 2, 3) for order in itertools.permutations(range(3), size)]
    for device_policy in ("eager", "lazy"):
        for first, second in itertools.product(orders, orders):
            streaming = Streaming(3, 2, FakeDevice(device_policy))
            streaming.run(first)
            streaming.run(second)
            streaming.close()


def test_a_new_order_is_learned_in_one_pass() -> None:
    """The model's modules are one guess; what is called is what counts. The second pass ends what the guess still cost."""
    streaming = Streaming(6, 3, FakeDevice("lazy"))
    order = [5, 3, 1, 0, 2, 4]
    streaming.run(order)
    streaming.run(order)
    streaming.scheduler.reset()
    streaming.run(order)
    report = streaming.scheduler.report()
    assert report.lookahead_hits == 5
    assert report.unused_copies == 0


def _events(streaming: Streaming) -> list[str]:
    """The log as short words: what the golden tests compare."""
    words = {"copy": "copy", "kernel": "use", "wait": "wait", "record": "record"}
    return [f"{words[entry.kind]} on {entry.stream}" for entry in streaming.device.log if entry.kind in words]


def _copies_before_each_use(streaming: Streaming) -> list[int]:
    copies, seen = [], 0
    for word in _events(streaming):
        seen += word == "copy on copy"
        if word == "use on compute":
            copies.append(seen)
    return copies


@pytest.mark.parametrize(("slots", "expected"), [(3, [3, 4, 5, 6, 6, 6]), (4, [3, 4, 5, 6, 6, 6]), (2, [2, 3, 4, 5, 6, 6])])
def test_bank_i_plus_2_is_sent_while_bank_i_computes(slots: int, expected: list[int]) -> None:
    """With 3 and 4 slots before the kernels of bank i are enqueued, with 2 right after its release."""
    streaming = Streaming(6, slots, FakeDevice("lazy"))
    streaming.run(range(6))
    assert _copies_before_each_use(streaming) == expected


def test_one_wait_and_one_record_for_each_call_on_the_compute_stream() -> None:
    """The whole conversation of a steady call with 3 slots: wait once, refill what was freed, compute, free."""
    streaming = Streaming(8, 3, FakeDevice("lazy"))
    streaming.run(range(3))
    before = len(streaming.device.log)
    streaming.use(3)
    log = [f"{entry.kind} {entry.stream}" for entry in streaming.device.log[before:] if entry.kind != "mark"]
    assert log == [
        "wait compute",
        "wait copy",
        "copy copy",
        "record copy",
        "kernel compute",
        "poison compute",
        "poison compute",
        "record compute",
    ]


def test_nothing_is_sent_beyond_the_last_bank() -> None:
    """When a prefill ends no copy is under way: nobody knows what comes next."""
    for slots in (2, 3, 4):
        streaming = Streaming(4, slots, FakeDevice("eager"))
        for _ in range(2):
            streaming.run(range(4))
            assert streaming.scheduler.report().unused_copies == 0
            copies = streaming.scheduler.report().copies
        assert copies == 8


def test_slots_are_allocated_at_the_first_use_and_no_more_than_are_needed() -> None:
    """Nothing when enabled, one slot for calls of few tokens, all of them at the first big one."""
    streaming = Streaming(4, 3, FakeDevice("eager"))
    largest = max(bank.nbytes for bank in streaming.banks)
    assert streaming.device.allocated_bytes == 0
    streaming.run(range(4), FEW)
    assert streaming.device.allocated_bytes == largest
    streaming.run(range(4), MANY)
    assert streaming.device.allocated_bytes == 3 * largest == streaming.scheduler.report().device_bytes
    streaming.close()


def test_calls_under_the_gate_are_not_sent_ahead() -> None:
    """Fewer than two routed ids per expert (of two): the bank is copied when needed, and that is no failure."""
    streaming = Streaming(4, 3, FakeDevice("lazy"))
    streaming.run(range(4), 3)
    report = streaming.scheduler.report()
    assert (report.calls, report.lookahead_calls, report.lookahead_hits, report.fallbacks) == (4, 0, 0, 0)
    streaming.run(range(4), 4)
    assert streaming.scheduler.report().lookahead_hits == 3
    streaming.close()


def test_the_verbs_are_idempotent() -> None:
    """Twice prefetched is copied once, twice acquired gives the same tensors, twice released frees once."""
    streaming = Streaming(4, 3, FakeDevice("lazy"))
    bank = streaming.banks[2]
    assert streaming.scheduler.prefetch(bank)
    assert streaming.scheduler.prefetch(bank)
    assert streaming.scheduler.report().copies == 1
    first = streaming.scheduler.acquire(bank, FEW).tensors
    again = streaming.scheduler.acquire(bank, FEW).tensors
    assert all(first[name] is again[name] for name in first)
    assert streaming.scheduler.report().copies == 1
    streaming.launch(2, dict(first))
    streaming.scheduler.release(bank)
    streaming.scheduler.release(bank)
    del first, again
    streaming.close()


def test_a_prefetch_that_nobody_uses_costs_no_byte() -> None:
    """It is counted as unused when its slot is taken, and nothing else notices."""
    streaming = Streaming(6, 3, FakeDevice("lazy"))
    for index in (5, 4, 5):
        streaming.scheduler.prefetch(streaming.banks[index])
    streaming.run(range(6))
    streaming.run(range(6))
    streaming.close()


def test_an_exception_inside_a_forward_frees_its_slot() -> None:
    """At every bank in turn; the passes before and after are right."""
    for index in range(4):
        streaming = Streaming(4, 2, FakeDevice("lazy"))
        streaming.run(range(index))
        with pytest.raises(ValueError, match="from inside"):
            streaming.use(index, fails=True)
        streaming.run(range(4))
        streaming.run(range(4))
        streaming.close()


def test_streams_are_asked_for_at_each_call() -> None:
    """A caller may compute on another stream each time; `copy` waits for whichever read the slot last."""
    for device_policy in POLICIES:
        device = FakeDevice(device_policy)
        streaming = Streaming(5, 2, device)
        for number in range(3):
            with device.use(device.stream(f"side {number}")):
                streaming.run(range(5))
        streaming.close()


def test_a_bank_called_within_another_one_gets_a_slot_of_its_own() -> None:
    """Not known from any model, but it must not end in a wrong byte: the ring grows instead."""
    streaming = Streaming(5, 2, FakeDevice("lazy"))
    scheduler, banks = streaming.scheduler, streaming.banks
    for index in range(4):
        streaming.launch(index, dict(scheduler.acquire(banks[index], MANY).tensors))
    for index in range(4):
        scheduler.release(banks[index])
    streaming.run(range(5))
    streaming.close()


def test_pageable_banks_are_sent_after_the_kernels_that_hide_them() -> None:
    """A copy from pageable memory holds the host, so it must not come before the kernels of the current bank."""
    streaming = Streaming(6, 3, FakeDevice("lazy", refuse_pinning=True))
    assert streaming.store.refusals
    streaming.run(range(6))
    assert _copies_before_each_use(streaming) == [1, 3, 4, 5, 6, 6]
    assert streaming.scheduler.report().lookahead_hits == 5
    assert streaming.scheduler.report().pinned_bytes == 0
    streaming.close()


@pytest.mark.parametrize("room", [1, 2])
def test_without_room_for_all_slots_every_bank_is_copied_when_needed(room: int) -> None:
    """One warning, one fallback, one slot kept, and the right bytes."""
    device = FakeDevice("lazy")
    streaming = Streaming(5, 3, device)
    device.fail_allocations(after=room)
    with pytest.warns(RuntimeWarning, match="3 slots .* do not fit on fake device"):
        streaming.run(range(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streaming.run(range(5))
    report = streaming.scheduler.report()
    assert (report.fallbacks, report.lookahead_hits, report.looks_ahead) == (1, 0, False)
    assert device.allocated_bytes == report.device_bytes == max(bank.nbytes for bank in streaming.banks)
    streaming.close()


def test_without_room_for_one_slot_the_error_names_the_remedy() -> None:
    """And the next call is right again once there is room."""
    device = FakeDevice("eager")
    streaming = Streaming(3, 3, device)
    device.fail_allocations()
    with pytest.warns(RuntimeWarning), pytest.raises(torch.OutOfMemoryError, match=r"needs .* MiB .* Free device memory"):
        streaming.run(range(3))
    device.fail_allocations(None)
    streaming.run(range(3))
    streaming.close()


def test_stall_is_the_time_between_needing_a_bank_and_having_it() -> None:
    """A bank that arrives ahead of use does not hold the compute stream."""
    now = itertools.count()
    streaming = Streaming(3, 3, FakeDevice("eager", clock=lambda: float(next(now))))
    streaming.run(range(3))
    streaming.device.finish()
    assert streaming.scheduler.report().stall_seconds == 3.0, "one tick from begin to end of each of three calls"


def test_reset_zeroes_what_is_counted_and_keeps_what_is_held() -> None:
    """Counters start again; slots and host memory stay."""
    streaming = Streaming(3, 3, FakeDevice("eager"))
    streaming.run(range(3))
    held = streaming.scheduler.report()
    streaming.scheduler.reset()
    report = streaming.scheduler.report()
    assert (report.calls, report.copies, report.bytes_to_device, report.lookahead_hits, report.stall_seconds) == (0, 0, 0, 0, 0)
    assert (report.device_bytes, report.host_bytes, report.pinned_bytes) == (
        held.device_bytes,
        held.host_bytes,
        held.pinned_bytes,
    )


def test_closing_waits_for_what_is_under_way() -> None:
    """Copies that nobody has used, kernels on another stream, and a bank that is still held."""
    device = FakeDevice("lazy")
    streaming = Streaming(4, 3, device)
    streaming.use(0)
    with device.use(device.stream("side")):
        streaming.use(1)
    streaming.launch(2, dict(streaming.scheduler.acquire(streaming.banks[2], MANY).tensors))
    streaming.close()
    streaming.scheduler.close()
    with pytest.raises(RuntimeError, match="prefetching has ended"):
        streaming.scheduler.acquire(streaming.banks[0], MANY)


def test_devices_do_not_share_slots() -> None:
    """Two devices in one model: each has its own ring, and its own idea of what comes next."""
    from hf_prefetch.config import PrefetchConfig
    from hf_prefetch.scheduling.scheduler import PrefetchScheduler

    one, two = FakeDevice("lazy"), FakeDevice("lazy")
    streaming = Streaming(6, 3, one)
    homes = {bank: (one if bank.index % 2 else two) for bank in streaming.banks}
    streaming.scheduler = PrefetchScheduler(PrefetchConfig(slots=3), streaming.store, homes)
    for _ in range(2):
        for index in range(6):
            streaming.device = homes[streaming.banks[index]]
            streaming.use(index)
    report = streaming.scheduler.report()
    assert report.lookahead_hits == 2 * 4, "all but the first bank of each device, in each pass"
    for streaming.device in (one, two):
        streaming.check()
    streaming.scheduler.close()
    assert one.allocated_bytes == two.allocated_bytes == 0
