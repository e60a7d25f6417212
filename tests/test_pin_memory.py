"""A budget for page-locked memory: as many banks as fit are locked, the others are copied from pageable memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from apart import run_apart
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.cli import main
from hf_prefetch.config import PrefetchConfig
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import bank_bytes, build, experts_of, prompt


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("policy", ["eager", "lazy", 0])
def test_as_many_banks_as_fit_are_locked(share: float, policy: str | int) -> None:
    """Nothing is said, since it was asked for; the report tells the share."""
    model, ids, device = build("qwen3_moe"), prompt(20), FakeDevice(policy)
    layers, size = len(experts_of(model)), bank_bytes(model) // len(experts_of(model))
    locked = int(share * layers)
    with torch.no_grad():
        expected = [model(ids).logits, model(ids[:, :1]).logits]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            enable_expert_prefetch(model, device=device, pin_memory=locked * size + size // 2, progress=False)
        report = model.expert_prefetch.report()
        assert report.pinned_bytes == locked * size
        assert device.registered_bytes >= locked * size
        for _ in range(2):
            with device.watching():
                assert all(map(torch.equal, [model(ids).logits, model(ids[:, :1]).logits], expected))
        assert f"{locked / layers:.0%} of it page-locked" in str(model.expert_prefetch.report())
        assert model.expert_prefetch.report().fallbacks == 0
        disable_expert_prefetch(model)
    assert (device.allocated_bytes, device.registered_bytes) == (0, 0)
    RaceChecker().assert_clean(device.log)


@pytest.mark.gpu
def test_a_limit_of_the_system(device: torch.device) -> None:
    """In a process that may lock next to nothing: the same logits, and one message if the driver heeds the limit."""
    program = """
import resource, sys, warnings
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
import torch
from hf_prefetch import enable_expert_prefetch
from hf_prefetch.demo import load_demo_model
torch.use_deterministic_algorithms(True, warn_only=True)
model, ids = load_demo_model().cuda(), torch.arange(5, 205, device="cuda").view(1, -1)
with torch.no_grad(), warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    expected = model(ids).logits
    enable_expert_prefetch(model, progress=False)
    same = all(torch.equal(model(ids).logits, expected) for _ in range(3))
ours = [warning for warning in told if "could not be page-locked" in str(warning.message)]
report = model.expert_prefetch.report()
print(same, len(ours) == (report.pinned_bytes < report.host_bytes))
"""
    run_apart(program, says="True True", CUBLAS_WORKSPACE_CONFIG=":4096:8")


def test_without_a_budget_all_of_it_is_locked() -> None:
    """Zero is none, and not the same as nothing given, which "auto" is."""
    model, device = build("qwen3_moe"), FakeDevice()
    assert PrefetchConfig(pin_memory="auto") == PrefetchConfig()
    enable_expert_prefetch(model, device=device, pin_memory="auto", progress=False)
    assert model.expert_prefetch.report().pinned_bytes == bank_bytes(model)
    enable_expert_prefetch(model, device=device, pin_memory=0, progress=False)
    assert (model.expert_prefetch.report().pinned_bytes, device.registered_bytes) == (0, 0)
    disable_expert_prefetch(model)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (-1, ValueError, "pin_memory can't be negative"),
        ("much", ValueError, "is no size"),
        ("9" * 400 + "GiB", ValueError, "is no size"),
        (True, TypeError, "pin_memory must be bytes"),
    ],
)
def test_what_is_no_budget_is_refused(value: Any, error: type[Exception], words: str) -> None:
    """Before anything is touched, and by the command with the option's name."""
    with pytest.raises(error, match=words):
        PrefetchConfig(pin_memory=value)


def test_the_commands_option(capsys: pytest.CaptureFixture[str]) -> None:
    """It is named where it is wrong."""
    assert main(["generate", "demo", "--prompt", "hi", "--pin-memory", "much", "--device", "cpu"]) == 2
    assert "--pin-memory" in capsys.readouterr().err
