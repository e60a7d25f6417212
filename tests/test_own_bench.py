"""The command `bench` where a device answers otherwise than the CPU: no room for the whole model, or none for a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_prefetch.command.bench import Bench
from hf_prefetch.config import PrefetchConfig
from hf_prefetch.demo import load_demo_model
from hf_prefetch.streams import stream_device


@pytest.fixture
def bench(device: torch.device) -> Bench:
    """One pass of each kind, on the demonstration model."""
    return Bench(load_demo_model(), PrefetchConfig(), stream_device(device), repeats=1)


def test_both_arms_are_measured_and_the_model_is_left_as_it_was(bench: Bench, device: torch.device) -> None:
    before = {name: weights.clone() for name, weights in bench.model.state_dict().items()}
    said: list[str] = []
    bench.run([40], 2, said.append)
    assert said == [f"{arm}: {what}" for arm in ("off", "on") for what in ("prefill, 40 tokens", "decode, 40 tokens")]
    on = bench.arms[1]
    assert on.points[0].logits_equal is True
    assert (on.points[0].hits, on.points[0].lookups) == (6, 7)
    assert all((point.peak_bytes is None) == (device.type == "cpu") for arm in bench.arms for point in arm.points)
    assert not hasattr(bench.model, "expert_prefetch")
    after = bench.model.state_dict()
    assert all(weights.device.type == "cpu" and torch.equal(weights, before[name]) for name, weights in after.items())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_model_that_does_not_fit_is_measured_with_prefetching_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = bench._ask_device
    monkeypatch.setattr(bench, "_ask_device", lambda what: (2**20, 2**20) if what == "mem_get_info" else ask(what))
    bench.run([40], 0)
    off, on = bench.arms
    assert (off.points, on.points[0].logits_equal) == ([], None)
    assert "off: skipped, the model takes 0.0 GiB and 0.0 GiB are free" in str(bench)
    assert on.points[0].seconds


def test_a_prompt_without_room_leaves_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = bench._prefill

    def refuse(prompt: torch.Tensor) -> Any:
        if prompt.shape[1] > 40:
            raise torch.OutOfMemoryError("no room")
        return prefill(prompt)

    monkeypatch.setattr(bench, "_prefill", refuse)
    bench.run([40, 41], 0)
    assert [[point.error for point in arm.points] for arm in bench.arms] == [[None, "out of device memory"]] * 2
    assert str(bench).count("out of device memory") == 2
