"""CUDA graphs that a user captures over prefetched experts: each replay decides anew, on the device, which experts it brings.

What is captured is the Mixture-of-Experts blocks of a model, one after the other, on static inputs; the outputs of all experts
modules are compared with those of the same model, resident and not captured, under the same implementation. `eager` looks at
the routing on the host, so no graph can be captured over it. In bfloat16, for which grouped_mm has kernels.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from caching import REMAPPING, assert_rows_are_right, budget, cached, inputs_of, lane_of
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.memory.ledger import Purpose
from hf_prefetch.routing import inject_routing
from hf_prefetch.scheduling.scheduler import PrefetchScheduler
from models import EXPERTS, TOP_K, build, experts_of, prompt

pytestmark = pytest.mark.gpu

LAYERS = 4
STEPS = 50
PROMPT = 20

Outputs = list[torch.Tensor]
# No cache: what a token uses is brought into a slot. Just a token's experts, half of all, all.
every_way = pytest.mark.parametrize(
    ("implementation", "rows"), [(name, rows) for name in REMAPPING for rows in (0, TOP_K, EXPERTS // 2, EXPERTS)]
)
both_ways = pytest.mark.parametrize(
    ("implementation", "rows"), [(name, rows) for name in REMAPPING for rows in (0, EXPERTS // 2)]
)


class Blocks:
    """The Mixture-of-Experts blocks of a model, and what their experts gave."""

    def __init__(self, device: torch.device, implementation: str, seed: int = 0) -> None:
        self.model: PreTrainedModel = build("qwen3_moe", torch.bfloat16, seed=seed)
        del self.model.model.layers[LAYERS:]
        self.model.config.num_hidden_layers = LAYERS
        self.model.set_experts_implementation(implementation)
        self.model.to(device)
        self.device = device
        self.outputs: Outputs = []
        for module in experts_of(self.model).values():
            module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self.outputs.append(output.clone())

    def hidden(self, tokens: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1, tokens, 64, generator=generator).to(self.device, torch.bfloat16)

    def run(self, hidden: torch.Tensor) -> Outputs:
        """A pass that is not captured."""
        self.outputs = []
        with torch.no_grad():
            for layer in self.model.model.layers:
                hidden = hidden + layer.mlp(hidden)
        return self.outputs

    def capture(self, tokens: int = 1) -> Callable[[torch.Tensor], Outputs]:
        """Warm up, capture, and give the function that replays."""
        static = self.hidden(tokens, 999)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self.run(static)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.run(static)

        def replay(hidden: torch.Tensor) -> Outputs:
            static.copy_(hidden)
            graph.replay()
            return [output.clone() for output in outputs]

        return replay

    @contextmanager
    def enabled(self, rows: int, slots: int = 3) -> Iterator[PrefetchScheduler]:
        cache = budget(self.model, rows)
        enable_expert_prefetch(self.model, slots, device=self.device, expert_cache=cache, progress=False)
        try:
            yield self.model.expert_prefetch
        finally:
            with warnings.catch_warnings():
                # A graph was captured: what it knows stays until the model is gone.
                warnings.simplefilter("ignore")
                disable_expert_prefetch(self.model)


def assert_equal(actual: Outputs, expected: Outputs, where: object) -> None:
    assert len(actual) == len(expected) == LAYERS
    for layer, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(mine, theirs), f"{where}: layer {layer}"


@every_way
def test_replays_are_exact(device: torch.device, implementation: str, rows: int) -> None:
    """Fifty replays on other hidden states each time, so that each is routed otherwise."""
    blocks = Blocks(device, implementation)
    given = [blocks.hidden(1, seed) for seed in range(STEPS)]
    expected = [blocks.run(hidden) for hidden in given]
    with blocks.enabled(rows):
        replay = blocks.capture()
        blocks.model.expert_prefetch.reset()
        for step, hidden in enumerate(given):
            assert_equal(replay(hidden), expected[step], step)
        report = blocks.model.expert_prefetch.report()
        # Counted on the device, replays included.
        assert report.cache_hits + report.routed_rows == STEPS * LAYERS * TOP_K
        assert (report.cache_hits > 0) == (rows > 0)
        assert report.routed_rows > 0
        assert report.calls == 0, "the host has seen none of them"
        assert_rows_are_right(blocks.model.expert_prefetch)
        # The hooks are as before: an eager pass over the same caches.
        assert_equal(blocks.run(given[7]), expected[7], "eager")
        assert_equal(replay(given[3]), expected[3], "once more")


@both_ways
def test_replays_without_a_host_in_between(device: torch.device, implementation: str, rows: int) -> None:
    """All of them enqueued at once: nothing that a replay needs is overwritten by the next one."""
    blocks = Blocks(device, implementation)
    given = [blocks.hidden(1, seed) for seed in range(STEPS)]
    expected = [blocks.run(hidden) for hidden in given]
    with blocks.enabled(rows):
        replay = blocks.capture()
        torch.cuda.synchronize(device)
        torch.cuda._sleep(20_000_000)
        actual = [replay(hidden) for hidden in given]
        for step in range(STEPS):
            assert_equal(actual[step], expected[step], step)


@both_ways
def test_routing_that_is_injected(device: torch.device, implementation: str, rows: int) -> None:
    """Ids from a table on the device: each replay takes the next token's, and the weights of just those experts."""
    blocks = Blocks(device, implementation)
    generator = torch.Generator().manual_seed(1)
    table = torch.rand(LAYERS, STEPS, EXPERTS, generator=generator).topk(TOP_K).indices
    hidden = blocks.hidden(1, 5)
    with inject_routing(blocks.model, table) as injection:
        expected = [blocks.run(hidden) for _ in range(STEPS)]
        assert not torch.equal(expected[0][0], expected[1][0])
        with blocks.enabled(rows):
            injection.seek(0)
            replay = blocks.capture()
            for turn in range(2):
                injection.seek(0)
                for step in range(STEPS):
                    assert_equal(replay(hidden), expected[step], (turn, step))


@both_ways
def test_graphs_of_two_sizes_share_what_is_cached(device: torch.device, implementation: str, rows: int) -> None:
    """One token and two, in turn. Two tokens' experts fit into half of all rows."""
    blocks = Blocks(device, implementation)
    given = {tokens: [blocks.hidden(tokens, seed) for seed in range(10)] for tokens in (1, 2)}
    expected = {tokens: [blocks.run(hidden) for hidden in hiddens] for tokens, hiddens in given.items()}
    with blocks.enabled(rows):
        replays = {tokens: blocks.capture(tokens) for tokens in (1, 2)}
        for step in range(10):
            for tokens in (1, 2, 2, 1):
                assert_equal(replays[tokens](given[tokens][step]), expected[tokens][step], (tokens, step))


@pytest.mark.parametrize("slots", [2, 3])
@both_ways
def test_prompts_between_replays(device: torch.device, implementation: str, rows: int, slots: int) -> None:
    """They look ahead through the slots that no graph knows, and fill the caches that it knows."""
    blocks = Blocks(device, implementation)
    given = [blocks.hidden(1, seed) for seed in range(12)]
    prompts = [blocks.hidden(PROMPT, seed) for seed in range(12)]
    expected = [(blocks.run(long), blocks.run(hidden)) for long, hidden in zip(prompts, given, strict=True)]
    with blocks.enabled(rows, slots):
        blocks.run(prompts[0])
        replay = blocks.capture()
        actual = [(blocks.run(long), replay(hidden)) for long, hidden in zip(prompts, given, strict=True)]
        for step in range(12):
            assert_equal(actual[step][0], expected[step][0], f"prompt {step}")
            assert_equal(actual[step][1], expected[step][1], f"replay {step}")
        assert_rows_are_right(blocks.model.expert_prefetch)
        assert blocks.model.expert_prefetch.report().fallbacks == 0


@both_ways
def test_weights_that_are_loaded_between_replays(device: torch.device, implementation: str, rows: int) -> None:
    """The next replay computes with them; the one before it, which may still be running, with the old ones."""
    blocks, other = (Blocks(device, implementation, seed=seed) for seed in (0, 1))
    given = [blocks.hidden(1, seed) for seed in range(6)]
    weights = [{name: value.clone() for name, value in each.model.state_dict().items()} for each in (blocks, other)]
    expected = [[each.run(hidden) for hidden in given] for each in (blocks, other)]
    with blocks.enabled(rows):
        replay = blocks.capture()
        for turn in range(4):
            actual = [replay(hidden) for hidden in given]
            blocks.model.load_state_dict(weights[(turn + 1) % 2])
            for step in range(6):
                assert_equal(actual[step], expected[turn % 2][step], (turn, step))


@both_ways
def test_replays_after_disabling(device: torch.device, implementation: str, rows: int) -> None:
    """What the graph knows stays until the model is gone, and is given back then."""
    blocks = Blocks(device, implementation)
    given = [blocks.hidden(1, seed) for seed in range(10)]
    expected = [blocks.run(hidden) for hidden in given]
    enable_expert_prefetch(blocks.model, device=device, expert_cache=budget(blocks.model, rows), progress=False)
    scheduler = blocks.model.expert_prefetch
    replay = blocks.capture()
    with pytest.warns(UserWarning, match="CUDA graph was captured") as told:
        disable_expert_prefetch(blocks.model)
    assert len([item for item in told if "hf_prefetch" in str(item.message)]) == 1
    # Whatever is free by now is somebody else's soon.
    noise = [torch.full((2**20,), 255, dtype=torch.uint8, device=device) for _ in range(64)]
    for step, hidden in enumerate(given):
        assert_equal(replay(hidden), expected[step], step)
        assert_equal(blocks.run(hidden), expected[step], f"resident {step}")
    del noise, replay
    ledger = scheduler.store.ledger
    assert ledger.held(Purpose.SLOTS) + ledger.held(Purpose.CACHES) > 0
    del blocks
    gc.collect()
    assert ledger.held(Purpose.SLOTS) + ledger.held(Purpose.CACHES) == 0


@pytest.mark.parametrize("implementation", REMAPPING)
def test_a_capture_of_tokens_that_only_a_prompt_has_warmed(device: torch.device, implementation: str) -> None:
    """The prompt took whole banks. What single experts need besides the slots is there from the start."""
    blocks = Blocks(device, implementation)
    hidden, many = blocks.hidden(1, 0), blocks.hidden(40, 1)
    expected = blocks.run(hidden)
    with blocks.enabled(0) as scheduler:
        scheduler.config = dataclasses.replace(scheduler.config, lookahead_gate=1)
        blocks.run(many)
        assert scheduler.report().lookahead_calls == LAYERS
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outputs = blocks.run(hidden)
        before = scheduler.report().routed_rows
        for _ in range(2):
            graph.replay()
            assert_equal(outputs, expected, "replay")
        assert scheduler.report().routed_rows == before + 2 * LAYERS * TOP_K


@both_ways
def test_graphs_of_compiled_code_from_the_first_call(device: torch.device, implementation: str, rows: int) -> None:
    """What is run once before its capture uses the graph's pool, where nothing may stay: ours comes from elsewhere."""
    blocks = Blocks(device, implementation)
    given = [blocks.hidden(1, seed) for seed in range(6)]
    expected = [blocks.run(hidden)[-1] for hidden in given]
    for module in experts_of(blocks.model).values():
        module._forward_hooks.clear()

    def step(hidden: torch.Tensor) -> torch.Tensor:
        for layer in blocks.model.model.layers[:-1]:
            hidden = hidden + layer.mlp(hidden)
        return blocks.model.model.layers[-1].mlp(hidden)

    torch.compiler.reset()
    with blocks.enabled(rows) as scheduler, torch.no_grad():
        run = torch.compile(step, backend="cudagraphs", fullgraph=True)
        for hidden, outcome in zip(given, expected, strict=True):
            assert torch.equal(run(hidden).clone().view(-1), outcome.view(-1))
        assert scheduler.report().routed_rows > 0
    torch.compiler.reset()


def test_a_capture_without_a_warm_up(device: torch.device) -> None:
    """Fails with the remedy, which helps."""
    blocks = Blocks(device, "batched_mm")
    hidden = blocks.hidden(1, 0)
    expected = blocks.run(hidden)
    with blocks.enabled(EXPERTS // 2):
        with pytest.raises(RuntimeError, match="once without capture first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            blocks.run(hidden)
        assert_equal(blocks.run(hidden), expected, "eager")
        assert_equal(blocks.capture()(hidden), expected, "replay")


def test_a_cache_that_a_graph_knows_is_not_given_up(device: torch.device) -> None:
    """Out of memory in an eager call is an error then, and replays go on being right."""
    blocks = Blocks(device, "batched_mm")
    hidden = blocks.hidden(1, 0)
    expected = blocks.run(hidden)
    with blocks.enabled(EXPERTS // 2):
        replay = blocks.capture()
        assert not lane_of(blocks.model.expert_prefetch).budget.give_up()
        experts = blocks.model.model.layers[1].mlp.experts

        def fail(gate: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no room for an activation")

        act_fn = experts.act_fn
        experts.act_fn = Activation(fail)
        with pytest.raises(torch.OutOfMemoryError, match="no room for an activation"):
            blocks.run(blocks.hidden(1, 1))
        experts.act_fn = act_fn
        assert_equal(replay(hidden), expected, "replay")
        assert_equal(blocks.run(hidden), expected, "eager")


class Activation(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        return self.function(gate)


# -- without capture --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, PROMPT], ids=["token", "prompt"])
@both_ways
def test_no_call_holds_the_host(device: torch.device, implementation: str, rows: int, tokens: int) -> None:
    """Once warm, experts modules are called without a single synchronisation: torch raises an error at any."""
    blocks = Blocks(device, implementation)
    modules, generator = list(experts_of(blocks.model).values()), torch.Generator().manual_seed(0)
    given = [inputs_of(modules[0], tokens, generator, device) for _ in range(12)]
    with torch.no_grad():
        expected = [[module(*inputs) for module in modules] for inputs in given]
        with blocks.enabled(rows):
            for module in modules * 2:
                module(*given[0])
            torch.cuda.synchronize(device)
            torch.cuda.set_sync_debug_mode("error")
            try:
                actual = [[module(*inputs) for module in modules] for inputs in given]
            finally:
                torch.cuda.set_sync_debug_mode("default")
    for step in range(12):
        assert_equal(actual[step], expected[step], step)


@both_ways
def test_the_host_runs_ahead_of_a_slow_device(device: torch.device, implementation: str, rows: int) -> None:
    """Many tokens and prompts are enqueued while the device sleeps: no row and no slot is overwritten before it was read."""
    blocks = Blocks(device, implementation)
    sizes = [1, 1, PROMPT, 1, 2, 1, PROMPT, PROMPT, 1, 1]
    given = [blocks.hidden(tokens, seed) for seed, tokens in enumerate(sizes)]
    expected = [blocks.run(hidden) for hidden in given]
    with blocks.enabled(rows):
        blocks.run(given[2])
        blocks.run(given[0])
        torch.cuda.synchronize(device)
        torch.cuda._sleep(100_000_000)
        actual = [blocks.run(hidden) for hidden in given]
        for step, outputs in enumerate(actual):
            assert_equal(outputs, expected[step], step)


@both_ways
def test_another_stream_in_each_call(device: torch.device, implementation: str, rows: int) -> None:
    """Without the caller waiting for anything but the inputs: the caches order their users themselves."""
    blocks = Blocks(device, implementation)
    given = [blocks.hidden(tokens, tokens) for tokens in (1, PROMPT, 1, 1, 2, PROMPT, 1)]
    expected = [blocks.run(hidden) for hidden in given]
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    with blocks.enabled(rows):
        actual = []
        torch.cuda.synchronize(device)
        for step, hidden in enumerate(given):
            with torch.cuda.stream(streams[step % 3]):
                torch.cuda._sleep(5_000_000 * (step % 2))
                actual.append(blocks.run(hidden))
        torch.cuda.synchronize(device)
        for step, outputs in enumerate(actual):
            assert_equal(outputs, expected[step], step)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
@pytest.mark.parametrize("rows", [0, 4])
def test_banks_on_another_device_than_the_current_one(rows: int) -> None:
    """Kernels run where their bank computes, whichever device is current."""
    other = torch.device("cuda", 1)
    model, ids = build("qwen3_moe").to(other), prompt(20, device=other)
    model.set_experts_implementation("batched_mm")
    assert torch.cuda.current_device() == 0
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)
        with cached(model, rows, other) as scheduler:
            assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
            assert scheduler.report().routed_calls + scheduler.report().cached_calls > 0
