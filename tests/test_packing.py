"""Packing keeps every bit: all patterns, any distribution, any shape; and makes three quarters of what looks like weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apart import run_apart
from hf_prefetch.demo import load_demo_model
from hf_prefetch.memory.packing import BLOCK, BLOCK_BYTES, HEADER, PackedRows, pack, unpack
from models import experts_of

EVERY = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(torch.bfloat16)


def assert_same_bits(rows: torch.Tensor) -> PackedRows:
    packed = pack(rows)
    back = unpack(packed)
    assert back.shape == rows.shape
    assert back.dtype is torch.bfloat16
    assert torch.equal(back.view(torch.int16), rows.view(torch.int16))
    return packed


def test_every_pattern() -> None:
    """All 65,536, in order and shuffled: NaNs with all their payloads, infinities, denormals, both zeros."""
    assert_same_bits(EVERY.view(4, -1))
    shuffled = EVERY[torch.randperm(EVERY.numel(), generator=torch.Generator().manual_seed(0))]
    assert_same_bits(shuffled.view(2, -1))
    assert_same_bits(EVERY.repeat_interleave(3).view(1, -1))


def test_a_block_is_what_the_note_says() -> None:
    """Byte by byte, of one block that is worked out by hand."""
    row = torch.zeros(1, BLOCK, dtype=torch.bfloat16)
    # Exponents 127 (1.0), 128 (-3.0) and 120 are neighbours; 2**-100 is far from them.
    row[0, 0], row[0, 1], row[0, BLOCK // 2 + 1], row[0, 5] = 1.0, -3.0, 2.0**-7 * 1.5, 2.0**-100
    packed = pack(row)
    (block,) = packed.blocks[0].tolist()
    base = block[0]
    assert block[1:HEADER] == [0, 1] + [0] * (HEADER - 3), "one escape, and none before"
    assert 128 - 14 <= base <= 119
    codes, rests = block[HEADER : HEADER + BLOCK // 2], block[HEADER + BLOCK // 2 :]
    assert codes[0] == 127 - base
    assert codes[1] == (128 - base) | ((120 - base) << 4)
    assert codes[5] == 15
    assert sum(codes) == codes[0] + codes[1] + codes[5]
    assert (rests[0], rests[1], rests[BLOCK // 2 + 1]) == (0, 0x80 | 0x40, 0x40)
    (escape,) = packed.escapes[0, 1:].tolist()
    assert packed.escapes[0, 0] == 1
    assert (escape & 0xFFFFFFFF, escape >> 32) == (5, (127 - 100) << 7)


@pytest.mark.parametrize("weights", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_any_shape(rows: int, weights: int) -> None:
    """Rows that are no whole number of blocks; no rows at all."""
    packed = assert_same_bits(torch.randn(rows, weights, generator=torch.Generator().manual_seed(weights)).bfloat16())
    assert packed.blocks.shape == (rows, -(-weights // BLOCK), BLOCK_BYTES)


distributions = st.sampled_from(["normal", "uniform", "constant", "sparse", "bits", "outliers", "tiny"])


@given(distributions, st.integers(0, 2**31), st.floats(-30, 30), st.integers(1, 3), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_any_distribution(kind: str, seed: int, scale: float, rows: int, weights: int) -> None:
    """Whatever the weights are."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, weights, generator=generator)
    uniform = torch.rand(rows, weights, generator=generator)
    bits = torch.randint(-(2**15), 2**15, (rows, weights), generator=generator).short().view(torch.bfloat16)
    made = {
        "normal": normal * 2.0**scale,
        "uniform": uniform * 2.0**scale,
        "constant": torch.full_like(normal, 2.0**scale),
        "sparse": torch.where(uniform < 0.9, 0.0, normal),
        "bits": bits,
        "outliers": torch.where(uniform < 0.01, normal * 1e30, normal),
        "tiny": normal * 2.0**-130,
    }
    assert_same_bits(made[kind].bfloat16().contiguous())


def test_many_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worked on at a time is no part of the result."""
    rows = (torch.randn(2, 9 * BLOCK + 3, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    whole = assert_same_bits(rows)
    monkeypatch.setattr("hf_prefetch.memory.packing._AT_ONCE_ON_CPU", 2 * BLOCK)
    parts = assert_same_bits(rows)
    assert torch.equal(whole.blocks, parts.blocks)
    assert torch.equal(whole.escapes, parts.escapes)


def test_what_looks_like_weights_takes_three_quarters() -> None:
    """Normal weights, and those of the demonstration model. Random bits take more than before: whoever packs has to look."""
    weights = (torch.randn(4, 64 * BLOCK, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    packed = pack(weights)
    assert packed.ratio < 0.76
    escapes = packed.escapes[:, 0].sum() / weights.numel()
    assert 0 < escapes < 4e-4
    for module in experts_of(load_demo_model()).values():
        for name in ("gate_up_proj", "down_proj"):
            rows = getattr(module, name).detach()
            rows = rows.view(rows.shape[0], -1)
            assert assert_same_bits(rows).ratio < 0.79, name
    noise = torch.randint(-(2**15), 2**15, (1, 64 * BLOCK), generator=torch.Generator().manual_seed(0)).short()
    assert pack(noise.view(torch.bfloat16)).ratio > 1


def test_the_window_that_has_the_most_is_taken() -> None:
    """A few outliers, infinities or NaNs among the weights cost their own escapes and no others'."""
    weights = (torch.randn(1, BLOCK, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    before = int(pack(weights).escapes[0, 0])
    weights[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, 3e38]).bfloat16()
    assert int(assert_same_bits(weights).escapes[0, 0]) <= before + 5


@pytest.mark.parametrize("rows", [torch.zeros(2, 4), torch.zeros(8).bfloat16(), torch.zeros(4, 4).bfloat16().t()[:, ::2]])
def test_other_things_are_refused(rows: torch.Tensor) -> None:
    """In words."""
    with pytest.raises(TypeError, match="rows of bfloat16 can be packed"):
        pack(rows)


def test_the_table_of_candidates_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is filled from the measurement, and what is chosen there is what the package does."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "scripts"))
    study = importlib.import_module("packing_study")
    assert study.main(["--check"]) == 0
    measured = json.loads(study.RESULTS.read_text())["bits"]
    rows = study.weights()["demonstration model"]
    for name, (rate, _) in study.CANDIDATES.items():
        assert measured[name]["demonstration model"] == pytest.approx(rate(rows), abs=0.02), name


# -- the kernels ----------------------------------------------------------------------------------------------------------

KERNEL_CHECK = """
import sys, torch
from hf_prefetch.device.table import Assignment
from hf_prefetch.device.unpacking import unpack_rows
from hf_prefetch.memory.packing import BLOCK, pack
device = torch.device(sys.argv[1])
generator = torch.Generator().manual_seed(0)
every = torch.arange(-(2**15), 2**15, dtype=torch.int32).short()
normal = (torch.randn(3, 2 * BLOCK + 78, generator=generator) * 0.02).bfloat16().view(torch.int16)
shuffled = every[torch.randperm(every.numel(), generator=generator)][: 5 * BLOCK - 2]
for number, bits in enumerate((every[: 9 * BLOCK], every[-BLOCK:], normal, normal[:, :6].contiguous(), shuffled)):
    bits = bits.view(-1, bits.shape[-1])
    rows = bits.view(torch.bfloat16)
    packed = pack(rows.to(device))
    there = torch.full(rows.shape, 7.0, dtype=torch.bfloat16, device=device)
    beyond = torch.full((rows.numel() + 64,), 3.0, dtype=torch.bfloat16, device=device)
    unpack_rows(packed, there, blocks=2 ** (number % 3))
    assert torch.equal(there.view(torch.int16).cpu(), bits), rows.shape
    unpack_rows(packed, beyond[: rows.numel()].view(rows.shape), blocks=2)
    assert set(beyond[rows.numel() :].tolist()) == {3.0}, "something was written beyond the rows"
    # Rows by their numbers, of which the others may be anything, lists of escapes too.
    for ids in ([[0]], [[2, 0], [2, 0]], [[5, -1]], [[-3]], [[1] * 300 + [0]])[: 5 if len(rows) > 1 else 1]:
        named = {min(i, len(rows) - 1) for i in sum(ids, []) if i >= 0}
        for row in set(range(len(rows))) - named:
            packed.blocks[row], packed.escapes[row] = 255, 2**62
        there = torch.full(rows.shape, 7.0, dtype=torch.bfloat16, device=device)
        lists = [len(named), *sorted(named), *[2**40] * len(named)]
        found = Assignment(torch.tensor(ids), max(len(named), 1), torch.tensor(lists + [7, 7], device=device))
        unpack_rows(packed, there, found)
        for row in range(len(rows)):
            wanted = bits[row].view(torch.bfloat16) if row in named else torch.full_like(rows[row], 7.0)
            assert torch.equal(there[row].view(torch.int16).cpu(), wanted.view(torch.int16)), (ids, row)
        packed = pack(rows.to(device))
# A file that somebody has tampered with: escapes that lie elsewhere, and headers that point elsewhere.
for blocks, escapes in ((slice(0, 0), slice(1, None)), (slice(4, 8), slice(0, 0)), (slice(2, 4), slice(0, 0))):
    packed = pack(every[:6144].view(torch.bfloat16).view(3, 2048).to(device))
    packed.blocks[:, :, blocks] = 0xEF
    packed.escapes[:, escapes] |= 0x7FFFFFF0
    beyond = torch.full((4 * 2048,), 3.0, dtype=torch.bfloat16, device=device)
    unpack_rows(packed, beyond[: 3 * 2048].view(3, 2048))
    assert set(beyond[3 * 2048 :].tolist()) == {3.0}, "something was written beyond the rows"
try:
    unpack_rows(pack(torch.zeros(2, 5, dtype=torch.bfloat16, device=device)), torch.zeros(2, 5, device=device).bfloat16())
    raise SystemExit("rows of an odd number of weights went through")
except ValueError as error:
    assert "an even number" in str(error)
print("bits are right")
"""


def test_the_kernels_unpack_the_same_bits() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled and tested below")
    run_apart(KERNEL_CHECK, "cpu", says="bits are right", TRITON_INTERPRET="1")


def test_the_measurement_of_the_kernels_runs() -> None:
    """It compares every bit, whatever the constants are; the times mean nothing here."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("runs there by itself")
    program = (
        "import sys, io, contextlib; sys.path.insert(0, sys.argv[1]); import bench_unpack as script; said = io.StringIO()\n"
    )
    program += "with contextlib.redirect_stdout(said): code = script.main(sys.argv[2:])\n"
    program += "lines = said.getvalue().splitlines(); print(code, lines[-1].split(':')[0])"
    small = ("--experts", "2", "--hidden", "32", "--intermediate", "32", "--repeats", "1")
    scripts = str(Path(__file__).resolve().parent.parent / "scripts")
    run_apart(program, scripts, *small, says="0 best for whole banks", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_the_kernels_on_a_gpu(device: torch.device) -> None:
    """The same, compiled."""
    run_apart(KERNEL_CHECK, device.type, says="bits are right")
