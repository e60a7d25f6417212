"""Generation gives the same tokens and the same logits with prefetching as without, whichever way it is asked for.

On and off are compared on the same device and on the same model object, so every test also enables and disables it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, TextIteratorStreamer, TextStreamer, pipeline
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_prefetch import Report, disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.discovery import find_banks
from hf_prefetch.streams import AcceleratorDevice
from models import (
    EXPERTS,
    FAMILIES,
    GATE,
    Snapshot,
    build,
    build_tokenizer,
    experts_of,
    prefetching,
    prompt,
)
from opaque import experts_as_operators

pytestmark = pytest.mark.usefixtures("deterministic")

NEW_TOKENS = 5
# Above the gate on its own, so that its prefill looks ahead.
LONG = 20

both_families = pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])

Build = Callable[[str], PreTrainedModel]


@pytest.fixture(scope="module")
def model_of(device: torch.device) -> Build:
    """Models on the test's device, each built once."""
    built: dict[str, PreTrainedModel] = {}

    def get(family: str) -> PreTrainedModel:
        if family not in built:
            built[family] = build(family).to(device)
        built[family].set_experts_implementation("grouped_mm")
        return built[family]

    return get


# -- one run, and two runs compared -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its tokens, and the logits and scores of every step where there are any."""

    tokens: torch.Tensor
    values: tuple[torch.Tensor, ...]

    def assert_equal(self, other: Outcome) -> None:
        assert torch.equal(self.tokens, other.tokens), f"other tokens: {self.tokens.tolist()}, {other.tokens.tolist()}"
        assert len(self.values) == len(other.values)
        for position, (mine, theirs) in enumerate(zip(self.values, other.values, strict=True)):
            assert torch.equal(mine, theirs), f"same tokens, but logits or scores {position} of {len(self.values)} differ"


def generate(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Outcome:
    """Generate with everything that `generate` can return, from a fixed seed."""
    torch.manual_seed(7)
    wanted = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    output = model.generate(ids, **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **wanted, **options})
    return Outcome(output.sequences, tuple(output.logits) + tuple(output.scores))


def forward(model: PreTrainedModel, ids: torch.Tensor) -> Outcome:
    """One forward, in whatever grad mode the caller is."""
    logits = model(ids).logits.detach()
    return Outcome(logits.argmax(-1), (logits,))


def check(
    model: PreTrainedModel, device: torch.device, run: Callable[[], Outcome], *, slots: int = 3, looks_ahead: bool = True
) -> Report:
    """`run` gives the same off, on, on once more, and off again, and the model is as before; returns what on reported."""
    expected = run()
    before = Snapshot.of(model)
    with prefetching(model, slots, device) as report:
        run().assert_equal(expected)
        run().assert_equal(expected)
        counted = report()
    before.assert_restored(model)
    run().assert_equal(expected)
    assert counted.fallbacks == 0
    assert counted.bytes_to_device > 0
    if looks_ahead:
        assert counted.lookahead_hits > 0
    else:
        assert counted.lookahead_calls == 0
    return counted


def left_padded(lengths: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    """Prompts of these lengths in one batch."""
    width = max(lengths)
    ids = prompt(width, batch=len(lengths), device=device)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : width - length] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


# -- ways to decode ---------------------------------------------------------------------------------------------------

WAYS: dict[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "chunked prefill": {"prefill_chunk_size": 9},
    "without cache": {"use_cache": False},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(model_of: Build, device: torch.device, family: str, slots: int) -> None:
    """Every family, every number of slots: a prefill that looks ahead, then decoding step by step."""
    model, ids = model_of(family), prompt(LONG, device=device)
    check(model, device, lambda: generate(model, ids), slots=slots)


@pytest.mark.parametrize("way", WAYS)
@both_families
def test_way_to_decode(model_of: Build, device: torch.device, family: str, way: str) -> None:
    """Each way to choose tokens, to fill the cache and to do without one; sampling starts from the same seed."""
    model = model_of(family)
    ids = prompt(LONG, device=device).repeat(1, 2)  # a text that repeats itself gives prompt lookup something to find
    check(model, device, lambda: generate(model, ids, **WAYS[way]))


def test_without_cache_every_step_looks_ahead(model_of: Build, device: torch.device) -> None:
    """Without a cache each step is a whole forward above the gate: all of them go ahead of use, pass after pass."""
    model, ids = model_of("qwen3_moe"), prompt(LONG, device=device)
    counted = check(model, device, lambda: generate(model, ids, use_cache=False))
    passes, banks = 2 * NEW_TOKENS, len(experts_of(model))
    assert counted.lookahead_calls == counted.calls == passes * banks
    assert counted.lookahead_hits == passes * (banks - 1)


@both_families
def test_batch_with_left_padding(model_of: Build, device: torch.device, family: str) -> None:
    """Prompts of different lengths in one batch."""
    model, batch = model_of(family), left_padded((LONG, 11, 5, 1), device)
    check(model, device, lambda: generate(model, batch["input_ids"], attention_mask=batch["attention_mask"]))


@pytest.mark.parametrize("assistant_enabled", [False, True], ids=["plain", "enabled"])
@both_families
def test_assisted_decoding(model_of: Build, device: torch.device, family: str, assistant_enabled: bool) -> None:
    """A second model drafts, without prefetching and with its own: the two take turns within one `generate`."""
    model, assistant = model_of(family), build("qwen3_moe", seed=5).to(device)
    ids = prompt(LONG, device=device)
    with prefetching(assistant, 2, device) if assistant_enabled else nullcontext() as report:
        check(model, device, lambda: generate(model, ids, assistant_model=assistant))
        if report is not None:
            assert report().lookahead_hits > 0


def test_early_exit_drafts(model_of: Build, device: torch.device) -> None:
    """The model drafts with its own first layers: the banks' order changes between a prefix and all of them."""
    model, ids = model_of("qwen3_moe"), prompt(LONG, device=device)
    check(model, device, lambda: generate(model, ids, assistant_early_exit=3))


@both_families
def test_bfloat16(device: torch.device, family: str) -> None:
    """A model in bfloat16, greedy and sampled."""
    model, ids = build(family, torch.bfloat16).to(device), prompt(LONG, batch=2, device=device)
    check(model, device, lambda: generate(model, ids))
    check(model, device, lambda: generate(model, ids, do_sample=True))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@both_families
def test_experts_implementation(model_of: Build, device: torch.device, family: str, implementation: str) -> None:
    """Each experts implementation, through prefill and decoding."""
    model, ids = model_of(family), prompt(LONG, batch=2, device=device)
    model.set_experts_implementation(implementation)
    check(model, device, lambda: generate(model, ids))


# -- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "batch", "prefill_ahead", "decode_ahead"),
    [
        (1, 1, False, False),
        (GATE - 1, 1, False, False),
        (GATE, 1, True, False),
        (GATE + 1, 1, True, False),
        (GATE // 2, 2, True, False),
        (1, GATE - 1, False, False),
        (1, GATE, True, True),
    ],
)
@both_families
def test_gate(
    model_of: Build, device: torch.device, family: str, tokens: int, batch: int, prefill_ahead: bool, decode_ahead: bool
) -> None:
    """From two routed ids per expert on a call looks ahead, below it does not; either way the tokens are the same.

    It's the number of ids that counts, not whether they come from one long prompt or from many sequences that decode.
    """
    model, ids = model_of(family), prompt(tokens, batch, device=device)
    run = lambda: generate(model, ids)  # noqa: E731
    counted = check(model, device, run, looks_ahead=prefill_ahead or decode_ahead)
    banks = len(experts_of(model))
    assert counted.calls == 2 * NEW_TOKENS * banks
    assert counted.lookahead_calls == 2 * banks * (prefill_ahead + (NEW_TOKENS - 1) * decode_ahead)


@both_families
def test_session_of_prompts_of_all_lengths(model_of: Build, device: torch.device, family: str) -> None:
    """One enabled model answers prompts above and below the gate in turn: what a call leaves in the slots harms no other."""
    model = model_of(family)
    prompts = [prompt(length, seed=length, device=device) for length in (40, 3, LONG, GATE, 1, GATE - 1, 64, 2, 2, LONG)]
    expected = [generate(model, ids) for ids in prompts]
    with prefetching(model, 3, device) as report:
        for ids, outcome in zip(prompts, expected, strict=True):
            generate(model, ids).assert_equal(outcome)
        assert report().lookahead_hits > 0
        assert report().fallbacks == 0


# -- caches -----------------------------------------------------------------------------------------------------------


@both_families
def test_static_cache(model_of: Build, device: torch.device, family: str) -> None:
    """A static cache. On an accelerator transformers compiles the decoding step, which fuses otherwise around an operator: off
    has one in the place of the experts, too."""
    model, ids = model_of(family), prompt(LONG, device=device)

    def run() -> Outcome:
        off = nullcontext() if hasattr(model, "expert_prefetch") else experts_as_operators(model)
        with off:
            return generate(model, ids, cache_implementation="static")

    check(model, device, run)
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_decoding_step(device: torch.device) -> None:
    """The decoding step is compiled off, on and off again, on one model object: each keeps to its own weights.

    The backend runs the traced operators as they are, and batched_mm takes the same ones traced and untraced, so on the
    CPU the logits are the same too. On an accelerator attention over a static cache may pick its kernel by what else lies
    in memory, so there it's the tokens.
    """
    model, ids = build("qwen3_moe"), prompt(LONG, device=device)
    model.set_experts_implementation("batched_mm")
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    model.to(device)
    compilation = CompileConfig(backend="eager", mode=None)
    compilation._compile_all_devices = True  # not only on accelerators

    def run() -> Outcome:
        outcome = generate(model, ids, cache_implementation="static", compile_config=compilation)
        return outcome if device.type == "cpu" else Outcome(outcome.tokens, ())

    expected = run()
    for slots in (3, 2):
        with prefetching(model, slots, device) as report:
            run().assert_equal(expected)
            run().assert_equal(expected)
            counted = report()
        run().assert_equal(expected)
        assert counted.lookahead_hits > 0
        assert counted.calls == 2 * NEW_TOKENS * len(experts_of(model)), "some calls went past the hook"
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
@both_families
def test_offloaded_cache(model_of: Build, device: torch.device, family: str, cache: str) -> None:
    """A key-value cache that moves between host and device on streams of its own, beside the experts."""
    model, ids = model_of(family), prompt(LONG, device=device)

    # Compiled by torch 2.11 the streams of such a cache crash the interpreter, wherever the experts are.
    def run() -> Outcome:
        return generate(model, ids, cache_implementation=cache, disable_compile=True)

    # One that reads what is still on its way gives NaN now and then, wherever the experts are.
    values = [value for _ in range(3) for value in run().values]
    if not all(value.isfinite().all() for value in values):
        pytest.skip("this cache of transformers gives NaN with all experts on the device")
    check(model, device, run)


@both_families
def test_cache_is_kept_while_prefetching_comes_and_goes(model_of: Build, device: torch.device, family: str) -> None:
    """A conversation in four turns over one cache, the second and third with prefetching, against one wholly without."""
    model = model_of(family)

    def converse(turns: Callable[[int], AbstractContextManager[Any]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        text, cache = prompt(0, device=device), {}
        for turn in range(4):
            text = torch.cat([text, prompt(LONG, seed=turn, device=device)], dim=1)
            with turns(turn):
                output = model.generate(
                    text, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True, **cache
                )
            outcomes.append(Outcome(output.sequences, tuple(output.logits)))
            name = "cache" if "cache" in output else "past_key_values"  # the name changed within transformers 5
            text, cache = output.sequences, {name: output[name]}
        return outcomes

    expected = converse(lambda turn: nullcontext())
    actual = converse(lambda turn: prefetching(model, 3, device) if turn in (1, 2) else nullcontext())
    for mine, theirs in zip(actual, expected, strict=True):
        mine.assert_equal(theirs)


# -- pipelines and streamers ------------------------------------------------------------------------------------------

TEXTS = ("w5 w6 w7 w8 w9", "w100 w90 w80 w70 w60 w50 w40 w30 w20 w10 w9 w8", "w4")


@pytest.mark.parametrize("placed", [False, True], ids=["default device", "device of the model"])
@both_families
def test_pipeline(model_of: Build, device: torch.device, family: str, placed: bool) -> None:
    """`pipeline(model=...)`, with and without `device=model.device`, singly and in batches, gives the same texts."""
    if not placed and device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("a pipeline would take the model to the accelerator")
    model, tokenizer = model_of(family), build_tokenizer()
    options = {"device": model.device} if placed else {}

    def run() -> list[str]:
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, **options)
        results = [result for text in TEXTS for result in pipe(text, max_new_tokens=NEW_TOKENS, do_sample=False)]
        results += [result for (result,) in pipe(list(TEXTS), max_new_tokens=NEW_TOKENS, do_sample=False, batch_size=3)]
        assert pipe.model is model
        assert model.device == device
        return [result["generated_text"] for result in results]

    expected = run()
    with prefetching(model, 3, device) as report:
        assert run() == expected
        assert report().lookahead_hits > 0
        assert report().fallbacks == 0
    assert run() == expected
    assert len(set(expected)) > 1


@both_families
def test_text_streamer(model_of: Build, device: torch.device, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A streamer prints the same text."""
    model, tokenizer, ids = model_of(family), build_tokenizer(), prompt(LONG, device=device)

    def run() -> str:
        model.generate(ids, streamer=TextStreamer(tokenizer), max_new_tokens=NEW_TOKENS, do_sample=False)
        return capsys.readouterr().out

    expected = run()
    with prefetching(model, 3, device) as report:
        assert run() == expected != ""
        assert report().lookahead_hits > 0


@both_families
def test_iterator_streamer_in_a_thread(model_of: Build, device: torch.device, family: str) -> None:
    """Generation in a thread of its own, its text read piece by piece from this one, and its logits compared."""
    model, tokenizer, ids = model_of(family), build_tokenizer(), prompt(LONG, device=device)

    def run() -> tuple[list[str], Outcome]:
        streamer, outcomes = TextIteratorStreamer(tokenizer, timeout=60), []
        thread = threading.Thread(target=lambda: outcomes.append(generate(model, ids, streamer=streamer)))
        thread.start()
        pieces = list(streamer)
        thread.join()
        return pieces, outcomes[0]

    pieces, expected = run()
    with prefetching(model, 3, device) as report:
        for _ in range(2):
            pieces_on, outcome = run()
            assert pieces_on == pieces
            outcome.assert_equal(expected)
        generate(model, ids).assert_equal(expected)
        assert report().lookahead_hits > 0


# -- grad modes and autocast ------------------------------------------------------------------------------------------


def grad_modes() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {"inference": torch.inference_mode, "no grad": torch.no_grad, "grad": nullcontext}


@pytest.mark.parametrize("second", grad_modes())
@pytest.mark.parametrize("first", grad_modes())
@both_families
def test_grad_modes_in_turn(model_of: Build, device: torch.device, family: str, first: str, second: str) -> None:
    """The very first call, which allocates the slots, in one grad mode and later ones in another."""
    model, ids, modes = model_of(family), prompt(LONG, device=device), grad_modes()

    def run(mode: str) -> list[Outcome]:
        with modes[mode]():
            return [forward(model, ids), generate(model, ids, max_new_tokens=2)]

    sequence = (first, second, second, first)
    expected = [run(mode) for mode in sequence]
    before = Snapshot.of(model)
    with prefetching(model, 3, device) as report:
        for mode, outcomes in zip(sequence, expected, strict=True):
            for mine, theirs in zip(run(mode), outcomes, strict=True):
                mine.assert_equal(theirs)
        assert report().lookahead_hits > 0
    before.assert_restored(model)


@both_families
def test_enabled_and_disabled_under_inference_mode(device: torch.device, family: str) -> None:
    """Enabling under inference mode leaves ordinary weights: later calls in any mode work, and so does training."""
    model, ids = build(family).to(device), prompt(LONG, device=device)
    expected = forward(model, ids)
    before = Snapshot.of(model)
    with torch.inference_mode():
        enable_expert_prefetch(model, slots=3, device=device)
    for mode in (nullcontext, torch.inference_mode, torch.no_grad):
        with mode():
            forward(model, ids).assert_equal(expected)
    with torch.inference_mode():
        disable_expert_prefetch(model)
    before.assert_restored(model)
    forward(model, ids).assert_equal(expected)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for module in experts_of(model).values() for parameter in module.parameters())


@pytest.mark.gpu
@both_families
def test_model_on_the_host_enabled_under_inference_mode(device: torch.device, family: str) -> None:
    """The same where enabling moves the whole model to the accelerator and disabling moves it back: it trains on the CPU."""
    model, ids = build(family), prompt(LONG, device=device)
    expected = forward(build(family).to(device), ids)
    before = Snapshot.of(model)
    with torch.inference_mode():
        enable_expert_prefetch(model, slots=3, device=device)
    for mode in (nullcontext, torch.inference_mode, torch.no_grad):
        with mode():
            forward(model, ids).assert_equal(expected)
    with torch.inference_mode():
        disable_expert_prefetch(model)
    before.assert_restored(model)
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    model(ids.cpu(), labels=ids.cpu()).loss.backward()
    assert all(parameter.grad is not None for module in experts_of(model).values() for parameter in module.parameters())


@both_families
def test_training_after_disabling(device: torch.device, family: str) -> None:
    """Gradients after an enabled spell are those of a model that was never enabled."""
    gradients = []
    for enabled in (False, True):
        model, ids = build(family).to(device), prompt(LONG, device=device)
        if enabled:
            with prefetching(model, 3, device):
                generate(model, ids)
        model.train()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@both_families
def test_autocast(model_of: Build, device: torch.device, family: str, implementation: str, grad: bool) -> None:
    """bfloat16 autocast over a float32 model, several forwards and a generation within one autocast region."""
    model, ids = model_of(family), prompt(LONG, device=device)
    model.set_experts_implementation(implementation)

    def run() -> Outcome:
        with torch.set_grad_enabled(grad), torch.autocast(device.type, dtype=torch.bfloat16):
            outcomes = [forward(model, ids), forward(model, ids), generate(model, ids), forward(model, ids)]
        return Outcome(outcomes[2].tokens, tuple(value for outcome in outcomes for value in outcome.values))

    check(model, device, run)


def whole_parameter_experts(
    self: nn.Module, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Experts as matrix products over whole Parameters: what autocast casts and keeps are the Parameters themselves."""
    mask = torch.zeros(len(hidden_states), EXPERTS, dtype=weights.dtype, device=weights.device).scatter(1, ids, weights)
    if self.is_transposed:  # (experts, in, out)
        inputs = hidden_states.expand(EXPERTS, *hidden_states.shape)
        inner = torch.bmm(inputs, self.gate_up_proj)[..., : self.down_proj.shape[1]].tanh()
        outputs = torch.bmm(inner, self.down_proj)
    else:
        inputs = hidden_states.T.expand(EXPERTS, *hidden_states.T.shape)
        inner = torch.bmm(self.gate_up_proj, inputs)[:, : self.down_proj.shape[2]].tanh()
        outputs = torch.bmm(self.down_proj, inner).transpose(1, 2)
    return (outputs * mask.T.unsqueeze(-1)).sum(0).to(hidden_states.dtype)


@pytest.fixture
def whole_parameters(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an experts implementation that hands whole Parameters to operators which autocast casts."""
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "whole_parameters", whole_parameter_experts)
    return "whole_parameters"


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("slots", [2, 3, 4])
@both_families
def test_autocast_keeps_no_cast_of_a_slot(
    model_of: Build, device: torch.device, whole_parameters: str, family: str, slots: int, grad: bool
) -> None:
    """Autocast keeps the casts of leaf tensors by identity until its region ends; a slot's tensors are reused within it.

    A kept cast would hand the experts of one layer to the next layer that passes through the same slot.
    """
    model, ids = model_of(family), prompt(LONG, device=device)
    model.set_experts_implementation(whole_parameters)

    def run() -> Outcome:
        with torch.set_grad_enabled(grad), torch.autocast(device.type, dtype=torch.bfloat16):
            outcomes = [forward(model, ids) for _ in range(3)]
        return Outcome(outcomes[0].tokens, tuple(value for outcome in outcomes for value in outcome.values))

    check(model, device, run, slots=slots)


@both_families
def test_train_mode_under_no_grad(model_of: Build, device: torch.device, family: str) -> None:
    """A model that was left in train mode."""
    model, ids = model_of(family).train(), prompt(LONG, device=device)
    try:
        check(model, device, lambda: generate(model, ids))
    finally:
        model.eval()


# -- in the middle of a session, and streams --------------------------------------------------------------------------


@both_families
def test_enabled_in_the_middle_of_a_session(device: torch.device, family: str) -> None:
    """Generate, enable, generate, disable, generate, and that once more with other slots: always the same."""
    model, ids, short = build(family).to(device), prompt(LONG, device=device), prompt(3, device=device)
    expected, expected_short = generate(model, ids), generate(model, short)
    for slots in (3, 2, 4):
        enable_expert_prefetch(model, slots=slots, device=device)
        generate(model, short).assert_equal(expected_short)
        generate(model, ids).assert_equal(expected)
        assert model.expert_prefetch.report().lookahead_hits > 0
        disable_expert_prefetch(model)
        assert not hasattr(model, "expert_prefetch")
        generate(model, ids).assert_equal(expected)
        generate(model, short).assert_equal(expected_short)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [2, 3, 4])
@both_families
def test_streams_of_the_caller(model_of: Build, device: torch.device, family: str, slots: int) -> None:
    """Generation on a stream that is not the default one, and on another one at each call."""
    model, ids = model_of(family), prompt(LONG, device=device)
    expected = generate(model, ids)
    streams = [torch.cuda.default_stream(device), *(torch.cuda.Stream(device) for _ in range(2))]
    with prefetching(model, slots, device) as report:
        for stream in (streams[1], streams[1], streams[0], streams[2], streams[1], streams[0]):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                outcome = generate(model, ids)
            torch.cuda.current_stream(device).wait_stream(stream)
            outcome.assert_equal(expected)
        assert report().lookahead_hits > 0
        assert report().fallbacks == 0


@pytest.mark.gpu
@pytest.mark.parametrize("delayed", ["compute", "copy"])
@pytest.mark.parametrize("slots", [2, 3, 4])
@both_families
def test_a_slow_stream(
    model_of: Build, device: torch.device, monkeypatch: pytest.MonkeyPatch, family: str, slots: int, delayed: str
) -> None:
    """One of the two streams lags far behind the other, so that a missing wait would read or overwrite the wrong bytes."""
    model, ids = model_of(family), prompt(LONG, device=device)
    expected = [forward(model, ids) for _ in range(2)]
    copy = AcceleratorDevice.copy

    def slow_copy(self: AcceleratorDevice, stream: torch.Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        with stream:
            torch.cuda._sleep(3_000_000)
        copy(self, stream, destination, source)

    def slow_experts(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        torch.cuda._sleep(3_000_000)

    handles = []
    if delayed == "copy":
        monkeypatch.setattr(AcceleratorDevice, "copy", slow_copy)
    else:
        handles = [module.register_forward_pre_hook(slow_experts) for module in experts_of(model).values()]
    try:
        with prefetching(model, slots, device) as report:
            actual = [forward(model, ids) for _ in range(2)]
            assert report().lookahead_hits > 0
    finally:
        for handle in handles:
            handle.remove()
    for mine, theirs in zip(actual, expected, strict=True):
        mine.assert_equal(theirs)


@pytest.mark.slow
def test_continuous_batching(device: torch.device) -> None:
    """Requests of different lengths, scheduled into shared batches by a thread of its own, over a row cache."""
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("transformers page-locks memory for a GPU that the model is not on")
    model = build("qwen3_moe").to(device)
    requests = [prompt(length)[0].tolist() for length in (12, 20, 7)]
    # A small cache of keys and values: its size is measured otherwise, which takes long.
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=2, num_blocks=32, max_batch_tokens=64)

    def run() -> list[list[int]]:
        outputs = model.generate_batch(requests, generation_config=config)
        return [outputs[name].generated_tokens for name in sorted(outputs)]

    expected = run()
    assert all(expected)
    budget = 4 * sum(bank.layout.row_nbytes for bank in find_banks(model).banks)
    enable_expert_prefetch(model, device=device, expert_cache=budget)
    assert run() == expected
    report = model.expert_prefetch.report()
    assert report.routed_calls + report.cached_calls > 0
    disable_expert_prefetch(model)
