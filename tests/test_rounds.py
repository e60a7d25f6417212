"""Many rounds leave nothing behind, and a process that is killed in the middle of one leaves the files as they were."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm.auto
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained
from hf_prefetch.testing import FakeDevice
from models import build, prompt

ROUNDS, WARM = 200, 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, in several files."""
    folder = tmp_path_factory.mktemp("rounds")
    small().save_pretrained(folder, max_shard_size="300KB")
    return folder


def small() -> PreTrainedModel:
    model = build("qwen3_moe", torch.bfloat16)
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    return model


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_two_hundred_rounds_leave_nothing_behind(checkpoint: Path) -> None:
    """Load, enable, run, and disable or delete, from files and from memory, packed and not, with budgets and without: memory,
    page locks, threads and open files are what they were."""
    device, ids = FakeDevice("eager"), prompt(20)
    budgets: list[dict[str, Any]] = [{}, {"pin_memory": "100KiB"}, {"host_memory": 0}, {"host_memory": "300KiB"}]
    held: list[tuple[int, int, int]] = []
    with torch.no_grad():
        for number in range(ROUNDS):
            pack = number % 3 == 0
            if number % 2:
                budget = {} if pack else budgets[number // 2 % 4]
                model = from_pretrained(checkpoint, device=device, pack=pack, progress=False, **budget)
            else:
                model = enable_expert_prefetch(small(), device=device, pack=pack, expert_cache="64KiB", progress=False)
            for part in (ids, ids[:, :1]):
                model(part)
            if number % 4 < 2:
                disable_expert_prefetch(model)
            del model
            gc.collect()
            device.log.clear()
            assert (device.allocated_bytes, device.registered_bytes) == (0, 0), number
            if number >= WARM:
                held.append((resident_bytes(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
    memory, threads, files = zip(*held, strict=True)
    assert max(threads) <= threads[0]
    assert max(files) <= files[0]
    # A round's weights are 600 KB: what grew by one of them each round would show as 80 MB.
    assert memory[-1] - memory[0] < 16 * 2**20, [size // 2**20 for size in memory[::20]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_processes_that_are_killed(checkpoint: Path) -> None:
    """At random moments of loading, enabling, running and disabling: no file has changed, and the next one works."""
    before = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(checkpoint.iterdir())}
    choose, ids = random.Random(5), prompt(20)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")(ids).logits
        for _ in range(50):
            child = os.fork()
            if child == 0:
                try:
                    # tqdm's own lock is shared with children, and who is killed never gives it back.
                    for bar in (tqdm.tqdm, tqdm.auto.tqdm):
                        bar.set_lock(threading.RLock())
                    while True:
                        model = from_pretrained(checkpoint, device="cpu", progress=False)
                        model(ids)
                        disable_expert_prefetch(model)
                finally:
                    os._exit(1)
            time.sleep(choose.uniform(0.0, 0.3))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "it failed before it was killed"
        assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(checkpoint.iterdir())} == before
        model = from_pretrained(checkpoint, device="cpu", progress=False)
        assert torch.equal(model(ids).logits, expected)
