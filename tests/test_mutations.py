"""Would anybody notice? Each wait, record and synchronisation is removed in turn, and the suite below must fail.

The lines are found in the source, so one that is added later is tried as well.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hf_prefetch
from hf_prefetch.device import cache, slots, staging
from hf_prefetch.scheduling import budget, lane
from hf_prefetch.testing import FakeDevice, FakeEvent, FakeStream
from hf_prefetch.testing.watcher import Watcher
from streaming import FEW, MANY, SLOWLY, Streaming

MUTATED = "mutated_module"
ORDERING = {"wait", "record", "synchronize"}


def is_ordering(node: ast.AST) -> bool:
    """A statement that only orders: `self.device.wait(...)` and the like."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in ORDERING
    )


ORIGINALS = {"slots": slots, "cache": cache, "staging": staging}
SOURCES = {name: inspect.getsource(module) for name, module in ORIGINALS.items()}
LINES = [(name, node.lineno) for name, source in SOURCES.items() for node in ast.walk(ast.parse(source)) if is_ordering(node)]


def without(name: str, line: int | None) -> types.ModuleType:
    """A module of `device`, with the ordering statement of one line taken out."""

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.stmt:
            return ast.copy_location(ast.Pass(), node) if is_ordering(node) and node.lineno == line else node

    module = types.ModuleType(MUTATED)
    module.__package__ = slots.__package__
    sys.modules[MUTATED] = module
    exec(compile(Remove().visit(ast.parse(SOURCES[name])), f"{name} without line {line}", "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def interrupted_record(device: FakeDevice) -> Iterator[None]:
    """Ctrl-C comes when the copy stream is about to record."""

    def record(event: FakeEvent, stream: FakeStream) -> None:
        if stream is device.copy_stream():
            raise KeyboardInterrupt
        type(device).record(device, event, stream)

    device.record = record  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device.record


def suite() -> None:
    """Small cases that need every ordering there is."""
    for slot_count, policy in itertools.product((2, 3), ("eager", "lazy", 0)):
        device = FakeDevice(policy)
        streaming = Streaming(5, slot_count, device)
        streaming.run(range(5))
        with device.use(device.stream("side")):
            streaming.run(range(5))
        streaming.check()
        # Rows into slots that were filled on the copy stream or read on another stream, and the other way round.
        with device.use(device.stream("side")):
            streaming.use(3, FEW)
        streaming.use_rows(2, [1])
        streaming.run(range(5))
        for bank in range(5):
            streaming.use_rows(bank, [0, 1])
        streaming.check()
        # Close while a kernel of another stream is under way, after which nothing else was enqueued.
        with device.use(device.stream("side")):
            streaming.use(0, FEW)
        streaming.close()
        # An interrupt after a copy was enqueued and before it was recorded; then rows into the same, only slot.
        device = FakeDevice(policy)
        streaming = Streaming(5, slot_count, device)
        streaming.use(0, FEW)
        with interrupted_record(device), pytest.raises(KeyboardInterrupt):
            streaming.use(1, FEW)
        streaming.use_rows(2, [0])
        streaming.check()
        # Close while a slot is held on another stream, and copies are under way that nobody has used.
        device = FakeDevice(policy)
        streaming = Streaming(5, slot_count, device)
        streaming.run(range(5))
        with device.use(device.stream("side")):
            streaming.launch(1, dict(streaming.scheduler.acquire(streaming.banks[1], MANY).tensors))
            streaming.close()
        # Caches are used on one stream and then on another, filled from slots and read into slots, and forgotten. What
        # is done to their tables is torch's operators.
        device = FakeDevice(policy)
        streaming = Streaming(2, slot_count, device, cached_rows=1)
        side = device.stream("side")
        with Watcher(device):
            for expert in (0, 1):
                streaming.use_cached(0, [expert])
                with device.use(side):
                    streaming.use_cached(0, [1 - expert])
            streaming.scheduler.settle()
            with device.use(side):
                streaming.use_cached(0, [0])
            streaming.scheduler.settle()
            with device.use(side):
                streaming.use_rows(0, [0, 1])
            streaming.check()
        # A cache is freed while a kernel of another stream reads it, after which nothing else was enqueued.
        device = FakeDevice(policy)
        streaming = Streaming(2, slot_count, device, cached_rows=1)
        with device.use(device.stream("side")):
            streaming.use_cached(0, [0])
        streaming.close()
        staged(slot_count, policy)


class SlowDevice(FakeDevice):
    """Whoever enqueues a copy from another thread than the main one takes some time for it, and `begins` before."""

    def __init__(self, policy: str | int) -> None:
        super().__init__(policy)
        self.begins = threading.Event()
        self.delay = SLOWLY

    def copy(self, stream: FakeStream, destination: torch.Tensor, source: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            delay = self.delay
            self.begins.set()
            time.sleep(delay)
        super().copy(stream, destination, source)


def staged(slot_count: int, policy: str | int) -> None:
    """Banks of which only the first ones are page-locked; the others come through the staging ring."""
    device = SlowDevice(policy)
    streaming = Streaming(5, slot_count, device, pinned=2)
    streaming.run(range(5))
    with device.use(device.stream("side")):
        streaming.run(range(5))
    streaming.check()
    # A pass breaks off while banks are on their way; their slots are taken by rows, and by banks that need no staging.
    for take in (lambda bank: streaming.use_rows(bank, [1]), streaming.use):
        streaming.run(range(5))
        with pytest.raises(ValueError, match="inside"):
            streaming.use(2, fails=True)
        streaming.use(2)
        device.delay = 10 * SLOWLY
        device.begins.clear()
        assert device.begins.wait(10)
        streaming.scheduler.break_off()
        device.delay = SLOWLY
        take(0)
        take(1)
        # What was under way has arrived by then, had nobody waited for it.
        time.sleep(15 * SLOWLY)
        streaming.check()
    # Nothing reads host memory any more when that may be written to.
    streaming.run(range(5))
    streaming.use(2)
    while not streaming.reads:
        time.sleep(SLOWLY / 20)
    streaming.scheduler.settle()
    assert streaming.reads == 0
    # The ring is closed while copies from it are under way, and comes again.
    streaming.run(range(5))
    (lane,) = set(streaming.scheduler._lane_of.values())
    lane.staging.close()
    streaming.run(range(5))
    streaming.use(2)
    streaming.close()


@pytest.fixture(name="scheduler_with")
def _scheduler_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    rings = []

    def use(name: str, line: int | None) -> None:
        module = without(name, line)
        user, kind = {"slots": (lane, "SlotRing"), "cache": (budget, "RowCaches"), "staging": (lane, "StagingRing")}[name]
        monkeypatch.setattr(user, kind, getattr(module, kind))
        of_rings = lane.StagingRing

        def ring(*arguments: object) -> object:
            rings.append(of_rings(*arguments))
            return rings[-1]

        monkeypatch.setattr(lane, "StagingRing", ring)

    yield use
    sys.modules.pop(MUTATED, None)
    for ring in rings:
        # A suite that fails leaves its ring open, and may find another fault when that is closed.
        with contextlib.suppress(AssertionError):
            ring.close()


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_suite_passes_on_the_module_as_it_is(name: str, scheduler_with) -> None:  # type: ignore[no-untyped-def]
    """The control: what fails below fails because of the line that is missing."""
    scheduler_with(name, None)
    suite()


def test_there_are_lines_to_remove() -> None:
    """Orderings of slots and of caches, and those of closing; fewer means that this test looks in the wrong place."""
    assert [name for name, _ in LINES].count("slots") >= 7
    assert [name for name, _ in LINES].count("cache") >= 5
    assert [name for name, _ in LINES].count("staging") >= 5


@pytest.mark.parametrize(
    ("name", "line"), LINES, ids=[f"{name}:{line}:{SOURCES[name].splitlines()[line - 1].strip()}" for name, line in LINES]
)
def test_a_missing_ordering_is_noticed(name: str, line: int, scheduler_with) -> None:  # type: ignore[no-untyped-def]
    """By a wrong byte, by the race checker, or by memory that was freed too early."""
    scheduler_with(name, line)
    with pytest.raises(AssertionError):
        suite()


def test_ordering_lives_in_three_files() -> None:
    """No other file of the package waits, records or synchronises, so nothing escapes the test above."""
    # The benchmark and the timeline read a clock of the device, which orders nothing.
    elsewhere = {"streams.py", "device/slots.py", "device/cache.py", "device/staging.py", "command/bench.py", "timeline.py"}
    elsewhere.add("device/uploads.py")  # whose lines test_uploads.py takes out
    root = Path(hf_prefetch.__file__).parent
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name not in elsewhere and not name.startswith("testing/"):
            assert not any(map(is_ordering, ast.walk(ast.parse(path.read_text())))), name
