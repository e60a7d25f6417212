"""What happens while a CUDA graph is captured, and afterwards, on a device that only says that it captures."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from caching import assert_rows_are_right, budget, cached, caches_of, lane_of
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.testing import FakeDevice, FakeEvent, FakeMark, FakeStream, RaceChecker
from models import EXPERTS, Snapshot, build, experts_of, prompt

LAYERS = 3


class CapturingDevice(FakeDevice):
    """Says that it captures when it is told to, and notes what must not be done meanwhile."""

    capturing = False

    def __init__(self, policy: Any = "lazy", **options: Any) -> None:
        super().__init__(policy, **options)
        self.forbidden: list[str] = []

    def is_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A graph is captured inside."""
        self.capturing = True
        try:
            with self.watching():
                yield
        finally:
            self.capturing = False

    def _refuse(self, what: str) -> None:
        if self.capturing:
            self.forbidden.append(what)

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._refuse(f"allocate {nbytes}")
        return super().allocate(nbytes)

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self._refuse(f"record on {stream.name}")
        super().record(event, stream)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._refuse(f"wait on {stream.name}")
        super().wait(stream, event)

    def synchronize(self, event: FakeEvent) -> None:
        self._refuse("synchronize")
        super().synchronize(event)

    def mark(self, stream: FakeStream) -> FakeMark:
        self._refuse("mark")
        return super().mark(stream)

    def elapsed(self, begin: FakeMark, end: FakeMark) -> float | None:
        self._refuse("elapsed")
        return super().elapsed(begin, end)

    def register(self, address: int, nbytes: int) -> str | None:
        self._refuse(f"register {nbytes}")
        return super().register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._refuse("unregister")
        super().unregister(address)

    def trim(self) -> None:
        self._refuse("trim")
        super().trim()

    def copy(self, stream: FakeStream, destination: torch.Tensor, source: torch.Tensor) -> None:
        if stream is self.copy_stream():
            self._refuse("copy on the copy stream")
        super().copy(stream, destination, source)


def small(implementation: str) -> PreTrainedModel:
    model = build("qwen3_moe")
    del model.model.layers[LAYERS:]
    model.config.num_hidden_layers = LAYERS
    model.set_experts_implementation(implementation)
    return model


def logits(model: PreTrainedModel, ids: torch.Tensor, device: CapturingDevice, *, captured: bool = False) -> torch.Tensor:
    with torch.no_grad(), device.capture() if captured else device.watching():
        return model(ids).logits


@contextmanager
def without_warnings() -> Iterator[None]:
    """For the end of a model over which a graph was captured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# How a model decodes: from caches, from a slot with the cached rows, from a slot alone.
WAYS = [("batched_mm", 3), ("eager", 3), ("grouped_mm", 0)]
ways = pytest.mark.parametrize(("implementation", "rows"), WAYS, ids=[f"{name}-{rows} rows" for name, rows in WAYS])
one, many = prompt(1), prompt(20)


@ways
def test_a_capture_without_a_warm_up_is_refused(implementation: str, rows: int) -> None:
    """With a message that names the remedy; nothing is allocated, and afterwards all is as it was."""
    model, device = small(implementation), CapturingDevice()
    expected = model(one).logits.detach()
    with without_warnings(), cached(model, rows, device) as scheduler:
        before = Snapshot.of(model).parameters
        with pytest.raises(RuntimeError, match=r"graph.*layers\.0\.mlp\.experts.*once without capture first"):
            logits(model, one, device, captured=True)
        assert (device.allocated_bytes, device.forbidden) == (0, [])
        assert Snapshot.of(model).parameters == before
        assert not scheduler.lock._is_owned()
        assert torch.equal(logits(model, one, device), expected)
        assert torch.equal(logits(model, one, device, captured=True), expected), "what the message advises helps"
    assert device.races() == []


@ways
def test_a_refused_capture_leaves_no_lease(implementation: str, rows: int) -> None:
    """There is no graph, so disabling gives everything back, without a warning."""
    model, device = small(implementation), CapturingDevice()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with cached(model, rows, device):
            with pytest.raises(RuntimeError, match="once without capture first"):
                logits(model, one, device, captured=True)
            logits(model, one, device)
    assert device.allocated_bytes == device.registered_bytes == 0


@ways
def test_a_capture_decides_nothing_on_the_host(implementation: str, rows: int) -> None:
    """In it nothing is allocated, recorded or waited for, and no other stream is used; the output is right."""
    model, device = small(implementation), CapturingDevice()
    expected, short = model(one).logits.detach(), model(prompt(3)).logits.detach()
    with cached(model, rows, device) as scheduler:
        logits(model, many, device)
        logits(model, prompt(3), device)
        logits(model, one, device)
        held = device.allocated_bytes
        for ids, outcome in ((one, expected), (prompt(3), short), (one, expected)):
            assert torch.equal(logits(model, ids, device, captured=True), outcome)
        assert device.forbidden == []
        assert device.allocated_bytes == held
        device.finish()
        assert_rows_are_right(scheduler)
        leased = [slot for slot in lane_of(scheduler).ring._slots if slot.is_leased]
        if implementation == "eager" or not rows:
            assert len(leased) == 1
        assert all(cache.is_leased for cache, _ in caches_of(scheduler))
        assert torch.equal(logits(model, one, device), expected)
        with without_warnings():
            disable_expert_prefetch(model)
    assert device.races() == []


@pytest.mark.parametrize("slots", [2, 3])
@ways
def test_a_slot_that_a_graph_knows_is_not_filled_any_more(implementation: str, rows: int, slots: int) -> None:
    """Prompts between replays go through the others, and their logits are right."""
    model, device = small(implementation), CapturingDevice(5)
    expected, expected_one = model(many).logits.detach(), model(one).logits.detach()
    with cached(model, rows, device, slots=slots) as scheduler:
        logits(model, many, device)
        logits(model, one, device)
        logits(model, one, device, captured=True)
        leased = [slot for slot in lane_of(scheduler).ring._slots if slot.is_leased]
        places = [device.range_of(slot.buffer) for slot in leased]
        begin = len(device.log)
        for _ in range(3):
            assert torch.equal(logits(model, many, device), expected)
            assert torch.equal(logits(model, one, device), expected_one)
        writes = [write for entry in device.log[begin:] for write in entry.writes]
        assert not any(write.overlaps(place) for write in writes for place in places if place is not None)
        assert torch.equal(logits(model, one, device, captured=True), expected_one)
        assert [slot for slot in lane_of(scheduler).ring._slots if slot.is_leased] == leased, "one is enough"
        with without_warnings():
            disable_expert_prefetch(model)
    assert device.races() == []


def test_a_cache_that_a_graph_knows_keeps_its_size() -> None:
    """However short memory is: it is neither halved nor made anew, and no other cache is."""
    model, device = small("batched_mm"), CapturingDevice()
    expected = model(one).logits.detach()
    with cached(model, EXPERTS, device) as scheduler:
        logits(model, one, device)
        logits(model, one, device, captured=True)
        addresses = [cache.buffer.data_ptr() for cache, _ in caches_of(scheduler)]
        device.memory.memory_limit = device.allocated_bytes
        assert not lane_of(scheduler).budget.give_up()
        for _ in range(20):
            assert torch.equal(logits(model, one, device), expected)
        assert [cache.buffer.data_ptr() for cache, _ in caches_of(scheduler)] == addresses
        assert lane_of(scheduler).caches.rows == EXPERTS
        assert scheduler.report().fallbacks == 0
        with without_warnings():
            disable_expert_prefetch(model)


@pytest.mark.raw
def test_a_bank_without_room_for_its_cache_after_a_capture() -> None:
    """Graphs know the other caches, so this bank does without one, also in the next capture."""
    model, device = small("batched_mm"), CapturingDevice()
    first, last = (model.model.layers[layer].mlp.experts for layer in (0, 2))
    given = torch.randn(1, 64), torch.tensor([[5, 2]]), torch.rand(1, 2)
    with torch.no_grad():
        expected = last(*given)
        with without_warnings(), cached(model, EXPERTS, device) as scheduler:
            with device.watching():
                first(*given)
            with device.capture():
                first(*given)
            device.memory.memory_limit = device.allocated_bytes + scheduler.banks[0].nbytes
            for _ in range(2):
                with device.watching():
                    assert torch.equal(last(*given), expected)
            with device.capture():
                assert torch.equal(last(*given), expected)
            assert device.forbidden == []
            assert len(caches_of(scheduler)) == 1
            with without_warnings():
                disable_expert_prefetch(model)
    assert device.races() == []


@pytest.mark.raw
def test_a_bank_that_was_sent_ahead_is_not_what_a_graph_reads() -> None:
    """A captured pass starts with an empty ring (invariant 9): whatever lies there was sent outside of the graph."""
    model, device = small("eager"), CapturingDevice()
    first, second = (model.model.layers[layer].mlp.experts for layer in (0, 1))
    given, large = ((torch.randn(n, 64), torch.arange(2 * n).view(n, 2) % EXPERTS, torch.rand(n, 2)) for n in (1, 20))
    with torch.no_grad():
        expected = second(*given)
        with without_warnings(), cached(model, 0, device) as scheduler:
            with device.watching():
                first(*given)
                first(*large)  # the next two are on their way
            with device.capture():
                assert torch.equal(second(*given), expected)
            assert device.forbidden == []
            assert any(slot.is_leased for slot in lane_of(scheduler).ring._slots)


# -- the end ------------------------------------------------------------------------------------------------------


@ways
def test_disabling_after_a_capture_keeps_what_the_graph_knows(implementation: str, rows: int) -> None:
    """Slots, caches and page locks stay until the model is gone; one warning says so; the model is disabled all the same."""
    model, device = small(implementation), CapturingDevice()
    expected, before = model(one).logits.detach(), Snapshot.of(model)
    enable_expert_prefetch(model, device=device, expert_cache=budget(model, rows))
    logits(model, many, device)
    logits(model, one, device)
    logits(model, one, device, captured=True)
    held, locked = device.allocated_bytes, device.registered_bytes
    with pytest.warns(UserWarning, match=r"CUDA graph.*MiB on the device.*until the model is deleted") as told:
        disable_expert_prefetch(model)
    assert len(told) == 1
    assert (device.allocated_bytes, device.registered_bytes) == (held, locked)
    before.assert_restored(model)
    assert torch.equal(model(one).logits, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disable_expert_prefetch(model)
    other = FakeDevice()
    with cached(model, rows, other):
        assert torch.equal(model(one).logits, expected)
    assert other.allocated_bytes == other.registered_bytes == 0
    assert (device.allocated_bytes, device.registered_bytes) == (held, locked), "another spell has nothing to do with it"
    del model, before
    gc.collect()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    assert device.races() == []


def test_enabling_again_after_a_capture_keeps_what_the_graph_knows() -> None:
    """Which disables first."""
    model, device = small("batched_mm"), CapturingDevice()
    expected = model(one).logits.detach()
    enable_expert_prefetch(model, device=device, expert_cache=budget(model, 3))
    logits(model, one, device)
    logits(model, one, device, captured=True)
    held, locked = device.allocated_bytes, device.registered_bytes
    with pytest.warns(UserWarning, match="until the model is deleted"):
        enable_expert_prefetch(model, device=device, expert_cache=budget(model, 3))
    assert (device.allocated_bytes, device.registered_bytes) == (held, 2 * locked)
    assert torch.equal(logits(model, one, device), expected)
    disable_expert_prefetch(model)
    assert (device.allocated_bytes, device.registered_bytes) == (held, locked)
    del model
    gc.collect()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


@pytest.mark.parametrize("was_captured", [False, True])
def test_a_model_that_is_found_to_be_gone_while_another_is_captured(was_captured: bool) -> None:
    """The garbage collector comes at any time. Waiting for the device would end the capture, so nothing is given back yet."""
    model, device = small("batched_mm"), CapturingDevice()
    enable_expert_prefetch(model, device=device, expert_cache=budget(model, 3))
    logits(model, one, device)
    if was_captured:
        logits(model, one, device, captured=True)
    other = small("batched_mm")
    expected = other(one).logits.detach()
    with cached(other, 3, device):
        logits(other, one, device)
        both = device.allocated_bytes
        callbacks = len(gc.callbacks)
        with device.capture(), torch.no_grad():
            del model
            gc.collect()
            gc.collect()
            assert torch.equal(other(one).logits, expected)
            assert not device.forbidden
            assert device.allocated_bytes == both
        gc.collect()
        assert device.allocated_bytes == both // 2
        assert len(gc.callbacks) == callbacks
        assert torch.equal(logits(other, one, device), expected)
    with without_warnings():
        del other
        gc.collect()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    assert device.races() == []


@ways
def test_graphs_of_compiled_code_end_with_it(implementation: str, rows: int) -> None:
    """Compiled code is thrown away when the hooks go, its graphs with it: disabling gives everything back."""
    model, device = small(implementation), CapturingDevice()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with cached(model, rows, device) as scheduler:
            logits(model, one, device)
            with scheduler.in_compiled_code():
                logits(model, one, device, captured=True)
            assert not scheduler.is_leased
        assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


# -- what can't be captured ---------------------------------------------------------------------------------------


def whole_bank_experts(self: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """An implementation of which nothing is known."""
    return hidden + self.gate_up_proj.sum() * 0


@pytest.mark.parametrize("pageable", [False, True])
def test_calls_that_can_not_be_captured_say_so(monkeypatch: pytest.MonkeyPatch, pageable: bool) -> None:
    """Whole banks, because the implementation is unknown, and pageable memory: the host would decide."""
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "whole_bank", whole_bank_experts)
    model = small("batched_mm" if pageable else "whole_bank")
    device = CapturingDevice(refuse_pinning=pageable)
    with without_warnings():
        enable_expert_prefetch(model, device=device, expert_cache="1MiB")
    expected = logits(model, one, device)
    with pytest.raises(
        RuntimeError, match=r"can't be captured over the experts of model\.layers\.0.*page-locked.*without capture"
    ):
        logits(model, one, device, captured=True)
    assert device.forbidden == []
    assert torch.equal(logits(model, one, device), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disable_expert_prefetch(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0), "no graph came of it"


@ways
def test_an_error_in_a_capture_leaves_the_model_at_work(implementation: str, rows: int) -> None:
    """The capture is lost, and the next one works."""
    model, device = small(implementation), CapturingDevice()
    expected, experts = model(one).logits.detach(), list(experts_of(model).values())[1]
    with cached(model, rows, device) as scheduler:
        logits(model, one, device)
        act_fn, experts.act_fn = experts.act_fn, torch.nn.Bilinear(1, 1, 1)
        with pytest.raises(TypeError):
            logits(model, one, device, captured=True)
        experts.act_fn = act_fn
        assert experts.num_experts == EXPERTS
        assert torch.equal(logits(model, one, device), expected)
        assert torch.equal(logits(model, one, device, captured=True), expected)
        assert device.forbidden == []
        assert sum(slot.is_leased for slot in lane_of(scheduler).ring._slots) <= 1
        with without_warnings():
            disable_expert_prefetch(model)
    RaceChecker().assert_clean(device.log)


# -- replays ------------------------------------------------------------------------------------------------------


@pytest.mark.raw
@pytest.mark.parametrize(
    "prompts",
    [
        False,
        True,
    ],
)
def test_settling_waits_for_replays(prompts: bool) -> None:
    """A replay on the current stream reads the banks' host memory: whoever settles and writes there must come after it."""
    model, device = small("batched_mm"), CapturingDevice()
    with without_warnings(), cached(model, 3, device) as scheduler:
        if prompts:
            logits(model, many, device)
        logits(model, one, device)
        logits(model, one, device, captured=True)
        block = scheduler.store[scheduler.banks[0]].block
        device.launch(lambda: None, reads=[block], label="a replay")
        scheduler.settle()
        with device.watching():
            block.view(torch.float32).mul_(2)
    assert device.races() == []


def test_after_a_capture_what_was_seen_before_counts_as_made_up() -> None:
    """Whoever captures graphs warms up with tokens that are all alike."""
    model, device = small("batched_mm"), CapturingDevice()
    scheduler = enable_expert_prefetch(model, device=device).expert_prefetch
    logits(model, one, device)
    scheduler.begin_anew()
    logits(model, one, device)
    assert not scheduler.is_new
    logits(model, one, device, captured=True)
    assert scheduler.is_new
