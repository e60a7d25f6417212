"""What new users ran into; each was wrong once."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained, save_packed
from hf_prefetch.config import PrefetchConfig
from hf_prefetch.model.telling import _tell_of_the_cpu
from hf_prefetch.routing import inject_routing
from hf_prefetch.testing import FakeDevice
from models import Snapshot, build, experts_of, prompt


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("disabled", [False, True])
def test_a_forked_child_that_writes_weights_keeps_its_hands_off_the_parents(disabled: bool) -> None:
    """Where nothing is page-locked memory is copied on write, as it would be without the package."""
    model, ids = build("mixtral"), prompt(20)
    with torch.no_grad():
        expected = model(ids).logits
        enable_expert_prefetch(model, device="cpu")
        if disabled:
            disable_expert_prefetch(model)
        child = os.fork()
        if child == 0:
            for module in experts_of(model).values():
                module.down_proj.zero_()
            os._exit(0)
        os.waitpid(child, 0)
        assert torch.equal(model(ids).logits, expected)


def test_a_model_made_under_inference_mode() -> None:
    """Its Parameters keep no count of changes."""
    with torch.inference_mode():
        model, ids = build("mixtral"), prompt(20)
        expected = model(ids).logits
    enable_expert_prefetch(model, device="cpu")
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)
    assert model.expert_prefetch.report().lookahead_hits > 0


def test_experts_that_share_a_part_of_their_weights_are_left_alone() -> None:
    """Each would have to be pointed at two places."""
    model, ids = build("qwen3_moe"), prompt(20)
    layers = model.model.layers
    layers[2].mlp.experts.down_proj = layers[1].mlp.experts.down_proj
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.warns(UserWarning, match="shares some of its weights, but not all"):
            enable_expert_prefetch(model, device="cpu")
        assert torch.equal(model(ids).logits, expected)
    assert model.expert_prefetch.report().banks == 5


@pytest.mark.parametrize("again", [False, True])
def test_a_part_whose_model_is_gone_can_be_freed(again: bool) -> None:
    """Or enabled itself."""
    model, ids = build("mixtral"), prompt(20)
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
        enable_expert_prefetch(model, device=FakeDevice())
        part = model.model
        del model
        gc.collect()
        if again:
            enable_expert_prefetch(part, device=FakeDevice())
        else:
            disable_expert_prefetch(part)
        assert torch.equal(part(ids).last_hidden_state, expected)
    disable_expert_prefetch(part)
    assert not any(hasattr(module, "_hf_hook") or "_apply" in module.__dict__ for module in part.modules())


def test_numbers_of_other_libraries_and_sizes_as_digits() -> None:
    """A number is a number; True and "3" are none."""
    model = build("mixtral")
    enable_expert_prefetch(model, slots=numpy.int64(2), n_cpu_moe=numpy.int64(3), device="cpu")
    report = model.expert_prefetch.report()
    assert (report.slots, report.banks) == (2, 3)
    enable_expert_prefetch(model, gpu_memory="1000000000", device="cpu")
    assert model.expert_prefetch.report().banks == 0
    with pytest.raises(TypeError, match="slots must be an int"):
        enable_expert_prefetch(model, slots=3.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("20GB", 20 * 10**9), ("20GiB", 20 * 2**30), ("1.5 MB", 1_500_000), ("3KiB", 3072), ("1TB", 10**12), ("2TiB", 2 * 2**40)],
)
def test_sizes_are_bytes_in_letters_of_either_case(text: str, nbytes: int) -> None:
    """A small b is no bit."""
    for written in (text, text.lower(), text.upper(), text.swapcase(), text.replace("B", "b"), f" {text} "):
        config = PrefetchConfig(gpu_memory=written, host_memory=written, pin_memory=written)
        assert (config.gpu_memory, config.host_memory, config.pin_memory) == (nbytes, nbytes, nbytes)
        assert PrefetchConfig(expert_cache=written).expert_cache == nbytes


@pytest.mark.parametrize("text", ["20G", "20Gbit", "GiB", "nan GB", "1.5", ""])
def test_what_is_no_size_is_told_what_would_be_one(text: str) -> None:
    with pytest.raises(ValueError, match=r'is no size: give bytes, or a number with .*GB.*GiB.*, such as "20GiB"\.$'):
        PrefetchConfig(gpu_memory=text)


@pytest.mark.parametrize("name", ["gpu", "auto", "", 1.5])
def test_what_is_no_device_is_named(name: object) -> None:
    """With what would be one."""
    model = build("mixtral")
    before = Snapshot.of(model)
    with pytest.raises(ValueError, match=r"is no device of torch: give 'cuda'"):
        enable_expert_prefetch(model, device=name)  # type: ignore[arg-type]
    before.assert_restored(model)


def test_a_broken_checkpoint_is_one_line(tmp_path: Path) -> None:
    """Whatever the library that reads it raises."""
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 50)
    command = [sys.executable, "-m", "hf_prefetch", "generate", str(tmp_path), "--prompt", "a"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_a_model_made_under_inference_mode_works_afterwards(device: torch.device, implementation: str) -> None:
    """As it did before: with inference_mode and without."""
    with torch.inference_mode():
        model = build("qwen3_moe").to(device)
    model.set_experts_implementation(implementation)
    ids = prompt(5, device=device)
    modes = (torch.no_grad, torch.inference_mode)
    expected = [call(model, ids, mode) for mode in modes]
    enable_expert_prefetch(model, device=device)
    for mode, right in zip(modes, expected, strict=True):
        assert torch.equal(call(model, ids, mode), right)
    disable_expert_prefetch(model)
    for mode, right in zip(modes, expected, strict=True):
        assert torch.equal(call(model, ids, mode), right)
    assert all(parameter.is_inference() for parameter in model.parameters())


def call(model: nn.Module, ids: torch.Tensor, mode: Callable[[], AbstractContextManager[None]]) -> torch.Tensor:
    with mode():
        logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("cache", [None, 0.2, 0.5, "64KiB"])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_the_least_gpu_memory_that_is_named_is_enough(cache: float | str | None, slots: int) -> None:
    """The message names a size; who gives it gets no other message."""
    model = build("qwen3_moe")
    with pytest.raises(ValueError, match="Give at least") as caught:
        enable_expert_prefetch(model, slots, gpu_memory="100KiB", expert_cache=cache)
    least = re.search(r"Give at least (\S+?[KMG]iB)", str(caught.value))
    assert least, caught.value
    assert ("expert_cache" in str(caught.value)) == (cache is not None)
    enable_expert_prefetch(model, slots, gpu_memory=least[1], expert_cache=cache)
    disable_expert_prefetch(model)


def test_a_cache_too_small_for_a_token_is_said_once() -> None:
    """It would only take memory. The message names a size that is enough."""
    model, ids = build("qwen3_moe"), prompt(20)
    model.set_experts_implementation("batched_mm")
    enable_expert_prefetch(model, device="cpu", expert_cache=1)
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(3):
            model(ids[:, :1])
    assert len(told) == 1
    assert "a token uses 2" in str(told[0].message)
    assert "too small" in str(model.expert_prefetch.report())
    assert model.expert_prefetch.report().cache_bytes == 0
    least = re.search(r"Give at least (\S+?[KMG]iB)", str(told[0].message))
    assert least, told[0].message
    enable_expert_prefetch(model, device="cpu", expert_cache=least[1])
    with torch.no_grad():
        model(ids[:, :1])
    assert model.expert_prefetch.report().cached_calls == 7


@pytest.mark.parametrize("share", [0.5, "0.5", "50%", ".5"])
def test_a_share_may_be_a_number_or_a_text(share: float | str) -> None:
    """Of gpu_memory."""
    assert PrefetchConfig(gpu_memory="8MiB", expert_cache=share).cache_budget == 4 * 2**20
    with pytest.raises(ValueError, match="gpu_memory, which is not given"):
        PrefetchConfig(expert_cache=share)


@pytest.mark.parametrize("pack", [False, True])
def test_a_state_dict_that_is_asked_for_inside_a_call(pack: bool) -> None:
    """The module's own Parameters are in a slot then, where only some of the experts are: the host has them all."""
    model, ids = build("qwen3_moe", torch.bfloat16), prompt(20)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    enable_expert_prefetch(model, device=FakeDevice("lazy"), pack=pack)
    seen: list[dict[str, torch.Tensor]] = []
    module = next(iter(experts_of(model).values()))
    module.act_fn.register_forward_hook(lambda *_: seen.append(model.state_dict()))
    with torch.no_grad():
        for part in (ids, ids[:, :1]):
            model(part)
    assert len(seen) >= 2
    for state in seen:
        assert list(state) == list(expected)
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


def test_a_state_dict_while_another_thread_generates() -> None:
    """It waits for a call's end, and is right; so is what is saved from it."""
    model, ids, stop = build("qwen3_moe", torch.bfloat16), prompt(5), threading.Event()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    enable_expert_prefetch(model, device="cpu")

    def work() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(ids[:, :1])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(200):
            state = {name: value.clone() for name, value in model.state_dict().items()}
            assert all(torch.equal(value, expected[name]) for name, value in state.items())
    finally:
        stop.set()
        thread.join()


def test_a_cache_that_can_not_be_used_is_said_once_with_the_remedy() -> None:
    """A bigger one would change nothing; another implementation does."""
    model, ids = build("qwen3_moe"), prompt(20)
    model.set_experts_implementation("eager")
    enable_expert_prefetch(model, device="cpu", expert_cache="400KiB")
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(3):
            model(ids[:, :1])
        assert len(told) == 1
        assert "set_experts_implementation('batched_mm')" in str(told[0].message)
        assert "needs batched_mm or grouped_mm" in str(model.expert_prefetch.report())
        model.set_experts_implementation("batched_mm")
        model(ids[:, :1])
    assert model.expert_prefetch.report().cached_calls == 7
    assert len(told) == 1


def test_one_timeline_at_a_time() -> None:
    """A second one would end the first without a word."""
    model, ids = build("qwen3_moe"), prompt(20)
    enable_expert_prefetch(model, device="cpu")
    scheduler = model.expert_prefetch
    with torch.no_grad(), scheduler.timeline() as timeline:
        model(ids)
        with pytest.raises(RuntimeError, match="recorded already"), scheduler.timeline():
            pass
        model(ids)
    assert sum(span.kind == "compute" for span in timeline.spans()) == 14
    with scheduler.timeline():
        pass


def test_ids_from_nowhere_are_refused_at_once() -> None:
    """And not in the middle of a forward."""
    with pytest.raises(TypeError, match="not from a dict"), inject_routing(build("qwen3_moe"), {}):
        pass


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    """And not another one, whose shape is right."""
    build("qwen3_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.2.mlp.experts.3.gate_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj.*missing for 3") as caught:
        from_pretrained(tmp_path, device="cpu")
    assert "layers.2" in str(caught.value)


def test_an_index_that_is_no_json_is_named(tmp_path: Path) -> None:
    """transformers says only where in it."""
    build("qwen3_moe").save_pretrained(tmp_path, max_shard_size="300KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{ broken")
    with pytest.raises(ValueError, match=re.escape(str(index))):
        from_pretrained(tmp_path, device="cpu")


def test_an_interrupt_of_a_finalizer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python only prints what a finalizer raises. What is left to do is done, and the interrupt comes a moment later."""
    model, device = build("qwen3_moe"), FakeDevice("lazy")
    enable_expert_prefetch(model, device=device)
    model(prompt(20))
    ring, interrupts = model.expert_prefetch._lane_of[model.expert_prefetch.banks[0]].ring, iter([KeyboardInterrupt])
    settle = ring.settle

    def interrupted() -> None:
        for interrupt in interrupts:
            raise interrupt
        settle()

    monkeypatch.setattr(ring, "settle", interrupted)
    del model
    gc.collect()
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)


def test_the_note_about_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """Once in a process, and not where nothing is sent."""
    _tell_of_the_cpu.cache_clear()  # another test may have seen it
    model, other = build("mixtral"), build("mixtral")
    with caplog.at_level("WARNING", logger="hf_prefetch"):
        enable_expert_prefetch(model, device="cpu", n_cpu_moe=0, progress=False)
        disable_expert_prefetch(model)
        assert not caplog.records
        for slots in (3, 2, 4):
            enable_expert_prefetch(model, slots, device="cpu", progress=False)
        disable_expert_prefetch(model)
        for each in (model, other):
            enable_expert_prefetch(each, device="cpu", progress=False)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["hf_prefetch: this computes on the CPU"]


@pytest.mark.parametrize("call", [enable_expert_prefetch, disable_expert_prefetch])
def test_what_is_no_model_is_named_by_its_type(call: Callable[[Any], Any]) -> None:
    """A config shows as many lines, a tensor as many numbers."""
    with pytest.raises(TypeError, match=r"^Expected .*, got an object of type MixtralConfig\.$"):
        call(build("mixtral").config)
    with pytest.raises(TypeError, match=r"^Expected .*, got an object of type str\. Load it first: .*\('a/model'\)\.$"):
        call("a/model")


def test_packed_experts_that_would_go_to_files(tmp_path: Path) -> None:
    """The first of the layers is named, each time, with what helps, which unpacking is not."""
    save_packed(build("qwen3_moe", torch.bfloat16), tmp_path, progress=False)
    for pack in (None, False) * 3:
        with pytest.raises(ValueError, match=r"^The experts of model\.layers\.0\.mlp\.experts come from a packed") as caught:
            from_pretrained(tmp_path, pack=pack, host_memory=0, device="cpu", progress=False)
        assert "leave out host_memory, give more of it, or load the ordinary checkpoint" in str(caught.value)
    from_pretrained(tmp_path, pack=False, host_memory="1GiB", device="cpu", progress=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_where_a_finalizer_begins_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a Ctrl-C is raised that came during a garbage collection, and nothing of the finalizer runs."""
    model, device = build("qwen3_moe"), FakeDevice("lazy")
    enable_expert_prefetch(model, device=device)
    model(prompt(20))
    interrupts, call = iter([KeyboardInterrupt]), weakref.finalize.__call__

    def interrupted(self: Any, _: object = None) -> Any:
        for interrupt in interrupts:
            raise interrupt
        return call(self)

    monkeypatch.setattr(weakref.finalize, "__call__", interrupted)
    del model
    gc.collect()
    assert next(interrupts, None) is None
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)


def test_a_model_without_its_attribute_can_be_disabled() -> None:
    """`expert_prefetch` is for users, who may delete it."""
    model, ids = build("mixtral"), prompt(20)
    before = Snapshot.of(model)
    enable_expert_prefetch(model, device="cpu", progress=False)
    scheduler = model.expert_prefetch
    del model.expert_prefetch
    with torch.no_grad():
        model(ids)
    enable_expert_prefetch(model, device="cpu", progress=False)
    assert scheduler.has_ended
    del model.expert_prefetch
    disable_expert_prefetch(model)
    before.assert_restored(model)
