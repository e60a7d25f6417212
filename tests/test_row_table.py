"""The table of a row cache: torch's operators and the kernels do what `Replacement` says, to the last bit of every score."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apart import run_apart
from hf_prefetch.banks.layout import BankLayout
from hf_prefetch.device.table import Assignment, RowTable
from hf_prefetch.scheduling.replacement import EMPTY, CacheState, Placement, Replacement
from hf_prefetch.streams import stream_device

# Experts and rows: powers of two and others, a chunk of the kernels (32) and one more or less, rows from one to all.
SIZES = [(2, 1), (2, 2), (3, 2), (8, 4), (31, 5), (33, 32), (60, 33), (64, 64), (100, 8), (127, 31), (128, 96)]
# The interpreter takes a tenth of a second for a launch.
FEW_SIZES = [(3, 2), (33, 32), (128, 96)]
# "step" or "prompt", and its ids, a list for each token.
Call = tuple[str, list[list[int]]]


class Both:
    """A table on a device beside the reference, which sees the same calls."""

    def __init__(self, device: torch.device, experts: int, rows: int, decay: float = 0.98, window: int = 128) -> None:
        self.device = device
        self.policy = Replacement(decay, window)
        self.state = CacheState.empty(experts, rows)
        self.table = RowTable(stream_device(device), experts, rows, self.policy.decay)
        self.totals = torch.zeros(2, dtype=torch.int64, device=device)
        self.needed = self.missed = 0

    @property
    def rows(self) -> int:
        return len(self.state.experts)

    @property
    def experts(self) -> int:
        return len(self.state.scores)

    def step(self, ids: list[list[int]], *, by_kernel: bool = False) -> Placement:
        """One call, by torch's operators or by the kernel."""
        given_ids = torch.tensor(ids, dtype=torch.int64, device=self.device)
        kept = given_ids.clone()
        if by_kernel:
            from hf_prefetch.device.kernels import assign_rows

            found = assign_rows(self.table, given_ids, self.totals)
        else:
            found = self.table.assign(given_ids)
        flat = [expert for token in ids for expert in token]
        placement = self.policy.step(self.state, flat)
        self.state = placement.state
        self.needed += len({expert for expert in flat if 0 <= expert < self.experts})
        self.missed += len(placement.fetches)
        rows = [self.rows if row == EMPTY else row for row in placement.rows]
        assert torch.equal(given_ids, kept), "the router's ids are the caller's"
        assert found.ids.dtype == torch.int64
        assert found.ids.shape == given_ids.shape
        assert found.ids.flatten().tolist() == rows
        self.check(found, placement)
        if by_kernel:
            assert self.totals.tolist() == [self.needed, self.missed]
        return placement

    def prompt(self, ids: list[list[int]]) -> Placement:
        """A whole prompt, of which the table gets the last tokens."""
        last = ids[-self.policy.window :]
        given_ids = torch.tensor(last, dtype=torch.int64, device=self.device)
        found = self.table.assign_prompt(given_ids, *self.policy.weights(len(ids)))
        flat = [expert for token in last for expert in token]
        counts = [flat.count(expert) for expert in range(self.experts)]
        placement = self.policy.prompt(self.state, counts, len(ids))
        self.state = placement.state
        self.check(found, placement)
        return placement

    def check(self, found: Assignment, placement: Placement) -> None:
        """The fetch list, the rows and every score are the reference's, bit for bit."""
        assert found.lists.shape == (2 * found.most + 1,)
        assert found.moves() == list(placement.fetches)
        assert self.table.expert_of.tolist() == list(placement.state.experts)
        expected = torch.tensor(placement.state.scores, dtype=torch.float64)
        # float64 holds every float32: a score that was rounded otherwise would differ here.
        assert torch.equal(self.table.scores.cpu().double(), expected)


def calls_for(choose: random.Random, experts: int, rows: int, count: int, *, prompts: bool = True) -> Iterable[Call]:
    """Calls that fit: duplicates, ids that name no expert, one to many tokens, and prompts in between."""
    for number in range(count):
        if prompts and number % 5 == 4:
            tokens = choose.choice([1, 3, 40])
            yield "prompt", [[choose.randrange(-1, experts + 2) for _ in range(2)] for _ in range(tokens)]
            continue
        fitting = choose.sample(range(experts), choose.randint(0, min(rows, experts)))
        beyond = choose.choice([[], [-1], [experts], [experts + 1, experts + 900, -7]])
        flat = [*fitting, *choose.choices([*fitting, *beyond, experts], k=choose.choice([0, 1, 2, 9])), *beyond]
        choose.shuffle(flat)
        if not flat:
            flat = [experts]
        yield "step", [flat] if len(flat) % 2 else [flat[::2], flat[1::2]]


@pytest.mark.parametrize(("experts", "rows"), SIZES)
def test_the_table_does_what_the_reference_says(device: torch.device, experts: int, rows: int) -> None:
    """Steps between prompts, from an empty cache to one that has been full for long."""
    both, choose = Both(device, experts, rows), random.Random(experts)
    for kind, ids in calls_for(choose, experts, rows, 40):
        both.step(ids) if kind == "step" else both.prompt(ids)
    assert EMPTY not in both.state.experts, "the cache never filled up, so nothing was ever evicted"


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, float, int, list[Call]]:
    """Sizes, a decay, a window, and calls."""
    experts = draw(st.integers(2, 128))
    rows = draw(st.integers(1, experts))
    decay = draw(st.sampled_from([1e-3, 0.5, 0.9, 0.98, 1.0]))
    window = draw(st.sampled_from([1, 4, 128]))
    seed = draw(st.integers(0, 2**16))
    return experts, rows, decay, window, list(calls_for(random.Random(seed), experts, rows, draw(st.integers(1, 12))))


@given(histories())
@settings(max_examples=60, deadline=None)
def test_any_history_is_the_references(history: tuple[int, int, float, int, list[Call]]) -> None:
    """Any sizes, decays from least recently used to least frequently used, any window of a prompt."""
    experts, rows, decay, window, calls = history
    both = Both(torch.device("cpu"), experts, rows, decay, window)
    for kind, ids in calls:
        both.step(ids) if kind == "step" else both.prompt(ids)


def test_scores_fade_to_zero_as_in_the_reference() -> None:
    """Below the smallest normal float32 a score is zero, everywhere; a denormal would differ from device to device."""
    both = Both(torch.device("cpu"), 4, 2, decay=0.25)
    both.step([[0, 1]])
    for _ in range(70):
        both.step([[2]])
    assert both.state.scores[0] == 0.0
    assert both.state.scores[2] > 0.0


def test_a_table_that_is_cleared_starts_again() -> None:
    """Nothing of what was there is found any more."""
    both = Both(torch.device("cpu"), 6, 3)
    both.step([[0, 1, 2]])
    both.table.clear()
    both.state = CacheState.empty(6, 3)
    assert len(both.step([[2, 1]]).fetches) == 2
    assert both.table.row_of()[:6].tolist() == [-1, 0, 1, -1, -1, -1]


def test_the_row_of_an_expert_is_where_it_lies() -> None:
    """Also after evictions, and with rows that hold nothing."""
    both, choose = Both(torch.device("cpu"), 9, 5), random.Random(1)
    assert both.table.row_of().tolist() == [-1] * 10
    for kind, ids in calls_for(choose, 9, 5, 30):
        both.step(ids) if kind == "step" else both.prompt(ids)
        assert both.table.row_of()[:9].tolist() == [both.state.row_of(expert) for expert in range(9)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_grad_mode_will_do(mode: type) -> None:
    """The table is made in one and updated in another."""
    with torch.inference_mode():
        both = Both(torch.device("cpu"), 6, 3)
    with mode():
        both.step([[0, 4]])
        both.prompt([[1, 2], [1, 3]])
    both.step([[0, 4]])


@pytest.mark.parametrize("experts", [5, 8])
def test_a_call_without_ids_only_lets_scores_fade(experts: int) -> None:
    """A forward of no tokens."""
    both = Both(torch.device("cpu"), experts, 3)
    both.step([[0, 1]])
    assert both.step([[]]).fetches == ()


def test_a_step_takes_ids_of_any_integer_type() -> None:
    """As the experts implementations do."""
    table = RowTable(stream_device("cpu"), 6, 3, 0.5)
    assert table.assign(torch.tensor([[1, 4]], dtype=torch.int32)).ids.tolist() == [[0, 1]]


def test_a_prompt_takes_ids_of_any_integer_type() -> None:
    """As the experts implementations do."""
    table = RowTable(stream_device("cpu"), 6, 2, 0.5)
    table.assign_prompt(torch.tensor([[1, 4]], dtype=torch.int32), 1.0, 1.0)
    assert table.expert_of.tolist() == [1, 4]


# -- kernels ----------------------------------------------------------------------------------------------------------


def check_assign(device: torch.device) -> None:
    """`assign_rows` step by step, between prompts that torch's operators decide."""
    for experts, rows in sizes(device):
        both, choose = Both(device, experts, rows), random.Random(experts)
        for kind, ids in calls_for(choose, experts, rows, 8):
            both.step(ids, by_kernel=True) if kind == "step" else both.prompt(ids)
        # Full since the prompt: what follows has to evict.
        for expert in range(min(experts, 3)):
            both.step([[experts - 1 - expert]], by_kernel=True)
    check_scores(device)


def sizes(device: torch.device) -> list[tuple[int, int]]:
    return SIZES if device.type == "cuda" else FEW_SIZES


def check_scores(device: torch.device) -> None:
    """Ties, decays at both ends, and scores that fade to zero."""
    for decay in (0.5, 1.0):
        both = Both(device, 5, 3, decay)
        for ids in ([0, 1, 2], [3], [4, 3], [0], [2, 2, 2]):
            both.step([ids], by_kernel=True)
    both = Both(device, 4, 2, 2.0**-60)
    for ids in ([0, 1], [2], [2], [3]):
        both.step([ids], by_kernel=True)
    assert both.state.scores[0] == 0.0


def check_list(device: torch.device) -> None:
    """`list_experts` names the distinct experts in ascending order, with their rows, and leaves table and ids as they are."""
    from hf_prefetch.device.kernels import _MANY, list_experts

    for experts, rows in sizes(device):
        both, choose = Both(device, experts, rows), random.Random(rows)
        totals, sums = torch.zeros(2, dtype=torch.int64, device=device), [0, 0]
        for kind, ids in calls_for(choose, experts, rows, 3):
            both.step(ids) if kind == "step" else both.prompt(ids)
            asked = [[choose.randrange(-2, experts + 3) for _ in range(choose.choice([1, 2, 40, 2 * _MANY + 3]))]]
            before, scores = both.table.expert_of.clone(), both.table.scores.clone()
            for table in (both.table, None):
                given_ids = torch.tensor(asked, device=device)
                found = list_experts(given_ids, experts, table, totals)
                # What lives elsewhere counts as the last one: batched_mm multiplies that by 0, so it has to be there.
                wanted = sorted({min(expert, experts - 1) for expert in asked[0] if expert >= 0})
                where = [both.state.row_of(expert) if table is not None else EMPTY for expert in wanted]
                assert found.moves() == list(zip(wanted, where, strict=True))
                assert found.ids is given_ids
                assert given_ids.tolist() == asked
                sums = [sums[0] + len(wanted), sums[1] + where.count(EMPTY)]
                assert totals.tolist() == sums
            assert torch.equal(both.table.expert_of, before)
            assert torch.equal(both.table.scores, scores)


def check_bytes(device: torch.device) -> None:
    """A cache that is filled by the kernels holds in each row its expert's bytes, and a slot gets experts from either place."""
    from hf_prefetch.device.kernels import assign_rows, gather_rows, list_experts

    for experts, rows, width in [(5, 2, 1030), (12, 7, 30)][: 2 if device.type == "cuda" else 1]:
        both, choose = Both(device, experts, rows), random.Random(experts)
        # Rows of 6 and 1 bytes are no whole words.
        shapes = {"up": (experts, 6, width), "bias": (experts, 12), "down": (experts, 4, 2), "scale": (experts, 1, 3)}
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        layout = BankLayout.of([*tensors.items(), ("exponent", torch.empty(experts, 1, 1, dtype=torch.uint8))])
        small = layout.with_rows(rows)
        host = torch.randint(0, 255, (layout.nbytes,), dtype=torch.uint8)
        host = host.pin_memory() if device.type == "cuda" else host
        cache, slot = (torch.full((size,), 255, dtype=torch.uint8, device=device) for size in (small.nbytes, layout.nbytes))
        places = torch.tensor(
            [
                (whole.nbytes // experts, whole.offset, some.offset)
                for whole, some in zip(layout.specs, small.specs, strict=True)
            ],
            device=device,
        )
        for number, (_, ids) in enumerate(calls_for(choose, experts, rows, 6, prompts=False)):
            given_ids = torch.tensor(ids, device=device)
            if number == 3:
                # After a prompt the cache is filled from a slot on the device.
                whole = host.to(device)
                found = both.table.assign_prompt(given_ids, 0.5, 1.0)
                gather_rows(places, found, whole, cache, cache, to_rows=True)
            else:
                gather_rows(places, assign_rows(both.table, given_ids, both.totals), host, cache, cache, to_rows=True)
            owners = both.table.expert_of.tolist()
            assert_rows(small, cache, layout, host, dict(enumerate(owners)))
            # What is in the cache comes from there: in host memory that is other bytes now.
            slot.fill_(255)
            asked = torch.tensor([choose.randrange(experts) for _ in range(3)], device=device)
            found = list_experts(asked, experts, both.table, both.totals)
            other = torch.full_like(host, 254).pin_memory() if device.type == "cuda" else torch.full_like(host, 254)
            gather_rows(places, found, other, cache, slot, to_rows=False)
            for name, there in layout.views(slot.cpu()).items():
                for expert in range(experts):
                    sure = layout.views(host)[name][expert] if expert in owners else layout.views(other.cpu())[name][expert]
                    sure = sure if expert in asked.tolist() else torch.full_like(sure.view(torch.uint8), 255)
                    assert torch.equal(as_bytes(there[expert]), as_bytes(sure)), (name, expert)


def assert_rows(small: BankLayout, cache: torch.Tensor, layout: BankLayout, host: torch.Tensor, owner: dict[int, int]) -> None:
    for name, rows in small.views(cache.cpu()).items():
        for row, expert in owner.items():
            if expert == EMPTY:
                assert set(as_bytes(rows[row]).tolist()) == {255}, f"something was written to {name} of empty row {row}"
            else:
                assert torch.equal(as_bytes(rows[row]), as_bytes(layout.views(host)[name][expert])), (name, row, expert)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def check_huge_ids(device: torch.device) -> None:
    """An id that 32 bits don't hold names nothing, whatever its lower half is."""
    Both(device, 6, 3).step([[1, 2**32 + 4, -(2**32) + 2]], by_kernel=True)


def run_in_process(check: str, device: str, **environment: str) -> None:
    """Triton decides when it is imported whether it compiles or interprets, so each check has a process of its own."""
    program = f"import torch, test_row_table as t; t.{check}(torch.device({device!r})); print('right')"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    run_apart(program, says="right", PYTHONPATH=path, OMP_NUM_THREADS="1", **environment)


CHECKS = [
    check_assign.__name__,
    check_list.__name__,
    check_bytes.__name__,
    check_huge_ids.__name__,
]


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_in_the_interpreter(check: str) -> None:
    """As the reference says, bit for bit."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled and tested below")
    run_in_process(check, "cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_compiled(device: torch.device, check: str) -> None:
    """The same on the device, from page-locked memory."""
    run_in_process(check, device.type)
