"""Experts that are kept packed: the same bits on every way, fewer bytes, and ordinary weights for whoever reads them."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from caching import budget
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained
from hf_prefetch.demo import demo_model_path, load_demo_model
from hf_prefetch.discovery import find_banks
from hf_prefetch.hooks import flatten
from hf_prefetch.memory.packing import PackedRows, pack
from hf_prefetch.model.measuring import chooses_packing, measure
from hf_prefetch.model.packed import PackedWeights
from hf_prefetch.scheduling.packing import Rates, packing_pays
from hf_prefetch.streams import stream_device
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import EXPERTS, Snapshot, bank_bytes, build, experts_of, prompt
from test_dispatch import LAYERS, Dispatch, hooks_of, offloaded, ways

LONG, NEW_TOKENS = 24, 5
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


def model_of(
    family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16, implementation: str = "batched_mm"
) -> PreTrainedModel:
    model = build(family, dtype)
    model.set_experts_implementation(implementation)
    return model


def outcome(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": NEW_TOKENS}
    output = model.generate(ids, **options)
    return (output.sequences, *output.logits)


def packed_parameters(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, PackedWeights)]


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("rows", [0, EXPERTS // 2])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_same_bits(device: torch.device, family: str, implementation: str, rows: int, slots: int) -> None:
    """Off, on, again and off: a prompt in whole banks and tokens in rows; gpt-oss has biases, which stay as they are."""
    model = model_of(family, implementation=implementation).to(device)
    ids = prompt(LONG, device=device)
    expected, before = outcome(model, ids), Snapshot.of(model)
    raw = sum(bank.nbytes for bank in find_banks(model).banks)
    cache = budget(model, rows) if rows else None
    enable_expert_prefetch(model, slots, device=device, expert_cache=cache, pack=True, progress=False)
    assert len(packed_parameters(model)) == 2 * len(experts_of(model))
    for _ in range(2):
        assert all(map(torch.equal, outcome(model, ids), expected))
    report = model.expert_prefetch.report()
    assert report.lookahead_hits > 0
    assert report.routed_calls + report.cached_calls == 2 * (NEW_TOKENS - 1) * report.banks
    assert (report.cached_calls > 0) == (rows > 0 and implementation != "eager")
    assert report.host_bytes < 0.8 * raw
    assert report.fallbacks == 0
    disable_expert_prefetch(model)
    before.assert_restored(model)
    assert not packed_parameters(model)
    assert all(map(torch.equal, outcome(model, ids), expected))


@pytest.mark.parametrize("policy", ["eager", "lazy", 0, 1])
@pytest.mark.parametrize("rows", [0, EXPERTS // 2])
def test_on_adversarial_schedules(rows: int, policy: str | int) -> None:
    """Unpacking reads slots and caches like any kernel of the compute stream: no wait is missing."""
    model, ids, device = model_of(), prompt(LONG), FakeDevice(policy)
    with torch.no_grad():
        expected = [model(ids).logits, model(ids[:, :1]).logits]
        enable_expert_prefetch(
            model, device=device, expert_cache=budget(model, rows) if rows else None, pack=True, progress=False
        )
        for _ in range(2):
            with device.watching():
                actual = [model(ids).logits, model(ids[:, :1]).logits]
            assert all(map(torch.equal, actual, expected))
        disable_expert_prefetch(model)
        assert all(map(torch.equal, [model(ids).logits, model(ids[:, :1]).logits], expected))
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    RaceChecker().assert_clean(device.log)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@pytest.mark.parametrize("rows", [0, EXPERTS // 2])
def test_short_prompts_of_every_length(device: torch.device, rows: int) -> None:
    """With as many ids as there are experts, or more, and still not all of them used: what was not sent is not unpacked."""
    model = model_of().to(device)
    with torch.no_grad():
        prompts = [prompt(length, seed=length, device=device) for length in range(1, 12)]
        expected = [model(ids).logits for ids in prompts]
        cache = budget(model, rows) if rows else None
        enable_expert_prefetch(model, device=device, expert_cache=cache, pack=True, progress=False)
        for _ in range(3):
            for ids, logits in zip(prompts, expected, strict=True):
                # What was there before must not be of use to anybody. Copies for the next pass may be under way.
                settle(device)
                for lane in {id(lane): lane for lane in model.expert_prefetch._lane_of.values()}.values():
                    for slot in lane.ring._slots:
                        slot.buffer.fill_(255)
                settle(device)
                assert torch.equal(model(ids).logits, logits)
        assert model.expert_prefetch.report().routed_calls > 0
        disable_expert_prefetch(model)


@pytest.mark.parametrize("rows", [0, EXPERTS // 2])
def test_banks_that_are_packed_in_part(rows: int) -> None:
    """A weight that would get larger stays as it is, beside one that is packed: slots are read while calls compute."""
    model, device = model_of(), FakeDevice("lazy")
    for module in experts_of(model).values():
        noise = torch.randn(module.down_proj.shape) * 2.0 ** torch.randint(-40, -3, module.down_proj.shape)
        module.down_proj.data = noise.bfloat16()
    with torch.no_grad():
        prompts = [prompt(length, seed=length) for length in (1, 4, 7, LONG, 2, LONG)]
        expected = [model(ids).logits for ids in prompts]
        cache = budget(model, rows) if rows else None
        enable_expert_prefetch(model, device=device, expert_cache=cache, pack=True, progress=False)
        assert all(name.endswith("gate_up_proj") for name in packed_parameters(model))
        assert len(packed_parameters(model)) == len(experts_of(model))
        for ids, logits in zip(prompts, expected, strict=True):
            with device.watching():
                assert torch.equal(model(ids).logits, logits)
        disable_expert_prefetch(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    RaceChecker().assert_clean(device.log)


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_the_memory_of_one_slot_is_what_calls_compute_with(slots: int) -> None:
    """Slots hold packed banks and are free once these are unpacked, so there is one less; banks still come ahead of use."""
    model, ids, device = model_of(), prompt(LONG), FakeDevice("lazy")
    raw = max(bank.nbytes for bank in find_banks(model).banks)
    with torch.no_grad():
        expected = model(ids).logits
        enable_expert_prefetch(model, slots, device=device, pack=True, progress=False)
        for _ in range(2):
            with device.watching():
                assert torch.equal(model(ids).logits, expected)
    report = model.expert_prefetch.report()
    assert report.lookahead_hits == 2 * (report.banks - 1)
    assert device.allocated_bytes < 0.8 * (slots - 1) * raw
    disable_expert_prefetch(model)


def test_whoever_reads_a_packed_weight_gets_what_it_was(tmp_path: Any) -> None:
    """By an operator, in a state dict, in a file; and what is loaded is what computes."""
    model, other, ids = model_of(), model_of(), prompt(LONG)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    state, second = {name: value.clone() for name, value in model.state_dict().items()}, outcome(other, ids)
    expected = outcome(model, ids)
    enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    name, parameter = next((name, p) for name, p in model.named_parameters() if isinstance(p, PackedWeights))
    assert parameter.dtype is torch.bfloat16
    assert parameter.shape == state[name].shape
    assert torch.equal(parameter + 0, state[name])
    assert torch.equal(parameter[2], state[name][2])
    assert float(parameter.detach().float().sum()) == float(state[name].float().sum())
    now = model.state_dict()
    assert list(now) == list(state)
    assert all(type(value) is torch.Tensor and torch.equal(value, state[key]) for key, value in now.items())
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    assert all(torch.equal(value, state[key]) for key, value in saved.items())
    assert all(map(torch.equal, outcome(model, ids), expected))
    model.load_state_dict(other.state_dict())
    assert all(map(torch.equal, outcome(model, ids), second))
    disable_expert_prefetch(model)
    assert all(map(torch.equal, outcome(model, ids), second))


WRITES: list[Any] = [
    lambda weights: weights.mul_(0.5),
    lambda weights: weights.data.add_(0.25),
    lambda weights: weights.__setitem__(1, 0.0),
    lambda weights: weights.__setitem__((slice(None), 2), weights[:, 3] * 0),
    lambda weights: weights.data.__setitem__(weights > 0, -0.5),
    lambda weights: weights.zero_(),
    lambda weights: torch.add(weights, weights, out=weights),
    lambda weights: torch._foreach_mul_([weights], 2.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_whoever_writes_into_a_packed_weight_finds_it_there(write: Any) -> None:
    """Whatever the way, what is computed with afterwards is what was written, or it is an error."""
    model, other, ids = model_of(), model_of(), prompt(LONG)
    enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    model(ids)
    with torch.no_grad():
        for name, weights in other.named_parameters():
            if name.endswith("down_proj"):
                write(weights)
                write(model.get_parameter(name))
                assert isinstance(model.get_parameter(name), PackedWeights)
                assert torch.equal(model.get_parameter(name) + 0, weights)
        assert torch.equal(model(ids).logits, other(ids).logits)
        assert torch.equal(model(ids[:, :1]).logits, other(ids[:, :1]).logits)


def test_a_result_that_holds_on_to_weights() -> None:
    """With gradients: before enabling it is an error that says what to do; one that was made meanwhile holds nothing."""
    model, ids = model_of(implementation="grouped_mm"), prompt(LONG)
    expected = model(ids).logits
    with pytest.raises(RuntimeError, match=r"something else holds on to their weights.*no_grad.*Delete it"):
        enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    assert torch.equal(model(ids).logits, expected)
    expected = expected.detach()
    enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    logits = model(ids).logits
    assert torch.equal(logits, expected)
    assert logits.requires_grad
    with pytest.raises(RuntimeError, match="Backward reached the experts"):
        logits.sum().backward()
    disable_expert_prefetch(model)
    assert not packed_parameters(model)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(("on", "off"), [(True, True), (True, False), (False, True)])
def test_under_inference_mode(*, on: bool, off: bool) -> None:
    """Weights that were packed or unpacked there can be trained afterwards."""
    model, ids = model_of(), prompt(LONG)
    with torch.inference_mode(on):
        enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
        expected = model(ids).logits.clone()
    with torch.inference_mode(off):
        disable_expert_prefetch(model)
    output = model(ids)
    assert torch.equal(output.logits, expected)
    output.logits.float().sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if ".experts." in name)


def test_loading_straight_from_files() -> None:
    """`from_pretrained(pack=True)`: the weights of the checkpoint, packed as they are read."""
    expected = load_demo_model()
    model = from_pretrained(demo_model_path(), device="cpu", pack=True)
    assert len(packed_parameters(model)) == 2 * len(experts_of(model))
    now = model.state_dict()
    assert all(torch.equal(now[key], value) for key, value in expected.state_dict().items())
    report = model.expert_prefetch.report()
    assert report.host_bytes < 0.77 * report.weight_bytes
    assert "packed" in str(report)
    ids = prompt(LONG)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert torch.equal(model(ids[:, :3]).logits, expected(ids[:, :3]).logits)


def test_weights_that_find_no_room_are_refused() -> None:
    """Whatever needs more escapes than were counted on; the remedy works."""
    model, ids = model_of(), prompt(LONG)
    noise = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in noise.items():
        if ".experts." in name:
            noise[name] = (torch.randn(value.shape) * 2.0 ** torch.randint(-40, -3, value.shape)).bfloat16()
    enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    with pytest.raises(RuntimeError, match=r"kept whole.*disable_expert_prefetch"):
        model.load_state_dict(noise)
    disable_expert_prefetch(model)
    model.load_state_dict(noise)
    expected = outcome(model, ids)
    enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    assert not packed_parameters(model), "these would get larger"
    assert all(map(torch.equal, outcome(model, ids), expected))
    disable_expert_prefetch(model)


def test_only_what_gets_smaller_is_packed() -> None:
    """float32 stays as it is; so does what stays on the device."""
    model = model_of(dtype=torch.float32)
    enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    assert not packed_parameters(model)
    disable_expert_prefetch(model)
    model = model_of()
    layers = len(experts_of(model))
    enable_expert_prefetch(model, device="cpu", n_cpu_moe=2, pack=True, progress=False)
    assert len(packed_parameters(model)) == 2 * 2 < 2 * layers
    disable_expert_prefetch(model)
    assert not packed_parameters(model)


def test_parameters_stay_the_objects_that_they_were() -> None:
    """Also whether they require gradients, and when a model is deleted while it is enabled nothing is left behind."""
    model, device = model_of(), FakeDevice("lazy")
    before = [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()]
    for _ in range(2):
        enable_expert_prefetch(model, device=device, pack=True, progress=False)
        assert [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()] == before
    disable_expert_prefetch(model)
    assert [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()] == before
    enable_expert_prefetch(model, device=device, pack=True, progress=False)
    model(prompt(LONG))
    del model
    gc.collect()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


@ways
def test_experts_that_accelerate_has_offloaded(
    dispatch: Dispatch, banks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken over, packed, and given back as they were; accelerate keeps no second copy meanwhile."""
    model, ids, device = build("mixtral", torch.bfloat16), prompt(LONG), FakeDevice()
    model.set_experts_implementation("batched_mm")
    monkeypatch.setattr("hf_prefetch.model.homes.stream_device", lambda place: device)
    expected = outcome(model, ids)
    dispatch(model, tmp_path)
    hooks, away = hooks_of(model), list(offloaded(model))
    for _ in range(2):
        enable_expert_prefetch(model, pack=True, progress=False)
        assert len(packed_parameters(model)) == 2 * banks
        assert model.expert_prefetch.report().host_bytes < 0.8 * banks * bank_bytes(model) // LAYERS
        with device.watching():
            assert all(map(torch.equal, outcome(model, ids), expected))
        assert device.races() == []
        for name in away:
            for hook in flatten(model.get_submodule(name).__dict__["_hf_prefetch_taken"]):
                kept = getattr(hook.weights_map, "dataset", hook.weights_map)
                held = kept if isinstance(kept, dict) else kept.state_dict
                mine = [held[key] for own in ("gate_up_proj", "down_proj") for key in (own, f"{name}.{own}") if key in held]
                assert all(isinstance(value, PackedWeights) for value in mine)
        disable_expert_prefetch(model)
        assert hooks_of(model) == hooks
        assert list(offloaded(model)) == away
        assert all(map(torch.equal, outcome(model, ids), expected))
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_weights_from_files_that_would_get_larger(tmp_path: Path) -> None:
    """They are read to see that, and stay as they are."""
    model, ids = model_of(), prompt(LONG)
    for module in experts_of(model).values():
        noise = torch.randint(-(2**15), 2**15, module.down_proj.shape).short().view(torch.bfloat16)
        module.down_proj.data.copy_(torch.where(noise.isfinite(), noise, 0))
    model.save_pretrained(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = from_pretrained(tmp_path, device="cpu", pack=True, progress=False)
    assert len(packed_parameters(loaded)) == len(experts_of(model))
    after = loaded.state_dict()
    assert all(torch.equal(after[name].view(torch.uint8), value.view(torch.uint8)) for name, value in before.items())
    loaded(ids)


@pytest.mark.parametrize("number", [1, 4, 9])
def test_an_interrupt_while_weights_are_packed_undoes_it(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are packed already are unpacked."""
    model, ids, calls = model_of(), prompt(LONG), iter(range(1, 100))
    expected, before = outcome(model, ids), Snapshot.of(model)

    def interrupted(rows: torch.Tensor) -> PackedRows:
        if next(calls) == number:
            raise KeyboardInterrupt
        return pack(rows)

    monkeypatch.setattr("hf_prefetch.model.packed.pack", interrupted)
    device = FakeDevice()
    with pytest.raises(KeyboardInterrupt):
        enable_expert_prefetch(model, device=device, pack=True, progress=False)
    before.assert_restored(model)
    assert not packed_parameters(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    assert all(map(torch.equal, outcome(model, ids), expected))


# -- pack="auto" ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "unpack", "pays"),
    [
        (55e9, 1300e9, True),
        (55e9, 285e9, True),
        (55e9, 280e9, False),
        (8e9, 100e9, True),
        (400e9, 1300e9, False),
        (1300e9, 1300e9, False),
    ],
)
def test_what_pays(link: float, unpack: float, *, pays: bool) -> None:
    """0.755 of the time on the link, and all of the time that unpacking takes, must come to 0.95 of it."""
    assert packing_pays(Rates(link=link, unpack=unpack)) == pays


def test_auto_is_off_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where there is one, what was measured decides."""
    model = model_of()
    monkeypatch.setattr("hf_prefetch.model.measuring.measure", lambda *_, **__: pytest.fail("nothing to measure"))
    enable_expert_prefetch(model, device=FakeDevice(), pack="auto", progress=False)
    assert not packed_parameters(model)
    assert model.expert_prefetch.config.pack is None
    for pays in (True, False):
        asked: dict[str, Any] = {}

        def chooses(devices: Any, *, pays: bool = pays, asked: dict[str, Any] = asked, **options: Any) -> bool:
            asked.update(options, devices=list(devices))
            return pays

        monkeypatch.setattr("hf_prefetch.api.chooses_packing", chooses)
        device = FakeDevice()
        enable_expert_prefetch(model, device=device, pack="auto", pin_memory=0, progress=False)
        assert asked == {"devices": [device], "pins": False}
        assert bool(packed_parameters(model)) == pays
    disable_expert_prefetch(model)


def test_auto_is_off_where_there_is_no_room_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is enabled all the same, and what was allocated is given back."""

    def full(device: FakeDevice, **_: Any) -> Any:
        raise torch.OutOfMemoryError

    trimmed: list[FakeDevice] = []
    monkeypatch.setattr("hf_prefetch.model.measuring.measure", full)
    monkeypatch.setattr("hf_prefetch.model.measuring.triton_is_there", lambda: True)
    monkeypatch.setattr(FakeDevice, "trim", lambda self: trimmed.append(self))
    device = FakeDevice()
    device.device = torch.device("cuda", 0)
    assert not chooses_packing([device], pins=True)
    assert trimmed == [device]


@pytest.mark.gpu
def test_it_is_measured_in_a_moment(device: torch.device) -> None:
    """Rates that a device can have, in less than half a second when the kernel is compiled; nothing stays there."""
    pytest.importorskip("triton")
    home = stream_device(device)
    measure(home, pins=True)
    torch.cuda.synchronize()
    before, begin = torch.cuda.memory_allocated(), time.perf_counter()
    rates = measure(home, pins=True)
    assert time.perf_counter() - begin < 0.5
    assert torch.cuda.memory_allocated() == before
    assert 1e9 < rates.link < 1e12
    assert 1e10 < rates.unpack < 1e13


@pytest.mark.parametrize("value", [1, "yes", 0.5])
def test_what_is_no_answer_is_refused(value: Any) -> None:
    """Before anything is touched."""
    with pytest.raises(ValueError if isinstance(value, str) else TypeError, match="pack must be True, False"):
        enable_expert_prefetch(model_of(), device="cpu", pack=value)
