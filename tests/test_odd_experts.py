"""Experts as nobody in transformers writes them, as remote code may: each exact, or left where it is with the reason."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.discovery import find_banks
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import Snapshot

EXPERTS, WIDTH, INNER, TOP_K, LAYERS = 6, 16, 24, 2, 5


class Mlp(nn.Module):
    """One expert."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.up(hidden.to(self.up.weight.dtype))))  # type: ignore[no-any-return]


class Unlike(Mlp):
    """One of another kind, with a buffer."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__(inner)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.scale  # type: ignore[operator]


def mixed(experts: Iterable[Callable[..., Any]], hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """What those that tokens are routed to make of them."""
    output = torch.zeros_like(hidden)
    for number, expert in enumerate(experts):
        token, place = torch.where(ids == number)
        if token.numel():
            output.index_add_(0, token, expert(hidden[token]).to(hidden.dtype) * weights[token, place, None])
    return output


class Block(nn.Module):
    """A layer that routes to whatever it has under `own`."""

    def __init__(self, own: str, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.own = nn.Linear(WIDTH, EXPERTS, bias=False), own
        setattr(self, own, experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(hidden).softmax(-1).topk(TOP_K)
        return hidden + self.mixed(getattr(self, self.own), hidden, ids, weights)  # type: ignore[no-any-return]

    def mixed(self, experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        return mixed(experts, hidden, ids, weights)


class Calling(Block):
    """The same, of experts that do this themselves, and give more than that."""

    def mixed(self, experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        output = experts(hidden, ids, weights)
        return output if isinstance(output, torch.Tensor) else output["hidden"] if type(output) is dict else output[0]


class CallingByName(Block):
    def mixed(self, experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        return experts(hidden=hidden, chosen=ids, scales=weights)


class CallingWithAMask(Block):
    """What is said of an expert is whether a token is routed to it."""

    def mixed(self, experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        return experts(hidden, torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter(1, ids, True), weights)


class Packed(nn.Module):
    """A linear layer of which only the values are a Parameter, as HQQ has it: its scales are in a dict."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randint(0, 256, (rows, columns), dtype=torch.uint8), requires_grad=False)
        self.about = {"scale": torch.rand(rows, 1) / 64, "zero": torch.full((rows, 1), 128.0)}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, (self.values - self.about["zero"]) * self.about["scale"])


class PackedMlp(Mlp):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up, self.down = Packed(INNER, WIDTH), Packed(WIDTH, INNER)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.up(hidden)))  # type: ignore[no-any-return]


def some(like: Callable[..., Any] = Mlp) -> nn.ModuleList:
    return nn.ModuleList(like() for _ in range(EXPERTS))


class Wrapper(nn.Module):
    """Experts in a list in a module, which are given one batch each."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped_experts = some()

    def forward(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        return [expert(batch) for expert, batch in zip(self.wrapped_experts, batches, strict=True)]


class CallingWithBatches(Block):
    def mixed(self, experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        batches = experts([hidden[(ids == number).any(1)] for number in range(EXPERTS)])
        return mixed([lambda _, batch=batch: batch for batch in batches], hidden, ids, weights)


Weights = Callable[..., Any]


class Stacks(nn.Module):
    """Weights of all experts; `keep` makes of a tensor what the module has."""

    def __init__(self, keep: Weights = nn.Parameter, **attributes: Any) -> None:
        super().__init__()
        self.up, self.down = keep(torch.randn(EXPERTS, WIDTH, INNER) / 8), keep(torch.randn(EXPERTS, INNER, WIDTH) / 8)
        for name, value in attributes.items():
            setattr(self, name, value)

    def each(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return [lambda given, e=e: functional.silu(given @ self.up[e]) @ self.down[e] for e in range(EXPERTS)]

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, scales: torch.Tensor) -> Any:
        return mixed(self.each(), hidden, chosen, scales)


class SomeExperts(Stacks):
    pass


class ByNameOnly(Stacks):
    def forward(self, hidden: torch.Tensor, *, scales: torch.Tensor, chosen: torch.Tensor) -> Any:
        return super().forward(hidden, chosen, scales)


class Masked(Stacks):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, scales: torch.Tensor) -> Any:
        return super().forward(hidden, mask.nonzero()[:, 1].view(-1, TOP_K), scales)


class RoutesItself(SomeExperts):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights, ids = self.gate(hidden).softmax(-1).topk(TOP_K)
        return hidden + mixed(self.each(), hidden, ids, weights)  # type: ignore[no-any-return]


class Gives(Stacks):
    """Its output in what `give` makes of it."""

    def __init__(self, give: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, scales: torch.Tensor) -> Any:
        return self.give(super().forward(hidden, chosen, scales), chosen)


Pair = namedtuple("Pair", "hidden, ids")


def in_a_buffer(linear: nn.Linear) -> nn.Linear:
    value = linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", value)
    return linear


def with_buffers() -> Mlp:
    """As some quantizations keep theirs."""
    expert = Mlp()
    in_a_buffer(expert.up), in_a_buffer(expert.down)
    return expert


def buffers(**attributes: Any) -> SomeExperts:
    made = SomeExperts(**attributes)
    for name in ("up", "down"):
        value = getattr(made, name).detach()
        delattr(made, name)
        made.register_buffer(name, value)
    return made


def sharing(first: nn.ModuleList) -> nn.ModuleList:
    first[3].up = first[1].up
    return first


def turns(*likes: Callable[[], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(likes[number % len(likes)]() for number in range(EXPERTS))


# A layer, and whether single experts are sent for few tokens.
EXACT: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "a list by another name, beside a router": (lambda: Block("mlp", some()), False),
    "a list that is called something of experts": (lambda: Block("local_experts", some()), False),
    "a list in a wrapper": (lambda: CallingWithBatches("experts", Wrapper()), False),
    "experts of several sizes": (lambda: Block("experts", nn.ModuleList(Mlp(8 + 8 * e) for e in range(EXPERTS))), False),
    "experts of several types": (lambda: Block("experts", turns(Mlp, lambda: Mlp().bfloat16())), False),
    "experts of several kinds, with buffers": (lambda: Block("experts", turns(Mlp, Unlike)), False),
    "bytes with scales elsewhere": (lambda: Block("experts", some(PackedMlp)), False),
    "one expert under two numbers": (lambda: Block("experts", nn.ModuleList([*some()[1:], *[Mlp()] * 2][-EXPERTS:])), False),
    "called by name": (lambda: CallingByName("moe", Stacks()), True),
    "called by name only, in another order": (lambda: CallingByName("moe", ByNameOnly()), False),
    "given a mask": (lambda: CallingWithAMask("moe", Masked()), False),
    "weights as attributes": (lambda: Calling("experts", SomeExperts(torch.clone)), False),
    "weights in lists of parameters": (
        lambda: Calling("moe", Stacks(lambda stack: nn.ParameterList(map(nn.Parameter, stack)))),
        False,
    ),
    "a router inside": (lambda: RoutesItself(n_routed_experts=EXPERTS), False),
    "tuples": (lambda: Calling("moe", Gives(lambda output, ids: (output, None, [ids]))), True),
    "named tuples": (lambda: Calling("moe", Gives(Pair)), True),
    "dicts": (lambda: Calling("moe", Gives(lambda output, ids: {"hidden": output, "ids": ids})), True),
    "outputs of transformers": (lambda: Calling("moe", Gives(lambda output, _: BaseModelOutput(output))), True),
}
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "some that share weights": (lambda: Block("experts", sharing(some())), "some of its experts share weights"),
    "a list of those with buffers": (lambda: Block("experts", some(with_buffers)), "its weights are buffers"),
    "stacks that are buffers": (lambda: Calling("experts", buffers()), "its weights are buffers"),
    "weights in lists among attributes": (lambda: Calling("experts", SomeExperts(list)), "its weights are neither among"),
    "one after the other in a matrix": (
        lambda: Calling("experts", InARow(lambda stack: nn.Parameter(stack.flatten(0, 1)))),
        "lie one after the other in matrices",
    ),
    "a router inside, and no number": (lambda: RoutesItself(), r"its forward takes \(hidden\)"),
    "a sequence that is no sequence": (lambda: Block("experts", nn.Sequential(*some())), "in no layout that is known"),
}


class InARow(SomeExperts):
    def each(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        up, down = self.up.view(EXPERTS, WIDTH, INNER), self.down.view(EXPERTS, INNER, WIDTH)
        return [lambda given, e=e: functional.silu(given @ up[e]) @ down[e] for e in range(EXPERTS)]


@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("kind", EXACT)
def test_the_same_bits(kind: str, slots: int, grad: bool) -> None:
    """Off, on, again, and off; prompts and tokens."""
    layer, routed = EXACT[kind]
    model, device = nn.Sequential(*(layer() for _ in range(LAYERS))), FakeDevice("lazy")
    given = [torch.randn(20, WIDTH), torch.randn(1, WIDTH), torch.randn(2, WIDTH)]
    with torch.set_grad_enabled(grad):
        expected, before = [model(hidden) for hidden in given], Snapshot.of(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            enable_expert_prefetch(model, slots, device=device, progress=False)
        assert sum(bank.nbytes for bank in find_banks(model).banks) > 0.6 * sum(map(size, model.children()))
        for _ in range(2):
            with device.watching():
                assert all(torch.equal(model(hidden), other) for hidden, other in zip(given, expected, strict=True))
        if grad:
            with pytest.raises(RuntimeError, match="before training"):
                model(given[0]).sum().backward()
        report = model.expert_prefetch.report()
        disable_expert_prefetch(model)
        before.assert_restored(model)
        assert all(torch.equal(model(hidden), other) for hidden, other in zip(given, expected, strict=True))
    assert report.banks == LAYERS
    assert report.fallbacks == report.idle_banks == 0
    assert report.lookahead_hits > 0
    # One that wants all rows shows it once.
    assert report.routed_calls >= 4 * LAYERS if routed else report.routed_calls <= 2 * LAYERS
    RaceChecker().assert_clean(device.log)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def size(module: nn.Module) -> int:
    """Bytes of what it holds; those of attributes in the place of Parameters count, too."""
    held = {id(tensor): tensor for each in module.modules() for tensor in (*each.parameters(), *vars(each).values())}
    return sum(each.numel() * each.element_size() for each in held.values() if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("kind", LEFT)
@torch.no_grad()
def test_left_where_they_are(kind: str) -> None:
    """With the reason: alone as an error, and in a warning among others that work."""
    layer, reason = LEFT[kind]
    alone, hidden = nn.Sequential(layer()), torch.randn(20, WIDTH)
    with pytest.raises(ValueError, match=f"(?s)has experts, but none.*{reason}"):
        enable_expert_prefetch(alone, device="cpu")
    among = nn.Sequential(*(Block("experts", some()) for _ in range(4)), layer(), layer())
    expected = among(hidden)
    device = FakeDevice("lazy")
    with pytest.warns(UserWarning, match=reason) as caught:
        enable_expert_prefetch(among, device=device, progress=False)
    assert len(caught) == 1
    assert "4.experts" in str(caught[0].message) or "4 (" in str(caught[0].message)
    assert "5." not in str(caught[0].message), "said once"
    for _ in range(2):
        with device.watching():
            assert torch.equal(among(hidden), expected)
    assert among.expert_prefetch.report().banks == 4
    disable_expert_prefetch(among)
    assert torch.equal(among(hidden), expected)


def test_what_is_no_list_of_experts() -> None:
    """Layers and heads beside something that has another number of rows, and experts that every token reads."""
    model = nn.ModuleDict({"layers": some(), "head": nn.Linear(WIDTH, EXPERTS + 1), "shared_experts": some()})
    model["block"] = Block("experts", some())
    assert [bank.name for bank in find_banks(model).banks] == ["block.experts"]
    assert not find_banks(model).refusals
