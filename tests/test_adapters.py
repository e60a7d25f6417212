"""Experts that others reach into: adapters, as PEFT adds them and as others may, and kernels in a block's place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.discovery import find_banks
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import EXPERTS, Snapshot, build, experts_of, prompt
from test_towers import older

LONG, RANK, NEW_TOKENS = 24, 2, 4
_DRAWN = torch.Generator().manual_seed(3)


class Delta(nn.Module):
    """Weights and what an adapter adds to them."""

    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


class Adapter(nn.Module):
    """Changes one stack of weights of the module inside, for the time of a call."""

    def __init__(self, inside: nn.Module, innermost: nn.Module, name: str) -> None:
        super().__init__()
        self.inside, self.name = inside, name
        self.__dict__["innermost"] = innermost
        experts, rows, columns = getattr(innermost, name).shape
        self.first = nn.Parameter(torch.randn(experts, rows, RANK, generator=_DRAWN) * 0.1)
        self.second = nn.Parameter(torch.randn(experts, RANK, columns, generator=_DRAWN) * 0.1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        delta = (self.first @ self.second).to(getattr(self.innermost, self.name).dtype)
        parametrize.register_parametrization(self.innermost, self.name, Delta(delta))
        try:
            return self.inside(*args, **kwargs)
        finally:
            parametrize.remove_parametrizations(self.innermost, self.name, leave_parametrized=False)


def adapted(family: str = "qwen3_moe") -> PreTrainedModel:
    """A small model with an adapter for each stack of its experts, one around the other."""
    model = build(family)
    for name, experts in experts_of(model).items():
        outer = experts
        for weight in ("gate_up_proj", "down_proj"):
            outer = Adapter(outer, experts, weight)
        model.set_submodule(name, outer)
    return model


def with_peft(**options: Any) -> Any:
    """The same as PEFT does it."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("qwen3_moe"), peft.LoraConfig(r=RANK, lora_alpha=4, **options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=_DRAWN) * 0.1)
    return model


EXPERTS_TOO = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ADDED: dict[str, Callable[[], Any]] = {
    "own": adapted,
    "target_parameters": lambda: with_peft(**EXPERTS_TOO),
    "one stack of them": lambda: with_peft(target_parameters=["experts.down_proj"]),
    "all-linear": lambda: with_peft(target_modules="all-linear"),
    "attention": lambda: with_peft(target_modules=["q_proj", "v_proj"]),
}


@torch.no_grad()
def outcome(model: Any) -> tuple[torch.Tensor, ...]:
    """Logits of a prompt, and tokens after it."""
    ids = prompt(LONG)
    return model(ids).logits, model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=False)


@pytest.mark.parametrize("way", ADDED)
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_the_same_bits_ahead_of_use(way: str, slots: int) -> None:
    """Off, on, again, and off; experts travel, adapters stay on the device."""
    torch.manual_seed(0)
    model = ADDED[way]()
    expected, before, device = outcome(model), Snapshot.of(model), FakeDevice("lazy")
    banks = find_banks(model).banks
    experts = {id(parameter) for bank in banks for parameter in bank.parameters.values()}
    assert len(banks) == 7
    assert all(bank.num_experts == EXPERTS and len(bank.parameters) == 2 for bank in banks)
    assert not any(id(parameter) in experts for name, parameter in model.named_parameters() if "lora" in name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable_expert_prefetch(model, slots, device=device, progress=False)
    for _ in range(2):
        with device.watching():
            assert all(map(torch.equal, outcome(model), expected))
    report = model.expert_prefetch.report()
    assert report.fallbacks == 0
    assert report.lookahead_hits > 0
    # Whoever adds to weights reads all of them.
    assert (report.routed_calls > 0) == (way == "attention")
    disable_expert_prefetch(model)
    before.assert_restored(model)
    assert all(map(torch.equal, outcome(model), expected))
    RaceChecker().assert_clean(device.log)


def test_adapters_in_a_list_of_experts() -> None:
    """They are weights of each expert like others, and travel with it."""
    peft = pytest.importorskip("peft")
    base = older(torch.float32)
    base.config.model_type = "older"  # of which PEFT does not believe that its experts are stacked
    config = peft.LoraConfig(r=RANK, lora_alpha=4, target_modules=r".*experts\.\d+\.w[12]")
    model, device = peft.get_peft_model(base, config).eval(), FakeDevice("lazy")
    for parameter in (parameter for name, parameter in model.named_parameters() if "lora_B" in name):
        parameter.data = torch.randn(parameter.shape, generator=_DRAWN) * 0.1
    expected, before = outcome(model), Snapshot.of(model)
    assert sum("lora" in name for name in find_banks(model).banks[0].parameters) == 4 * EXPERTS
    enable_expert_prefetch(model, device=device, progress=False)
    for _ in range(2):
        with device.watching():
            assert all(map(torch.equal, outcome(model), expected))
    assert model.expert_prefetch.report().lookahead_hits > 0
    with device.watching(), model.disable_adapter():
        assert not torch.equal(outcome(model)[0], expected[0])
    disable_expert_prefetch(model)
    before.assert_restored(model)
    RaceChecker().assert_clean(device.log)


def test_an_adapter_shows() -> None:
    """What the test above rests on."""
    model = adapted()
    expected = outcome(model)[0]
    for adapter in (module for module in model.modules() if isinstance(module, Adapter)):
        before, adapter.first.data = adapter.first.data, torch.zeros_like(adapter.first)
        assert not torch.equal(outcome(model)[0], expected)
        adapter.first.data = before


@pytest.mark.parametrize("way", ["target_parameters", "all-linear"])
def test_adapters_that_are_switched_off_and_on(way: str) -> None:
    """As PEFT's users do; what the model gives without them is what it gave before."""
    model = ADDED[way]()
    expected = outcome(model)[0]
    with model.disable_adapter():
        without = outcome(model)[0]
    assert not torch.equal(expected, without)
    enable_expert_prefetch(model, device="cpu")
    with model.disable_adapter():
        assert torch.equal(outcome(model)[0], without)
    assert torch.equal(outcome(model)[0], expected)
    disable_expert_prefetch(model)


@pytest.mark.parametrize("way", ["target_parameters", "all-linear", "attention"])
@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_adapters_that_are_merged_into_packed_weights(merge: str, way: str) -> None:
    """What PEFT writes is what is computed with, and what is there afterwards: the bits of a model that was never packed."""
    merged = []
    for is_packed in (False, True):
        torch.manual_seed(0)
        _DRAWN.manual_seed(0)
        model = ADDED[way]().to(torch.bfloat16)
        if is_packed:
            enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
            assert model.expert_prefetch.report().host_bytes < 0.9 * model.expert_prefetch.report().weight_bytes
        whole = getattr(model, merge)() or model
        found = [outcome(whole)[0]]
        disable_expert_prefetch(model)
        merged.append([*found, outcome(whole)[0], *whole.state_dict().values()])
    assert all(map(torch.equal, *merged))


@pytest.mark.parametrize("way", ["own", "target_parameters"])
def test_training_adapters_is_refused(way: str) -> None:
    """Also where nothing before the experts needs a gradient: without a word theirs would be missing."""
    model = ADDED[way]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("lora_", ".first", ".second")))
    enable_expert_prefetch(model, device="cpu")
    with pytest.raises(RuntimeError, match=r"disable_expert_prefetch\(model\) before training"):
        model(prompt(LONG)).logits.sum().backward()
    disable_expert_prefetch(model)
    model(prompt(LONG)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_adapters_that_are_added_to_an_enabled_model_are_refused() -> None:
    """With the remedy, which works."""
    model = build("qwen3_moe")
    enable_expert_prefetch(model, device="cpu")
    name, experts = next(iter(experts_of(model).items()))
    model.set_submodule(name, Adapter(experts, experts, "down_proj"))
    with pytest.raises(RuntimeError, match=r"an adapter that was added since.*enable it again"):
        outcome(model)
    disable_expert_prefetch(model)
    expected = outcome(model)
    enable_expert_prefetch(model, device="cpu")
    assert all(map(torch.equal, outcome(model), expected))
    disable_expert_prefetch(model)


# -- kernels in the place of a block --------------------------------------------------------------------------------------


class Kernel(nn.Module):
    """Takes the place of a block's forward, as `use_kernels=True` has it, and reads the experts' weights by itself."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = hidden.flatten(0, -2)
        logits, weights, ids = self.router(flat)
        experts = self.experts
        assert experts.gate_up_proj.shape[0] == experts.num_experts
        up = torch.einsum("ti,tkij->tkj", flat, experts.gate_up_proj[ids]) + experts.gate_up_proj_bias[ids]
        down = torch.einsum("tkj,tkji->tki", up[..., ::2].sigmoid() * up[..., 1::2], experts.down_proj[ids])
        return ((down + experts.down_proj_bias[ids]) * weights[..., None]).sum(1).view(hidden.shape), logits


def with_kernels() -> PreTrainedModel:
    """A gpt-oss whose blocks are computed by such."""
    model = build("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(Kernel.forward, layer.mlp)
    return model


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_kernel_in_the_place_of_a_block(slots: int) -> None:
    """It is the one that is hooked; nothing calls the experts' own forward. Enabled twice, it is found again."""
    model, device = with_kernels(), FakeDevice("lazy")
    expected, before = outcome(model), Snapshot.of(model)
    assert not torch.equal(expected[0], outcome(build("gpt_oss"))[0])
    for _ in range(2):
        enable_expert_prefetch(model, slots, device=device, progress=False)
        with device.watching():
            assert all(map(torch.equal, outcome(model), expected))
            assert all(map(torch.equal, outcome(model), expected))
        report = model.expert_prefetch.report()
        assert report.idle_banks == report.fallbacks == report.routed_calls == 0
        assert report.lookahead_hits > 0
    disable_expert_prefetch(model)
    before.assert_restored(model)
    assert all(map(torch.equal, outcome(model), expected))
    RaceChecker().assert_clean(device.log)


def test_a_kernel_that_comes_later_is_noticed() -> None:
    """It reads host memory past the hooks, which the report tells."""
    model = build("gpt_oss")
    enable_expert_prefetch(model, device="cpu")
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(Kernel.forward, layer.mlp)
    model.model.layers[0].mlp.experts(*(torch.zeros(1, 64), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2)))
    assert torch.equal(outcome(model)[0], outcome(with_kernels())[0])
    assert "; 6 were never called" in str(model.expert_prefetch.report())
    disable_expert_prefetch(model)
