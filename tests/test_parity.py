"""The same bits with prefetching as without, and a model that is as it was afterwards.

On and off are compared on the same device, at the output of every experts module and in the whole logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from models import (
    EXPERTS,
    FAMILIES,
    GATE,
    TOP_K,
    Recording,
    Snapshot,
    bank_bytes,
    build,
    experts_of,
    prefetching,
    prompt,
    recording,
)

pytestmark = pytest.mark.usefixtures("deterministic")

DTYPES = (torch.float32, torch.bfloat16)
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
SLOTS = (2, 3, 4)
PASSES = 2

Build = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def model_of(device: torch.device) -> Build:
    """Models on the test's device, each built once, with the experts implementation that is asked for."""
    built: dict[tuple[str, torch.dtype], PreTrainedModel] = {}

    def get(family: str, dtype: torch.dtype = torch.float32, implementation: str = "grouped_mm") -> PreTrainedModel:
        if (family, dtype) not in built:
            built[family, dtype] = build(family, dtype).to(device)
        built[family, dtype].set_experts_implementation(implementation)
        return built[family, dtype]

    return get


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, Recording]:
    with torch.no_grad(), recording(model) as calls:
        logits = model(ids, use_cache=False).logits
    return logits, calls


# -- every family, dtype, implementation and number of slots ---------------------------------------------------------


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_is_exact(
    model_of: Build, device: torch.device, family: str, dtype: torch.dtype, implementation: str, slots: int
) -> None:
    """Prefills give the same bits on as off, every bank is sent once a pass and ahead of use, and off leaves no trace.

    The number of banks is no multiple of the slots, so the second pass finds the ring turned.
    """
    model = model_of(family, dtype, implementation)
    ids = prompt(19, batch=2, device=device)
    expected, expected_calls = prefill(model, ids)
    before = Snapshot.of(model)
    banks = len(experts_of(model))

    with prefetching(model, slots, device) as report:
        for _ in range(PASSES):
            logits, calls = prefill(model, ids)
            calls.assert_equal(expected_calls)
            assert torch.equal(logits, expected)
        counted = report()
        before.assert_same_values(model)
    before.assert_restored(model)

    assert counted.fallbacks == 0
    assert counted.looks_ahead
    assert counted.calls == counted.lookahead_calls == PASSES * banks
    # Nobody can have sent the first bank of a pass ahead.
    assert counted.lookahead_hits == PASSES * (banks - 1) > 0
    assert counted.weight_bytes == bank_bytes(model)
    assert counted.bytes_to_device == PASSES * counted.host_bytes > 0

    logits, calls = prefill(model, ids)
    calls.assert_equal(expected_calls)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_expert_in_any_layer_shows(model_of: Build, device: torch.device, family: str, dtype: torch.dtype) -> None:
    """What the other tests rest on: exchange the experts of one layer and the logits differ, whichever layer it is."""
    model = model_of(family, dtype)
    ids = prompt(19, batch=2, device=device)
    expected, _ = prefill(model, ids)
    for name, module in experts_of(model).items():
        for parameter_name, parameter in module.named_parameters():
            original = parameter.data
            parameter.data = original.roll(1, dims=0)
            logits, _ = prefill(model, ids)
            parameter.data = original
            assert not torch.equal(logits, expected), f"{name}.{parameter_name} does not show in the logits"


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_with_grad_enabled_is_exact(model_of: Build, device: torch.device, family: str) -> None:
    """`model(**inputs)` without `no_grad`, as many call a model in eval mode, gives the same bits."""
    model = model_of(family)
    ids = prompt(19, batch=2, device=device)
    # A graph that is kept refers to the weights, which then can't be packed (`make test-packed`).
    expected = model(ids).logits.detach()
    with prefetching(model, 3, device) as report:
        assert torch.equal(model(ids).logits, expected)
        assert report().lookahead_hits > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_a_forward_returns_is_exact(model_of: Build, device: torch.device, family: str) -> None:
    """Losses, hidden states and router logits, which transformers collects through hooks of its own, are the same."""
    model, ids = model_of(family), prompt(19, batch=2, device=device)
    options = {"labels": ids, "output_hidden_states": True, "use_cache": False}
    if hasattr(model.config, "output_router_logits"):
        options["output_router_logits"] = True

    def run() -> dict[str, tuple[torch.Tensor, ...]]:
        with torch.no_grad():
            output = model(ids, **options)
        return {name: value if isinstance(value, tuple) else (value,) for name, value in output.items()}

    expected = run()
    assert {"loss", "logits", "hidden_states"} <= expected.keys()
    with prefetching(model, 3, device) as report:
        actual = run()
        assert report().lookahead_hits > 0
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert len(actual[name]) == len(values)
        assert all(map(torch.equal, actual[name], values)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_train_mode_under_no_grad_is_exact(model_of: Build, device: torch.device, family: str) -> None:
    """A model in train mode gives the same bits, stays in that mode, and is in it afterwards."""
    model = model_of(family).train()
    try:
        ids = prompt(19, batch=2, device=device)
        expected, expected_calls = prefill(model, ids)
        before = Snapshot.of(model)
        with prefetching(model, 3, device) as report:
            logits, calls = prefill(model, ids)
            assert model.training
            calls.assert_equal(expected_calls)
            assert torch.equal(logits, expected)
            assert report().lookahead_hits > 0
        before.assert_restored(model)
    finally:
        model.eval()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_model_on_the_host_computes_on_the_accelerator(device: torch.device, family: str) -> None:
    """A model that was never moved computes what the resident one computes, and is wholly on the CPU again afterwards."""
    ids = prompt(19, batch=2, device=device)
    expected, expected_calls = prefill(build(family).to(device), ids)
    model = build(family)
    before = Snapshot.of(model)
    with prefetching(model, 3, device) as report:
        logits, calls = prefill(model, ids)
        calls.assert_equal(expected_calls)
        assert torch.equal(logits, expected)
        assert report().lookahead_hits > 0
    before.assert_restored(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_slots_zero_is_off(model_of: Build, device: torch.device, family: str) -> None:
    """`slots=0` leaves a model untouched, and takes prefetching off one that has it."""
    model = model_of(family)
    before = Snapshot.of(model)
    assert enable_expert_prefetch(model, slots=0) is model
    before.assert_restored(model)
    assert enable_expert_prefetch(model, slots=3, device=device) is model
    assert enable_expert_prefetch(model, slots=0) is model
    before.assert_restored(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_enabling_again_with_other_slots_is_exact(model_of: Build, device: torch.device, family: str) -> None:
    """Enabled three times in a row with other slots and disabled once, a model is as it was before the first."""
    model = model_of(family)
    ids = prompt(19, batch=2, device=device)
    expected, _ = prefill(model, ids)
    before = Snapshot.of(model)
    try:
        for slots in (4, 2, 3):
            enable_expert_prefetch(model, slots=slots, device=device)
            assert model.expert_prefetch.report().slots == slots
            for _ in range(PASSES):
                assert torch.equal(prefill(model, ids)[0], expected)
    finally:
        disable_expert_prefetch(model)
    before.assert_restored(model)


def test_two_models_do_not_know_of_each_other(device: torch.device) -> None:
    """Two enabled models that take turns give their own bits; disabling one leaves the other enabled and exact."""
    models = [build("qwen3_moe", seed=seed).to(device) for seed in (0, 1)]
    ids = prompt(19, batch=2, device=device)
    expected = [prefill(model, ids)[0] for model in models]
    assert not torch.equal(*expected)
    with prefetching(models[0], 3, device) as report:
        with prefetching(models[1], 2, device):
            for _ in range(PASSES):
                for model, logits in zip(models, expected, strict=True):
                    assert torch.equal(prefill(model, ids)[0], logits)
        assert torch.equal(prefill(models[0], ids)[0], expected[0])
        assert torch.equal(prefill(models[1], ids)[0], expected[1])
        banks = len(experts_of(models[0]))
        assert report().lookahead_hits == (PASSES + 1) * (banks - 1)


# -- the order of the layers ------------------------------------------------------------------------------------------

ORDERS: dict[str, Sequence[int]] = {
    "backwards": (6, 5, 4, 3, 2, 1, 0),
    "mixed": (3, 0, 6, 2, 5, 1, 4),
    "one skipped": (0, 1, 3, 4, 5, 6),
    "first skipped": (1, 2, 3, 4, 5, 6),
    "every other": (0, 2, 4, 6),
    "a prefix": (0, 1, 2),
    "two": (5, 2),
    "one": (4,),
}
REPEATING: dict[str, Sequence[int]] = {
    "each twice": (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6),
    "middle repeated": (0, 1, 2, 3, 4, 2, 3, 4, 5, 6),
    "back and forth": (0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6),
    "there and back": (0, 1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1, 0),
}


@contextmanager
def layers_in_order(model: PreTrainedModel, order: Sequence[int]) -> Iterator[None]:
    """The decoder calls its layers in this order, and only these."""
    layers, number = model.model.layers, model.config.num_hidden_layers
    model.model.layers = nn.ModuleList([layers[index] for index in order])
    model.config.num_hidden_layers = len(order)
    try:
        yield
    finally:
        model.model.layers, model.config.num_hidden_layers = layers, number


@pytest.fixture(scope="module")
def ordered(model_of: Build) -> Callable[[Sequence[int], torch.Tensor], torch.Tensor]:
    """Logits of a forward through the layers in some order."""
    model = model_of("qwen3_moe")

    def run(order: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
        with layers_in_order(model, order):
            return prefill(model, ids)[0]

    return run


Ordered = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_lookahead_follows_the_observed_order(
    model_of: Build, ordered: Ordered, device: torch.device, order: Sequence[int], slots: int
) -> None:
    """Layers called in another order than the model lists them, or skipped, stay exact, and the second pass is ahead again.

    The first pass in the new order may guess wrong; from the second on only the first bank of a pass is not sent ahead,
    and nothing is sent that is not used.
    """
    model, ids, usual = model_of("qwen3_moe"), prompt(19, batch=2, device=device), range(7)
    expected, expected_usual = ordered(order, ids), ordered(usual, ids)
    with prefetching(model, slots, device) as report:
        assert torch.equal(ordered(usual, ids), expected_usual)
        for _ in range(3):
            assert torch.equal(ordered(order, ids), expected)
        before = report()
        assert torch.equal(ordered(order, ids), expected)
        after = report()
        for _ in range(PASSES):
            assert torch.equal(ordered(usual, ids), expected_usual)
        assert report().fallbacks == 0
    assert after.lookahead_hits - before.lookahead_hits == len(order) - 1


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("order", REPEATING.values(), ids=REPEATING.keys())
def test_a_layer_called_more_than_once_in_a_pass_is_exact(
    model_of: Build, ordered: Ordered, device: torch.device, order: Sequence[int], slots: int
) -> None:
    """Looped and revisited layers, where one bank has more than one successor, stay exact."""
    model, ids = model_of("qwen3_moe"), prompt(19, batch=2, device=device)
    expected = ordered(order, ids)
    with prefetching(model, slots, device) as report:
        for _ in range(3):
            assert torch.equal(ordered(order, ids), expected)
        assert report().lookahead_hits > 0
        assert report().fallbacks == 0


@pytest.mark.parametrize("slots", SLOTS)
def test_an_order_that_changes_with_each_call_is_exact(
    model_of: Build, ordered: Ordered, device: torch.device, slots: int
) -> None:
    """Thirty forwards, each through a random choice of layers in random order and with a random number of tokens."""
    model, choose = model_of("qwen3_moe"), random.Random(slots)
    lengths = [choose.choice((1, 3, GATE - 1, GATE, 19, 40)) for _ in range(30)]
    forwards = [([choose.randrange(7) for _ in range(choose.randint(1, 9))], length) for length in lengths]
    expected = [ordered(order, prompt(length, device=device)) for order, length in forwards]
    with prefetching(model, slots, device) as report:
        for (order, length), logits in zip(forwards, expected, strict=True):
            assert torch.equal(ordered(order, prompt(length, device=device)), logits), (order, length)
        assert report().lookahead_hits > 0
        assert report().fallbacks == 0


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_called_by_hand_in_any_order_are_exact(
    model_of: Build, device: torch.device, family: str, implementation: str, slots: int
) -> None:
    """Experts modules called on their own, two hundred times at random, with few and many tokens, give the same bits."""
    model, choose = model_of(family, implementation=implementation), random.Random(slots)
    experts = list(experts_of(model).values())
    generator = torch.Generator().manual_seed(slots)
    inputs = []
    for tokens in (1, 5, GATE - 1, GATE, 20, 33):
        hidden = torch.randn(tokens, model.config.hidden_size, generator=generator)
        weights, chosen = torch.rand(tokens, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
        hidden, weights = hidden.to(model.dtype), weights.to(model.dtype)
        inputs.append(tuple(tensor.to(device) for tensor in (hidden, chosen, weights)))
    calls = [(choose.randrange(len(experts)), choose.randrange(len(inputs))) for _ in range(200)]
    with torch.no_grad():
        expected = {call: experts[call[0]](*inputs[call[1]]) for call in set(calls)}
        with prefetching(model, slots, device) as report:
            for position, call in enumerate(calls):
                assert torch.equal(experts[call[0]](*inputs[call[1]]), expected[call]), f"call {position}: {call}"
            assert report().lookahead_hits > 0
            assert report().fallbacks == 0
            assert report().calls == len(calls)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_layers_rearranged_before_enabling_are_exact(device: torch.device, family: str) -> None:
    """A model whose layers were put in another order before enabling is exact from the first pass on."""
    model = build(family).to(device)
    layers = list(model.model.layers)
    shuffled = [layers[0], *reversed(layers[1:])]
    model.model.layers = nn.ModuleList(shuffled)
    ids = prompt(19, batch=2, device=device)
    expected, expected_calls = prefill(model, ids)
    before = Snapshot.of(model)
    with prefetching(model, 3, device) as report:
        for _ in range(PASSES):
            logits, calls = prefill(model, ids)
            calls.assert_equal(expected_calls)
            assert torch.equal(logits, expected)
        assert report().lookahead_hits == PASSES * (len(experts_of(model)) - 1)
    before.assert_restored(model)
