"""What all tests of the vLLM plugin share: no network, one thread, engines in the process of the test, tiny checkpoints.

They run in an environment of their own (`make test-vllm`), with vLLM's CPU build.
"""

from __future__ import annotations

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoints import write
from hf_prefetch.device.slots import SlotRing
from hf_prefetch.streams import InOrderDevice
from hf_prefetch.testing.memory import POISON


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint of a family, written when it is first asked for."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = write(family, tmp_path_factory.mktemp(family))
        return folders[family]

    return folder


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, device memory that nothing was sent to holds NaN, and so does a slot from its release on."""
    allocate, release = InOrderDevice.allocate, SlotRing.release

    def allocate_poisoned(self: InOrderDevice, nbytes: int) -> torch.Tensor:
        return allocate(self, nbytes).fill_(POISON)

    def release_poisoned(self: SlotRing, bank: int) -> None:
        slot = self.slot_of(bank)
        release(self, bank)
        if slot is not None and slot.bank is None:
            slot.buffer.fill_(POISON)

    monkeypatch.setattr(InOrderDevice, "allocate", allocate_poisoned)
    monkeypatch.setattr(SlotRing, "release", release_poisoned)
