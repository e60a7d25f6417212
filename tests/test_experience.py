"""What earlier calls have shown, and what is chosen by it."""

from __future__ import annotations

import math

import pytest
import torch

from hf_prefetch.scheduling.experience import Experience
from hf_prefetch.scheduling.observer import Observer
from hf_prefetch.streams import InOrderDevice

# Qwen3-30B-A3B: a bank of 128 experts, top 8.
EXPERTS, ROW = 128, 9_437_184
BANK = EXPERTS * ROW
LINK, GATHER = 55e9, 50e9


def measured() -> Experience:
    """A link that was measured, and nothing known of calls."""
    experience = Experience()
    experience.saw_copy(BANK, BANK / LINK)
    experience.saw_gather(ROW, ROW / GATHER)
    return experience


def test_the_guess_lies_within_what_is_published() -> None:
    """Shares of the experts that prompts use: between the flattest and the most even routing at each size."""
    for ids, experts, lowest, highest in [
        (384 * 8, 128, 0.49, 1.0),
        (130 * 8, 256, 0.40, 0.99),
        (1658 * 8, 256, 0.77, 1.0),
        (512 * 8, 384, 0.49, 1.0),
    ]:
        assert lowest <= Experience().share(ids, experts) <= highest


def test_the_guess_grows_with_the_call() -> None:
    """And never leaves 0 to 1."""
    shares = [Experience().share(2**power, 128) for power in range(20)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1


def test_what_was_seen_replaces_the_guess() -> None:
    """For calls of that size, and it bends the guess for others towards it."""
    experience = measured()
    before = experience.share(4096, EXPERTS)
    for _ in range(8):
        experience.saw_experts(1024, EXPERTS, 40)
    assert experience.share(1024, EXPERTS) == pytest.approx(40 / EXPERTS)
    assert 40 / EXPERTS < experience.share(4096, EXPERTS) < before


@pytest.mark.parametrize(
    ("used", "seconds", "expected"),
    [
        (8, 0.0, True),
        (110, 0.0, True),
        (127, 0.0, False),
        # Kernels of half a copy's time: they run beside whole banks, and after single experts.
        (50, 0.011, True),
        (70, 0.011, False),
        # Kernels that take longer than a whole bank hide it.
        (8, 0.030, False),
    ],
)
def test_the_shorter_way_is_taken(used: int, seconds: float, expected: bool) -> None:
    """Single experts come after the router, at the rate of the kernel that reads them; whole banks come beside other work."""
    experience = measured()
    for _ in range(20):
        experience.saw_experts(1600, EXPERTS, used)
        experience.saw_kernels(1600, seconds)
    assert experience.routed_pays(1600, EXPERTS, BANK, ROW) is expected


def test_calls_of_two_streams_say_nothing_about_the_time_between() -> None:
    """The later one may have come first, and what is less than nothing would be the best for ever."""
    experience = measured()
    experience.saw_kernels(1600, -1.0)
    assert experience.kernels(1600) == 0.0


def test_nothing_measured_yet() -> None:
    """One token gets its experts, a long prompt whole banks."""
    assert Experience().routed_pays(8, EXPERTS, BANK, ROW)
    assert not Experience().routed_pays(16384 * 8, EXPERTS, BANK, ROW)


def test_a_disturbed_measurement_does_not_stay() -> None:
    """A first pass compiles kernels: its time says nothing, and better ones replace it at once."""
    experience = measured()
    experience.saw_kernels(1600, 3.0)
    assert not experience.routed_pays(1600, EXPERTS, BANK, ROW)
    experience.saw_kernels(1600, 0.001)
    assert experience.kernels(1600) == 0.001
    experience.saw_copy(BANK, 10.0)
    assert experience.copy_rate is not None
    assert math.isclose(experience.copy_rate, LINK / 1.05)


def test_the_observer_passes_on_what_it_saw() -> None:
    """Experts in use, the rate of their copies, time between calls of a size: when the next pass begins."""
    device = InOrderDevice(torch.device("cpu"))
    observer = Observer(device)
    totals = torch.tensor([5, 5])
    observer.note_copy(1000, 1.0, 3.0)

    def count() -> None:
        totals.add_(torch.tensor([7, 4]))

    observer.note_experts(totals, count, 16, 8, 2**22)
    observer.note_call(16, 1.0, 2.0)
    observer.note_call(16, 2.5, 3.0)
    observer.note_call(99, 9.0, 9.5)
    assert observer.experience == Experience()
    observer.begin_pass()
    assert observer.experience.copy_rate == 500
    assert observer.experience.share(16, 8) == 7 / 8
    assert observer.experience.gather_rate is not None
    assert observer.experience.kernels(16) == 0.5
    assert observer.experience.kernels(99) == 0


def test_few_calls_are_looked_at() -> None:
    """The first ones, then one now and then: looking costs launches."""
    observer = Observer(InOrderDevice(torch.device("cpu")))
    looked = [observer.wants(8) for _ in range(1000)]
    assert all(looked[:64])
    assert 10 <= sum(looked[64:]) <= 30
