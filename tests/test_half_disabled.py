"""What keeps weights from being given back, or from being taken: an error that names it, the model as usable as before, and
disabling that can be called again until it is done."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained, save_packed
from hf_prefetch.memory.disk import OnDisk
from hf_prefetch.model.packed_weights import PackedWeights
from hf_prefetch.workers import Workers
from models import build, prompt

LONG = 24


def parameter_of(model: nn.Module) -> nn.Parameter:
    return model.model.layers[1].mlp.experts.down_proj  # type: ignore[no-any-return, union-attr, index]


def kinds(model: nn.Module) -> set[type]:
    return {type(parameter) for parameter in model.parameters()}


@pytest.fixture
def ways(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {"files": {"host_memory": 0, "offload_folder": tmp_path / "off"}, "packed": {"pack": True}}


@pytest.mark.parametrize("way", ["files", "packed"])
def test_weak_references_are_of_no_importance(ways: dict[str, dict[str, Any]], way: str) -> None:
    """torch.export leaves some behind that nobody can delete."""
    model, ids = build("qwen3_moe", torch.bfloat16), prompt(LONG)
    with torch.no_grad():
        expected = model(ids).logits
        torch.export.export(model, (ids,), {"use_cache": False})
        seen = weakref.ref(parameter_of(model))
        enable_expert_prefetch(model, device="cpu", progress=False, **ways[way])
        assert kinds(model) & {OnDisk, PackedWeights}
        assert torch.equal(model(ids).logits, expected)
        disable_expert_prefetch(model)
        assert seen() is parameter_of(model)
        assert kinds(model) == {nn.Parameter}
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("way", ["files", "packed"])
def test_what_is_held_is_told_and_disabling_can_be_repeated(ways: dict[str, dict[str, Any]], way: str) -> None:
    model, ids = build("qwen3_moe", torch.bfloat16), prompt(LONG)
    with torch.no_grad():
        expected = model(ids).logits
    enable_expert_prefetch(model, device="cpu", progress=False, **ways[way])
    held = _save(parameter_of(model))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"something else holds on to their weights.*Delete it.*call this again"):
            disable_expert_prefetch(model)
        assert hasattr(model, "expert_prefetch")
        with pytest.raises(RuntimeError, match="can't be converted"):
            model.half()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    del held
    gc.collect()
    disable_expert_prefetch(model)
    assert not hasattr(model, "expert_prefetch")
    assert kinds(model) == {nn.Parameter}
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    assert model.half().dtype == torch.float16


def _save(parameter: nn.Parameter) -> torch.Tensor:
    """A graph that keeps the Parameter itself."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(given)
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    return Keeping.apply(parameter)  # type: ignore[no-any-return, no-untyped-call]


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    """What was there is gone: every attempt says so, and none calls it done."""
    build("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, host_memory=0, device="cpu", progress=False)
    os.truncate(tmp_path / "model.safetensors", 1000)
    for _ in range(2):
        with pytest.raises(ValueError, match="has become shorter"):
            disable_expert_prefetch(model)
        assert hasattr(model, "expert_prefetch")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_can_not_be_asked_for_leaves_it_enabled(tmp_path: Path) -> None:
    """A model whose experts are in the files of its checkpoint is not read into memory to find that out."""
    build("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "model")
    model = from_pretrained(tmp_path / "model", host_memory=0, device="cpu", progress=False)
    with pytest.raises(ValueError, match=r"offload_folder=.*from_pretrained"):
        enable_expert_prefetch(model, device="cpu", host_memory=0, progress=False)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="it is a file"):
        enable_expert_prefetch(model, device="cpu", host_memory=0, offload_folder=tmp_path / "file", progress=False)
    assert hasattr(model, "expert_prefetch")
    assert OnDisk in kinds(model)
    disable_expert_prefetch(model)


def test_a_state_dict_that_can_not_be_loaded_changes_nothing(tmp_path: Path) -> None:
    model, other, ids = build("qwen3_moe", torch.bfloat16), build("qwen3_moe", torch.bfloat16, seed=5), prompt(LONG)
    enable_expert_prefetch(model, device="cpu", host_memory=0, offload_folder=tmp_path, progress=False)
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.raises(RuntimeError, match=r"stay in files.*nothing was loaded.*disable_expert_prefetch"):
            model.load_state_dict(other.state_dict())
        assert torch.equal(model(ids).logits, expected)
        dense = {name: value for name, value in other.state_dict().items() if ".experts." not in name}
        model.load_state_dict(dense, strict=False)
        assert torch.equal(model.lm_head.weight, other.lm_head.weight)
        disable_expert_prefetch(model)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_nothing_is_allocated_when_it_has_ended() -> None:
    model = build("qwen3_moe", torch.bfloat16)
    enable_expert_prefetch(model, device="cpu", progress=False)
    scheduler = model.expert_prefetch
    disable_expert_prefetch(model)
    for call in (scheduler.reserve, lambda: scheduler.prefetch(scheduler.banks[0])):
        with pytest.raises(RuntimeError, match="prefetching has ended"):
            call()
    assert scheduler.report().device_bytes == 0


class Interrupting:
    """A Ctrl-C where a Python function begins: in the `at`-th that does while the lock is held."""

    def __init__(self, lock: Any, at: int) -> None:
        self.lock, self.left = lock, at

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and self.lock._is_owned():
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("change", ["disable", "enable", "save"])
def test_no_interrupt_keeps_the_lock(change: str, tmp_path: Path) -> None:
    """Whoever takes it by code that is written in Python can be interrupted before anybody knows that it is taken."""
    changes: dict[str, Callable[[nn.Module], object]] = {
        "disable": disable_expert_prefetch,
        "enable": lambda model: enable_expert_prefetch(model, device="cpu", progress=False),
        "save": lambda model: save_packed(model, tmp_path / "packed", progress=False),
    }
    model, ids = build("qwen3_moe", torch.bfloat16), prompt(LONG)
    with torch.no_grad():
        expected = model(ids).logits
    interrupted = 0
    for at in (*range(1, 25), 40, 80, 160, 320, 640):
        enable_expert_prefetch(model, device="cpu", progress=False)
        lock = model.expert_prefetch.lock
        sys.settrace(Interrupting(lock, at))
        try:
            changes[change](model)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        with Workers(1) as workers:
            assert workers.submit(lambda lock=lock: lock.acquire(timeout=5) and not lock.release())(), f"call {at}"
        disable_expert_prefetch(model)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)
    assert interrupted > 5
