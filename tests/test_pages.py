"""Memory from the system: in segments or not, shared or not, brought in by threads, near a device where that is known."""

from __future__ import annotations

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hf_prefetch.memory import pages
from hf_prefetch.memory.pages import Pages, node_of
from hf_prefetch.memory.pinned import Arena
from hf_prefetch.testing import FakeDevice

PAGE = mmap.PAGESIZE


STATUS = Path("/proc/self/status")


def resident(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


@pytest.mark.parametrize("nbytes", [1, PAGE, 3 * PAGE + 5, 40 * 2**20 + 77])
@pytest.mark.parametrize("segment", [None, PAGE, 4 * 2**20])
@pytest.mark.parametrize("shared", [True, False])
def test_memory_is_memory(nbytes: int, segment: int | None, shared: bool) -> None:
    """Zeros first, every byte its own, whole pages and no less."""
    if segment == PAGE and nbytes > 100 * PAGE:
        segment = 64 * PAGE
    memory = Pages(nbytes, shared=shared, segment=segment, node=0)
    assert memory.block.numel() == nbytes
    assert memory.block.data_ptr() % PAGE == 0
    assert memory.mapped % PAGE == 0
    assert 0 <= memory.mapped - nbytes < PAGE
    memory.touch()
    assert int(memory.block.count_nonzero()) == 0
    values = torch.arange(nbytes, dtype=torch.int64).remainder_(251).to(torch.uint8)
    memory.block.copy_(values)
    assert torch.equal(memory.block, values)


# Some sandboxes (gVisor) have the file, and not all of its lines.
@pytest.mark.skipif(not STATUS.exists() or "RssShmem" not in STATUS.read_text(), reason="reads /proc")
@pytest.mark.parametrize("segment", [None, pages.SEGMENT])
def test_it_is_there_when_touched_and_gone_with_the_last_reference(segment: int | None) -> None:
    size, before = 96 * 2**20, resident("RssShmem")
    memory = Pages(size, shared=True, segment=segment)
    assert resident("RssShmem") - before < 2**20
    memory.touch()
    assert size <= resident("RssShmem") - before <= size + 4 * 2**20
    view = memory.block[5:10]
    del memory
    assert resident("RssShmem") - before >= size
    del view
    assert resident("RssShmem") - before < 2**20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("shared", [True, False])
def test_who_sees_what_a_child_writes(shared: bool) -> None:
    memory = Pages(4 * PAGE, shared=shared, segment=PAGE)
    child = os.fork()
    if child == 0:
        memory.block.fill_(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.block.tolist() == [7 if shared else 0] * (4 * PAGE)


def test_a_system_without_any_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_libc", lambda: None)
    memory = Pages(3 * PAGE, shared=True, segment=PAGE, node=0)
    memory.touch()
    assert memory.offset == 0
    memory.block.fill_(3)
    pages.give_back_freed()


def test_segments_are_one_registration_or_are_not_used() -> None:
    """A device that refuses them is asked once, and leaves nothing registered."""
    taking, refusing = FakeDevice(), FakeDevice(refuse_pinning=True)
    assert Arena.can_have_segments(taking)
    assert not Arena.can_have_segments(refusing)
    assert (taking.registered_bytes, refusing.registered_bytes) == (0, 0)


def test_the_node_of_a_device(tmp_path: Path) -> None:
    """Only where the system has several, and says which."""
    device = tmp_path / "bus/pci/devices/0000:ab:00.0"
    device.mkdir(parents=True)
    nodes = tmp_path / "devices/system/node"
    nodes.mkdir(parents=True)
    assert node_of("0000:AB:00.0", tmp_path) is None
    (device / "numa_node").write_text("1\n")
    assert node_of("0000:AB:00.0", tmp_path) is None
    (nodes / "online").write_text("0\n")
    assert node_of("0000:AB:00.0", tmp_path) is None
    (nodes / "online").write_text("0-1\n")
    assert node_of("0000:AB:00.0", tmp_path) == 1
    (device / "numa_node").write_text("-1\n")
    assert node_of("0000:AB:00.0", tmp_path) is None
    (device / "numa_node").write_text("what?\n")
    assert node_of("0000:AB:00.0", tmp_path) is None
    assert node_of("0000:CD:00.0", tmp_path) is None


def test_a_page_lock_that_is_given_back_while_it_is_taken() -> None:
    """Two interrupts can end whoever would have waited for the thread that locks. No lock may outlive its memory."""
    device, arena = FakeDevice(), Arena(4 * PAGE)
    register, begun, go_on = device.register, threading.Event(), threading.Event()

    def slowly(address: int, nbytes: int) -> str | None:
        begun.set()
        assert go_on.wait(20)
        return register(address, nbytes)

    device.register = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        locked = pool.submit(arena.pin, device)
        assert begun.wait(20)
        given_back = pool.submit(arena.unpin)
        time.sleep(0.05)
        go_on.set()
        assert (locked.result(), given_back.result()) == (None, None)
    assert (arena.is_pinned, device.registered_bytes) == (False, 0)
    arena.pin(device)
    assert (arena.is_pinned, device.registered_bytes) == (False, 0), "the thread may begin only now"
