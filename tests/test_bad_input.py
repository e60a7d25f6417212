"""What can't work is refused before anything is touched, in words that say what would; enabling twice replaces."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.testing import FakeDevice
from models import GATE, Snapshot, bank_bytes, build, experts_of, prompt

Untouched = Callable[[nn.Module], None]


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def untouched(model: nn.Module) -> Callable[[], None]:
    """A check that a model is the same as now, down to where its bytes are."""
    before, places = Snapshot.of(model), addresses(model)

    def check() -> None:
        before.assert_restored(model)
        assert addresses(model) == places

    return check


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def enabled_on(model: PreTrainedModel, device: FakeDevice, slots: int = 3) -> PreTrainedModel:
    return enable_expert_prefetch(model, slots, device=device, progress=False)


# -- slots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_two_to_four_slots_work(slots: int) -> None:
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    expected = logits(model, ids)
    enabled_on(model, device, slots)
    assert torch.equal(logits(model, ids), expected)
    assert model.expert_prefetch.report().slots == slots
    largest = bank_bytes(model) // 5
    assert device.allocated_bytes == slots * largest


def test_three_slots_are_the_default() -> None:
    model = enable_expert_prefetch(build("mixtral"), device=FakeDevice())
    assert model.expert_prefetch.report().slots == 3


def test_zero_slots_leave_a_model_alone() -> None:
    model, device = build("mixtral"), FakeDevice()
    check = untouched(model)
    assert enabled_on(model, device, 0) is model
    check()
    assert not device.log
    assert device.registered_bytes == 0


def test_zero_slots_disable_an_enabled_model() -> None:
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    before, expected = Snapshot.of(model), logits(model, ids)
    enabled_on(model, device)
    logits(model, ids)
    assert device.allocated_bytes > 0
    assert device.registered_bytes > 0
    enabled_on(model, device, 0)
    before.assert_restored(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    assert torch.equal(logits(model, ids), expected)


# What the message has to say, besides the name and the value.
_BAD_SLOTS: list[tuple[Any, type[Exception], str]] = [
    (1, ValueError, "refilled while"),
    (5, ValueError, "lookahead is two"),
    (1000, ValueError, "lookahead is two"),
    (-1, ValueError, "must be 0"),
    (True, TypeError, "bool"),
    (False, TypeError, "bool"),
    ("3", TypeError, "str"),
    (2.0, TypeError, "float"),
    (None, TypeError, "NoneType"),
    ([3], TypeError, "list"),
    (torch.tensor(3), TypeError, "Tensor"),
]


@pytest.mark.parametrize(("slots", "error", "reason"), _BAD_SLOTS, ids=lambda value: repr(value)[:20])
def test_other_slots_are_refused(slots: Any, error: type[Exception], reason: str) -> None:
    model, device = build("mixtral"), FakeDevice()
    check = untouched(model)
    with pytest.raises(error) as caught:
        enabled_on(model, device, slots)
    assert "slots" in str(caught.value)
    assert reason in str(caught.value)
    if error is ValueError:
        assert str(slots) in str(caught.value)
        assert re.search(r"\b3\b.*recommended|recommended.*\b3\b", str(caught.value)), "it should say what to take"
    check()
    assert not device.log


# -- models -------------------------------------------------------------------------------------------------------


def tiny_llama() -> PreTrainedModel:
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(config).eval()


def two_linears() -> nn.ModuleList:
    """Equal experts."""
    return nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])


class TiedExperts(nn.Module):
    """Experts that share a matrix: what one of them is sent for would be the other's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = two_linears()
        self.experts[1].weight = self.experts[0].weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = self.router(hidden).argmax(-1)
        return torch.stack([self.experts[expert](row) for row, expert in zip(hidden, chosen.tolist(), strict=True)])


@pytest.mark.parametrize(
    ("make", "found"),
    [
        pytest.param(tiny_llama, ["LlamaForCausalLM", "no Mixture-of-Experts", "dense"], id="dense model"),
        pytest.param(lambda: nn.Linear(2, 2), ["Linear", "no Mixture-of-Experts"], id="a linear layer"),
        pytest.param(lambda: nn.Sequential(TiedExperts()), ["0.experts", "ModuleList", "share weights"], id="tied experts"),
        pytest.param(lambda: nn.ModuleDict({"experts": two_linears()}), ["ModuleList", "nothing around it"], id="no forward"),
    ],
)
def test_a_model_without_experts_that_can_travel_is_refused(make: Callable[[], nn.Module], found: list[str]) -> None:
    model, device = make(), FakeDevice()
    check = untouched(model)
    with pytest.raises(ValueError, match="What works") as caught:
        enable_expert_prefetch(model, device=device)
    for word in (*found, "unchanged", "Mixtral", "transformers >="):
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"
    check()
    assert not device.log


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", None, 3, {"a": 1}, nn.Linear], ids=repr)
@pytest.mark.parametrize("call", [enable_expert_prefetch, disable_expert_prefetch])
def test_what_is_no_model_is_refused(call: Callable[[Any], Any], model: Any) -> None:
    with pytest.raises(TypeError, match="transformers model") as caught:
        call(model)
    assert type(model).__name__ in str(caught.value)
    if isinstance(model, str):
        assert model in str(caught.value)
        assert "from_pretrained" in str(caught.value)


def test_a_model_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = build_on_meta()
    check = untouched_on_meta(model)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts is on the meta device.*Load the checkpoint"):
        enable_expert_prefetch(model)
    check()


def build_on_meta() -> PreTrainedModel:
    return type(build("mixtral"))(build("mixtral").config).eval()


def untouched_on_meta(model: nn.Module) -> Callable[[], None]:
    def look() -> Any:
        modules = dict(model.named_modules())
        return [(set(module.__dict__), module.forward) for module in modules.values()], dict(model.named_parameters())

    before, parameters = look()

    def check() -> None:
        assert look()[0] == before
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())

    return check


@pytest.mark.parametrize("place", ["nonsense", 3.5, "cuda:77", "meta"], ids=repr)
def test_a_device_that_is_not_there_is_refused(place: Any) -> None:
    model = build("mixtral")
    check = untouched(model)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=rf"device|{place}"):
        enable_expert_prefetch(model, device=place)
    check()


@pytest.mark.parametrize("progress", ["yes", 1, 0.5])
def test_progress_is_a_bool(progress: Any) -> None:
    model = build("mixtral")
    check = untouched(model)
    with pytest.raises(TypeError, match="progress must be True, False or None"):
        enable_expert_prefetch(model, progress=progress)
    check()


def test_a_warning_that_is_made_an_error_undoes_everything() -> None:
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice(refuse_pinning=True)
    before, expected = Snapshot.of(model), logits(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="page-locked"):
            enabled_on(model, device)
    before.assert_restored(model)
    assert torch.equal(logits(model, ids), expected)


def test_experts_that_cannot_be_prefetched_beside_some_that_can_are_named() -> None:
    model = build("mixtral")
    model.extra = TiedExperts()
    with pytest.warns(UserWarning, match=r"extra\.experts \(ModuleList\)"):
        enable_expert_prefetch(model, device=FakeDevice())
    assert model.expert_prefetch.report().banks == 5


# -- a second call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(lambda model: enable_expert_prefetch(model, slots=1), id="slots=1"),
        pytest.param(lambda model: enable_expert_prefetch(model, slots="3"), id="slots='3'"),
        pytest.param(lambda model: enable_expert_prefetch(model, progress="yes"), id="progress"),
        pytest.param(lambda model: enable_expert_prefetch(model, device="nonsense"), id="device"),
        pytest.param(lambda model: enable_expert_prefetch(model, device="meta"), id="meta"),
    ],
)
def test_a_bad_second_call_leaves_the_first_at_work(second: Callable[[nn.Module], Any]) -> None:
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    before, expected = Snapshot.of(model), logits(model, ids)
    enabled_on(model, device)
    logits(model, ids)
    scheduler, held, calls = model.expert_prefetch, device.allocated_bytes, model.expert_prefetch.report().calls
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        second(model)
    assert model.expert_prefetch is scheduler
    assert torch.equal(logits(model, ids), expected)
    assert scheduler.report().calls == 2 * calls
    assert device.allocated_bytes == held
    disable_expert_prefetch(model)
    before.assert_restored(model)


def test_enabling_twice_replaces_the_first() -> None:
    model, ids, first, second = build("mixtral"), prompt(GATE), FakeDevice(), FakeDevice()
    before, expected = Snapshot.of(model), logits(model, ids)
    enabled_on(model, first, 2)
    logits(model, ids)
    old = weakref.ref(model.expert_prefetch)
    assert first.allocated_bytes > 0
    enabled_on(model, second, 4)
    assert (first.allocated_bytes, first.registered_bytes) == (0, 0)
    report = model.expert_prefetch.report()
    assert (report.slots, report.calls, report.bytes_to_device, report.device_bytes) == (4, 0, 0, 0)
    assert torch.equal(logits(model, ids), expected)
    assert model.expert_prefetch.report().calls == 5
    assert second.registered_bytes >= model.expert_prefetch.report().pinned_bytes == bank_bytes(model)
    disable_expert_prefetch(model)
    before.assert_restored(model)
    gc.collect()
    assert old() is None


def test_disabling_twice_or_never_enabled_changes_nothing() -> None:
    model = build("mixtral")
    check = untouched(model)
    assert disable_expert_prefetch(model) is model
    check()
    enable_expert_prefetch(model, device=FakeDevice())
    disable_expert_prefetch(model)
    check = untouched(model)
    disable_expert_prefetch(model)
    check()


def test_a_part_of_an_enabled_model_is_refused() -> None:
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    expected = logits(model, ids)
    enabled_on(model, device)
    for part in (model.model, model.model.layers[1], model.model.layers[1].mlp.experts):
        with pytest.raises(ValueError, match=r"already prefetched through another object.*disable_expert_prefetch"):
            enabled_on(part, FakeDevice())
        assert "expert_prefetch" not in part.__dict__
    disable_expert_prefetch(model.model)
    assert torch.equal(logits(model, ids), expected)
    assert model.expert_prefetch.report().calls == 5


def test_a_part_alone_can_be_enabled_and_its_whole_takes_over() -> None:
    model, ids, first, second = build("mixtral"), prompt(GATE), FakeDevice(), FakeDevice()
    before, expected = Snapshot.of(model), logits(model, ids)
    enabled_on(model.model, first)
    assert torch.equal(logits(model, ids), expected)
    assert model.model.expert_prefetch.report().calls == 5
    enabled_on(model, second)
    assert (first.allocated_bytes, first.registered_bytes) == (0, 0)
    assert "expert_prefetch" not in model.model.__dict__
    assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    before.assert_restored(model)


def test_an_experts_module_alone_can_be_enabled() -> None:
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    before, expected = Snapshot.of(model), logits(model, ids)
    experts = model.model.layers[2].mlp.experts
    enabled_on(experts, device)
    place = addresses(experts)
    assert torch.equal(logits(model, ids), expected)
    assert experts.expert_prefetch.report().calls == 1
    experts.to("cpu")
    assert addresses(experts) == place
    with pytest.raises(RuntimeError, match="disable_expert_prefetch"):
        experts.half()
    disable_expert_prefetch(model)
    before.assert_restored(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_models_that_share_experts_are_refused_without_harm() -> None:
    model, ids, device = build("mixtral"), prompt(GATE), FakeDevice()
    expected = logits(model, ids)
    other = type(model)(model.config).eval()
    other.model.layers[3] = model.model.layers[3]
    shown = logits(other, ids)
    enabled_on(model, device)
    with pytest.raises(ValueError, match="already prefetched through another object"):
        enabled_on(other, FakeDevice())
    assert "expert_prefetch" not in other.__dict__
    assert torch.equal(logits(model, ids), expected)
    assert torch.equal(logits(other, ids), shown)
    disable_expert_prefetch(other)
    assert torch.equal(logits(model, ids), expected)
    assert model.expert_prefetch.report().calls == 5 + 5 + 1


@pytest.mark.parametrize("options", [{}, {"pack": True}, {"host_memory": 0}])
def test_models_that_share_parameters_are_refused_without_harm(tmp_path: Path, options: dict[str, Any]) -> None:
    """Their modules are their own, so no hook tells."""
    model, other, ids = build("mixtral", torch.bfloat16), build("mixtral", torch.bfloat16, seed=1), prompt(GATE)
    ours, theirs = model.model.layers[3].mlp.experts, other.model.layers[3].mlp.experts
    theirs.gate_up_proj = ours.gate_up_proj
    expected, shown = logits(model, ids), logits(other, ids)
    options = {**options, "offload_folder": tmp_path} if "host_memory" in options else options
    enable_expert_prefetch(model, device=FakeDevice(), **options)
    with pytest.raises(ValueError, match=r"already prefetched through another object that holds the same Parameters"):
        enabled_on(other, FakeDevice())
    assert "expert_prefetch" not in other.__dict__
    assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    assert torch.equal(logits(other, ids), shown)
    enabled_on(other, FakeDevice())
    assert torch.equal(logits(other, ids), shown)


def test_a_refused_whole_leaves_its_enabled_part_at_work() -> None:
    """Enabling a whole disables its parts, but only once nothing can be refused any more."""
    ours, theirs, ids = build("mixtral"), build("mixtral", seed=1), prompt(GATE)
    expected = logits(ours, ids)
    enabled_on(ours, FakeDevice())
    enabled_on(theirs, FakeDevice())
    both = nn.ModuleList([ours, theirs.model])
    with pytest.raises(ValueError, match="already prefetched through another object"):
        enable_expert_prefetch(both, device=FakeDevice())
    assert torch.equal(logits(ours, ids), expected)
    assert ours.expert_prefetch.report().calls == 5


def test_two_enabled_models_do_not_know_of_each_other() -> None:
    ids, device = prompt(GATE), FakeDevice()
    models = [build("mixtral"), build("qwen3_moe", seed=1)]
    expected = [logits(model, ids) for model in models]
    for model, slots in zip(models, (2, 4), strict=True):
        enabled_on(model, device, slots)
    for _ in range(2):
        for model, right in zip(models, expected, strict=True):
            assert torch.equal(logits(model, ids), right)
    first, second = (model.expert_prefetch.report() for model in models)
    assert (first.slots, first.calls, second.slots, second.calls) == (2, 10, 4, 14)
    disable_expert_prefetch(models[0])
    assert device.allocated_bytes == second.device_bytes
    assert device.registered_bytes == second.pinned_bytes
    assert torch.equal(logits(models[0], ids), expected[0])
    assert torch.equal(logits(models[1], ids), expected[1])


def test_an_enabled_model_is_the_same_object_with_the_same_parameters() -> None:
    model = build("mixtral")
    parameters = dict(model.named_parameters())
    assert enable_expert_prefetch(model, device=FakeDevice()) is model
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad for module in experts_of(model).values() for parameter in module.parameters())
