"""Hypothesis against the scheduler: any sequence of calls, under any schedule of the device, reads the right bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_prefetch.testing import FakeDevice, RaceChecker
from streaming import FEW, MANY, Streaming

BANKS = 5
indices = st.integers(0, BANKS - 1)
sizes = st.sampled_from([FEW, MANY, None])


class SchedulerMachine(RuleBasedStateMachine):
    """What a model, its user and its device may do, in any order."""

    streaming: Streaming | None = None

    @initialize(slots=st.integers(2, 4), schedule=st.lists(st.integers(0, 7), max_size=200), refuse=st.booleans())
    def enable(self, slots: int, schedule: list[int], refuse: bool) -> None:
        """`schedule` is what the device does between two operations: run the n-th that can run, or nothing."""
        choices = iter(schedule)

        def choose(runnable: Sequence[object]) -> int | None:
            choice = next(choices, 0)
            return None if choice >= len(runnable) else choice

        device = FakeDevice(choose, refuse_pinning=refuse)
        self.streaming = Streaming(BANKS, slots, device, widths=[8, 16, 4])

    @rule(routed_ids=sizes)
    def forward(self, routed_ids: int | None) -> None:
        """A whole pass."""
        assert self.streaming
        self.streaming.run(range(BANKS), routed_ids)

    @rule(index=indices, routed_ids=sizes)
    def call_one(self, index: int, routed_ids: int | None) -> None:
        """A single bank: a skip, a repeat, a step back."""
        assert self.streaming
        self.streaming.use(index, routed_ids)

    @rule(index=indices)
    def prefetch(self, index: int) -> None:
        """Somebody asks ahead."""
        assert self.streaming
        self.streaming.scheduler.prefetch(self.streaming.banks[index])

    @rule(index=indices, routed_ids=sizes)
    def fail_inside(self, index: int, routed_ids: int | None) -> None:
        """An exception in the middle of a forward."""
        assert self.streaming
        with contextlib.suppress(ValueError):
            self.streaming.use(index, routed_ids, fails=True)

    @rule(index=indices, name=st.sampled_from(["a", "b"]))
    def on_another_stream(self, index: int, name: str) -> None:
        """The caller computes elsewhere."""
        assert self.streaming
        device = self.streaming.device
        with device.use(device.stream(name)):
            self.streaming.use(index)

    @rule()
    def everything_ends(self) -> None:
        """The device catches up."""
        assert self.streaming
        self.streaming.device.finish()

    @precondition(lambda self: self.streaming is not None)
    @invariant()
    def no_kernel_saw_a_wrong_byte(self) -> None:
        """Nor does any order of execution that the log allows let one see it."""
        assert self.streaming
        assert not self.streaming.wrong
        RaceChecker().assert_clean(self.streaming.device.log)

    def teardown(self) -> None:
        """Disable."""
        if self.streaming:
            self.streaming.close()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = SchedulerMachine.TestCase
