"""Whole models over a device that runs its queues in adversarial orders, with every read of a slot logged."""

from __future__ import annotations

import pytest
import torch

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.testing import FakeDevice, RaceChecker
from models import build, prompt

POLICIES = ["eager", "lazy", 3]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_logits_are_equal_and_nothing_races(family: str, slots: int, policy: str | int) -> None:
    """Prefill and decode under each implementation of the experts; poison in the slots would show as NaN."""
    model = build(family)
    ids = prompt(20, batch=2)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        expected = model.generate(ids, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True)
        device = FakeDevice(policy)
        enable_expert_prefetch(model, slots=slots, device=device)
        with device.watching():
            actual = model.generate(ids, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(expected.sequences, actual.sequences)
        assert all(map(torch.equal, expected.logits, actual.logits))
        report = model.expert_prefetch.report()
        assert report.lookahead_hits > 0
        assert report.fallbacks == 0
        assert report.pinned_bytes == report.host_bytes
        disable_expert_prefetch(model)
        RaceChecker().assert_clean(device.log)
        assert device.allocated_bytes == device.registered_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_pageable_memory_keeps_the_order(policy: str | int) -> None:
    """Where nothing can be page-locked copies hold the host, and bytes and order stay right."""
    model, ids = build("mixtral"), prompt(20)
    with torch.no_grad():
        expected = model(ids).logits
    device = FakeDevice(policy, refuse_pinning=True)
    with pytest.warns(RuntimeWarning, match="could not be page-locked"):
        enable_expert_prefetch(model, device=device)
    with device.watching(), torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(ids).logits, expected)
    report = model.expert_prefetch.report()
    assert report.lookahead_hits > 0
    assert report.pinned_bytes == 0
    disable_expert_prefetch(model)
    RaceChecker().assert_clean(device.log)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_caller_may_compute_on_any_stream(policy: str | int) -> None:
    """Another one in each call, as continuous batching and notebooks do."""
    model, ids = build("qwen3_moe"), prompt(20)
    device = FakeDevice(policy)
    with torch.no_grad():
        expected = model(ids).logits
        enable_expert_prefetch(model, device=device)
        for name in ("a", "b", "a"):
            with device.use(device.stream(name)), device.watching():
                assert torch.equal(model(ids).logits, expected)
    disable_expert_prefetch(model)
    RaceChecker().assert_clean(device.log)
