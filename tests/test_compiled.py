"""Compiled code: prefetched experts are one operator in it, so nothing breaks the graph, and the bits are those of off.

Whole graphs are asked for throughout (`fullgraph=True`), so a break is an error. The "eager" backend runs the traced operators
as they are. Off is traced as well; batched_mm takes the same operators traced and untraced, so the logits are comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel

from caching import REMAPPING, cached
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, ops
from models import EXPERTS, Snapshot, bank_bytes, build, experts_of, prefetching, prompt
from test_partial_residency import dense_bytes

pytestmark = pytest.mark.usefixtures("deterministic")

LAYERS = 2
NEW_TOKENS = 4


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def small(device: torch.device, family: str = "qwen3_moe", layers: int = LAYERS) -> PreTrainedModel:
    model = build(family)
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    model.set_experts_implementation("batched_mm")
    return model.to(device)


def compiled(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward that is compiled whole and gives the logits, without gradients."""
    function = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)

    def run(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return function(ids, use_cache=False).logits

    return run


def block_of(model: PreTrainedModel) -> nn.Module:
    """A router with its experts: compiled in a fraction of the time that a model takes."""
    return model.model.layers[1].mlp


def hidden(device: torch.device, tokens: int = 1) -> torch.Tensor:
    return torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(tokens)).to(device)


def call_of_experts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, ids and weights."""
    return (torch.randn(2, 64, device=device), torch.tensor([[1, 5], [5, 7]], device=device), torch.rand(2, 2, device=device))


@pytest.mark.parametrize(("family", "rows"), [("qwen3_moe", 0), ("gpt_oss", EXPERTS // 2)])
def test_whole_graphs_off_on_and_off(device: torch.device, family: str, rows: int) -> None:
    """One model object, compiled once for each spell: a prompt and a token, with the bits of off each time."""
    model = small(device, family)
    many, one = prompt(20, device=device), prompt(1, device=device)
    run = compiled(model)
    expected = [run(many), run(one)]
    before = Snapshot.of(model)
    with cached(model, rows, device) as scheduler:
        for _ in range(2):
            assert torch.equal(run(many), expected[0])
            assert torch.equal(run(one), expected[1])
        report = scheduler.report()
    before.assert_restored(model)
    assert torch.equal(run(many), expected[0])
    assert torch.equal(run(one), expected[1])
    assert report.calls == 4 * LAYERS, "some calls went past the hook"
    assert report.lookahead_calls == 2 * LAYERS
    assert report.cached_calls == (2 * LAYERS if rows else 0)
    assert report.fallbacks == 0


def test_compiled_code_calls_nothing_but_the_operator(device: torch.device) -> None:
    """Host weights are no input of a compiled region: inductor would leave CUDA graphs out for their sake."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = small(device)
    with cached(model, 4, device), torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(prompt(1, device=device), use_cache=False)
        (graph,) = graphs
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert sum("hf_prefetch.experts" in target for target in targets) == LAYERS
        addresses = {p.data_ptr() for module in experts_of(model).values() for p in module.parameters()}
        held = [tensor for tensor in (*graph.parameters(), *graph.buffers()) if tensor.data_ptr() in addresses]
        assert held == []
        names = [node.name for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")]
        assert not [name for name in names if "experts" in name], "weights of experts enter the graph"


@pytest.mark.slow
def test_inductor(device: torch.device) -> None:
    """Compiled for good: the router as inductor makes it, the experts behind it as they are, bit for bit."""
    model, given = small(device), hidden(device)
    block = block_of(model)
    with torch.no_grad(), cached(model, 4, device) as scheduler:
        function = torch.compile(block, fullgraph=True)
        # What the experts get is inductor's own; what they give to it is what resident experts give.
        with recording_of(block.experts) as calls:
            for _ in range(2):
                function(given)
        assert scheduler.report().cached_calls == 2
        disable_expert_prefetch(model)
        for inputs, output in calls:
            assert torch.equal(block.experts(*inputs), output)


@contextmanager
def recording_of(experts: nn.Module) -> Iterator[list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]]:
    """Inputs and outputs of the operator that stands for an experts module."""
    calls: list[tuple[tuple[torch.Tensor, ...], torch.Tensor]] = []
    runner = experts._old_forward._hf_prefetch_compiled
    run = runner._run

    def keep(*inputs: torch.Tensor) -> torch.Tensor:
        output = run(*inputs)
        calls.append((tuple(value.clone() for value in inputs), output.clone()))
        return output

    runner._run = keep
    yield calls
    runner._run = run


@pytest.mark.parametrize("rows", [EXPERTS // 2])
def test_a_compiled_decoding_step(device: torch.device, rows: int) -> None:
    """`generate` with a static cache and a step that is compiled whole, off, on, on with other slots, and off again."""
    model, ids = small(device), prompt(20, device=device)
    compilation = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compilation._compile_all_devices = True  # not only on accelerators

    def run() -> list[torch.Tensor]:
        output = model.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True,
            cache_implementation="static", compile_config=compilation,
        )  # fmt: skip
        # On an accelerator attention over a static cache may pick its kernel by what else lies in memory.
        return [output.sequences, *(output.logits if device.type == "cpu" else ())]

    expected = run()
    for slots in (3, 2):
        with cached(model, rows, device, slots=slots) as scheduler:
            for _ in range(2):
                assert all(map(torch.equal, run(), expected))
            report = scheduler.report()
        assert all(map(torch.equal, run(), expected))
        assert report.calls == 2 * NEW_TOKENS * LAYERS, "some calls went past the hook"
        assert report.lookahead_hits > 0
        assert report.cached_calls == (2 * (NEW_TOKENS - 1) * LAYERS if rows else 0)


def test_other_implementations_between_two_calls(device: torch.device) -> None:
    """What is decided inside of the operator is decided at each call: the one that is set now runs."""
    model, given = small(device), hidden(device)
    block = block_of(model)
    with torch.no_grad(), cached(model, EXPERTS // 2, device) as scheduler:
        function = torch.compile(block, backend="eager", fullgraph=True)
        for name in ("batched_mm", "eager", "grouped_mm", "batched_mm"):
            model.set_experts_implementation(name)
            scheduler.reset()
            output = function(given)
            assert scheduler.report().cached_calls == (name in REMAPPING), name
            assert scheduler.report().routed_calls == (name not in REMAPPING), name
            assert torch.equal(output, block(given))


@pytest.mark.parametrize("rows", [0, EXPERTS])
def test_autocast(device: torch.device, rows: int) -> None:
    """It's off while compiled code runs, so the operator is told; inside and outside of it, in turn."""
    model, given = small(device), hidden(device, 3)
    block = block_of(model)

    def all_of(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        outputs = []
        for enabled in (True, False, True):
            with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
                outputs.append(function(given))
        return outputs

    expected = all_of(torch.compile(block, backend="eager", fullgraph=True))
    assert not torch.equal(expected[0], expected[1])
    with cached(model, rows, device) as scheduler:
        assert all(map(torch.equal, all_of(torch.compile(block, backend="eager", fullgraph=True)), expected))
        assert scheduler.report().calls == 3


def test_every_mode_without_gradients(device: torch.device) -> None:
    """Under inference_mode as under no_grad, and one after the other."""
    model, given = small(device), hidden(device)
    block = block_of(model)
    with torch.no_grad():
        expected = block(given)
    with cached(model, 4, device):
        function = torch.compile(block, backend="eager", fullgraph=True)
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(function(given), expected)


def test_gradients_break_the_graph(device: torch.device) -> None:
    """With them a call is a break, which works; where a whole graph is asked for, the message says why it can't be."""
    model, given = small(device), hidden(device, 20)
    block = block_of(model)
    expected = block(given)
    with cached(model, 4, device) as scheduler:
        output = torch.compile(block, backend="eager")(given)
        assert torch.equal(output, expected)
        assert scheduler.report().calls == 1
        with pytest.raises(RuntimeError, match="disable_expert_prefetch"):
            output.sum().backward()
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="one operator only in calls without gradients"):
            torch.compile(block, backend="eager", fullgraph=True)(given)
        with torch.no_grad():
            assert torch.equal(block(given), expected)


def test_code_that_is_kept_follows_every_change(device: torch.device) -> None:
    """One compiled object through enabling, disabling, other slots and other weights: never another spell's experts."""
    model, other, given = small(device), build("qwen3_moe", seed=1).to(device), hidden(device, 3)
    function = torch.compile(block_of(model), backend="eager", fullgraph=True)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return function(given)

    expected = run()
    weights = {name: value for name, value in other.state_dict().items() if name in model.state_dict()}
    mine = {name: value.clone() for name, value in model.state_dict().items()}
    for rows in (0, 4):
        enable_expert_prefetch(model, device=device, expert_cache="1MiB" if rows else None)
        assert torch.equal(run(), expected)
        enable_expert_prefetch(model, 2, device=device)
        assert torch.equal(run(), expected)
        model.load_state_dict(weights)
        changed = run()
        assert not torch.equal(changed, expected)
        disable_expert_prefetch(model)
        assert torch.equal(run(), changed)
        model.load_state_dict(mine)
        assert torch.equal(run(), expected)


def test_an_experts_module_compiled_on_its_own(device: torch.device) -> None:
    """As regional compilation does; and the object that was compiled while it was on still works when it is off."""
    model = small(device)
    module = model.model.layers[1].mlp.experts
    given = call_of_experts(device)
    with torch.no_grad():
        expected = module(*given)
        with cached(model, EXPERTS, device) as scheduler:
            function = torch.compile(module, backend="eager", fullgraph=True)
            assert torch.equal(function(*given), expected)
            assert scheduler.report().cached_calls == 1
        assert torch.equal(function(*given), expected)
        with prefetching(model, 2, device) as report:
            assert torch.equal(function(*given), expected)
            assert report().routed_calls == 1


def test_the_operator_of_a_model_that_is_gone_says_so(device: torch.device) -> None:
    """A graph that somebody kept by other means than torch.compile: an error, and not another model's weights."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = small(device)
    module = model.model.layers[1].mlp.experts
    given = call_of_experts(device)
    with torch.no_grad():
        with prefetching(model, 3, device):
            torch.compile(module, backend=backend, fullgraph=True)(*given)
            (graph,) = graphs
            (node,) = [node for node in graph.graph.nodes if "hf_prefetch.experts" in str(node.target)]
            rest = node.args[3:]
            torch.ops.hf_prefetch.experts(*given, *rest)
        with pytest.raises(RuntimeError, match=r"disabled|ended"):
            torch.ops.hf_prefetch.experts(*given, *rest)


def test_the_operator_keeps_its_promises(device: torch.device) -> None:
    """Its schema, its shape without data, and memory of its own."""
    model = small(device)
    module = model.model.layers[0].mlp.experts
    given = call_of_experts(device)
    with torch.no_grad(), cached(model, 4, device):
        own = module._old_forward._hf_prefetch_compiled
        (found,) = [number for number, runner in ops._runners.items() if runner is own]
        arguments = (*given, found, "batched_mm", None)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.hf_prefetch.experts.default, arguments, test_utils=tests)
        output = torch.ops.hf_prefetch.experts(*arguments)
        assert output.is_contiguous()
        assert output.data_ptr() != given[0].data_ptr()


def test_a_model_that_is_partly_resident(device: torch.device) -> None:
    """Its resident layers are traced as usual, and whoever begins the pass for those behind them breaks nothing."""
    model, ids, layers = small(device, layers=4), prompt(1, device=device), 4
    run = compiled(model)
    expected = run(ids)
    memory = dense_bytes(model) + 3 * bank_bytes(model) // layers
    for options, host in (({"n_cpu_moe": 2}, [True, True, False, False]), ({"gpu_memory": memory, "slots": 2}, None)):
        with cached(model, EXPERTS // 2 if host else 0, device, **options) as scheduler:
            for _ in range(2):
                assert torch.equal(run(ids), expected)
            report = scheduler.report()
            hooked = [hasattr(module, "_hf_hook") for module in experts_of(model).values()]
        assert 0 < report.resident_banks < layers
        assert report.calls == 2 * report.banks
        assert sum(hooked) == report.banks
        assert hooked == host or (host is None and not hooked[0]), "the first layer begins the pass"


@pytest.mark.parametrize("strict", [False, True])
def test_export(device: torch.device, strict: bool) -> None:
    """An exported program could not find its experts again: it is refused with the remedy, and works when disabled."""
    model, ids = small(device), prompt(3, device=device)
    module = model.model.layers[0].mlp.experts
    given = call_of_experts(device)
    with torch.no_grad():
        expected, logits = module(*given), model(ids).logits
        with cached(model, 4, device):
            with pytest.raises(Exception, match="disable_expert_prefetch") as caught:
                torch.export.export(module, given, strict=strict)
            assert "torch.export" in str(caught.value)
            assert torch.equal(model(ids).logits, logits)
        program = torch.export.export(module, given, strict=strict)
        assert torch.equal(program.module()(*given), expected)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_functions(transform: Callable[..., Any], device: torch.device) -> None:
    """They are refused with the remedy, and work when disabled."""
    model = small(device)
    embedded = torch.randn(2, 1, 3, model.config.hidden_size, device=device)

    def call(embedded: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=embedded, use_cache=False).logits.float().square().sum()  # type: ignore[no-any-return]

    value = embedded if transform is torch.func.vmap else embedded[0]
    with cached(model, 4, device), pytest.raises(RuntimeError, match=r"torch\.func \(\w+\) can't .*disable_expert_prefetch"):
        transform(call)(value)
    if transform is torch.func.grad:
        assert transform(call)(value).isfinite().all()


def test_jit_trace(device: torch.device) -> None:
    """A trace would note where experts are during one call: it is refused with the remedy, and works when disabled."""
    # What a function reads becomes a constant, which must not want gradients.
    model, ids = small(device).requires_grad_(False), prompt(3, device=device)

    def call(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, use_cache=False).logits  # type: ignore[no-any-return]

    # batched_mm has an operator that can't be traced on a GPU, where a traced call may also round otherwise than a plain one.
    model.set_experts_implementation("eager")
    with torch.no_grad():
        expected = call(ids)
        traced = torch.jit.trace(call, (ids,), check_trace=False)(ids)
        assert device.type != "cpu" or torch.equal(traced, expected)
        with cached(model, 4, device):
            with pytest.raises(RuntimeError, match=r"torch\.jit\.trace.*disable_expert_prefetch"):
                torch.jit.trace(call, (ids,), check_trace=False)
            assert torch.equal(call(ids), expected)
        assert torch.equal(torch.jit.trace(call, (ids,), check_trace=False)(ids), traced)
