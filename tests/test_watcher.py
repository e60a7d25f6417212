"""FakeDevice.watching: what the host computes is seen, ordered and logged as a device would run it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fake_programs import kinds, slot_of, upload
from hf_prefetch.testing import ByteRange, FakeDevice

torch.set_num_threads(1)


Compute = Callable[[torch.Tensor], torch.Tensor]
ROWS = torch.tensor([1, 0])


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


COMPUTE: dict[str, Compute] = {
    "linear": lambda w: torch.nn.functional.linear(randn(3, 16), w[0]),
    "matmul": lambda w: randn(3, 16) @ w[1].t(),
    "bmm": lambda w: torch.bmm(randn(2, 3, 16), w.transpose(1, 2)),
    "index_select": lambda w: w.index_select(0, ROWS),
    "indexing": lambda w: w[ROWS],
    "embedding": lambda w: torch.nn.functional.embedding(ROWS, w[0]),
    "einsum": lambda w: torch.einsum("ti,eoi->eto", randn(3, 16), w),
    "reshape of a transposed view": lambda w: w.transpose(0, 1).reshape(-1),
    "contiguous": lambda w: w.transpose(0, 2).contiguous(),
    "to": lambda w: w.to(torch.float64),
    "cat": lambda w: torch.cat([w[0], w[1]]),
    "out": lambda w: torch.mul(w, 2, out=torch.empty_like(w)),
    "foreach": lambda w: torch._foreach_mul([w[0], w[1]], 2.0)[1],
    "autocast": lambda w: torch.autocast("cpu", torch.bfloat16)(torch.nn.functional.linear)(randn(3, 16), w[0]),
    "grouped_mm": lambda w: torch._grouped_mm(
        randn(5, 16, dtype=torch.bfloat16),
        w.to(torch.bfloat16).transpose(1, 2),
        offs=torch.tensor([2, 5], dtype=torch.int32),
    ),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMPUTE)
@pytest.mark.parametrize("policy", ["eager", "lazy", 0])
def test_watched_operators_are_kernels_of_the_compute_stream(name, mode, policy) -> None:
    weights, compute = randn(2, 8, 16), COMPUTE[name]
    device = FakeDevice(policy, assume_pinned=True)
    with MODES[mode](), device.watching():
        expected = compute(weights)
        assert all(entry.kind != "kernel" for entry in device.log)
        slot = torch.nn.Parameter(slot_of(device, 2, 8, 16), requires_grad=False)
        ready = upload(device, slot, weights)
        device.wait(device.compute_stream(), ready)
        result = compute(slot)
    assert torch.equal(result, expected)
    device.finish()
    assert device.races() == []
    reads = [entry for entry in device.log if entry.kind == "kernel"]
    assert reads
    assert all(entry.stream == "compute" and entry.reads and not entry.writes for entry in reads)


@pytest.mark.parametrize("name", COMPUTE)
def test_watched_operators_without_the_ready_wait_see_poison(name) -> None:
    device = FakeDevice("lazy", assume_pinned=True)
    with torch.no_grad(), device.watching():
        slot = slot_of(device, 2, 8, 16)
        upload(device, slot, randn(2, 8, 16))
        result = COMPUTE[name](slot)
    assert result.isnan().any()
    assert "read after write" in kinds(device)


def test_grouped_mm_straight_from_a_slot() -> None:
    weights = randn(2, 16, 8, dtype=torch.bfloat16)
    inputs, offsets = randn(5, 16, dtype=torch.bfloat16), torch.tensor([2, 5], dtype=torch.int32)
    device = FakeDevice("lazy", assume_pinned=True)
    with torch.inference_mode(), device.watching():
        slot = slot_of(device, 2, 16, 8, dtype=torch.bfloat16)
        device.wait(device.compute_stream(), upload(device, slot, weights))
        result = torch._grouped_mm(inputs, slot, offs=offsets)
        assert torch.equal(result, torch._grouped_mm(inputs, weights, offs=offsets))
    assert device.log[-1].label.startswith("_grouped_mm")
    assert device.log[-1].reads == (device.range_of(slot),)


def test_watched_writes_and_their_ranges() -> None:
    device = FakeDevice("lazy")
    with device.watching():
        slot = slot_of(device, 4, 8)
        begin = len(device.log)
        slot[1].fill_(1.0)
        slot[2:].mul_(2.0)
        torch.add(slot[1], slot[1], out=slot[0])
        torch._foreach_add_([slot[0], slot[3]], 1.0)
    storage = device.log[0].writes[0].storage
    row = [ByteRange(storage, 32 * r, 32 * r + 32) for r in range(4)]
    below = ByteRange(storage, 64, 128)
    touched = [(entry.label.split(".")[0], entry.reads, entry.writes) for entry in device.log[begin:]]
    assert touched == [
        ("fill_", (), (row[1],)),
        ("mul_", (), (below,)),
        ("add", (row[1], row[1]), (row[0],)),
        ("_foreach_add_", (), (row[0], row[3])),
    ]


def test_views_and_metadata_run_nothing_and_log_nothing() -> None:
    device = FakeDevice("lazy", assume_pinned=True)
    with torch.inference_mode(), device.watching():
        slot = device.allocate(256)
        entries, pending = len(device.log), len(device.pending)
        view = slot.view(torch.float32).view(4, 16)
        view[1], view[1:3], view.t(), view.narrow(0, 1, 2), view.reshape(-1), view.expand(2, 4, 16), view.detach()
        view.unbind(0), view.chunk(2), view.contiguous(), view.to(torch.float32), view.data, view.as_strided((4,), (4,))
        torch.empty_like(view), view.new_zeros(3), view.is_pinned(), view.shape, torch.nn.Parameter(view, False)
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert (len(device.log), len(device.pending)) == (entries, pending)


def test_an_adversary_runs_between_watched_operators() -> None:
    device = FakeDevice(lambda runnable: 0 if armed else None, assume_pinned=True)
    armed: list[bool] = []
    with device.watching():
        slot, other = slot_of(device, 4), slot_of(device, 4)
        upload(device, slot, torch.ones(4))
        other.zero_()
        assert [op.stream.name for op in device.pending] == ["copy"] * 4
        armed.append(True)
        other.zero_()
        assert device.pending == []


@torch.library.custom_op("hf_prefetch_tests::double_rows", mutates_args=())
def double_rows(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return weights.index_select(0, rows) * 2


@torch.library.custom_op("hf_prefetch_tests::hidden", mutates_args=())
def hidden(rows: torch.Tensor) -> torch.Tensor:
    return HIDDEN[0].index_select(0, rows)


HIDDEN: list[torch.Tensor] = []


@pytest.mark.parametrize("mode", MODES)
def test_custom_operators_are_watched_inside(mode) -> None:
    device = FakeDevice("lazy", assume_pinned=True)
    weights = randn(3, 4)
    with MODES[mode](), device.watching():
        slot = slot_of(device, 3, 4)
        device.wait(device.compute_stream(), upload(device, slot, weights))
        assert torch.equal(double_rows(slot, ROWS), weights[ROWS] * 2)
        HIDDEN[:] = [slot]
        assert torch.equal(hidden(ROWS), weights[ROWS])
    HIDDEN.clear()
    labels = [entry.label for entry in device.log if entry.kind == "kernel"]
    assert labels == ["hf_prefetch_tests.double_rows.default", "index_select.default", "index_select.default"]


def test_what_runs_from_a_queue_is_not_watched() -> None:
    device = FakeDevice("lazy")
    with device.watching():
        slot, event = slot_of(device, 4), device.new_event()
        device.launch(lambda: slot.fill_(3.0), writes=[slot])
        device.record(event, device.compute_stream())
        device.synchronize(event)
    assert [entry.kind for entry in device.log] == ["allocate", "kernel", "record", "synchronize"]
    assert slot.tolist() == [3.0] * 4


def test_kernels_that_torch_does_not_see_can_be_told() -> None:
    device = FakeDevice("lazy", assume_pinned=True)
    slot = slot_of(device, 4)
    device.wait(device.compute_stream(), upload(device, slot, torch.ones(4)))
    with device.computing(reads=[slot], label="a Triton kernel"):
        assert slot.tolist() == [1.0] * 4
    assert device.races() == []
    assert device.log[-1].label == "a Triton kernel"
