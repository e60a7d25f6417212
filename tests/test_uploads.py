"""Uploads: every part arrives as it was, whatever the schedule, and a buffer is written only when nobody reads it any more."""

from __future__ import annotations

import ast
import gc
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hf_prefetch.device import uploads
from hf_prefetch.device.uploads import uploaded
from hf_prefetch.memory.packing import pack
from hf_prefetch.testing import FakeDevice, RaceChecker
from test_mutations import is_ordering

SOURCE = inspect.getsource(uploads)


def orders(node: ast.AST) -> bool:
    """A statement that waits or records, or waits for all that the device was given."""
    return is_ordering(node) or (isinstance(node, ast.Expr) and ast.unparse(node).endswith(".settle()"))


LINES = [node.lineno for node in ast.walk(ast.parse(SOURCE)) if orders(node)]


def check(upload: Callable[..., Iterator[torch.Tensor]], count: int, policy: str | int) -> None:
    """Bring parts to a device, where a kernel reads each."""
    device = FakeDevice(policy)
    parts = [torch.arange(64 * number, 64 * number + 8 * (number % 3 + 1), dtype=torch.int16) for number in range(count)]
    arrived: list[torch.Tensor] = []

    def take(there: torch.Tensor) -> None:
        device.launch(lambda: arrived.append(there.clone()), reads=(there,), label="pack")

    for there in upload(device, parts, 256):
        take(there)
        del there
    device.finish()
    gc.collect()
    assert len(arrived) == count
    assert all(map(torch.equal, arrived, parts))
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    RaceChecker().assert_clean(device.log)


@pytest.mark.parametrize("policy", ["eager", "lazy", 0, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_part_arrives(count: int, policy: str | int) -> None:
    check(uploaded, count, policy)


@pytest.mark.parametrize("room", [0, 1])
def test_no_room_on_the_device_leaves_nothing_locked(room: int) -> None:
    """Whoever asked packs on the CPU then, and the next mapping may lie where the buffer was."""
    device = FakeDevice("eager")
    device.fail_allocations(after=room)
    with pytest.raises(torch.OutOfMemoryError):
        next(uploaded(device, [torch.zeros(4)] * 5, 256))
    gc.collect()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_there_are_lines_to_remove() -> None:
    assert len(LINES) >= 7


@pytest.mark.parametrize("line", [None, *LINES], ids=lambda line: line and SOURCE.splitlines()[line - 1].strip())
def test_a_missing_ordering_is_noticed(line: int | None) -> None:
    """Each is taken out in turn; with all of them everything is right."""

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.stmt:
            return ast.copy_location(ast.Pass(), node) if orders(node) and node.lineno == line else node

    module: Any = types.ModuleType("mutated_uploads")
    module.__package__ = uploads.__package__
    exec(compile(Remove().visit(ast.parse(SOURCE)), f"without line {line}", "exec"), module.__dict__)
    with nullcontext() if line is None else pytest.raises(AssertionError):
        for policy in ("eager", "lazy", 0):
            check(module.uploaded, 7, policy)


def test_packed_on_the_way() -> None:
    """Rows that are brought in parts give what they give where they are; what is left half done holds nothing."""
    rows = (torch.randn(5, 3 * 2048 + 6, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    device = FakeDevice("eager")
    there = pack(rows, lambda parts: (part.clone() for part in uploaded(device, parts, rows.nbytes)))
    here = pack(rows)
    assert torch.equal(there.blocks, here.blocks)
    assert torch.equal(there.escapes, here.escapes)

    def broken() -> object:
        yield torch.zeros(8, dtype=torch.int16)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(uploaded(device, broken(), 256))  # type: ignore[arg-type]
    next(uploaded(device, [torch.zeros(4)] * 5, 256))
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
