"""Random programs on the fake device: with their waits they have one result, without any one of them a race."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_prefetch.testing import FakeDevice, FakeEvent, FakeStream, Operation, RaceChecker

torch.set_num_threads(1)


def slot_of(device: FakeDevice, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return device.allocate(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)


@dataclass
class Program:
    """Steps on three streams over three buffers, with the waits that they need and no others.

    A step is ("work", stream, destination, source), ("record", stream, event) or ("wait", stream, event). Work on the
    copy stream is a copy of host data.
    """

    steps: list[tuple[str, str, int, int]] = field(default_factory=list)

    def run(self, policy: object) -> FakeDevice:
        device = FakeDevice(policy, assume_pinned=True)  # type: ignore[arg-type]
        self.buffers = [slot_of(device, 4, dtype=torch.int64) for _ in range(3)]
        events: dict[int, FakeEvent] = {}
        for number, (verb, name, first, second) in enumerate(self.steps):
            stream: FakeStream = device.stream(name)
            if verb == "record":
                device.record(events.setdefault(first, device.new_event()), stream)
            elif verb == "wait":
                device.wait(stream, events.setdefault(first, device.new_event()))
            elif name == "copy":
                device.copy(stream, self.buffers[first], torch.full((4,), number))
            else:
                into, of = self.buffers[first], self.buffers[second]

                def kernel(into: torch.Tensor = into, of: torch.Tensor = of, number: int = number) -> None:
                    into.copy_(of * 3 + into + number)

                device.launch(kernel, reads=[of], writes=[into], stream=stream)
        device.finish()
        return device

    def without(self, place: int) -> Program:
        return Program([step for at, step in enumerate(self.steps) if at != place])

    @property
    def waits(self) -> list[int]:
        return [place for place, step in enumerate(self.steps) if step[0] == "wait"]

    @property
    def is_clean(self) -> bool:
        return not self.run("lazy").races()

    def result(self, policy: object) -> list[list[int]]:
        self.run(policy)
        return [buffer.tolist() for buffer in self.buffers]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    streams = ["compute", "copy", "side"]
    work = draw(st.lists(st.tuples(st.sampled_from(streams), st.integers(0, 2), st.integers(0, 2)), max_size=6))
    program = Program()
    for number, (stream, into, of) in enumerate(work):
        # Wait for everything, then take away what is not needed.
        for other in streams:
            if other != stream:
                event = 10 * number + streams.index(other)
                program.steps += [("record", other, event, 0), ("wait", stream, event, 0)]
        program.steps.append(("work", stream, into, of))
    for place in reversed(program.waits):
        if program.without(place).is_clean:
            program = program.without(place)
    return program


@settings(max_examples=25, deadline=None)
@given(programs(), st.data())
def test_programs_with_all_their_waits_have_one_result(program: Program, data: st.DataObject) -> None:
    def chooser(runnable: list[Operation]) -> int | None:
        return data.draw(st.none() | st.integers(0, len(runnable) - 1))

    assert program.is_clean
    expected = program.result("eager")
    for policy in ("lazy", 1, 2, 3, chooser):
        assert program.result(policy) == expected


@settings(max_examples=25, deadline=None)
@given(programs(), st.sampled_from(["eager", "lazy", 7]))
def test_programs_without_one_of_their_waits_are_reported(program: Program, policy: object) -> None:
    for place in program.waits:
        with pytest.raises(AssertionError, match="races in"):
            RaceChecker().assert_clean(program.without(place).run(policy).log)
