"""torch's default type and device are the user's: whatever they are, the package makes the tensors that it means."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_prefetch
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import GATE, Snapshot, build, prompt

ROOT = Path(hf_prefetch.__file__).parent
# What takes its type, its device or both from torch's defaults if nobody says.
FACTORIES = {
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "rand",
    "randn",
    "randint",
    "empty_strided",
    "eye",
    "linspace",
    "arange",
}
# Of whole numbers it makes int64.
WITHOUT_TYPE = {"arange"}


def factories() -> list[tuple[str, str, set[str | None]]]:
    """Where a tensor is made, by what, and what is said about it."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "torch":
                assert isinstance(node, ast.Call)
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                found.append((where, called.attr, {keyword.arg for keyword in node.keywords}))
    return [call for call in found if call[1] in FACTORIES]


def test_no_tensor_is_made_by_default() -> None:
    calls = factories()
    assert len(calls) > 40, "it sees them"
    assert [call for call in calls if "device" not in call[2]] == []
    assert [call for call in calls if "dtype" not in call[2] and call[1] not in WITHOUT_TYPE] == []


OPTIONS: list[dict[str, Any]] = [{}, {"expert_cache": "64KiB"}, {"pin_memory": 0}, {"pack": True}, {"host_memory": 0}]


def outputs(model: PreTrainedModel, dtype: torch.dtype) -> list[torch.Tensor]:
    """A prompt's tokens and more, and logits of a prompt."""
    with torch.no_grad():
        return [model.generate(prompt(GATE), max_new_tokens=4, do_sample=False), model(prompt(20)).logits.to(dtype)]


@pytest.fixture
def default_dtype() -> Any:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_another_default_type(
    options: dict[str, Any], dtype: torch.dtype, default_dtype: Callable[[torch.dtype], None], tmp_path: Path
) -> None:
    """The same bits as without prefetching under the same default, whether that is set before or after enabling."""
    model, device = build("qwen3_moe", torch.bfloat16), FakeDevice("lazy")
    model.set_experts_implementation("batched_mm")
    if "host_memory" in options:
        options = {**options, "offload_folder": tmp_path}
    default_dtype(dtype)
    expected, before = outputs(model, dtype), Snapshot.of(model)
    for early in (False, True):
        default_dtype(dtype if early else torch.float32)
        enable_expert_prefetch(model, device=device, progress=False, **options)
        default_dtype(dtype)
        with device.watching():
            assert all(map(torch.equal, outputs(model, dtype), expected))
        assert model.expert_prefetch.report().fallbacks == 0
        disable_expert_prefetch(model)
        default_dtype(torch.float32)
    before.assert_restored(model)
    RaceChecker().assert_clean(device.log)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_another_default_device(options: dict[str, Any], tmp_path: Path) -> None:
    """Enabling and disabling while another device is torch's default: one on which a tensor has no values at all."""
    model = build("qwen3_moe", torch.bfloat16)
    model.set_experts_implementation("batched_mm")
    if "host_memory" in options:
        options = {**options, "offload_folder": tmp_path}
    expected, before = outputs(model, torch.float32), Snapshot.of(model)
    with torch.device("meta"):
        enable_expert_prefetch(model, device="cpu", progress=False, **options)
    assert all(map(torch.equal, outputs(model, torch.float32), expected))
    with torch.device("meta"):
        disable_expert_prefetch(model)
    before.assert_restored(model)
    assert all(map(torch.equal, outputs(model, torch.float32), expected))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loading_while_another_type_is_the_default(
    options: dict[str, Any], default_dtype: Callable[[torch.dtype], None], tmp_path: Path
) -> None:
    """As transformers loads it: rotary frequencies, say, have that type."""
    build("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    default_dtype(torch.float64)
    expected = outputs(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), torch.float64)
    model = from_pretrained(tmp_path, device="cpu", progress=False, **options)
    assert all(map(torch.equal, outputs(model, torch.float64), expected))
