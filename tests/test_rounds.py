"""Many rounds leave nothing behind, and a process that is killed in the middle of one leaves the files as they were."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
import tqdm.auto
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch, from_pretrained
from hf_prefetch.testing import FakeDevice
from models import build, prompt
from test_disk import reference
from test_faults import HARDWARE

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


Way = Callable[[Path, Path, Any], PreTrainedModel]


def loaded(**options: Any) -> Way:
    return lambda checkpoint, written, device: from_pretrained(
        checkpoint, device=device, progress=False, **options, **({"offload_folder": written} if "dtype" in options else {})
    )


def enabled(**options: Any) -> Way:
    return lambda checkpoint, written, device: enable_expert_prefetch(
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto"), device=device, progress=False, **options
    )


def enabled_in_files(checkpoint: Path, written: Path, device: Any) -> PreTrainedModel:
    return enabled(host_memory=0, offload_folder=written)(checkpoint, written, device)


# Each tier: all in page-locked memory, a part of it, a part in memory, nothing in memory, in files of their own.
WAYS: list[Way] = [
    loaded(),
    loaded(pin_memory="100KiB"),
    loaded(host_memory="300KiB"),
    loaded(host_memory=0),
    loaded(host_memory=0, dtype="float32"),
    enabled(pin_memory="100KiB"),
    enabled_in_files,
]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def logits(model: PreTrainedModel, device: FakeDevice) -> torch.Tensor:
    with torch.no_grad(), device.watching():
        return model(prompt(20)).logits


def expected_logits(checkpoint: Path, number: int) -> torch.Tensor:
    """Of a way."""
    with torch.no_grad():
        return reference(checkpoint, dtype="float32" if number % len(WAYS) == 4 else "auto")(prompt(20)).logits


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_two_hundred_rounds_leave_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    """Load, enable, run, and disable or delete, from files and from memory, packed and not, with each tier: memory, page
    locks, threads and open files are what they were."""
    device, ids = FakeDevice("eager"), prompt(20)
    held: list[tuple[int, int, int]] = []
    with torch.no_grad():
        for number in range(ROUNDS):
            if number % 2:
                model = WAYS[number // 2 % len(WAYS)](checkpoint, tmp_path, device)
            elif number % 3:
                model = enable_expert_prefetch(small(), device=device, expert_cache="64KiB", progress=False)
            else:
                model = loaded(pack=True)(checkpoint, tmp_path, device)
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


def ended(child: int, how: signal.Signals) -> int:
    """The status of a process that has a minute to end, and is told so again: a Ctrl-C that comes in a finalizer is lost."""
    for moment in range(6000):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        if moment % 1500 == 1499:
            os.kill(child, how)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("it hangs")


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. Inside of the stand-in it waits: in a real device's driver nobody looks at signals."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(HARDWARE):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def came_of_an_interrupt(error: BaseException | None) -> bool:
    """Ctrl-C inside of Python's own locks, which a library's pool of threads has, comes out as an error of theirs."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def work_until_the_end(checkpoint: Path, written: Path, number: int) -> NoReturn:
    """In a child: load, run and disable, over and over again. After Ctrl-C nothing is held, and the next one works."""
    way, device, status = WAYS[number % len(WAYS)], FakeDevice("eager"), 1
    model = None
    try:
        # tqdm's own lock is shared with children, and who is killed never gives it back.
        for bar in (tqdm.tqdm, tqdm.auto.tqdm):
            bar.set_lock(threading.RLock())
        torch.set_num_threads(1)
        try:
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGALRM, interrupt)
            (written / "begun").touch()
            while True:
                model = way(checkpoint, written, device)
                logits(model, device)
                disable_expert_prefetch(model)
                model = None
                device.log.clear()
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            if not came_of_an_interrupt(error):
                raise
        if model is not None:
            disable_expert_prefetch(model)
            model = None
        gc.collect()
        for _ in range(1000):
            # Idle threads of a pool whose end was interrupted go by themselves. Those of other libraries may not.
            left = [thread for thread in threading.enumerate() if thread.name.startswith("hf_prefetch")]
            if not left:
                break
            time.sleep(0.01)
        held = device.allocated_bytes, device.registered_bytes, left
        assert held == (0, 0, []), held
        assert not list(written.glob("*.tmp"))
        assert torch.equal(logits(way(checkpoint, written, device), device), expected_logits(checkpoint, number))
        status = 0
    except BaseException:  # noqa: BLE001 - nobody is above this
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_fifty_processes_that_are_ended(how: signal.Signals, checkpoint: Path, tmp_path: Path) -> None:
    """At random moments of loading, enabling, running and disabling, with each tier: no file has changed, the next works."""
    before, choose, written = digests(checkpoint), random.Random(5), tmp_path
    for number in range(50):
        for file in (*written.glob("*.safetensors"), *written.glob("begun")):
            file.unlink()
        child = os.fork()
        if child == 0:
            work_until_the_end(checkpoint, written, number)
        while not (written / "begun").exists():
            time.sleep(0.001)
        time.sleep(choose.uniform(0.0, 0.3))
        os.kill(child, how)
        status = ended(child, how)
        if how == signal.SIGKILL:
            assert os.WIFSIGNALED(status), "it failed before it was killed"
        else:
            assert os.waitstatus_to_exitcode(status) == 0, number
    assert digests(checkpoint) == before
    for number, way in enumerate(WAYS):
        device = FakeDevice("eager")
        assert torch.equal(logits(way(checkpoint, written, device), device), expected_logits(checkpoint, number)), number
        gc.collect()
    assert not list(written.glob("*.tmp")), "what those have left that were killed while they wrote"
