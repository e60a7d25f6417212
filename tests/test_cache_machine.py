"""Hypothesis against a scheduler with row caches: in any sequence of calls each expert is where it is said to be."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cached_streaming import EXPERTS, CachedStreaming
from caching import lane_of
from hf_prefetch.testing import FakeDevice, RaceChecker

BANKS = 4
indices = st.integers(0, BANKS - 1)
# Also an id beyond the last expert, and a negative one.
ids = st.lists(st.integers(-1, EXPERTS), min_size=1, max_size=3)


class CacheMachine(RuleBasedStateMachine):
    """What a model, its user and its device may do, in any order."""

    streaming: CachedStreaming | None = None

    @initialize(slots=st.integers(2, 3), rows=st.integers(1, EXPERTS), schedule=st.lists(st.integers(0, 7), max_size=200))
    def enable(self, slots: int, rows: int, schedule: list[int]) -> None:
        """`schedule` is what the device does between two operations: run the n-th that can run, or nothing."""
        choices = iter(schedule)

        def choose(runnable: Sequence[object]) -> int | None:
            choice = next(choices, 0)
            return None if choice >= len(runnable) else choice

        self.streaming = CachedStreaming(BANKS, slots, FakeDevice(choose), rows)

    @contextlib.contextmanager
    def running(self) -> Iterator[CachedStreaming]:
        assert self.streaming
        with self.streaming.device.watching(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield self.streaming

    @rule(index=indices, chosen=ids, remaps=st.booleans())
    def token(self, index: int, chosen: list[int], remaps: bool) -> None:
        """A small call, whose implementation can or can't be given other ids."""
        with self.running() as streaming:
            streaming.call(index, chosen, remaps=remaps)

    @rule(chosen=ids)
    def pass_of_a_token(self, chosen: list[int]) -> None:
        """All banks, one after the other."""
        with self.running() as streaming:
            for index in range(BANKS):
                streaming.call(index, chosen)

    @rule(index=indices, chosen=ids)
    def prompt(self, index: int, chosen: list[int]) -> None:
        """A large call fills the cache from its slot."""
        with self.running() as streaming:
            streaming.call(index, chosen, many=True)

    @rule()
    def pass_of_a_prompt(self) -> None:
        """All banks as a whole, looking ahead."""
        with self.running() as streaming:
            streaming.run(range(BANKS))

    @rule(index=indices, chosen=ids, many=st.booleans())
    def fail_inside(self, index: int, chosen: list[int], many: bool) -> None:
        """An exception in the middle of a forward."""
        with self.running() as streaming, contextlib.suppress(ValueError):
            streaming.call(index, chosen, many=many, fails=True)

    @rule(outer=indices, inner=indices, chosen=ids)
    def nested(self, outer: int, inner: int, chosen: list[int]) -> None:
        """A call within another one, of the same bank perhaps."""
        with self.running() as streaming:
            bank = streaming.banks[outer]
            streaming.scheduler.acquire(bank, 1, torch.tensor([[0]]), remaps=True)
            if inner != outer:
                streaming.call(inner, chosen)
            streaming.scheduler.release(bank)

    @rule(index=indices, chosen=ids, name=st.sampled_from(["a", "b"]))
    def on_another_stream(self, index: int, chosen: list[int], name: str) -> None:
        """The caller computes elsewhere."""
        with self.running() as streaming, streaming.device.use(streaming.device.stream(name)):
            streaming.call(index, chosen)

    @rule(index=indices, value=st.integers(1, 9))
    def weights_change(self, index: int, value: int) -> None:
        """Somebody settles and then writes to a bank."""
        with self.running() as streaming:
            streaming.scheduler.settle()
            streaming.write(index, float(value))

    @rule()
    def memory_is_short(self) -> None:
        """The caches get smaller."""
        with self.running() as streaming:
            lane_of(streaming.scheduler).budget.give_up()

    @rule(index=indices, chosen=ids, after=st.integers(0, 1))
    def allocation_fails(self, index: int, chosen: list[int], after: int) -> None:
        """There is no room for what a call would make."""
        with self.running() as streaming:
            streaming.device.fail_allocations(after)
            try:
                streaming.call(index, chosen)
            except torch.OutOfMemoryError:
                # Not even one slot: the message names the remedy, and what follows is right.
                assert streaming.device.allocated_bytes < streaming.banks[index].nbytes * 2
            finally:
                streaming.device.fail_allocations(None)

    @rule()
    def everything_ends(self) -> None:
        """The device catches up."""
        assert self.streaming
        self.streaming.device.finish()

    @precondition(lambda self: self.streaming is not None)
    @invariant()
    def no_kernel_saw_a_wrong_byte(self) -> None:
        """Nor does any order of execution that the log allows let one see it; and what is held is what is reported."""
        assert self.streaming
        assert not self.streaming.wrong
        RaceChecker().assert_clean(self.streaming.device.log)
        report = self.streaming.scheduler.report()
        assert report.device_bytes + report.cache_bytes == self.streaming.device.allocated_bytes

    def teardown(self) -> None:
        """Disable."""
        if self.streaming:
            self.streaming.close()


CacheMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCacheMachine = CacheMachine.TestCase
