"""Banks whose weights are not the holder's own: lists of experts, and experts around another module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.discovery import find_banks
from hf_prefetch.testing import FakeDevice, RaceChecker

EXPERTS, WIDTH = 4, 8


class Mlp(nn.Module):
    """One expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(hidden)))  # type: ignore[no-any-return]


class ListBlock(nn.Module):
    """A Mixture-of-Experts layer as many models outside of transformers have it: the block loops over its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(hidden).argmax(-1)
        output = hidden.clone()
        for number in chosen.unique().tolist():
            rows = chosen == number
            output[rows] += self.experts[number](hidden[rows])
        return output


class Glu(nn.Module):
    """Holds all experts in one matrix, and computes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS * 16, WIDTH))
        self.w2 = nn.Parameter(torch.randn(EXPERTS * 16, WIDTH))

    def forward(self, hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden @ w1.T) @ w2


class WrappedExperts(nn.Module):
    """Reads the weights of the module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.num_experts = Glu(), EXPERTS

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        w1, w2 = (weight.view(EXPERTS, 16, WIDTH) for weight in (self.mlp.w1, self.mlp.w2))
        output = torch.zeros_like(hidden)
        for number in ids.unique().tolist():
            token, place = torch.where(ids == number)
            output.index_add_(0, token, self.mlp(hidden[token], w1[number], w2[number]) * weights[token, place, None])
        return output


class WrappedBlock(nn.Module):
    """Routes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), WrappedExperts()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(hidden).softmax(-1).topk(2)
        return hidden + self.experts(hidden, ids, weights)  # type: ignore[no-any-return]


BLOCKS = {"list": ListBlock, "wrapped": WrappedBlock}


@pytest.fixture(params=BLOCKS, name="model")
def _model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(BLOCKS[request.param]() for _ in range(5))).eval()


def test_what_is_found(model: nn.Module) -> None:
    """The experts and nothing else; hooks go where they are read."""
    banks = find_banks(model).banks
    assert [bank.name for bank in banks] == [f"{number}.experts" for number in range(5)]
    for bank, block in zip(banks, model, strict=True):
        assert bank.num_experts == EXPERTS
        assert bank.modules == ((block,) if isinstance(block, ListBlock) else (block.experts,))
        assert {id(p) for p in bank.parameters.values()} == {id(p) for p in block.experts.parameters()}
        assert not bank.layout.has_rows


@pytest.mark.parametrize("policy", ["eager", "lazy", 0])
@pytest.mark.parametrize("slots", [2, 3, 4])
@torch.no_grad()
def test_same_bits_and_ahead_of_use(model: nn.Module, slots: int, policy: str | int) -> None:
    """On, again, and off; whole banks are sent ahead, by whatever schedule."""
    hidden, device = torch.randn(12, WIDTH), FakeDevice(policy)
    expected, before = model(hidden), dict(model.named_parameters())
    enable_expert_prefetch(model, slots, device=device, progress=False)
    for _ in range(2):
        with device.watching():
            assert torch.equal(model(hidden), expected)
        assert all(now is before[name] for name, now in model.named_parameters())
    report = model.expert_prefetch.report()
    assert (report.calls, report.lookahead_hits, report.fallbacks) == (10, 8, 0)
    disable_expert_prefetch(model)
    assert torch.equal(model(hidden), expected)
    assert all(now is before[name] for name, now in model.named_parameters())
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    RaceChecker().assert_clean(device.log)


@torch.no_grad()
def test_the_model_as_a_whole(model: nn.Module) -> None:
    """Moves are let through or refused, copies refused, weights loaded, whichever module owns them."""
    hidden, other = torch.randn(12, WIDTH), copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.add_(1.0)
    expected = other(hidden)
    enable_expert_prefetch(model, device=FakeDevice(), progress=False)
    model(hidden)
    model.to("cpu")
    for part in (model, model[0], next(iter(model[0].experts.children()))):
        with pytest.raises(RuntimeError, match="disable_expert_prefetch"):
            part.to(torch.float16)
        with pytest.raises(TypeError, match="can't be copied"):
            copy.deepcopy(part)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(hidden), expected)
    disable_expert_prefetch(model)
    model.to(torch.float64)
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())


@torch.no_grad()
def test_a_replaced_weight_is_noticed(model: nn.Module) -> None:
    """The device would get the old one."""
    enable_expert_prefetch(model, device=FakeDevice(), progress=False)
    owner = next(module for module in model[2].experts.modules() if module._parameters)
    name = next(iter(owner._parameters))
    owner._parameters[name] = nn.Parameter(torch.zeros_like(owner._parameters[name]))
    with pytest.raises(RuntimeError, match=r"2\.experts\..* was replaced"):
        model(torch.randn(3, WIDTH))


class Stacks(nn.Module):
    """Experts of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16))

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(torch.einsum("tkih,th->tki", self.up[ids], hidden))
        return torch.einsum("tkhi,tki,tk->th", self.down[ids], inner, weights)


class ListOfLayers(nn.Module):
    """All layers' experts in one list of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(3))
        self.experts = nn.ModuleList(Stacks() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights, ids = gate(hidden).softmax(-1).topk(2)
            hidden = hidden + experts(hidden, ids, weights)
        return hidden


class ListInside(nn.Module):
    """A module called experts around a list that is called so too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = self.Experts()

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

        def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            outputs = torch.stack([expert(hidden) for expert in self.experts], 1)
            return (outputs.gather(1, ids[..., None].expand(*ids.shape, WIDTH)) * weights[..., None]).sum(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(hidden).softmax(-1).topk(2)
        return hidden + self.experts(hidden, ids, weights)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (ListOfLayers, [f"experts.{layer}" for layer in range(3)]),
        (lambda: nn.Sequential(ListInside(), ListInside()), ["0.experts", "1.experts"]),
    ],
)
@torch.no_grad()
def test_lists_within(model: type[nn.Module], names: list[str]) -> None:
    """A list whose members are banks is none itself, and a holder that is found twice is one."""
    torch.manual_seed(0)
    made, device, hidden = model(), FakeDevice(), torch.randn(5, WIDTH)
    expected = [made(hidden), made(hidden[:1])]
    discovery = find_banks(made)
    assert [bank.name for bank in discovery.banks] == names
    assert not discovery.refusals
    assert all(len(bank.holders) == 1 for bank in discovery.banks)
    enable_expert_prefetch(made, device=device, progress=False)
    with device.watching():
        assert all(map(torch.equal, [made(hidden), made(hidden[:1])], expected))
    disable_expert_prefetch(made)
    assert all(map(torch.equal, [made(hidden), made(hidden[:1])], expected))
