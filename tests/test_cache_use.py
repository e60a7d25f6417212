"""Row caches as their user meets them: options, budgets, reports, errors and interrupts, and how they end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from caching import REMAPPING, assert_rows_are_right, budget, cached, inputs_of, lane_of, poison_unknown_rows
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.config import PrefetchConfig
from hf_prefetch.testing import FakeDevice
from models import EXPERTS, TOP_K, Snapshot, bank_bytes, build, experts_of, prompt
from test_faults import Interrupt
from test_partial_residency import dense_bytes

# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"expert_cache": True}, TypeError, "expert_cache"),
        ({"expert_cache": -1}, ValueError, "expert_cache"),
        ({"expert_cache": "-4GiB"}, ValueError, "expert_cache"),
        ({"expert_cache": "much"}, ValueError, "4GiB|20GiB"),
        ({"expert_cache": [1]}, TypeError, "expert_cache"),
        ({"expert_cache": 0.5}, ValueError, "share of gpu_memory"),
        ({"expert_cache": 1.5, "gpu_memory": "1GiB"}, ValueError, "between 0 and 1"),
        ({"expert_cache": 0.0, "gpu_memory": "1GiB"}, ValueError, "between 0 and 1"),
        ({"expert_cache": float("nan"), "gpu_memory": "1GiB"}, ValueError, "between 0 and 1"),
        ({"expert_cache": "2GiB", "gpu_memory": "1GiB"}, ValueError, "must be smaller"),
        ({"expert_cache": "1GiB", "gpu_memory": "1GiB"}, ValueError, "must be smaller"),
    ],
)
def test_what_can_not_be_a_cache_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    """Before anything is touched, with a message that says what would do."""
    model = build("mixtral")
    before = Snapshot.of(model)
    with pytest.raises(error, match=words):
        enable_expert_prefetch(model, device="cpu", **options)
    before.assert_restored(model)


@pytest.mark.parametrize(
    ("given", "nbytes"), [(None, 0), (0, 0), ("0", 0), (4096, 4096), ("4096", 4096), ("4KiB", 4096), ("4KB", 4000)]
)
def test_sizes_of_a_cache(given: Any, nbytes: int) -> None:
    """Bytes, or a text as everywhere else."""
    assert PrefetchConfig(expert_cache=given).cache_budget == nbytes


def test_a_cache_that_is_a_share() -> None:
    """Of gpu_memory."""
    assert PrefetchConfig(expert_cache=0.25, gpu_memory=1000).cache_budget == 250


@pytest.mark.filterwarnings("ignore:hf_prefetch. expert_cache is:RuntimeWarning")
@pytest.mark.parametrize("given", [None, 0, 1, 90_000])
def test_no_cache(given: int | None) -> None:
    """None, 0, and less than a token's experts a bank (here none or one) are no cache at all."""
    model, device = build("mixtral"), FakeDevice()
    model.set_experts_implementation("batched_mm")
    enable_expert_prefetch(model, device=device, expert_cache=given)
    with torch.no_grad():
        model(prompt(20))
        model(prompt(1))
    report = model.expert_prefetch.report()
    assert (report.cached_calls, report.cache_hits, report.cache_bytes) == (0, 0, 0)
    assert report.routed_calls == len(experts_of(model))
    assert device.allocated_bytes == report.device_bytes


@pytest.mark.parametrize("rows", [TOP_K, 5])
def test_no_more_memory_than_asked_for(rows: int) -> None:
    """The caches keep to their budget, tables aside, and are allocated when they are first used."""
    model, device = build("gpt_oss", torch.bfloat16), FakeDevice()
    model.set_experts_implementation("batched_mm")
    asked = budget(model, rows)
    enable_expert_prefetch(model, device=device, expert_cache=asked)
    assert model.expert_prefetch.report().cache_bytes == device.allocated_bytes == 0
    with torch.no_grad():
        model(prompt(20))
        model(prompt(1))
    report = model.expert_prefetch.report()
    assert report.device_bytes + report.cache_bytes == device.allocated_bytes
    # Each tensor starts at a multiple of 256 bytes, and a table has 4 bytes a row and an expert.
    padding = sum(256 * len(bank.layout.specs) + 4 * (rows + EXPERTS) for bank in model.expert_prefetch.banks)
    assert asked <= report.cache_bytes <= asked + padding


@pytest.mark.parametrize("cache", ["rows", 0.2])
def test_a_cache_is_part_of_gpu_memory(cache: str | float) -> None:
    """Slots, caches, resident experts and what is not an expert fit into it together."""
    model, ids = build("qwen3_moe"), prompt(20)
    model.set_experts_implementation("batched_mm")
    layers, bank = len(experts_of(model)), bank_bytes(model) // len(experts_of(model))
    dense, asked = dense_bytes(model), budget(model, EXPERTS // 2)
    # Rows start at multiples of 256 bytes, and a table takes 4 bytes a row and an expert: that little comes on top.
    memory = dense + 2 * bank + asked + bank + layers * 1024
    with torch.no_grad():
        expected, one = model(ids).logits, model(ids[:, :1]).logits
        enable_expert_prefetch(
            model, 2, device=FakeDevice(), gpu_memory=memory, expert_cache=asked if cache == "rows" else cache
        )
        for _ in range(2):
            assert torch.equal(model(ids).logits, expected)
            assert torch.equal(model(ids[:, :1]).logits, one)
    report = model.expert_prefetch.report()
    assert 0 < report.resident_banks < layers
    assert report.cached_calls > 0
    assert dense + report.resident_banks * bank + report.device_bytes + report.cache_bytes <= memory
    with pytest.raises(ValueError, match="gpu_memory"):
        enable_expert_prefetch(model, 2, device=FakeDevice(), gpu_memory=dense + 2 * bank, expert_cache=bank)


# -- reports, and the end ---------------------------------------------------------------------------------------------


def test_what_the_report_says() -> None:
    """Calls, hits and bytes of a call that finds nothing, of one that finds everything, and after a reset."""
    model, device = build("mixtral"), FakeDevice()
    model.set_experts_implementation("batched_mm")
    experts = model.model.layers[0].mlp.experts
    given = inputs_of(experts, 1, torch.Generator().manual_seed(0))
    with cached(model, 4, device) as scheduler, torch.no_grad():
        assert scheduler.report().hit_rate is None
        row = scheduler.banks[0].layout.row_nbytes
        experts(*given)
        first = scheduler.report()
        assert (first.calls, first.cached_calls, first.routed_calls, first.lookahead_calls) == (1, 1, 0, 0)
        assert (first.cache_hits, first.routed_rows, first.hit_rate, first.bytes_to_device) == (0, 2, 0.0, 2 * row)
        for _ in range(3):
            experts(*given)
        report = scheduler.report()
        assert (report.cached_calls, report.cache_hits, report.routed_rows, report.hit_rate) == (4, 6, 2, 0.75)
        assert report.bytes_to_device == 2 * row
        assert "75%" in str(report)
        assert "cached calls" in report._repr_html_()
        held = report.cache_bytes
        scheduler.reset()
        empty = scheduler.report()
        assert (empty.cached_calls, empty.cache_hits, empty.routed_rows, empty.hit_rate) == (0, 0, 0, None)
        assert empty.cache_bytes == held > 0
        experts(*given)
        assert scheduler.report().hit_rate == 1.0, "a reset keeps what is cached"


def test_disabling_gives_everything_back() -> None:
    """Slots, caches, tables and page locks; and enabling again starts with empty caches."""
    model, device = build("qwen3_moe"), FakeDevice("lazy")
    model.set_experts_implementation("grouped_mm")
    before = Snapshot.of(model)
    for _ in range(2):
        with cached(model, 4, device) as scheduler, torch.no_grad(), device.watching():
            model(prompt(20))
            model(prompt(1))
            assert scheduler.report().cache_bytes > 0
        before.assert_restored(model)
        assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    assert device.races() == []


def test_deleting_the_model_gives_everything_back() -> None:
    """Without disabling it."""
    model, device = build("qwen3_moe"), FakeDevice()
    model.set_experts_implementation("grouped_mm")
    enable_expert_prefetch(model, device=device, expert_cache="1MiB")
    with torch.no_grad():
        model(prompt(1))
    assert device.allocated_bytes > 0
    del model
    gc.collect()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_two_models_have_caches_of_their_own(device: torch.device) -> None:
    """They take turns, and disabling one leaves the other's."""
    models = [build("mixtral", seed=seed).to(device) for seed in (0, 1)]
    ids = prompt(1, device=device)
    with torch.no_grad():
        for model in models:
            model.set_experts_implementation("batched_mm")
        expected = [model(ids).logits for model in models]
        with cached(models[0], 4, device) as scheduler:
            with cached(models[1], 2, device):
                for _ in range(3):
                    for model, logits in zip(models, expected, strict=True):
                        assert torch.equal(model(ids).logits, logits)
            assert torch.equal(models[0](ids).logits, expected[0])
            assert scheduler.report().hit_rate == 0.75


# -- errors and interrupts in the middle of a call ---------------------------------------------------------------------


class RaiseOnce(TorchDispatchMode):
    """Raises an error instead of the n-th operator inside, and lets all others run."""

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.at, self.error, self.seen = at, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise self.error()
        return func(*args, **(kwargs or {}))


class OneBank:
    """An experts module of six experts with a cache of three rows, in which 0 and 1 are, and what it should give."""

    def __init__(self, implementation: str, device: Any = "cpu") -> None:
        config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=6, num_experts_per_tok=2)
        config._experts_implementation = implementation
        self.experts = MixtralExperts(config)
        with torch.no_grad():
            for parameter in self.experts.parameters():
                parameter.normal_()
        self.model = nn.ModuleList([self.experts])
        self.calls = {
            kind: (torch.randn(len(ids), 8), torch.tensor(ids), torch.rand(len(ids), 2))
            for kind, ids in {"before": [[0, 1]], "decode": [[2, 1]], "prompt": [[2, 3], [3, 4]] * 5, "after": [[3, 2]]}.items()
        }
        with torch.no_grad():
            self.expected = {kind: self.experts(*given) for kind, given in self.calls.items()}
        self.parameters = dict(self.experts.named_parameters())
        enable_expert_prefetch(self.model, 2, device=device, expert_cache=budget(self.model, 3))
        self.scheduler = self.model.expert_prefetch

    def run(self, kind: str) -> bool:
        with torch.no_grad():
            return torch.equal(self.experts(*self.calls[kind]), self.expected[kind])

    def begin(self) -> None:
        """The same state each time."""
        self.scheduler.settle()
        poison_unknown_rows(self.scheduler)
        self.run("before")
        # A call reads the marks so far only now and then.
        self.scheduler.report()

    def failures(self) -> list[str]:
        """What is not as it should be after a call broke off."""
        found = []
        now = dict(self.experts.named_parameters())
        if now.keys() != self.parameters.keys() or any(now[name] is not self.parameters[name] for name in now):
            found.append("parameters")
        if self.experts.num_experts != 6:
            found.append("num_experts")
        if self.scheduler.lock._is_owned():
            found.append("lock")
        try:
            assert_rows_are_right(self.scheduler)
        except AssertionError:
            found.append("rows")
        if not all(self.run(kind) for kind in ("decode", "after", "prompt", "decode", "before")):
            found.append("output")
        return found


CALLS = [
    pytest.param("decode", "eager"),
    *(pytest.param("decode", name) for name in REMAPPING),
    pytest.param("prompt", "batched_mm"),
]


@pytest.mark.parametrize(("kind", "implementation"), CALLS)
def test_an_interrupt_at_any_line_of_a_call(kind: str, implementation: str) -> None:
    """The module is as before, the lock is free, and what follows is right: no row is taken for an expert that never came."""
    bank = OneBank(implementation)
    bank.run("prompt")
    bank.begin()
    with Interrupt() as trial:
        assert bank.run(kind)
    assert len(trial.lines) > 60, "the tracer saw too little"
    failures, missed = [], 0
    for at in range(1, len(trial.lines) + 1):
        bank.begin()
        with Interrupt(at) as interrupt:
            try:
                bank.run(kind)
            except KeyboardInterrupt:
                pass
            else:
                # Which slot a bank is found in, and so how many lines that takes, differs from call to call.
                missed += 1
        if found := bank.failures():
            failures.append((interrupt.lines[-1], *found))
    disable_expert_prefetch(bank.model)
    assert missed < 20
    assert failures == []


@pytest.mark.parametrize(("kind", "implementation"), CALLS)
def test_an_error_in_any_operator_of_a_call(kind: str, implementation: str) -> None:
    """It comes through as it is, and what follows is right."""
    bank, error = OneBank(implementation), ValueError("from an operator")
    bank.run("prompt")
    bank.begin()
    with torch.no_grad(), RaiseOnce(0, ValueError) as trial:
        bank.experts(*bank.calls[kind])
    assert trial.seen > 20, "too few operators to break"
    failures, broken, missed = [], [], 0
    for at in range(1, trial.seen + 1):
        bank.begin()
        try:
            with torch.no_grad(), RaiseOnce(at, lambda: error):
                bank.experts(*bank.calls[kind])
        except ValueError as caught:
            broken.append(caught)
        else:
            missed += 1
        if found := bank.failures():
            failures.append((at, *found))
    assert missed < 12
    assert all(caught is error for caught in broken)
    assert failures == []


@pytest.mark.parametrize(("kind", "implementation"), [("decode", "eager"), ("decode", "batched_mm"), ("prompt", "grouped_mm")])
def test_out_of_memory_in_any_operator_of_a_call(kind: str, implementation: str) -> None:
    """The caches get smaller and the call is made again: the caller gets the right output and never sees an error."""
    at, operators = 0, 1
    while at < operators:
        at += 1
        bank = OneBank(implementation, FakeDevice())
        bank.run("prompt")
        bank.begin()
        if at == 1:
            with torch.no_grad(), RaiseOnce(0, ValueError) as count:
                bank.experts(*bank.calls[kind])
            operators = count.seen
            bank.begin()
        rows = lane_of(bank.scheduler).caches.rows
        with pytest.warns(RuntimeWarning, match="expert cache gets smaller") as told, torch.no_grad():  # noqa: SIM117
            with RaiseOnce(at, torch.OutOfMemoryError):
                output = bank.experts(*bank.calls[kind])
        assert torch.equal(output, bank.expected[kind]), at
        assert len(told) == 1
        # Half of three rows is less than a token needs.
        assert rows == 3
        assert lane_of(bank.scheduler).caches.rows == 0
        assert bank.scheduler.report().fallbacks == 1
        assert bank.failures() == []
        disable_expert_prefetch(bank.model)
