"""Models that accelerate has dispatched: the offloading of experts is taken over and given back, hooks of others stay."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import OffloadedWeightsLoader
from torch import nn
from torch._subclasses import FakeTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.discovery import find_banks
from hf_prefetch.hooks import ExpertPrefetchHook, flatten, hook_of
from hf_prefetch.model.placement import DeviceMap
from hf_prefetch.testing import FakeDevice
from models import GATE, Snapshot, bank_bytes, build, experts_of, prompt

LAYERS = 5
CPU = torch.device("cpu")


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


# -- ways to dispatch ---------------------------------------------------------------------------------------------


def _cpu_offload(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return cpu_offload(model, execution_device=CPU)


def _disk_offload(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return disk_offload(model, folder, execution_device=CPU)


def _experts_to_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """As `device_map` does it, with everything else on the device that computes."""
    leaves = {name: CPU for name, module in model.named_modules() if not list(module.children())}
    device_map = {name: CPU for name in leaves if ".experts" not in name}
    device_map |= {name: "disk" if int(name.split(".")[2]) % 2 else CPU for name in experts_of(model)}
    return dispatch_model(model, device_map, main_device=CPU, offload_dir=folder, force_hooks=True)


def _some_experts(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """By hand, and only the experts of the first layers."""
    weights = OffloadedWeightsLoader({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    for name, module in list(experts_of(model).items())[:3]:
        attach_align_device_hook(module, execution_device=CPU, offload=True, weights_map=weights, module_name=name)
    return model


def _each_with_a_map_of_its_own(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Without `weights_map` a hook makes itself a plain dict."""
    for module in experts_of(model).values():
        add_hook_to_module(module, AlignDevicesHook(execution_device=CPU, offload=True))
    return model


WAYS = {
    "cpu_offload": (_cpu_offload, LAYERS),
    "disk_offload": (_disk_offload, LAYERS),
    "dispatch_model": (_experts_to_disk, LAYERS // 2),
    "some of the experts": (_some_experts, 3),
    "own maps": (_each_with_a_map_of_its_own, LAYERS),
}
ways = pytest.mark.parametrize(("dispatch", "banks"), list(WAYS.values()), ids=list(WAYS))
Dispatch = Callable[[PreTrainedModel, Path], PreTrainedModel]


def hooks_of(model: nn.Module) -> dict[str, Any]:
    return {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}


def offloaded(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in experts_of(model).items() if next(module.parameters()).is_meta}


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@ways
@pytest.mark.parametrize("slots", [2, 3])
def test_offloaded_experts_are_taken_over_and_given_back(
    dispatch: Dispatch, banks: int, slots: int, tmp_path: Path, fake: FakeDevice
) -> None:
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    dispatch(model, tmp_path)
    assert torch.equal(logits(model, ids), expected)
    hooks, before, away = hooks_of(model), attributes(model), offloaded(model)
    assert len(away) == banks
    enable_expert_prefetch(model, slots, progress=False)
    report = model.expert_prefetch.report()
    assert report.banks == banks
    assert report.host_bytes == banks * bank_bytes(model) // LAYERS == report.pinned_bytes
    for module in away.values():
        assert isinstance(module._hf_hook, ExpertPrefetchHook)
        assert not any(parameter.is_meta for parameter in module.parameters())
    others = {name: hook for name, hook in hooks_of(model).items() if name not in away}
    assert others == {name: hook for name, hook in hooks.items() if name not in away}, "the rest stays as it was dispatched"
    with fake.watching():
        assert torch.equal(logits(model, ids), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), generated)
    assert fake.races() == []
    assert fake.allocated_bytes == slots * bank_bytes(model) // LAYERS
    disable_expert_prefetch(model)
    assert hooks_of(model) == hooks, "it should be the same hooks"
    assert attributes(model) == before
    assert list(offloaded(model)) == list(away), "parameters should be meta again"
    assert torch.equal(logits(model, ids), expected)
    assert (fake.allocated_bytes, fake.registered_bytes) == (0, 0)
    remove_hook_from_submodules(model)
    if dispatch is _cpu_offload:
        assert not any(parameter.is_meta for parameter in model.parameters())
        assert torch.equal(logits(model, ids), expected)


def attributes(model: nn.Module) -> dict[str, Any]:
    """What is in the modules, but for Parameters, which accelerate replaces at each step."""
    return {name: (set(module.__dict__), list(module._parameters)) for name, module in model.named_modules()}


@pytest.mark.parametrize("dispatch", [_cpu_offload, _some_experts, _each_with_a_map_of_its_own])
def test_no_second_copy_of_the_experts_stays_alive(dispatch: Dispatch, tmp_path: Path, fake: FakeDevice) -> None:
    """accelerate's map of weights refers to the memory that the experts have now, while enabled and afterwards."""
    model = build("mixtral", seed=100 + len(dispatch.__name__))  # weights that no other test has
    weights = model.model.layers[1].mlp.experts.down_proj.detach().clone()
    dispatch(model, tmp_path)
    assert places_of(weights) == 1
    for _ in range(2):
        enable_expert_prefetch(model, progress=False)
        for bank in model.expert_prefetch.banks:
            (module,) = bank.modules
            (hook,) = flatten(module.__dict__["_hf_prefetch_taken"])
            assert all(storage(hook.weights_map[name]) == storage(parameter) for name, parameter in bank.parameters.items())
        assert places_of(weights) == 1
        disable_expert_prefetch(model)
        assert places_of(weights) == 1


def places_of(weights: torch.Tensor) -> int:
    """In how many pieces of memory are these bytes, besides their own, among all tensors that Python knows of?"""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are asked for their class
        # Tests of compilation leave tensors without data behind.
        known = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and not isinstance(item, FakeTensor)]
    alike = (item for item in known if (item.shape, item.dtype, item.device) == (weights.shape, weights.dtype, CPU))
    return len({item.data_ptr() for item in alike if torch.equal(item, weights)} - {weights.data_ptr()})


def test_experts_from_disk_are_in_memory_only_while_enabled(tmp_path: Path, fake: FakeDevice) -> None:
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    disk_offload(model, tmp_path, execution_device=CPU)
    enable_expert_prefetch(model, progress=False)
    arenas = [weakref.ref(model.expert_prefetch.store[bank].arena) for bank in model.expert_prefetch.banks]
    maps = [weakref.ref(arena()._pages.buffer) for arena in arenas]
    disable_expert_prefetch(model)
    gc.collect()
    assert [reference() for reference in (*arenas, *maps) if reference() is not None] == []
    assert torch.equal(logits(model, ids), expected)


@ways
def test_enabling_again_keeps_to_the_dispatch(dispatch: Dispatch, banks: int, tmp_path: Path, fake: FakeDevice) -> None:
    """The offloading hooks are off by then, and still decide what is prefetched and where it computes."""
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    dispatch(model, tmp_path)
    hooks, away = hooks_of(model), list(offloaded(model))
    for slots in (2, 4, 3):
        enable_expert_prefetch(model, slots, progress=False)
        report = model.expert_prefetch.report()
        assert (report.banks, report.slots) == (banks, slots)
        assert torch.equal(logits(model, ids), expected)
    with pytest.raises(ValueError, match=r"dispatched by accelerate.*leave device= out"):
        enable_expert_prefetch(model, device="cpu")
    assert torch.equal(logits(model, ids), expected)
    enable_expert_prefetch(model, slots=0)
    assert hooks_of(model) == hooks
    assert list(offloaded(model)) == away
    assert torch.equal(logits(model, ids), expected)


@ways
def test_enabling_again_after_some_were_resident(dispatch: Dispatch, banks: int, tmp_path: Path, fake: FakeDevice) -> None:
    """Those that stayed on the device meanwhile count as offloaded, which they will be without us."""
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    dispatch(model, tmp_path)
    hooks, before, away = hooks_of(model), attributes(model), list(offloaded(model))
    for _ in range(2):
        enable_expert_prefetch(model, n_cpu_moe=1, progress=False)
        assert (model.expert_prefetch.report().banks, model.expert_prefetch.report().resident_banks) == (1, LAYERS - 1)
        assert torch.equal(logits(model, ids), expected)
        with pytest.raises(ValueError, match=r"dispatched by accelerate.*leave device= out"):
            enable_expert_prefetch(model, device="cpu")
        enable_expert_prefetch(model, progress=False)
        assert model.expert_prefetch.report().banks == banks
        assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    assert hooks_of(model) == hooks
    assert attributes(model) == before
    assert list(offloaded(model)) == away
    assert torch.equal(logits(model, ids), expected)


@ways
def test_a_device_for_a_dispatched_model_is_refused(dispatch: Dispatch, banks: int, tmp_path: Path) -> None:
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    dispatch(model, tmp_path)
    hooks, before = hooks_of(model), attributes(model)
    for device in ("cpu", CPU, FakeDevice()):
        with pytest.raises(ValueError, match=r"dispatched by accelerate.*leave device= out"):
            enable_expert_prefetch(model, device=device)
    assert hooks_of(model) == hooks
    assert attributes(model) == before
    assert torch.equal(logits(model, ids), expected)


def test_a_model_loaded_with_a_device_map(tmp_path: Path, fake: FakeDevice) -> None:
    """As people get one: `from_pretrained` with some layers on disk."""
    source, ids = build("mixtral"), prompt(GATE)
    expected = logits(source, ids)
    source.save_pretrained(tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{layer}": "disk" if layer > 1 else "cpu" for layer in range(LAYERS)}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload", dtype=torch.float32
    ).eval()
    assert torch.equal(logits(model, ids), expected)
    away = list(offloaded(model))
    assert len(away) == 3
    enable_expert_prefetch(model, progress=False)
    assert model.expert_prefetch.report().banks == 3
    assert torch.equal(logits(model, ids), expected)
    model.save_pretrained(tmp_path / "again")
    disable_expert_prefetch(model)
    assert list(offloaded(model)) == away
    assert torch.equal(logits(model, ids), expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).state_dict()
    assert again.keys() == source.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in source.state_dict().items())


def test_experts_behind_a_hook_of_another_module_are_refused(tmp_path: Path) -> None:
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    cpu_offload(model, execution_device=CPU, preload_module_classes=["MixtralSparseMoeBlock"])
    assert torch.equal(logits(model, ids), expected)
    hooks = hooks_of(model)
    with pytest.raises(ValueError, match=r"meta device.*offloaded by a hook of another module.*preload_module_classes"):
        enable_expert_prefetch(model)
    assert hooks_of(model) == hooks
    assert torch.equal(logits(model, ids), expected)


@ways
def test_an_error_while_enabling_gives_the_hooks_back(dispatch: Dispatch, banks: int, tmp_path: Path, fake: FakeDevice) -> None:
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    dispatch(model, tmp_path)
    hooks, before, away = hooks_of(model), attributes(model), list(offloaded(model))

    def fail() -> None:
        raise KeyboardInterrupt

    fake.trim = fail
    with pytest.raises(KeyboardInterrupt):
        enable_expert_prefetch(model, progress=False)
    assert hooks_of(model) == hooks
    assert attributes(model) == before
    assert list(offloaded(model)) == away
    assert fake.registered_bytes == 0
    assert torch.equal(logits(model, ids), expected)


# -- hooks of others ----------------------------------------------------------------------------------------------


class Counting(ModelHook):
    """A hook of somebody else, which shows when it runs."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.calls.append("pre")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls.append("post")
        return output

    def ran(self) -> bool:
        """Whether it has run exactly once since it was last asked."""
        calls, self.calls = self.calls, []
        return calls == ["pre", "post"]


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_hooks_from_before(append: bool, times: int) -> None:
    """They run while enabled, and are there afterwards."""
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    module, theirs = model.model.layers[1].mlp.experts, [Counting() for _ in range(times)]
    for hook in theirs:
        add_hook_to_module(module, hook, append=append)
    if not append:
        del theirs[:-1]
    for _ in range(2):
        enable_expert_prefetch(model, device=FakeDevice(), progress=False)
        assert torch.equal(logits(model, ids), expected)
        assert model.expert_prefetch.report().calls == LAYERS
        assert all(hook.ran() for hook in theirs)
    disable_expert_prefetch(model)
    assert flatten(module._hf_hook) == theirs
    assert torch.equal(logits(model, ids), expected)
    assert all(hook.ran() for hook in theirs)


@pytest.mark.parametrize("append", [True, False])
def test_hooks_from_meanwhile(append: bool) -> None:
    """Appended ones take ours off and put it on again; others replace it and leave its wrapping below."""
    model, ids = build("mixtral"), prompt(GATE)
    expected, forwards = logits(model, ids), {name: module.forward for name, module in model.named_modules()}
    enable_expert_prefetch(model, device=FakeDevice(), progress=False)
    scheduler, theirs = model.expert_prefetch, {}
    for name, module in experts_of(model).items():
        theirs[name] = Counting()
        add_hook_to_module(module, theirs[name], append=append)
        assert (theirs[name] is module._hf_hook) != append
    assert torch.equal(logits(model, ids), expected)
    assert scheduler.report().calls == LAYERS
    assert all(hook.ran() for hook in theirs.values())
    disable_expert_prefetch(model)
    for name, module in experts_of(model).items():
        assert module._hf_hook is theirs[name]
        assert hook_of(module) is None
    assert torch.equal(logits(model, ids), expected)
    assert all(hook.ran() for hook in theirs.values())
    for module in experts_of(model).values():
        remove_hook_from_module(module)
    assert {name: module.forward for name, module in model.named_modules()} == forwards
    assert scheduler.report().calls == LAYERS


@pytest.mark.parametrize("append", [True, False])
def test_hooks_from_meanwhile_that_are_removed_again(append: bool) -> None:
    """A replacing hook that goes leaves our wrapping; an appended one takes ours along, as accelerate removes a chain."""
    model, ids = build("mixtral"), prompt(GATE)
    before, expected = Snapshot.of(model), logits(model, ids)
    enable_expert_prefetch(model, device=(device := FakeDevice()), progress=False)
    for module in experts_of(model).values():
        add_hook_to_module(module, Counting(), append=append)
        remove_hook_from_module(module)
        assert (hook_of(module) is None) == append
    assert torch.equal(logits(model, ids), expected)
    assert model.expert_prefetch.report().calls == (0 if append else LAYERS)
    disable_expert_prefetch(model)
    before.assert_same_values(model)
    assert {name: module.forward for name, module in model.named_modules()} == before.forwards
    assert torch.equal(logits(model, ids), expected)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_our_hook_removed_by_others() -> None:
    model, ids = build("mixtral"), prompt(GATE)
    before, expected = Snapshot.of(model), logits(model, ids)
    enable_expert_prefetch(model, device=(device := FakeDevice()), progress=False)
    remove_hook_from_submodules(model)
    assert torch.equal(logits(model, ids), expected)
    disable_expert_prefetch(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    before.assert_same_values(model)
    enable_expert_prefetch(model, device=FakeDevice(), progress=False)
    assert torch.equal(logits(model, ids), expected)
    assert model.expert_prefetch.report().calls == LAYERS


def test_hooks_beside_the_offloading_one(fake: FakeDevice) -> None:
    """Somebody has chained theirs to accelerate's: theirs goes on running, and the chain comes back as it was."""
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    cpu_offload(model, execution_device=CPU)
    module, early, late = model.model.layers[1].mlp.experts, Counting(), Counting()
    add_hook_to_module(module, early, append=True)
    chain = module._hf_hook
    assert isinstance(chain, SequentialHook)
    enable_expert_prefetch(model, progress=False)
    assert early in flatten(module._hf_hook)
    assert not any(isinstance(hook, AlignDevicesHook) for hook in flatten(module._hf_hook))
    assert torch.equal(logits(model, ids), expected)
    assert early.ran()
    add_hook_to_module(module, late, append=True)
    assert torch.equal(logits(model, ids), expected)
    assert early.ran()
    assert late.ran()
    disable_expert_prefetch(model)
    assert flatten(module._hf_hook) == [*flatten(chain), late]
    assert next(module.parameters()).is_meta
    assert torch.equal(logits(model, ids), expected)
    assert early.ran()
    assert late.ran()


def test_the_chain_is_the_same_object_afterwards(fake: FakeDevice) -> None:
    model = build("mixtral")
    cpu_offload(model, execution_device=CPU)
    module = model.model.layers[1].mlp.experts
    add_hook_to_module(module, Counting(), append=True)
    chain = module._hf_hook
    enable_expert_prefetch(model, progress=False)
    disable_expert_prefetch(model)
    assert module._hf_hook is chain


def test_a_hook_beside_the_offloading_one_that_is_removed_meanwhile(fake: FakeDevice) -> None:
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    cpu_offload(model, execution_device=CPU)
    module, theirs = model.model.layers[1].mlp.experts, Counting()
    offloading = module._hf_hook
    add_hook_to_module(module, theirs, append=True)
    enable_expert_prefetch(model, progress=False)
    remove_hook_from_module(module)
    disable_expert_prefetch(model)
    assert flatten(module._hf_hook) == [offloading]
    assert torch.equal(logits(model, ids), expected)
    assert theirs.calls == []


def test_dispatching_an_enabled_model_is_an_error_and_not_a_wrong_output(fake: FakeDevice) -> None:
    """accelerate takes the Parameters away; the experts can't be right then, so they say so."""
    model, ids = build("mixtral"), prompt(GATE)
    expected = logits(model, ids)
    enable_expert_prefetch(model, device=fake, progress=False)
    cpu_offload(model, execution_device=CPU)
    with pytest.raises(RuntimeError, match=r"was replaced.*a dispatch.*Call disable_expert_prefetch"):
        logits(model, ids)
    disable_expert_prefetch(model)
    assert torch.equal(logits(model, ids), expected)
    assert (fake.allocated_bytes, fake.registered_bytes) == (0, 0)


def test_a_dispatch_to_meta_weights_is_refused(tmp_path: Path) -> None:
    """`init_empty_weights` and no checkpoint: hooks or not, there is nothing to send."""
    with torch.device("meta"):
        model = type(build("mixtral"))(build("mixtral").config)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    with pytest.raises(ValueError, match="on the meta device"):
        enable_expert_prefetch(model)


def test_a_dispatched_model_says_that_its_experts_are_on_the_device() -> None:
    """transformers reads the map, and does not compile decoding for a model with parts on the CPU or on disk."""
    model = build("qwen3_moe")
    banks = find_banks(model).banks
    device = torch.device("cuda", 0)
    before = {"model.embed_tokens": 0, banks[0].name: "cpu", banks[1].name: "disk", "model.layers.2": "cpu"}
    model.hf_device_map = before
    device_map = DeviceMap(model)
    device_map.claim(banks[:3], [device] * 3)
    assert model.hf_device_map == {**before, banks[0].name: 0, banks[1].name: 0}
    device_map.restore()
    assert model.hf_device_map is before
    device_map.restore()
    assert model.hf_device_map is before
