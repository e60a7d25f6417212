"""What forwards of which nothing is known leave behind: changed inputs, changed weights, and views of weights for later."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.calls.remains import kept_views
from hf_prefetch.testing import FakeDevice
from models import Snapshot
from test_guarded import EXPERTS, WIDTH, Experts, model_of


class ShiftsIds(Experts):
    """Numbers them as another place does."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ids.add_(1).remainder_(EXPERTS)
        return super().forward(hidden, ids, weights)


class ScalesItsInput(Experts):
    """And shows its weights to something past torch."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden.mul_(1.25)
        weights.mul_(0.5)
        ids.add_(1).remainder_(EXPERTS)
        torch._C._to_dlpack(self.up)  # type: ignore[attr-defined]
        return super().forward(hidden, ids, weights)


class HalvesWeights(Experts):
    """Once."""

    done = False

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not self.done:
            self.done = True
            self.halve()
        return super().forward(hidden, ids, weights)

    def halve(self) -> None:
        self.up.div_(2)


class HalvesRows(HalvesWeights):
    def halve(self) -> None:
        self.up[3].mul_(0.5)


class HalvesAndFails(HalvesWeights):
    """The first call is tried again."""

    def halve(self) -> None:
        self.up.div_(2)
        torch._C._to_dlpack(self.up)  # type: ignore[attr-defined]


class KeepsTransposed(Experts):
    kept: Any = None
    place = "kept"

    def one(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.keep()
        return torch.relu(functional.linear(hidden, self.up[expert])) @ self.read()[expert]

    def keep(self) -> Any:
        return self.down.detach().transpose(1, 2)

    def read(self) -> Any:
        return self.kept


class KeepsList(KeepsTransposed):
    place = "kept['down'][0]"

    def keep(self) -> Any:
        return {"down": [self.down[expert].detach().t() for expert in range(EXPERTS)]}

    def read(self) -> Any:
        return self.kept["down"]


class KeepsStack(KeepsTransposed):
    """As it was handed out."""

    def keep(self) -> Any:
        return (self.down,)

    place = "kept[0]"

    def read(self) -> Any:
        return self.kept[0].transpose(1, 2)


class Listed(nn.Module):
    """Experts one after the other, each with a transposed view of its weight."""

    kept = None
    place = "experts.0.kept"

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(self.One() for _ in range(EXPERTS))

    class One(nn.Module):
        kept: torch.Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if self.kept is None:
                self.kept = self.up.weight.detach().t()
            return hidden @ self.kept

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs = torch.stack([expert(hidden) for expert in self.experts], 1)
        return (outputs.gather(1, ids[..., None].expand(*ids.shape, WIDTH)) * weights[..., None]).sum(1)


def calls() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(tokens, WIDTH) for tokens in (1, 2, 40, 1, 1, 3)]


def run(model: nn.Module) -> list[torch.Tensor]:
    return [model(hidden.clone()) for hidden in calls()]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", [ShiftsIds, ScalesItsInput])
def test_what_a_call_is_given_may_be_changed_in_place(kind: type[Experts], inference: bool) -> None:
    """Also by a call that is tried once more, and as often as without the package."""
    with torch.inference_mode() if inference else torch.no_grad():
        model, device = model_of(kind), FakeDevice()
        expected, before = run(model), Snapshot.of(model)
        enable_expert_prefetch(model, device=device, progress=False)
        with device.watching():
            assert all(map(torch.equal, run(model), expected))
        disable_expert_prefetch(model)
        before.assert_restored(model)
        assert all(map(torch.equal, run(model), expected))


class RunsOut(Experts):
    changes, calls = False, 0

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.changes:
            hidden.mul_(2)
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("changes", [False, True])
@torch.no_grad()
def test_a_call_that_has_changed_its_input_is_not_repeated_for_lack_of_memory(changes: bool) -> None:
    """Caches that were made smaller would let it through with other bits."""
    model = model_of(RunsOut)
    enable_expert_prefetch(model, device=FakeDevice(), progress=False)
    model.expert_prefetch.give_up_cache = lambda bank: True
    model[0].experts.changes = changes
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(2, WIDTH))
    assert model[0].experts.calls == (1 if changes else 2)
    disable_expert_prefetch(model)


@pytest.mark.parametrize("prompt_first", [False, True])
@pytest.mark.parametrize("kind", [HalvesWeights, HalvesRows, HalvesAndFails])
@torch.no_grad()
def test_a_forward_that_writes_into_its_weights_is_told(kind: type[HalvesWeights], prompt_first: bool) -> None:
    """Its later calls would find them as they were."""
    model, device = model_of(kind), FakeDevice()
    before, hidden = Snapshot.of(model), torch.randn(40 if prompt_first else 1, WIDTH)
    enable_expert_prefetch(model, device=device, progress=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"0.experts has written into its own weight up.*reset"):
            model(hidden)
    disable_expert_prefetch(model)
    del model[0].experts.done
    before.assert_restored(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    assert all(map(torch.equal, run(model), run(model_of(kind))))


@pytest.mark.parametrize("prompt_first", [False, True])
@pytest.mark.parametrize("kind", [KeepsTransposed, KeepsList, KeepsStack, Listed])
@torch.no_grad()
def test_a_forward_that_keeps_views_of_its_weights_is_told(kind: Callable[[], Any], prompt_first: bool) -> None:
    """They would show another layer's."""
    model, device = model_of(kind), FakeDevice()
    enable_expert_prefetch(model, device=device, progress=False)
    hidden = torch.randn(40 if prompt_first else 1, WIDTH)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            model(hidden)
        assert f"keeps a view of its weights in the attribute {kind.place}," in str(caught.value)  # type: ignore[attr-defined]
    disable_expert_prefetch(model)
    for module in model.modules():
        if hasattr(module, "kept"):
            module.kept = None
    assert all(map(torch.equal, run(model), run(model_of(kind))))


@torch.no_grad()
def test_views_that_are_made_later_are_found_in_time() -> None:
    """In the memory of any call, not only of that which is looked at."""
    model = model_of(Experts)
    enable_expert_prefetch(model, device=FakeDevice(), progress=False)
    experts, hidden = model[1].experts, torch.randn(1, WIDTH)
    for _ in range(4):
        model(hidden)
    own = experts.one

    def one(*args: Any) -> torch.Tensor:
        experts.kept = experts.__dict__.get("kept", experts.down[0].detach())
        return own(*args)

    experts.one = one
    hiddens = [hidden] * 4
    with pytest.raises(RuntimeError, match="in the attribute kept,"):
        list(map(model, hiddens))
    disable_expert_prefetch(model)


class ReadsFiles(UserDict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError(key)


def test_what_is_no_view_is_none() -> None:
    """Copies, results, what leads back to itself, what has no memory to look at, and what would be read from a file."""
    module, weight = Experts(), torch.randn(3, 4)
    module.copied, module.loop = weight.clone(), [weight.sum()]
    module.loop.append(module.loop)
    module.meta, module.sparse = torch.empty(3, device="meta"), torch.eye(3).to_sparse()
    module.lazy = ReadsFiles(not_there=1)
    assert not list(kept_views(module, [weight]))
    module.register_buffer("late", weight[1:])
    assert list(kept_views(module, [weight])) == ["late"]
