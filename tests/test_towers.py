"""Models put together otherwise: several towers, shared Parameters, and lists of experts as remote code has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import architectures
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.discovery import find_banks
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import EXPERTS, TOP_K, Snapshot, build, experts_of, prompt

LONG, NEW_TOKENS = 24, 4


@contextmanager
def exactly(model: nn.Module, slots: int) -> Iterator[FakeDevice]:
    """Prefetched inside, without a race, and as it was afterwards."""
    before, device = Snapshot.of(model), FakeDevice("lazy")
    enable_expert_prefetch(model, slots, device=device, progress=False)
    try:
        with device.watching():
            yield device
        report = model.expert_prefetch.report()
        assert report.fallbacks == 0
        assert report.lookahead_hits > 0
        assert report.idle_banks == 0
    finally:
        disable_expert_prefetch(model)
    before.assert_restored(model)
    RaceChecker().assert_clean(device.log)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


# -- towers ---------------------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Models that take turns, as a thinker and a talker do."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.towers = nn.ModuleList(architectures.build(name) for name in names)

    def run(self) -> list[architectures.Output]:
        return [architectures.run(name, tower) for name, tower in zip(self.names, self.towers, strict=True)]


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize(
    "names",
    [("qwen3_omni_moe_thinker", "qwen3_omni_moe_talker"), ("mixtral", "nemotron_h_latent", "switch_transformers")],
    ids=["thinker and talker", "unlike ones"],
)
def test_towers_that_take_turns(names: tuple[str, ...], slots: int) -> None:
    """One set of slots, as large as the largest bank of them all."""
    model = Towers(*names)
    try:
        expected = model.run()
    except TypeError as error:
        # Older versions run into an error of their own in the talker, prefetched or not.
        pytest.skip(f"{names[-1]} does not run in transformers {transformers.__version__}: {error}")
    banks = find_banks(model).banks
    assert {bank.name.partition(".layers")[0].split(".")[1] for bank in banks} == {str(i) for i, _ in enumerate(names)}
    with exactly(model, slots):
        for _ in range(2):
            assert all(output.equals(other) for output, other in zip(model.run(), expected, strict=True))
        assert model.expert_prefetch.report().device_bytes == slots * max(bank.nbytes for bank in banks)
    assert all(output.equals(other) for output, other in zip(model.run(), expected, strict=True))


# -- shared ---------------------------------------------------------------------------------------------------------------


def test_parameters_of_two_modules_are_one_bank() -> None:
    """One copy in host memory, which both point at; the same objects throughout."""
    model = build("qwen3_moe")
    names = list(experts_of(model))
    first, last = (model.get_submodule(names[index]) for index in (0, -1))
    last.gate_up_proj, last.down_proj = first.gate_up_proj, first.down_proj
    with torch.no_grad():
        expected = model(prompt(LONG)).logits
    bank = find_banks(model).banks[0]
    assert bank.modules == (first, last)
    assert len(find_banks(model).banks) == len(names) - 1
    with exactly(model, 3), torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(prompt(LONG)).logits, expected)
            assert last.gate_up_proj is first.gate_up_proj
        assert model.expert_prefetch.report().host_bytes == (len(names) - 1) * bank.nbytes
    assert last.gate_up_proj is first.gate_up_proj


# -- rows that are all read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_where_every_row_is_read_no_row_is_left_out(slots: int) -> None:
    """Experts that nobody is routed to are multiplied by zero; poison in a slot, which is NaN, would show."""
    model = architectures.build("llama4_text")
    expected = architectures.run("llama4_text", model)
    for experts in experts_of(model).values():
        before, experts.down_proj.data = experts.down_proj.data, experts.down_proj.clone()
        experts.down_proj.data[0] = torch.nan
        assert architectures.logits_of("llama4_text", model).isnan().any(), "what this test rests on"
        experts.down_proj.data = before
    with exactly(model, slots):
        for _ in range(2):
            assert architectures.run("llama4_text", model).equals(expected)
        assert model.expert_prefetch.report().routed_calls == 0


# -- lists, as remote code has them -------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """One expert, made of a row of stacked ones."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        half, hidden = gate_up.shape[0] // 2, gate_up.shape[1]
        self.w1, self.w3 = (nn.Linear(hidden, half, bias=False) for _ in range(2))
        self.w2 = nn.Linear(half, hidden, bias=False)
        for linear, value in ((self.w1, gate_up[:half]), (self.w3, gate_up[half:]), (self.w2, down)):
            linear.weight.data = value.clone()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(hidden)) * self.w3(hidden))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block that routes, and loops over a list of its experts."""

    def __init__(self, gate: torch.Tensor, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(gate.shape[1], EXPERTS, bias=False)
        self.gate.weight.data = gate.clone()
        self.experts = nn.ModuleList(Mlp(experts.gate_up_proj[i], experts.down_proj[i]) for i in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.flatten(0, -2)
        weights, ids = self.gate(flat).softmax(-1).topk(TOP_K)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(ids == number)
            if token.numel():
                output.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return output.view(hidden.shape)


def older(dtype: torch.dtype) -> PreTrainedModel:
    """A model of the style from before experts were stacked."""
    model = build("mixtral", dtype)
    for layer in model.model.layers:
        layer.mlp = Block(layer.mlp.gate.weight, layer.mlp.experts).to(dtype)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_remote_code_with_a_list_of_experts(slots: int, dtype: torch.dtype) -> None:
    """Prompts and tokens, greedy and in beams."""
    model, ids = older(dtype), prompt(LONG, batch=2)

    @torch.no_grad()
    def outcome() -> list[torch.Tensor]:
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        return [model(ids).logits, model.generate(ids, **options), model.generate(ids, num_beams=2, **options)]

    expected = outcome()
    banks = find_banks(model).banks
    assert [bank.name for bank in banks] == [f"model.layers.{number}.mlp.experts" for number in range(len(banks))]
    assert all(bank.num_experts == EXPERTS and len(bank.parameters) == 3 * EXPERTS for bank in banks)
    with exactly(model, slots):
        for _ in range(2):
            assert all(map(torch.equal, outcome(), expected))
    assert all(map(torch.equal, outcome(), expected))
