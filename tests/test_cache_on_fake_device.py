"""Models with row caches over a device that runs its queues in adversarial orders and whose memory may run out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from cached_streaming import MANY, CachedStreaming
from caching import REMAPPING, assert_rows_are_right, budget, cached, lane_of
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.device.rows import RowSender
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import EXPERTS, Snapshot, bank_bytes, build, experts_of, prompt
from test_faults import counting_warnings

POLICIES = ["eager", "lazy", 3]
LAYERS = 3
NEW_TOKENS = 4


def small(family: str, implementation: str = "batched_mm") -> PreTrainedModel:
    """Three layers: one more than the lookahead."""
    model = build(family)
    del model.model.layers[LAYERS:]
    model.config.num_hidden_layers = LAYERS
    model.set_experts_implementation(implementation)
    return model


def generate(model: PreTrainedModel, ids: torch.Tensor, device: FakeDevice | None = None) -> list[torch.Tensor]:
    """The tokens, and the logits of each."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    if device is None:
        output = model.generate(ids, **options)
    else:
        with device.watching():
            output = model.generate(ids, **options)
    return [output.sequences, *output.logits]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


@pytest.fixture
def ample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is not looked for between two passes: the limits of these tests are far below what that would leave."""
    monkeypatch.setattr("hf_prefetch.scheduling.budget.LEAST_ROOM", 0)


@pytest.mark.parametrize(
    ("family", "implementation", "policy"),
    [
        *(("qwen3_moe", implementation, policy) for implementation in ("eager", "batched_mm") for policy in POLICIES),
        *(("gpt_oss", "grouped_mm", policy) for policy in POLICIES),
    ],
)
def test_logits_are_equal_and_nothing_races(family: str, implementation: str, policy: str | int) -> None:
    """A prompt fills the caches, tokens use them, short prompts pass them by; a row that nobody filled would show as NaN."""
    model, device = small(family, implementation), FakeDevice(policy)
    before = Snapshot.of(model)
    prompts = [prompt(20), prompt(3)]
    expected = [generate(model, ids) for ids in prompts]
    with cached(model, 3, device) as scheduler:
        for ids, outcome in zip(prompts, expected, strict=True):
            assert_equal(generate(model, ids, device), outcome)
        device.finish()
        assert_rows_are_right(scheduler)
        report = scheduler.report()
    before.assert_restored(model)
    assert report.lookahead_hits > 0
    assert report.cache_hits > 0
    assert report.fallbacks == 0
    assert report.cached_calls == (2 * (NEW_TOKENS - 1) * LAYERS if implementation in REMAPPING else 0)
    RaceChecker().assert_clean(device.log)
    assert device.allocated_bytes == device.registered_bytes == 0


@pytest.mark.parametrize("policy", ["lazy", 3])
def test_pageable_memory_keeps_the_order(policy: str | int) -> None:
    """Where nothing can be page-locked, copies of single experts hold the host, and bytes and order stay right."""
    model, device, ids = small("qwen3_moe"), FakeDevice(policy, refuse_pinning=True), prompt(20)
    expected = generate(model, ids)
    with counting_warnings() as told, cached(model, 3, device) as scheduler:
        assert_equal(generate(model, ids, device), expected)
        assert scheduler.report().cached_calls > 0
    assert len(told) == 1
    assert "could not be page-locked" in told[0]
    RaceChecker().assert_clean(device.log)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_caller_may_compute_on_any_stream(policy: str | int) -> None:
    """Another one in each call, over the same caches."""
    model, device, ids = small("qwen3_moe"), FakeDevice(policy), prompt(20)
    with torch.no_grad():
        expected, one = model(ids).logits, model(ids[:, :1]).logits
        with cached(model, 3, device):
            for name in ("a", "b", "a"):
                with device.use(device.stream(name)), device.watching():
                    assert torch.equal(model(ids).logits, expected)
                with device.use(device.stream(name + "'")), device.watching():
                    assert torch.equal(model(ids[:, :1]).logits, one)
    RaceChecker().assert_clean(device.log)


# -- memory that is not there -------------------------------------------------------------------------------------


@pytest.mark.raw
@pytest.mark.usefixtures("ample")
@pytest.mark.parametrize(("room", "policy"), [(0.0, "lazy"), (0.4, 3), (1.2, "eager"), (2.5, "lazy")])
def test_no_room_for_all_caches(room: float, policy: str | int) -> None:
    """Room for the slots and so many caches of all experts: one warning, smaller caches or none, and the right output.

    Less than the two rows that a token needs are none.
    """
    model, ids = small("qwen3_moe"), prompt(20)
    bank = bank_bytes(model) // LAYERS
    expected = generate(model, ids)
    device = FakeDevice(policy, memory_limit=int((3 + room) * bank))
    with counting_warnings() as told, cached(model, EXPERTS, device) as scheduler:
        for _ in range(2):
            assert_equal(generate(model, ids, device), expected)
        report, rows = scheduler.report(), lane_of(scheduler).caches.rows
        device.finish()
        assert_rows_are_right(scheduler)
    assert len(told) == 1
    assert "expert cache gets smaller" in told[0]
    assert "fake device" in told[0]
    assert "same output" in told[0]
    assert (report.fallbacks, rows) == {0.0: (4, 0), 0.4: (3, 0), 1.2: (2, 2), 2.5: (1, 4)}[room]
    assert report.looks_ahead
    assert report.lookahead_hits > 0
    assert report.cached_calls > 0 or rows < 2
    assert report.device_bytes + report.cache_bytes <= device.memory.memory_limit
    RaceChecker().assert_clean(device.log)
    assert device.allocated_bytes == device.registered_bytes == 0


@pytest.mark.usefixtures("ample")
@pytest.mark.parametrize("policy", POLICIES)
def test_caches_make_way_for_slots(policy: str | int) -> None:
    """Tokens come first and take the memory that a prompt's slots need: the output is right, and the limit is kept."""
    model, ids = small("qwen3_moe"), prompt(20)
    bank = bank_bytes(model) // LAYERS
    with torch.no_grad():
        expected, one = model(ids).logits, model(ids[:, :1]).logits
        device = FakeDevice(policy, memory_limit=int(3.5 * bank))
        with counting_warnings() as told, cached(model, EXPERTS, device) as scheduler, device.watching():
            for _ in range(3):
                assert torch.equal(model(ids[:, :1]).logits, one)
                assert torch.equal(model(ids).logits, expected)
            fallbacks = scheduler.report().fallbacks
    assert 0 < len(told) <= fallbacks
    RaceChecker().assert_clean(device.log)


@pytest.mark.usefixtures("ample")
def test_caches_make_way_before_the_lookahead_ends() -> None:
    """A cache can be halved; a prompt without lookahead is slow until prefetching is enabled again."""
    model, ids = small("qwen3_moe"), prompt(20)
    bank = bank_bytes(model) // LAYERS
    device = FakeDevice(memory_limit=int(5.5 * bank))
    with counting_warnings(), cached(model, EXPERTS, device) as scheduler, torch.no_grad():
        model(ids[:, :1])
        model(ids)
        assert scheduler.report().looks_ahead


def test_memory_that_runs_short_between_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV cache grows: within eight passes the caches are halved, once with a warning, until there is room again."""
    model, ids, device = small("qwen3_moe"), prompt(20), FakeDevice("lazy", memory_limit=2**30)
    monkeypatch.setattr("hf_prefetch.scheduling.budget.LEAST_ROOM", 4096)
    with torch.no_grad():
        expected, one = model(ids).logits, model(ids[:, :1]).logits
        with counting_warnings() as told, cached(model, EXPERTS, device) as scheduler, device.watching():
            caches = lane_of(scheduler).caches
            assert torch.equal(model(ids).logits, expected)
            for _ in range(10):
                assert torch.equal(model(ids[:, :1]).logits, one)
            assert caches.rows == EXPERTS, "there was room enough"
            held = caches.held()
            # Somebody else takes all the room that there was.
            device.memory.memory_limit = device.allocated_bytes
            for _ in range(9):
                assert torch.equal(model(ids[:, :1]).logits, one)
            assert caches.rows == EXPERTS // 2
            for _ in range(10):
                assert torch.equal(model(ids[:, :1]).logits, one)
            assert caches.rows == EXPERTS // 2, "half of it is room enough"
            device.memory.memory_limit = device.allocated_bytes
            for _ in range(30):
                assert torch.equal(model(ids[:, :1]).logits, one)
            report = scheduler.report()
            assert caches.rows == EXPERTS // 4
        assert report.fallbacks == 2
        assert report.cache_bytes < held / 2
    assert len(told) == 1
    RaceChecker().assert_clean(device.log)
    assert device.allocated_bytes == 0


class Failing(nn.Module):
    """An activation that runs out of memory, as often as it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.times, self.calls = inner, 0, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("no room for an activation")
        return self.inner(hidden)


@pytest.mark.usefixtures("ample")
@pytest.mark.parametrize("tokens", [20, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("implementation", "policy"), [("eager", "lazy"), ("batched_mm", "eager"), ("batched_mm", "lazy"), ("grouped_mm", 3)]
)
def test_out_of_memory_inside_a_forward(policy: str | int, implementation: str, tokens: int) -> None:
    """The caches are halved and the module is called again; nobody notices but for one warning, however often it happens."""
    model, device, ids = small("qwen3_moe", implementation), FakeDevice(policy), prompt(20)
    experts = model.model.layers[1].mlp.experts
    experts.act_fn = failing = Failing(experts.act_fn)
    with torch.no_grad():
        expected = model(ids[:, :tokens]).logits
        with counting_warnings() as told, cached(model, EXPERTS, device) as scheduler, device.watching():
            model(ids)
            for rows in (EXPERTS // 2, EXPERTS // 4):
                failing.times = 1
                assert torch.equal(model(ids[:, :tokens]).logits, expected)
                assert lane_of(scheduler).caches.rows == rows
                assert torch.equal(model(ids[:, :tokens]).logits, expected)
            assert scheduler.report().fallbacks == 2
            device.finish()
            assert_rows_are_right(scheduler)
    assert len(told) == 1
    RaceChecker().assert_clean(device.log)


def test_out_of_memory_that_no_cache_could_help() -> None:
    """It comes through as it is if it happens again, or if there is no cache; and what follows is right."""
    model, device, ids = small("qwen3_moe"), FakeDevice(), prompt(1)
    experts = model.model.layers[1].mlp.experts
    experts.act_fn = failing = Failing(experts.act_fn)
    with torch.no_grad():
        expected = model(ids).logits
        for rows, calls in ((4, 2), (0, 1)):
            with counting_warnings(), cached(model, rows, device) as scheduler:
                model(ids)
                failing.times, failing.calls = 5, 0
                with pytest.raises(torch.OutOfMemoryError, match="no room for an activation"):
                    model(ids)
                assert failing.calls == calls
                failing.times = 0
                assert experts.num_experts == EXPERTS
                assert torch.equal(model(ids).logits, expected)
                assert not scheduler.lock._is_owned()


def test_the_memory_that_a_cache_gives_up_is_there_for_the_call() -> None:
    """A traceback must not keep it: when the call is made again, half of the caches is free."""
    model, device, ids = small("qwen3_moe"), FakeDevice(), prompt(1)
    experts, seen = model.model.layers[1].mlp.experts, []

    class Measuring(Failing):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(device.allocated_bytes)
            return super().forward(hidden)

    experts.act_fn = failing = Measuring(experts.act_fn)
    with counting_warnings(), torch.no_grad(), cached(model, EXPERTS, device):
        model(ids)
        held, failing.times = device.allocated_bytes, 1
        seen.clear()
        model(ids)
    assert seen[0] == held
    # Of three caches that have halved, two have been made again by then.
    assert seen[1] < held / 2


def test_enabling_again_brings_the_cache_back() -> None:
    """In the size that is asked for, and with a warning of its own if it has to shrink again."""
    model, device, ids = small("qwen3_moe"), FakeDevice(), prompt(20)
    for _ in range(2):
        with counting_warnings() as told:
            enable_expert_prefetch(model, device=device, expert_cache=budget(model, EXPERTS))
            generate(model, ids)
            assert lane_of(model.expert_prefetch).caches.rows == EXPERTS
            lane_of(model.expert_prefetch).budget.give_up()
        assert len(told) == 1
    disable_expert_prefetch(model)
    assert len(experts_of(model)) == LAYERS


@pytest.mark.parametrize("many", [False, True])
def test_weights_that_change_while_experts_are_sent(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, say: what that call has brought into the cache is not taken for the new ones later on."""
    streaming = CachedStreaming(1, 2, FakeDevice("eager"), rows=3)
    name = "keep" if many else "send_to_cache"
    send = getattr(RowSender, name)

    def write_then(*args: object) -> object:
        found = send(*args)
        streaming.write(0, 2.0)
        return found

    with streaming.device.watching():
        with monkeypatch.context() as patch:
            patch.setattr(RowSender, name, write_then)
            bank, ids = streaming.banks[0], torch.tensor([[1], [2]])
            streaming.scheduler.acquire(bank, MANY if many else 2, ids, remaps=True)
            streaming.scheduler.release(bank)
        streaming.call(0, [1, 2])
    streaming.scheduler.close()
    # Whoever writes without settling races, but here all has run in order.
    streaming.device.finish()
    assert not streaming.wrong, streaming.wrong
