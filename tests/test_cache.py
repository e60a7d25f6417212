"""Experts kept on the device from call to call: the same bits as without, at every experts module and in the logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from caching import (
    REMAPPING,
    ROWS,
    assert_rows_are_right,
    cached,
    caches_of,
    inputs_of,
    lane_of,
    poison_slots,
    poison_unknown_rows,
)
from hf_prefetch import enable_expert_prefetch
from hf_prefetch.routing import inject_routing
from models import EXPERTS, FAMILIES, TOP_K, Recording, Snapshot, build, experts_of, prompt, recording
from test_generation import left_padded

pytestmark = pytest.mark.usefixtures("deterministic")

IMPLEMENTATIONS = ("eager", *REMAPPING)
Build = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def model_of(device: torch.device) -> Build:
    """Models on the test's device, each built once, with the experts implementation that is asked for."""
    built: dict[tuple[str, torch.dtype], PreTrainedModel] = {}

    def get(family: str, dtype: torch.dtype = torch.float32, implementation: str = "batched_mm") -> PreTrainedModel:
        if (family, dtype) not in built:
            built[family, dtype] = build(family, dtype).to(device)
        built[family, dtype].set_experts_implementation(implementation)
        return built[family, dtype]

    return get


# -- one experts module after another ---------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_exact_with_every_size_of_cache(
    model_of: Build, device: torch.device, family: str, dtype: torch.dtype, implementation: str
) -> None:
    """Every bank, decoding random tokens in batches of 1 and 4 between prompts; rows and slots that nobody filled are NaN."""
    model = model_of(family, dtype, implementation)
    experts, generator = list(experts_of(model).values()), torch.Generator().manual_seed(3)
    inputs = [inputs_of(experts[0], tokens, generator, device) for tokens in [1, 1, 4, 1, 20, 1, 1, 4, 3, 2, 1]]
    with torch.no_grad():
        expected = [module(*given) for given in inputs for module in experts]
        before = Snapshot.of(model)
        for rows in ROWS:
            with cached(model, rows, device) as scheduler:
                position = 0
                for given in inputs:
                    for module in experts:
                        assert torch.equal(module(*given), expected[position]), f"{rows} rows, call {position}"
                        position += 1
                    poison_unknown_rows(scheduler)
                assert_rows_are_right(scheduler)
                report = scheduler.report()
            before.assert_restored(model)
            # Two tokens may need four experts, four tokens all of them.
            fitting = sum(min(len(given[0]) * TOP_K, EXPERTS) <= rows for given in inputs if len(given[0]) < 20)
            assert report.cached_calls == (fitting * len(experts) if implementation in REMAPPING else 0)
            assert report.fallbacks == 0
            if implementation in REMAPPING or rows > TOP_K:
                assert report.cache_hits > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_way_to_call_an_experts_module(model_of: Build, device: torch.device, implementation: str) -> None:
    """By keyword, without a token, with an expert listed twice, with ids that are not contiguous, in every grad mode."""
    module = model_of("qwen3_moe", implementation=implementation).model.layers[2].mlp.experts
    generator = torch.Generator().manual_seed(5)
    hidden, ids, weights = inputs_of(module, 2, generator, device)
    twice = torch.tensor([[3, 3], [1, 3]], device=device)
    across = torch.arange(4, device=device).view(2, 2).t()

    def run() -> list[torch.Tensor]:
        outputs = []
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                outputs += [
                    module(hidden_states=hidden, top_k_index=ids, top_k_weights=weights),
                    module(hidden, top_k_weights=weights, top_k_index=ids),
                    module(hidden[:0], ids[:0], weights[:0]),
                    module(hidden, twice, weights),
                    module(hidden, across, weights),
                ]
        return [output.detach() for output in outputs]

    expected = run()
    with cached(model_of("qwen3_moe", implementation=implementation), EXPERTS // 2, device) as scheduler:
        for _ in range(2):
            assert all(map(torch.equal, run(), expected))
        assert scheduler.report().cached_calls == (30 if implementation in REMAPPING else 0)
        assert module.num_experts == EXPERTS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [0, EXPERTS // 2])
def test_ids_of_experts_that_live_elsewhere(device: torch.device, implementation: str, rows: int) -> None:
    """Expert parallelism gives them an id beyond the last one and the weight 0: they add nothing."""
    model = build("qwen3_moe")
    model.set_experts_implementation(implementation)
    module, generator = model.model.layers[0].mlp.experts, torch.Generator().manual_seed(5)
    module._is_expert_parallel = True
    hidden, ids, weights = (value.clone() for value in inputs_of(module, 2, generator, torch.device("cpu")))
    ids[0, 1], weights[0, 1] = EXPERTS, 0.0
    # The last expert is none of them.
    ids[ids == EXPERTS - 1] = 0
    try:
        module(hidden, ids, weights)
    except RuntimeError:
        pytest.skip("this version of transformers takes no such ids here")
    model.to(device)
    hidden, ids, weights = (value.to(device) for value in (hidden, ids, weights))
    with torch.no_grad():
        expected = module(hidden, ids, weights)
        with cached(model, rows, device) as scheduler:
            assert torch.equal(module(hidden, ids, weights), expected)
            poison_slots(scheduler)
            assert torch.equal(module(hidden, ids, weights), expected)


def test_ten_thousand_tokens_over_a_small_cache(device: torch.device) -> None:
    """Random routing over a cache that is often wrong: each output is that of resident experts, to the last bit.

    Now and then everything is forgotten and every row is filled with NaN, so that no output can live off what was there.
    """
    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=12, num_experts_per_tok=2)
    config._experts_implementation = "batched_mm"
    experts = MixtralExperts(config)
    model = nn.ModuleList([experts]).to(device)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    steps = 10_000
    hidden = torch.randn(steps, 1, 8, generator=generator).to(device)
    # Some experts are more popular than others, and which these are changes.
    popularity = torch.rand(10, 12, generator=generator).pow(4).repeat_interleave(steps // 10, 0)
    ids = torch.multinomial(popularity, 2, generator=generator).view(steps, 1, 2).to(device)
    weights = torch.rand(steps, 1, 2, generator=generator).to(device)
    with torch.no_grad():
        expected = torch.cat([experts(*given) for given in zip(hidden, ids, weights, strict=True)])
        with cached(model, 4, device, slots=2) as scheduler:
            actual = []
            for step, given in enumerate(zip(hidden, ids, weights, strict=True)):
                if step % 700 == 1:
                    scheduler.settle()
                    poison_unknown_rows(scheduler)
                actual.append(experts(*given))
                if step % 1000 == 999:
                    assert_rows_are_right(scheduler)
            report = scheduler.report()
    assert torch.equal(torch.cat(actual), expected)
    assert report.cached_calls == steps
    assert report.cache_hits + report.routed_rows == 2 * steps
    assert 0.35 < report.hit_rate < 0.95, "a third would be chance, and a cache that always hits would test nothing"


# -- whole models -----------------------------------------------------------------------------------------------------


def decode(model: PreTrainedModel, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], Recording]:
    with recording(model) as calls:
        output = model.generate(ids, max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return output.sequences, tuple(output.logits), calls


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_decoding_is_exact(model_of: Build, device: torch.device, family: str, implementation: str) -> None:
    """A prompt and 31 tokens of one sequence, and 7 of a batch of 4: tokens, logits and every experts module's output."""
    model = model_of(family, implementation=implementation)
    for batch, rows, tokens in ((1, 3, 32), (4, EXPERTS, 8)):
        ids = prompt(20, batch=batch, device=device)
        sequences, logits, calls = decode(model, ids, tokens)
        with cached(model, rows, device) as scheduler:
            on_sequences, on_logits, on_calls = decode(model, ids, tokens)
            report = scheduler.report()
        on_calls.assert_equal(calls)
        assert torch.equal(on_sequences, sequences)
        assert all(map(torch.equal, on_logits, logits))
        assert report.calls == tokens * len(experts_of(model))
        assert report.cached_calls == ((tokens - 1) * len(experts_of(model)) if implementation in REMAPPING else 0)
        assert report.cache_hits > 0
        assert report.fallbacks == 0


WAYS = {
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 9},
    "without cache": {"use_cache": False},
    "assisted": {},
    "padded": {},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("way", WAYS)
def test_way_to_decode(model_of: Build, device: torch.device, way: str, implementation: str) -> None:
    """Calls of changing sizes, some of which fit the cache and some of which don't."""
    model = model_of("qwen3_moe", torch.bfloat16, implementation)
    options = dict(WAYS[way])
    given = {"input_ids": prompt(20, device=device).repeat(1, 2)}
    if way == "assisted":
        options["assistant_model"] = model_of("qwen2_moe")
    if way == "padded":
        given = left_padded((20, 11, 5, 1), device)

    def run() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(7)
        options_of_all = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        output = model.generate(**given, **{**options_of_all, **options})
        return output.sequences, *output.logits

    expected = run()
    with cached(model, EXPERTS // 2, device) as scheduler:
        for _ in range(2):
            actual = run()
            assert len(actual) == len(expected)
            assert all(map(torch.equal, actual, expected))
        report = scheduler.report()
    assert report.fallbacks == 0
    if way != "without cache":
        assert report.cache_hits > 0


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_prompt_leaves_its_experts_in_the_cache(model_of: Build, device: torch.device, implementation: str) -> None:
    """The first token after it that goes the same way brings nothing over the link, and computes what it should."""
    model = model_of("qwen3_moe", implementation=implementation)
    banks = len(experts_of(model))
    routing = torch.stack([torch.arange(24).view(1, 24, 1) % 4, (torch.arange(24).view(1, 24, 1) + 1) % 4], dim=-1)
    routing = (routing.view(1, 24, 2) + torch.arange(banks).view(banks, 1, 1)) % EXPERTS
    with inject_routing(model, routing) as injection:
        expected = decode(model, prompt(20, device=device), 5)
        injection.seek(0)
        with cached(model, 4, device) as scheduler:
            with torch.no_grad():
                model(prompt(20, device=device))
            assert_rows_are_right(scheduler)
            assert all(EXPERTS > len(set(cache.table.expert_of.tolist())) == 4 for cache, _ in caches_of(scheduler))
            assert (scheduler.report().cache_hits, scheduler.report().routed_rows) == (0, 0), "whole banks are no rows"
            injection.seek(0)
            scheduler.reset()
            actual = decode(model, prompt(20, device=device), 5)
            report = scheduler.report()
    assert torch.equal(actual[0], expected[0])
    actual[2].assert_equal(expected[2])
    assert (report.cache_hits, report.routed_rows, report.hit_rate) == (4 * 2 * banks, 0, 1.0)
    assert report.lookahead_calls == banks


# -- weights that change ----------------------------------------------------------------------------------------------


def write_by_copy(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def write_under_inference_mode(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    with torch.inference_mode():
        write_by_copy(model, weights)


def write_to_data(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])


def write_to_data_and_settle(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    model.expert_prefetch.settle()
    write_to_data(model, weights)


WRITES = [
    pytest.param(lambda model, weights: model.load_state_dict(weights), id="load_state_dict"),
    pytest.param(write_by_copy, id="copy_"),
    pytest.param(write_under_inference_mode, id="inference_mode"),
    pytest.param(write_to_data_and_settle, id="settle"),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("write", WRITES)
def test_weights_that_are_written_to_are_seen(
    device: torch.device, write: Callable[[PreTrainedModel, dict[str, torch.Tensor]], None], implementation: str
) -> None:
    """Between two tokens, with everything cached since a prompt: what the caches hold is of no use then."""
    model, other = (build("mixtral", seed=seed).to(device) for seed in (0, 1))
    ids = prompt(1, device=device)
    for each in (model, other):
        each.set_experts_implementation(implementation)
    weights = other.state_dict()
    with torch.no_grad():
        expected, first = other(ids).logits, model(ids).logits
        with cached(model, EXPERTS, device) as scheduler:
            model(prompt(20, device=device))
            assert lane_of(scheduler).caches.held() > 0
            for _ in range(2):
                assert torch.equal(model(ids).logits, first)
            assert scheduler.report().hit_rate == 1.0
            write(model, weights)
            for _ in range(2):
                assert torch.equal(model(ids).logits, expected)


def test_a_model_made_under_inference_mode(device: torch.device) -> None:
    """Its weights keep no count of what is written to them; load_state_dict tells of it all the same."""
    with torch.inference_mode():
        model = build("mixtral").to(device)
    other, ids = build("mixtral", seed=1).to(device), prompt(1, device=device)
    for each in (model, other):
        each.set_experts_implementation("batched_mm")
    with torch.inference_mode():
        expected, first = other(ids).logits, model(ids).logits
        enable_expert_prefetch(model, device=device, expert_cache="1MiB")
        assert torch.equal(model(ids).logits, first)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(ids).logits, expected)
