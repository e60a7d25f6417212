"""Recording and deciding which experts are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import save_file
from torch import nn

from hf_prefetch.discovery import ExpertBank, find_banks
from hf_prefetch.routing import RoutingTrace, inject_routing, record_routing
from models import EXPERTS, TOP_K, build, prefetching, prompt


def router_ids(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The expert ids that the experts modules get, seen by a hook of the test's own."""
    seen: list[torch.Tensor] = []
    modules = [bank.modules[0] for bank in find_banks(model).banks]
    handles = [module.register_forward_pre_hook(lambda module, args: seen.append(args[1].cpu().clone())) for module in modules]
    model(ids)
    for handle in handles:
        handle.remove()
    return seen


@contextmanager
def inside(model: nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """The ids of each bank that get past all hooks which are there already."""
    modules = [bank.modules[0] for bank in find_banks(model).banks]
    seen: list[list[torch.Tensor]] = [[] for _ in modules]
    handles = [
        module.register_forward_pre_hook(lambda module, args, to=to: to.append(args[1].clone()))
        for module, to in zip(modules, seen, strict=True)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def table(model: nn.Module, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids for all banks of a model, different ones for each token: (banks, tokens, top-k)."""
    generator = torch.Generator().manual_seed(seed)
    banks = len(find_banks(model).banks)
    return torch.rand(banks, tokens, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]


# -- recording ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_a_generation_is_recorded_call_by_call(family: str) -> None:
    """A prompt, then a call of one token for each further one; the last token is never read."""
    model = build(family)
    expected = router_ids(model, prompt(5))
    with record_routing(model) as trace:
        model.generate(prompt(5), max_new_tokens=4, do_sample=False)
    assert trace.model == type(model).__name__
    assert trace.banks == tuple(bank.name for bank in find_banks(model).banks)
    assert set(trace.num_experts.values()) == {EXPERTS}
    assert set(trace.top_k.values()) == {TOP_K}
    assert all(calls == [5, 1, 1, 1] for calls in trace.calls.values())
    assert all(torch.equal(trace.split(name)[0], ids) for name, ids in zip(trace.banks, expected, strict=True))
    assert trace.stacked().shape == (len(trace.banks), 8, TOP_K)
    assert not any(module._forward_pre_hooks for module in model.modules()), "hooks are left behind"


@torch.no_grad()
def test_the_same_is_recorded_with_prefetching_and_with_accelerate() -> None:
    model, ids = build("qwen3_moe"), prompt(20, batch=2)
    with record_routing(model) as resident:
        model(ids)
    with prefetching(model, 3, torch.device("cpu")), record_routing(model) as prefetched:
        model(ids)
    cpu_offload(model, torch.device("cpu"))
    with record_routing(model) as offloaded:
        model(ids)
    assert torch.equal(resident.stacked(), prefetched.stacked())
    assert torch.equal(resident.stacked(), offloaded.stacked())


@torch.no_grad()
def test_what_was_recorded_until_an_error_is_there() -> None:
    model = build("mixtral")
    with pytest.raises(KeyboardInterrupt), record_routing(model) as trace:  # noqa: PT012 - that is what is tested
        model(prompt(3))
        raise KeyboardInterrupt
    assert trace.stacked().shape[1] == 3


@torch.no_grad()
def test_a_trace_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    model = build("mixtral")
    with record_routing(model) as trace:
        model(prompt(3))
        model(prompt(1))
    trace.save(tmp_path / "trace.safetensors")
    again = RoutingTrace.load(tmp_path / "trace.safetensors")
    assert (again.model, again.num_experts, again.calls) == (trace.model, trace.num_experts, trace.calls)
    assert again.banks == trace.banks
    assert torch.equal(again.stacked(), trace.stacked())


@torch.no_grad()
def test_banks_that_were_not_called_are_none_the_less_in_the_trace(tmp_path: Path) -> None:
    model = build("mixtral")
    first = find_banks(model).banks[0].modules[0]
    with record_routing(model) as trace:
        first(torch.zeros(2, 64), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2))
    trace.save(tmp_path / "trace.safetensors")
    again = RoutingTrace.load(tmp_path / "trace.safetensors")
    assert again.banks == trace.banks
    assert list(again.calls.values()) == [[2]]
    with pytest.raises(ValueError, match="did not see the same tokens"):
        again.stacked()


def test_a_file_of_another_kind_is_no_trace(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("text")
    for name in ("other", "text"):
        with pytest.raises(ValueError, match="is no routing trace"):
            RoutingTrace.load(tmp_path / f"{name}.safetensors")


# -- deciding -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_recorded_trace_gives_the_same_logits_again() -> None:
    """Prompt and decode steps, each with the ids that it had."""
    model, ids = build("qwen3_moe"), prompt(6)
    with record_routing(model) as trace:
        expected = model(ids).logits
    with inject_routing(model, trace) as injection:
        assert injection is not None
        assert torch.equal(model(ids).logits, expected)
        injection.seek(0)
        assert torch.equal(model(ids).logits, expected)
    assert not any(module._forward_pre_hooks for module in model.modules()), "hooks are left behind"


@pytest.mark.parametrize("way", ["resident", "prefetching", "accelerate"])
@torch.no_grad()
def test_forwards_take_the_next_tokens_of_a_table(way: str) -> None:
    """Five, then two one by one; then it starts again."""
    model = build("mixtral")
    ids = table(model, 7)
    if way == "accelerate":
        cpu_offload(model, torch.device("cpu"))

    def run() -> None:
        with inject_routing(model, ids), inside(model) as seen:
            for tokens in (5, 1, 1, 4):
                model(prompt(tokens))
        for bank, parts in enumerate(seen):
            assert torch.equal(torch.cat(parts), torch.cat([ids[bank], ids[bank, :4]]))

    if way == "prefetching":
        with prefetching(model, 2, torch.device("cpu")):
            run()
    else:
        run()


@torch.no_grad()
def test_a_function_decides_for_each_call() -> None:
    """Also by keyword, and from a tensor that its owner changes between calls."""
    model = build("mixtral")
    static = torch.tensor([[1, 2]])
    called: list[int] = []

    def choose(bank: ExpertBank, ids: torch.Tensor) -> torch.Tensor:
        called.append(bank.index)
        return static

    with inject_routing(model, choose) as injection, inside(model) as seen:
        model(prompt(1))
        static.fill_(3)
        model(prompt(1))
    assert injection is None
    assert called == [*range(5)] * 2
    assert [part.tolist() for part in seen[4]] == [[[1, 2]], [[3, 3]]]
    experts = find_banks(model).banks[0].modules[0]
    hidden, weights = torch.ones(1, 64), torch.ones(1, 2)
    expected = experts(hidden, static, weights)
    with inject_routing(model, choose):
        assert torch.equal(experts(hidden, top_k_weights=weights, top_k_index=torch.tensor([[5, 6]])), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda ids: ids[1:], r"must be \(banks, tokens, top-k\) for 5 banks", id="a bank less"),
        pytest.param(lambda ids: ids[0], r"must be \(banks, tokens, top-k\)", id="two dimensions"),
        pytest.param(lambda ids: ids[:, :0], r"must be \(banks, tokens, top-k\)", id="no token"),
        pytest.param(lambda ids: ids.float(), "must be integers", id="not integers"),
        pytest.param(lambda ids: ids - 1, "has 8 experts, but the ids are -1 to", id="negative"),
        pytest.param(lambda ids: ids + 2, "has 8 experts, but the ids are", id="beyond the last"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_at_once(change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    model = build("mixtral")
    with pytest.raises(ValueError, match=message), inject_routing(model, change(table(model, 40))):
        pass


@torch.no_grad()
def test_a_call_that_does_not_fit_is_refused() -> None:
    model = build("mixtral")
    with inject_routing(model, table(model, 4)) as injection:
        assert injection is not None
        with pytest.raises(ValueError, match="is called with 5 tokens, but the table has 4"):
            model(prompt(5))
        with pytest.raises(ValueError, match="tokens 0 to 3, not 4"):
            injection.seek(4)
    with inject_routing(model, table(model, 4)[..., :1]), pytest.raises(ValueError, match="to 2 experts, but the table has 1"):
        model(prompt(2))
    for wrong in (lambda bank, ids: ids[:1], lambda bank, ids: ids.int(), lambda bank, ids: None):
        with inject_routing(model, wrong), pytest.raises(ValueError, match=r"the ids injected into model\.layers\.0"):
            model(prompt(2))


@torch.no_grad()
def test_a_trace_of_another_model_is_refused() -> None:
    with record_routing(build("mixtral")) as trace:
        pass
    with (
        pytest.raises(ValueError, match=r"of other expert banks \(MixtralForCausalLM, 5 banks\)"),
        inject_routing(build("qwen3_moe"), trace),
    ):
        pass


@pytest.mark.gpu
@torch.no_grad()
def test_a_replayed_graph_takes_the_next_tokens(device: torch.device) -> None:
    """And nothing of it makes the host wait."""
    model = build("mixtral")
    # grouped_mm can't be captured in float32.
    model.set_experts_implementation("batched_mm")
    bank = find_banks(model).banks[-1]
    experts = bank.modules[0].to(device)
    ids = table(model, 6)
    hidden, routed = torch.ones(1, 64, device=device), torch.zeros(1, 2, dtype=torch.long, device=device)
    weights = torch.ones(1, 2, device=device)
    expected = [experts(hidden, ids[-1, token : token + 1].to(device), weights) for token in range(6)]
    with inject_routing(model, ids) as injection:
        assert injection is not None
        experts(hidden, routed, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = experts(hidden, routed, weights)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for start in (0, 3):
                injection.seek(start)
                seen = []
                for _ in range(3):
                    graph.replay()
                    seen.append(output.clone())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(map(torch.equal, seen, expected[3:]))
