"""Would anybody notice? Each wait, record and synchronisation is removed in turn, and the suite below must fail.

The lines are found in the source, so one that is added later is tried as well.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import pkgutil
import sys
import types
from collections.abc import Iterator

import pytest

import hf_prefetch
from hf_prefetch.device import slots
from hf_prefetch.testing import FakeDevice
from streaming import FEW, MANY, Streaming

ORDERING = {"wait", "record", "synchronize"}


def _is_ordering(node: ast.AST) -> bool:
    """A statement that only orders: `self.device.wait(...)` and the like."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in ORDERING
    )


SOURCE = inspect.getsource(slots)
LINES = [node.lineno for node in ast.walk(ast.parse(SOURCE)) if _is_ordering(node)]


def without(line: int | None) -> types.ModuleType:
    """The module of slots, with the ordering statement of one line taken out."""

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.stmt:
            return ast.copy_location(ast.Pass(), node) if _is_ordering(node) and node.lineno == line else node

    module = types.ModuleType("mutated_slots")
    module.__package__ = slots.__package__
    sys.modules["mutated_slots"] = module
    exec(compile(Remove().visit(ast.parse(SOURCE)), f"slots without line {line}", "exec"), module.__dict__)
    return module


def suite() -> None:
    """Small cases that need every ordering there is."""
    for slot_count, policy in itertools.product((2, 3), ("eager", "lazy", 0)):
        device = FakeDevice(policy)
        streaming = Streaming(5, slot_count, device)
        streaming.run(range(5))
        with device.use(device.stream("side")):
            streaming.run(range(5))
        streaming.check()
        # Close while a kernel of another stream is under way, after which nothing else was enqueued.
        with device.use(device.stream("side")):
            streaming.use(0, FEW)
        streaming.close()
        # Close while a slot is held on another stream, and copies are under way that nobody has used.
        device = FakeDevice(policy)
        streaming = Streaming(5, slot_count, device)
        streaming.run(range(5))
        with device.use(device.stream("side")):
            streaming.launch(1, dict(streaming.scheduler.acquire(streaming.banks[1], MANY)))
            streaming.close()


@pytest.fixture(name="scheduler_with")
def _scheduler_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    def use(module: types.ModuleType) -> None:
        monkeypatch.setattr("hf_prefetch.scheduling.scheduler.SlotRing", module.SlotRing)

    yield use
    sys.modules.pop("mutated_slots", None)


def test_the_suite_passes_on_the_module_as_it_is(scheduler_with) -> None:  # type: ignore[no-untyped-def]
    """The control: what fails below fails because of the line that is missing."""
    scheduler_with(without(None))
    suite()


def test_there_are_lines_to_remove() -> None:
    """Four orderings and the ones of closing; fewer means that this test looks in the wrong place."""
    assert len(LINES) >= 7


@pytest.mark.parametrize("line", LINES, ids=[f"{line}:{SOURCE.splitlines()[line - 1].strip()}" for line in LINES])
def test_a_missing_ordering_is_noticed(line: int, scheduler_with) -> None:  # type: ignore[no-untyped-def]
    """By a wrong byte, by the race checker, or by memory that was freed too early."""
    scheduler_with(without(line))
    with pytest.raises(AssertionError):
        suite()


def test_ordering_lives_in_one_file() -> None:
    """No other file of the package waits, records or synchronises, so nothing escapes the test above."""
    for info in pkgutil.walk_packages(hf_prefetch.__path__, "hf_prefetch."):
        if info.name.startswith(
            ("hf_prefetch.testing", "hf_prefetch.streams", "hf_prefetch.device.slots", "hf_prefetch.__main__")
        ):
            continue
        source = inspect.getsource(__import__(info.name, fromlist=["_"]))
        assert not any(_is_ordering(node) for node in ast.walk(ast.parse(source))), info.name
