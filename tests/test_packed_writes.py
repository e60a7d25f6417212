"""Packed Parameters in the hands of others: written through views, copied, pickled; their gradients, hooks and attributes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.model.packed import PackedWeights
from models import build, prompt

NAME = "model.layers.1.mlp.experts.down_proj"
LONG = 24


def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model, enabled with packed experts and not."""
    return enable(build("qwen3_moe", torch.bfloat16)), build("qwen3_moe", torch.bfloat16)


def enable(model: PreTrainedModel) -> PreTrainedModel:
    enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    assert isinstance(model.get_parameter(NAME), PackedWeights)
    return model


def noise(weights: torch.Tensor) -> torch.Tensor:
    """Values that need more room than any that were packed."""
    return (torch.randn(weights.shape) * 2.0 ** torch.randint(-40, -3, weights.shape)).bfloat16()


def two_rows(weights: torch.Tensor) -> None:
    first, second = weights[0], weights[1]
    first.zero_()
    second.mul_(0.5)
    first.add_(second)


def every_row(weights: torch.Tensor) -> None:
    for row in weights:
        row.mul_(0.5)


def kept_while_others_write(weights: torch.Tensor) -> None:
    row = weights[2]
    weights.mul_(0.5)
    weights[2, 0] = 0.25
    row.add_(row)


def data_rows(weights: torch.Tensor) -> None:
    for row in range(len(weights)):
        weights.data[row] += 0.25


def data_whole(weights: torch.Tensor) -> None:
    weights.data += 0.25


def turned(weights: torch.Tensor) -> None:
    row = weights[3]
    row.t_()
    row[0].zero_()


WAYS: list[Callable[[torch.Tensor], Any]] = [
    lambda weights: weights[3].zero_(),
    lambda weights: weights[3].data.zero_(),
    lambda weights: weights.data[3].copy_(weights.data[4]),
    lambda weights: weights[1:3].copy_(weights[3:5]),
    lambda weights: nn.init.constant_(weights[2], 0.125),
    lambda weights: weights.view(-1)[:100].zero_(),
    lambda weights: weights.chunk(2, 1)[0].zero_(),
    lambda weights: weights.select(0, 1).transpose(0, 1)[2].fill_(1.0),
    lambda weights: weights.mT.mul_(0.5),
    lambda weights: weights.diagonal(0, 1, 2).zero_(),
    lambda weights: torch._foreach_mul_([weights[0], weights[1], *weights[2:4].unbind()], 0.5),
    lambda weights: torch.mul(weights[0], 2.0, out=weights[5]),
    lambda weights: weights[0].__setitem__(weights[0] > 0, 0.5),
    lambda weights: weights.copy_(weights[0] + 0),
    two_rows,
    every_row,
    kept_while_others_write,
    data_rows,
    data_whole,
    turned,
]


@pytest.mark.parametrize("write", WAYS)
def test_whoever_writes_into_a_view_writes_into_the_weights(write: Callable[[torch.Tensor], Any]) -> None:
    """As with ordinary weights: they are packed anew, and computed with."""
    model, other = pair()
    ids = prompt(LONG)
    with torch.no_grad():
        model(ids)
        before = other.get_parameter(NAME).clone()
        write(other.get_parameter(NAME))
        assert not torch.equal(other.get_parameter(NAME), before), "it writes"
        write(model.get_parameter(NAME))
        model.expert_prefetch.settle()
        assert torch.equal(model.state_dict()[NAME], other.get_parameter(NAME))
        assert torch.equal(model(ids).logits, other(ids).logits)
        disable_expert_prefetch(model)
        assert torch.equal(model.get_parameter(NAME), other.get_parameter(NAME))


def test_a_view_shows_what_is_written_elsewhere() -> None:
    """Views of the same weights show the same, also after something was refused, of which nothing is written."""
    model, other = pair()
    packed, weights = model.get_parameter(NAME), other.get_parameter(NAME)
    view, again = packed.data[2], packed.data.view(-1)
    with torch.no_grad():
        packed.mul_(2.0)
        weights.mul_(2.0)
        for target in (view, packed[3], packed):
            with pytest.raises(RuntimeError, match=r"there is room for.*disable_expert_prefetch"):
                target.copy_(noise(target))
        assert torch.equal(packed + 0, weights)
        assert torch.equal(view, weights[2])
        assert torch.equal(again, weights.view(-1))
    assert view.tolist() == weights[2].tolist()
    assert repr(view) == repr(weights.data[2])
    assert not view.view(torch.int16).numpy().flags.writeable


@pytest.mark.parametrize("replace", [lambda p: p.data + 1, lambda p: torch.zeros(p.shape, dtype=p.dtype)])
def test_weights_are_not_replaced_unseen(replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Nor is their shape changed in place."""
    model, other = pair()
    packed = model.get_parameter(NAME)
    with pytest.raises(RuntimeError, match=r"assigning to \.data.*disable_expert_prefetch"):
        packed.data = replace(packed)
    with pytest.raises(RuntimeError, match="another shape"):
        packed.data.transpose_(1, 2)
    assert torch.equal(packed + 0, other.get_parameter(NAME))


def test_copies_and_pickles_are_ordinary(tmp_path: Path) -> None:
    """Of Parameters and of views, with no more than their own bytes; safetensors is refused, and what the error names works."""
    model, other = pair()
    packed, weights = model.get_parameter(NAME), other.get_parameter(NAME)
    for mine, expected in ((packed, weights), (packed.data, weights.data), (packed.data[3], weights.data[3].clone())):
        copied = copy.deepcopy(mine)
        file, size = io.BytesIO(), io.BytesIO()
        torch.save({"weights": mine}, file)
        torch.save({"weights": expected}, size)
        file.seek(0)
        for made in (copied, torch.load(file)["weights"]):
            assert type(made) is type(expected)
            assert made.requires_grad == expected.requires_grad
            assert torch.equal(made, expected)
        assert len(file.getvalue()) == len(size.getvalue())
    for refused in (
        lambda: save_file({"weights": packed}, tmp_path / "file"),
        packed.data_ptr,
        packed.share_memory_,
        packed.data.share_memory_,
        lambda: torch.from_dlpack(packed.data),
    ):
        with pytest.raises(RuntimeError, match=r"no memory.*state_dict\(\).*clone"):
            refused()
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(packed.data)
    assert packed.tolist() == weights.tolist()
    with pytest.raises(TypeError, match="BFloat16"):
        packed.detach().numpy()
    save_file({"weights": packed.detach().clone(), "view": packed.data[3]}, tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["weights"], weights)
    assert torch.equal(load_file(tmp_path / "file")["view"], weights[3])


def test_gradients_hooks_and_attributes_stay() -> None:
    """Those from before are there meanwhile and afterwards, those from meanwhile afterwards; hooks can be removed."""
    model, ids = build("qwen3_moe", torch.bfloat16), prompt(LONG)
    parameter, calls = model.get_parameter(NAME), list[str]()
    model(ids, labels=ids).loss.backward()
    gradient = parameter.grad
    assert gradient is not None
    expected, parameter.tag = gradient.clone(), "given"
    handles = [parameter.register_hook(lambda _: calls.append("before"))]
    for _ in range(2):
        enable(model)
        assert torch.equal(parameter.grad, expected)
        assert parameter.tag == "given"
        disable_expert_prefetch(model)
        assert torch.equal(parameter.grad, expected)
    enable(model)
    handles.append(parameter.register_hook(lambda _: calls.append("late")))
    handles.append(parameter.register_post_accumulate_grad_hook(lambda _: calls.append("meanwhile")))
    parameter.other = "given meanwhile"
    del parameter.tag
    model.zero_grad()
    assert parameter.grad is None
    disable_expert_prefetch(model)
    assert type(parameter) is nn.Parameter
    assert parameter.grad is None
    assert {"tag", "other"} & set(vars(parameter)) == {"other"}
    assert not PackedWeights.OWN & set(vars(parameter))
    model(ids, labels=ids).loss.backward()
    assert torch.equal(parameter.grad, expected)
    assert calls == ["before", "late", "meanwhile"]
    for handle in handles:
        handle.remove()
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 3


def test_a_gradient_that_comes_while_it_is_packed() -> None:
    """Of a loss over the weights themselves: it adds to that from before, and hooks see it."""
    model, other = pair()
    packed, weights, calls = model.get_parameter(NAME), other.get_parameter(NAME), list[int]()
    packed.register_hook(lambda gradient: calls.append(gradient.numel()))
    for _ in range(2):
        for parameter in (packed, weights):
            parameter.float().square().sum().backward()
        assert torch.equal(packed.grad, weights.grad)
    assert calls == [weights.numel()] * 2
    packed.float().square().sum().backward()
    weights.float().square().sum().backward()
    disable_expert_prefetch(model)
    assert torch.equal(packed.grad, weights.grad)
    assert len(calls) == 3


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_of_an_optimizer(*, foreach: bool) -> None:
    """It takes effect on what is computed with."""
    model, other = pair()
    ids = prompt(LONG)
    before = other.get_parameter(NAME).clone()
    for each in (model, other):
        for parameter in each.parameters():
            parameter.grad = parameter.detach().clone()
        torch.optim.SGD(each.parameters(), lr=0.5, foreach=foreach).step()
    assert torch.equal(other.get_parameter(NAME), before / 2)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)
    disable_expert_prefetch(model)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_step_that_finds_no_room_is_refused() -> None:
    """By an error, not in silence; the remedy works."""
    model, other = pair()
    step = noise(other.get_parameter(NAME)) * 2.0**30
    for each in (model, other):
        each.get_parameter(NAME).grad = step
    with pytest.raises(RuntimeError, match=r"there is room for.*disable_expert_prefetch"):
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert torch.equal(model.get_parameter(NAME) + 0, other.get_parameter(NAME))
    disable_expert_prefetch(model)
    for each in (model, other):
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    assert torch.equal(model.get_parameter(NAME), other.get_parameter(NAME))


def test_a_view_keeps_weights_packed() -> None:
    """While there is one, disabling says so, as often as it is called; the remedy works."""
    model, other = pair()
    view = model.get_parameter(NAME)[3]
    for again in (disable_expert_prefetch, disable_expert_prefetch, enable):
        with pytest.raises(RuntimeError, match=r"a view of them\. Delete it \(gc\.collect\(\) .*\) and call this again\.$"):
            again(model)
        packed = [name for name, parameter in model.named_parameters() if type(parameter) is not nn.Parameter]
        assert packed == [NAME]
        with torch.no_grad():
            assert torch.equal(model(prompt(LONG)).logits, other(prompt(LONG)).logits)
    del view
    disable_expert_prefetch(model)
    assert not hasattr(model, "expert_prefetch")
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_the_report_says_how_many_slots_are_held() -> None:
    """One less than was asked for, where calls unpack."""
    model, other = pair()
    assert "for 2; the room of one is left" in str(model.expert_prefetch.report())
    enable_expert_prefetch(other, device="cpu", progress=False)
    assert "the room of one" not in str(other.expert_prefetch.report())


def test_a_few_more_escapes_have_room() -> None:
    """As after merging an adapter: whatever random weights had before, so many more fit."""
    packed, plain = pair()
    with torch.no_grad():
        for model in (packed, plain):
            model.get_parameter(NAME)[:, 0, :8] = 1e-30
    assert torch.equal(packed.get_parameter(NAME), plain.get_parameter(NAME))
    disable_expert_prefetch(packed)
    assert torch.equal(packed.get_parameter(NAME), plain.get_parameter(NAME))
