"""Single experts for forwards of which nothing is known: what they read is seen, and what they want besides is there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, hooks
from hf_prefetch.calls.guarded import GuardedRows, Present
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import Snapshot

EXPERTS, WIDTH, LAYERS = 8, 16, 5


class Experts(nn.Module):
    """Stacked experts with a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2, requires_grad=False)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2, requires_grad=False)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for expert in ids.unique():
            token, place = torch.where(ids == expert)
            output.index_add_(0, token, self.one(hidden[token], expert) * weights[token, place, None])
        assert type(output) is torch.Tensor
        return output

    def one(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.relu(nn.functional.linear(hidden, self.up[expert])), self.down[int(expert)])


class ReadsAll(Experts):
    """Weighs each expert against the mean of all."""

    def one(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return super().one(hidden, expert) + hidden @ self.down.mean(0)


class ReadsAnother(Experts):
    """Wants an expert that nobody was routed to."""

    def one(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return super().one(hidden, expert) + hidden @ self.down[-1]


class Gathers(Experts):
    """Takes its rows in one go."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = self.up[ids], torch.index_select(self.down, 0, ids.flatten()).view(*ids.shape, WIDTH, WIDTH)
        return torch.einsum("tkoi,tkij,tj,tk->to", down, up, hidden, weights)


class ReadsMemory(Experts):
    """Takes a pointer, as a kernel does of which torch knows nothing."""

    def one(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        values = torch.from_numpy(self.down.numpy())
        return super().one(hidden, expert) + hidden @ values[expert]


class ReadsPastTorch(Experts):
    """The same without a word to torch, as an extension does."""

    def one(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            size, pointer = self.down.numel(), self.down.data_ptr()
        values = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (size,))
        return super().one(hidden, expert) + hidden @ torch.from_numpy(values).view(self.down.shape)[expert]


class Fails(Experts):
    """Has an error of its own."""

    fails = False

    def one(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ZeroDivisionError
        return super().one(hidden, expert)


class RunsOut(Experts):
    """Has no room for one of them."""

    def one(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError


class Block(nn.Module):
    """Routes to them."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS).requires_grad_(False), experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(hidden).softmax(-1).topk(2)
        return hidden + self.experts(hidden, ids, weights)  # type: ignore[no-any-return]


def model_of(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind()) for _ in range(LAYERS)))


PROMPT, TOKENS = 40, 3


@pytest.mark.parametrize("policy", ["eager", "lazy", 0])
@pytest.mark.parametrize(
    ("kind", "routed"),
    # A bank whose forward wants more than routed rows shows it once, and gets whole banks from then on.
    [(Experts, TOKENS), (ReadsAll, 1), (ReadsAnother, None), (Gathers, 1), (ReadsMemory, 1), (ReadsPastTorch, 1)],
)
@torch.no_grad()
def test_the_same_bits_whatever_is_read(kind: type[Experts], routed: int | None, policy: str | int) -> None:
    """Rows that were not sent are NaN in a slot of this device, and would show."""
    model = model_of(kind)
    hidden = [torch.randn(PROMPT, WIDTH), *(torch.randn(1, WIDTH) for _ in range(TOKENS))]
    expected, before, device = [model(each) for each in hidden], Snapshot.of(model), FakeDevice(policy)
    enable_expert_prefetch(model, device=device, progress=False)
    with device.watching():
        assert all(torch.equal(model(each), other) for each, other in zip(hidden, expected, strict=True))
    report = model.expert_prefetch.report()
    if routed is None:
        # Somebody may have been routed there.
        assert LAYERS <= report.routed_calls < TOKENS * LAYERS
    else:
        assert report.routed_calls == routed * LAYERS
    assert report.lookahead_hits > 0
    assert report.fallbacks == 0
    with device.watching():
        assert all(torch.equal(model(each), other) for each, other in zip(hidden, expected, strict=True))
    disable_expert_prefetch(model)
    before.assert_restored(model)
    assert all(torch.equal(model(each), other) for each, other in zip(hidden, expected, strict=True))
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    RaceChecker().assert_clean(device.log)


@pytest.mark.parametrize("kind", [Experts, RunsOut])
@torch.no_grad()
def test_nothing_of_a_call_outlives_it(kind: type[Experts], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what it was given nor what was made for it: that may be of a pool of memory that insists on it."""
    made: list[weakref.ref[Present]] = []

    class Watched(Present):
        def __init__(self, ids: torch.Tensor, count: int, complete: Callable[[], object]) -> None:
            super().__init__(ids, count, complete)
            made.append(weakref.ref(self))

    monkeypatch.setattr(hooks, "Present", Watched)
    model, hidden = model_of(kind), torch.randn(1, WIDTH)
    enable_expert_prefetch(model, device="cpu", progress=False)
    given = weakref.ref(hidden)
    with pytest.raises(torch.OutOfMemoryError) if kind is RunsOut else contextlib.nullcontext():
        model(hidden)
    del hidden
    gc.collect()
    assert given() is None
    assert made
    assert not [one for one in made if one() is not None]
    disable_expert_prefetch(model)


@torch.no_grad()
def test_an_error_of_its_own_comes_through() -> None:
    """Also in the first call of few tokens, which is tried once more with whole banks; and the next call works."""
    for proven in (False, True):
        model, hidden = model_of(Fails), torch.randn(1, WIDTH)
        expected = model(hidden)
        enable_expert_prefetch(model, device=FakeDevice(), progress=False)
        if proven:
            assert torch.equal(model(hidden), expected)
        model[2].experts.fails = True
        with pytest.raises(ZeroDivisionError):
            model(hidden)
        model[2].experts.fails = False
        assert torch.equal(model(hidden), expected)
        disable_expert_prefetch(model)


def test_no_pointer_is_given_away() -> None:
    """A kernel that got a null pointer would end the whole process's use of its device."""
    guarded = GuardedRows(torch.randn(EXPERTS, 4), Present(torch.tensor([1]), EXPERTS, lambda: None))
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="data pointer"):
        guarded.data_ptr()


def test_what_is_done_with_a_stack() -> None:
    """Rows that are there bring nothing; all else brings the others, once, and computes what the stack would."""
    stack, brought = torch.randn(EXPERTS, 4, 3), []

    def guard() -> tuple[GuardedRows, Present]:
        brought.clear()
        present = Present(torch.tensor([[1, 9], [-1, 3]]), EXPERTS, lambda: brought.append(1))
        return GuardedRows(stack, present), present

    guarded, present = guard()
    assert (guarded.shape, guarded.stride(), guarded.dtype) == (stack.shape, stack.stride(), stack.dtype)
    for row in (1, 3, 7, -1, torch.tensor(3)):
        assert torch.equal(guarded[row], stack[row])
        assert type(guarded[row]) is torch.Tensor
    assert torch.equal(guarded[1, :, 0], stack[1, :, 0])
    assert not present.is_whole
    for do in (
        lambda given: given[0],
        lambda given: given[1:3],
        lambda given: given.select(1, 1),
        lambda given: given[torch.tensor([1, 3])],
        lambda given: given[torch.tensor(1, dtype=torch.uint8)],
        lambda given: given[torch.tensor(True)],
        lambda given: given[True],
        lambda given: given.sum(0),
        lambda given: torch.cat([given, given]),
        lambda given: given.transpose(1, 2),
        lambda given: given.unbind()[1],
        lambda given: given.float().chunk(2)[0],
    ):
        guarded, present = guard()
        assert torch.equal(do(guarded), do(stack))
        assert type(do(guarded)) is torch.Tensor
        assert present.is_whole
        assert brought == [1]
    guarded, present = guard()
    with pytest.raises(IndexError):
        guarded[torch.tensor(1.0)]
    assert present.is_whole


def test_rows_are_those_that_were_sent_whatever_becomes_of_the_ids() -> None:
    brought: list[int] = []
    ids = torch.tensor([[1, 3]])
    guarded = GuardedRows(torch.randn(EXPERTS, 4), Present(ids, EXPERTS, lambda: brought.append(1)))
    ids.add_(1)
    assert guarded[3].shape == (4,)
    assert not brought
    assert guarded[2].shape == (4,)
    assert brought == [1]
