"""Part of the experts on the device, the rest in host memory: the same bits, and only the rest travels."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.config import PrefetchConfig
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import Snapshot, bank_bytes, build, experts_of, prompt


def dense_bytes(model: torch.nn.Module) -> int:
    """What is not an expert, buffers included."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) - bank_bytes(model)


@pytest.mark.raw
@pytest.mark.parametrize("share", [0, 25, 50, 75, 100])
def test_n_cpu_moe_sends_the_first_layers_and_no_others(share: int, device: torch.device) -> None:
    """In every share of the layers the logits are equal, and the bytes that travel fall in proportion."""
    model = build("qwen3_moe").to(device)
    layers = len(experts_of(model))
    host = round(layers * share / 100)
    before, ids = Snapshot.of(model), prompt(20, device=device)
    with torch.no_grad():
        expected = model(ids).logits
        enable_expert_prefetch(model, n_cpu_moe=host, device=device)
        for _ in range(2):
            assert torch.equal(model(ids).logits, expected)
    report = model.expert_prefetch.report()
    assert (report.banks, report.resident_banks) == (host, layers - host)
    assert report.bytes_to_device == 2 * bank_bytes(model) * host // layers
    assert report.lookahead_hits == 2 * max(0, host - 1)
    hooked = [hasattr(module, "_hf_hook") for module in experts_of(model).values()]
    assert hooked == [True] * host + [False] * (layers - host), "a resident layer has no hook at all"
    disable_expert_prefetch(model)
    before.assert_restored(model)


@pytest.mark.raw
@pytest.mark.parametrize("policy", ["eager", "lazy", 5])
def test_gpu_memory_keeps_as_many_layers_as_fit(policy: str | int) -> None:
    """Spread over the model; the first host-resident layer is on its way before it is reached."""
    model, ids = build("qwen3_moe"), prompt(20)
    layers, bank = len(experts_of(model)), bank_bytes(model) // len(experts_of(model))
    budget = dense_bytes(model) + 3 * bank + 2 * bank
    with torch.no_grad():
        expected = model(ids).logits
        device = FakeDevice(policy)
        enable_expert_prefetch(model, gpu_memory=budget, device=device)
        with device.watching():
            for _ in range(3):
                assert torch.equal(model(ids).logits, expected)
    report = model.expert_prefetch.report()
    assert (report.banks, report.resident_banks) == (layers - 2, 2)
    assert report.device_bytes == 3 * bank
    assert report.lookahead_hits == 3 * report.banks, "the first one of each pass as well"
    assert not hasattr(next(iter(experts_of(model).values())), "_hf_hook"), "the first layer stays on the device"
    disable_expert_prefetch(model)
    RaceChecker().assert_clean(device.log)
    assert device.allocated_bytes == 0
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_everything_fits(device: torch.device) -> None:
    """Then nothing is hooked, nothing is allocated, and the report says so."""
    model, ids = build("mixtral").to(device), prompt(20, device=device)
    with torch.no_grad():
        expected = model(ids).logits
        enable_expert_prefetch(model, gpu_memory="1GiB", device=device)
        assert torch.equal(model(ids).logits, expected)
    report = model.expert_prefetch.report()
    assert (report.banks, report.resident_banks, report.device_bytes, report.host_bytes) == (0, 5, 0, 0)
    assert "nothing to prefetch: all experts stay on the device" in str(report)
    disable_expert_prefetch(model)
    assert not hasattr(model, "expert_prefetch")


def test_too_little_memory_is_an_error_with_the_numbers() -> None:
    """And the model is as it was."""
    model = build("mixtral")
    before = Snapshot.of(model)
    with pytest.raises(ValueError, match=r"gpu_memory=292.97 KiB is too little .* Give at least \d+KiB, or take fewer slots"):
        enable_expert_prefetch(model, gpu_memory="300KB")
    before.assert_restored(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_cpu_moe": -1}, ValueError, "n_cpu_moe"),
        ({"n_cpu_moe": True}, TypeError, "n_cpu_moe"),
        ({"n_cpu_moe": "3"}, TypeError, "n_cpu_moe"),
        ({"gpu_memory": "twenty"}, ValueError, "gpu_memory='twenty' is no size"),
        ({"gpu_memory": "9" * 400 + "GiB"}, ValueError, "gpu_memory='9+GiB' is no size"),
        ({"gpu_memory": "9" * 400 + "KB"}, ValueError, "gpu_memory='9+KB' is no size"),
        ({"gpu_memory": "9" * 5000}, ValueError, "gpu_memory='9+' is no size"),
        ({"gpu_memory": 10**400}, ValueError, "gpu_memory=10+ is no size"),
        ({"gpu_memory": "1BiB"}, ValueError, "gpu_memory='1BiB' is no size"),
        ({"gpu_memory": "infGiB"}, ValueError, "gpu_memory='infGiB' is no size"),
        ({"expert_cache": "9" * 400 + "GiB"}, ValueError, "expert_cache='9+GiB' is no size"),
        ({"gpu_memory": 2.5}, TypeError, "gpu_memory must be bytes or a size"),
        ({"gpu_memory": 0}, ValueError, "more than nothing"),
        ({"gpu_memory": "1GiB", "n_cpu_moe": 2}, ValueError, "give one of them"),
    ],
)
def test_bad_options_say_what_is_wrong(options: dict[str, object], error: type[Exception], message: str) -> None:
    """Before anything is touched."""
    model = build("mixtral")
    before = Snapshot.of(model)
    with pytest.raises(error, match=message):
        enable_expert_prefetch(model, **options)  # type: ignore[arg-type]
    before.assert_restored(model)


def test_a_dispatched_model_gets_layers_back_onto_its_device() -> None:
    """What accelerate sent away may come back as far as it fits; disable gives accelerate everything back."""
    model, ids = build("qwen3_moe"), prompt(20)
    with torch.no_grad():
        expected = model(ids).logits
        cpu_offload(model, execution_device=torch.device("cpu"))
        hooks = {name: module._hf_hook for name, module in experts_of(model).items()}
        enable_expert_prefetch(model, n_cpu_moe=3)
        assert torch.equal(model(ids).logits, expected)
        report = model.expert_prefetch.report()
        assert (report.banks, report.resident_banks) == (3, 4)
        disable_expert_prefetch(model)
        assert {name: module._hf_hook for name, module in experts_of(model).items()} == hooks
        assert torch.equal(model(ids).logits, expected)


def test_a_second_call_changes_what_stays(device: torch.device) -> None:
    """Enabled again with other options: as if it had been the first time."""
    model, ids = build("qwen3_moe").to(device), prompt(20, device=device)
    with torch.no_grad():
        expected = model(ids).logits
        for host in (2, 7, 0, 4):
            enable_expert_prefetch(model, n_cpu_moe=host, device=device)
            assert torch.equal(model(ids).logits, expected)
            assert model.expert_prefetch.report().banks == host


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1B", 1), ("1 B", 1), ("4096 b", 4096), ("1.5 kb", 1500), ("2GiB", 2**31), ("7", 7)]
)
def test_a_size_can_be_given_as_it_is_shown(text: str, nbytes: int) -> None:
    assert PrefetchConfig(host_memory=text).host_budget == nbytes
