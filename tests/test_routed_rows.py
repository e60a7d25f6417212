"""Routed rows: a small call gets the experts it uses at their own places, whatever lies in between."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apart import run_apart
from hf_prefetch import enable_expert_prefetch
from hf_prefetch.banks.layout import BankLayout
from hf_prefetch.testing import FakeDevice
from models import build, prompt
from streaming import Streaming

# What the kernel has to do, on whatever device it runs: rows of several tensors, ids that repeat or name no row.
KERNEL_CHECK = """
import sys, torch
from hf_prefetch.device.kernels import gather_rows, list_experts
from hf_prefetch.banks.layout import BankLayout
device = torch.device(sys.argv[1])
generator = torch.Generator().manual_seed(0)
for rows, ids in [(5, [3]), (5, [0, 4, 4, 0]), (8, [[7, 1], [1, 2], [9, 3]]), (2, [0, 1]), (16, [5] * 7 + [-1, 16, 15])]:
    shapes = {"up": (rows, 6, 1030), "bias": (rows, 12), "down": (rows, 4, 2), "scale": (rows, 3)}
    tensors = [(name, torch.empty(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()]
    layout = BankLayout.of(tensors)
    source = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8, generator=generator)
    if device.type == "cuda":
        source = source.pin_memory()
    slot = torch.full((layout.nbytes,), 255, dtype=torch.uint8, device=device)
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    found = list_experts(torch.tensor(ids, device=device), rows, None, totals)
    places = [(spec.nbytes // rows, spec.offset, 0) for spec in layout.specs]
    gather_rows(torch.tensor(places, device=device), found, source, slot, slot, to_rows=False)
    wanted = {min(row, rows - 1) for row in torch.tensor(ids).flatten().tolist() if row >= 0}
    assert totals.tolist() == [len(wanted), len(wanted)], (totals, wanted)
    for name, there in layout.views(slot.cpu()).items():
        here = layout.views(source)[name]
        for row in range(rows):
            got, expected = there[row].reshape(-1).view(torch.uint8), here[row].reshape(-1).view(torch.uint8)
            assert torch.equal(got, expected if row in wanted else torch.full_like(got, 255)), (name, row)
print("rows are right")
"""


def test_the_kernel_copies_the_rows_and_nothing_else() -> None:
    """In Triton's interpreter, bit for bit, on random bytes."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled and tested below")
    run_apart(KERNEL_CHECK, "cpu", says="rows are right", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_the_kernel_reads_page_locked_memory(device: torch.device) -> None:
    """The same compiled, from host memory."""
    run_apart(KERNEL_CHECK, device.type, says="rows are right")


@given(st.integers(2, 4), st.sampled_from(["eager", "lazy", 1]), st.data())
@settings(max_examples=40, deadline=None)
def test_any_mix_of_rows_and_whole_banks_reads_the_right_bytes(slots: int, policy: str | int, data: st.DataObject) -> None:
    """On adversarial schedules; what a slot holds of other experts is poison."""
    streaming = Streaming(4, slots, FakeDevice(policy))
    rows = st.lists(st.integers(0, 1), min_size=1, max_size=3)
    for index, chosen in data.draw(st.lists(st.tuples(st.integers(0, 3), st.none() | rows), max_size=25)):
        if chosen is None:
            streaming.use(index)
        else:
            streaming.use_rows(index, chosen)
    streaming.close()


def test_rows_are_counted_once_each() -> None:
    """An expert that several tokens use is sent once."""
    streaming = Streaming(3, 3, FakeDevice("lazy"))
    streaming.use_rows(0, [1, 1, 0, 1])
    streaming.use_rows(1, [1])
    report = streaming.scheduler.report()
    assert (report.routed_calls, report.routed_rows, report.copies) == (2, 3, 0)
    assert report.bytes_to_device == 3 * streaming.banks[0].nbytes // 2
    streaming.scheduler.reset()
    assert streaming.scheduler.report().routed_rows == 0
    streaming.close()


def test_the_list_of_rows_is_gone_with_the_call() -> None:
    """It is memory of whoever has called, who may run a graph once before its capture: nothing in its pool may stay."""
    streaming, ids = Streaming(3, 3, FakeDevice("eager")), torch.tensor([1, 0])
    streaming.scheduler.acquire(streaming.banks[0], 2, ids)
    streaming.scheduler.release(streaming.banks[0])
    there = weakref.ref(ids)
    del ids
    assert there() is None
    streaming.close()


def test_a_bank_that_is_there_as_a_whole_needs_no_rows() -> None:
    """It was sent ahead and then asked for by a small call."""
    streaming = Streaming(3, 3, FakeDevice("lazy"))
    streaming.scheduler.prefetch(streaming.banks[1])
    streaming.use_rows(1, [0])
    report = streaming.scheduler.report()
    assert (report.routed_rows, report.lookahead_hits) == (0, 1)
    streaming.close()


def test_acquiring_rows_twice_adds_to_them() -> None:
    """Idempotent, and the second call's experts are there as well."""
    streaming = Streaming(3, 3, FakeDevice("lazy"))
    bank = streaming.banks[0]
    first = streaming.scheduler.acquire(bank, 1, torch.tensor([0])).tensors
    again = streaming.scheduler.acquire(bank, 1, torch.tensor([1])).tensors
    assert all(first[name] is again[name] for name in first)
    streaming.launch(0, dict(again))
    streaming.scheduler.release(bank)
    del first, again
    streaming.close()


def test_acquiring_the_whole_after_some_rows_gives_the_whole() -> None:
    """A large call of a bank inside a small one."""
    streaming = Streaming(3, 3, FakeDevice("lazy"))
    bank = streaming.banks[0]
    first = streaming.scheduler.acquire(bank, 1, torch.tensor([1])).tensors
    whole = streaming.scheduler.acquire(bank).tensors
    assert all(first[name] is whole[name] for name in first)
    streaming.launch(0, dict(whole))
    streaming.scheduler.release(bank)
    del first, whole
    streaming.close()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(4, 6, 8), True),
        (torch.empty(4, 6, 8).transpose(1, 2), True),
        (torch.empty(6, 4, 8).transpose(0, 1), False),
        (torch.empty(4, 3, 3, dtype=torch.bfloat16), True),
    ],
)
def test_rows_are_runs_of_bytes(tensor: torch.Tensor, expected: bool) -> None:
    """Otherwise a bank travels as a whole only."""
    assert BankLayout.of([("weight", tensor)]).has_rows is expected


@pytest.mark.raw
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_decode_sends_the_experts_in_use(device: torch.device, implementation: str) -> None:
    """At most top-k a layer for each token, under each implementation."""
    model, ids = build("qwen3_moe").to(device), prompt(20, device=device)
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=9, do_sample=False)
        enable_expert_prefetch(model, device=device)
        assert torch.equal(model.generate(ids, max_new_tokens=9, do_sample=False), expected)
    report = model.expert_prefetch.report()
    assert (report.lookahead_calls, report.routed_calls) == (7, 8 * 7)
    assert report.routed_rows == 8 * 7 * 2
    row = model.expert_prefetch.banks[0].nbytes // 8
    assert report.bytes_to_device == 7 * 8 * row + report.routed_rows * row


def test_a_forward_of_unknown_kind_gets_whole_banks(device: torch.device) -> None:
    """Somebody has put a forward of their own in place, which may read every row."""
    model, ids = build("mixtral").to(device), prompt(2, device=device)
    with torch.no_grad():
        expected = model(ids).logits
        experts = model.model.layers[1].mlp.experts
        original = experts.forward
        experts.forward = lambda *args, **kwargs: original(*args, **kwargs)
        enable_expert_prefetch(model, device=device)
        assert torch.equal(model(ids).logits, expected)
    report = model.expert_prefetch.report()
    assert (report.calls, report.routed_calls, report.copies) == (5, 4, 1)
