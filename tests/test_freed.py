"""What is disabled is gone at once, without the collector; and where the system gives no memory, the error says what for."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained
from hf_prefetch.memory import pinned
from hf_prefetch.memory.shortage import HostMemoryError, memory_for
from hf_prefetch.model.packed_weights import PackedWeights
from hf_prefetch.testing import FakeDevice
from models import build, prompt

LONG = 24


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def found_by_the_collector() -> list[object]:
    """Modules and tensors that only it can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    return [each for each in gc.garbage if isinstance(each, (nn.Module, torch.Tensor, PackedWeights))]


def compute(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model(prompt(LONG))
        model.generate(prompt(3), max_new_tokens=3, do_sample=False)


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda path: {},
    "page-locked": lambda path: {"device": FakeDevice()},
    "refused": lambda path: {"device": FakeDevice(refuse_pinning=True)},
    "packed": lambda path: {"pack": True},
    "packed, page-locked": lambda path: {"pack": True, "device": FakeDevice()},
    "files": lambda path: {"host_memory": 0, "offload_folder": path},
    "some resident": lambda path: {"n_cpu_moe": 2},
    "cached": lambda path: {"expert_cache": "1MiB"},
}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", ["unused", "used"])
def test_a_disabled_model_is_freed_by_its_last_reference(way: str, use: str, tmp_path: Path) -> None:
    model = build("qwen3_moe", torch.bfloat16)
    gc.collect()
    enable_expert_prefetch(model, progress=False, **{"device": "cpu", **WAYS[way](tmp_path)})
    if use == "used":
        compute(model)
    kept = [weakref.ref(each) for each in (model, model.expert_prefetch, *model.modules(), *model.parameters())]
    disable_expert_prefetch(model)
    assert kept[1]() is None, "the scheduler"
    del model
    assert [each() for each in kept if each() is not None] == []
    assert found_by_the_collector() == []


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("options", [{}, {"pack": True}, {"host_memory": 0}])
def test_so_is_one_that_was_loaded(options: dict[str, Any], tmp_path: Path) -> None:
    build("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    gc.collect()
    model = from_pretrained(tmp_path, device=FakeDevice(), progress=False, **options)
    compute(model)
    kept = [weakref.ref(each) for each in (model, model.expert_prefetch, *model.parameters())]
    disable_expert_prefetch(model)
    del model
    assert [each() for each in kept if each() is not None] == []
    assert [each for each in found_by_the_collector() if isinstance(each, nn.Module)] == []


@pytest.mark.usefixtures("uncollected")
def test_packed_memory_is_gone_with_the_packing() -> None:
    """Weights that become ordinary again leave nothing of what was packed behind, round after round."""
    model = build("qwen3_moe", torch.bfloat16)
    for _ in range(3):
        enable_expert_prefetch(model, device=FakeDevice(), pack=True, progress=False)
        packed = [parameter for parameter in model.parameters() if isinstance(parameter, PackedWeights)]
        parts = [weakref.ref(part) for each in packed for part in (each.blocks, each.escapes, each._shared)]
        assert parts
        del packed
        disable_expert_prefetch(model)
        assert [each() for each in parts if each() is not None] == []


# -- no memory ----------------------------------------------------------------------------------------------------------


class Refusing:
    """Gives memory for some banks, and then says what the system would."""

    def __init__(self, banks: int) -> None:
        self.left, self.own = banks, pinned.Pages

    def __call__(self, nbytes: int, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return self.own(nbytes, **options)


@pytest.mark.parametrize("options", [{}, {"pack": True}])
def test_a_layer_that_host_memory_has_no_room_for_is_named(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe", torch.bfloat16)
    with torch.no_grad():
        expected = model(prompt(LONG)).logits
    monkeypatch.setattr(pinned, "Pages", Refusing(2))
    with pytest.raises(
        MemoryError, match=r"no host memory for the experts of model\.layers\.2\.mlp\.experts \(.*KiB\)"
    ) as caught:
        enable_expert_prefetch(model, device="cpu", progress=False, **options)
    for remedy in ("host_memory=", "offload_folder=", "ulimit -v", "gpu_memory"):
        assert remedy in str(caught.value)
    monkeypatch.undo()
    assert not hasattr(model, "expert_prefetch")
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    with torch.no_grad():
        assert torch.equal(model(prompt(LONG)).logits, expected)
    enable_expert_prefetch(model, device="cpu", progress=False, **options)
    with torch.no_grad():
        assert torch.equal(model(prompt(LONG)).logits, expected)


def test_a_checkpoint_that_host_memory_has_no_room_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(pinned, "Pages", Refusing(0))
    with pytest.raises(MemoryError, match=r"no host memory for .* \(.*iB\)\. Free some.*host_memory="):
        from_pretrained(tmp_path, device="cpu", progress=False)


def test_what_torch_says_is_understood() -> None:
    said = r"no host memory for them \(1\.00 GiB\)\. Do that\."
    with pytest.raises(HostMemoryError, match=said), memory_for("them", "Do that.", 2**30):
        torch.empty(2**62, dtype=torch.uint8)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("else"), torch.OutOfMemoryError("device")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, memory_for("them", "Do that."):
        raise error
    assert caught.value is error


def test_the_first_to_say_it_is_heard() -> None:
    one, everything = memory_for("one of them", "Do that."), memory_for("all", "Do that.")
    with pytest.raises(HostMemoryError, match="for one of them"), everything, one:
        raise MemoryError


def test_what_can_t_be_undone_for_want_of_memory_is_undone_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed experts need more memory than they have to become what they were."""
    model = build("qwen3_moe", torch.bfloat16)
    with torch.no_grad():
        expected = model(prompt(LONG)).logits
    own, unpacked, short = pinned.Pages, PackedWeights.unpacked, True
    monkeypatch.setattr(pinned, "Pages", Refusing(2))

    def refused(self: PackedWeights) -> torch.Tensor:
        if short:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")
        return unpacked(self)

    monkeypatch.setattr(PackedWeights, "unpacked", refused)
    with pytest.raises(MemoryError, match=r"no host memory for experts as they were.*disable_expert_prefetch\(model\)"):
        enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
    monkeypatch.setattr(pinned, "Pages", own)
    with pytest.raises(MemoryError, match=r"no host memory for experts as they were"):
        disable_expert_prefetch(model)
    short = False
    disable_expert_prefetch(model)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert not [name for name in model.__dict__ if "expert_prefetch" in name]
    with torch.no_grad():
        assert torch.equal(model(prompt(LONG)).logits, expected)
        enable_expert_prefetch(model, device="cpu", pack=True, progress=False)
        assert torch.equal(model(prompt(LONG)).logits, expected)


LIMITED = """
import resource, torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from hf_prefetch import enable_expert_prefetch
sizes = dict(hidden_size=512, moe_intermediate_size=2048, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, vocab_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32))
ids = torch.arange(24)[None]
with torch.no_grad():
    expected = model(ids).logits
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 5 * 2**20, resource.RLIM_INFINITY))
    try:
        enable_expert_prefetch(model, device="cpu", progress=False)
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert torch.equal(model(ids).logits, expected)
    enable_expert_prefetch(model, device="cpu", progress=False)
    assert torch.equal(model(ids).logits, expected)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address spaces have no such limit")
def test_a_system_that_refuses_memory_is_quoted() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "no host memory for the experts of model.layers.0.mlp.experts (96.00 MiB)" in done.stdout
