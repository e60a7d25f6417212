"""Memory whose pages come by writing: every byte in its place, files closed, locks beside, whatever the system refuses."""

from __future__ import annotations

import mmap
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import test_loading as loading
from bench_host import HostMemory
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.memory import locking, pages
from hf_prefetch.memory.beside import Beside
from hf_prefetch.memory.locking import PageLocks
from hf_prefetch.memory.pages import Pages, bytes_of
from hf_prefetch.memory.pinned import Arena
from hf_prefetch.memory.values import copy_value
from hf_prefetch.testing import FakeDevice
from models import FAMILIES, bank_bytes, build, experts_of, prompt
from test_pages import STATUS, resident

PAGE = mmap.PAGESIZE
FDS = Path("/proc/self/fd")

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create") or not FDS.exists(), reason="files in memory are Linux's")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Banks of small models are in segments, too."""
    monkeypatch.setattr(locking, "SEGMENT", PAGE)
    monkeypatch.setattr(pages, "SEGMENT", PAGE)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were put into memory whose pages come by it."""
    sizes: list[int] = []
    really = Arena.put

    def note(self: Arena, destination: torch.Tensor, source: memoryview) -> None:
        assert self.comes_by_put
        sizes.append(len(source))
        really(self, destination, source)

    monkeypatch.setattr(Arena, "put", note)
    return sizes


@pytest.fixture(autouse=True)
def files_are_closed() -> Iterator[None]:
    yield
    assert [name for name in map(_target, FDS.iterdir()) if "memfd:hf_prefetch" in name] == []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""  # what lists the folder


def values(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [2 * PAGE, 7 * PAGE + 5, 200 * PAGE + 1])
@pytest.mark.parametrize("segment", [PAGE, 3 * PAGE])
def test_every_byte_has_its_place(nbytes: int, segment: int) -> None:
    """Written piece by piece in any order by several threads, by way of the mapping in between, and read while that goes on."""
    memory, wanted, draw = Pages(nbytes, shared=True, segment=segment, written=True), values(nbytes), random.Random(nbytes)
    if nbytes > segment:
        assert memory.is_open
    cuts = sorted({0, nbytes, *(draw.randrange(nbytes) for _ in range(20))})
    pieces = list(pairwise(cuts))
    draw.shuffle(pieces)

    def write(piece: tuple[int, int]) -> None:
        begin, end = piece
        if begin % 3:
            memory.write(begin, bytes_of(wanted[begin:end]))
        else:
            memory.block[begin:end] = wanted[begin:end]
        assert torch.equal(memory.block[begin:end], wanted[begin:end])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, pieces))
    assert torch.equal(memory.block, wanted)
    memory.settle()
    assert not memory.is_open
    assert torch.equal(memory.block, wanted)
    memory.write(1, bytes_of(values(PAGE, 1)))
    assert torch.equal(memory.block[1 : 1 + PAGE], values(PAGE, 1))
    assert torch.equal(memory.block[1 + PAGE :], wanted[1 + PAGE :])


def test_at_once_on_several_threads() -> None:
    memory, wanted = Pages(100 * PAGE, shared=True, segment=PAGE, written=True), values(100 * PAGE)
    memory.write(0, bytes_of(wanted))
    memory.settle()
    assert torch.equal(memory.block, wanted)


@pytest.mark.skipif(not STATUS.exists() or "RssShmem" not in STATUS.read_text(), reason="reads /proc")
def test_it_is_there_when_written_mapped_when_settled_and_gone_with_the_last_reference() -> None:
    size, before = 96 * 2**20, resident("RssShmem")
    memory = Pages(size, shared=True, written=True)
    memory.write(0, bytes_of(torch.ones(size, dtype=torch.uint8)))
    assert resident("RssShmem") - before < 2**20, "nothing was mapped for that"
    memory.settle()
    assert size <= resident("RssShmem") - before <= size + 4 * 2**20
    view = memory.block[5:10]
    del memory
    assert resident("RssShmem") - before >= size
    del view
    assert resident("RssShmem") - before < 2**20


def test_a_large_block_has_few_files() -> None:
    """Of which nothing is written here, so it takes no memory."""
    before = len(list(FDS.iterdir()))
    memory = Pages(200 * pages.SEGMENT, shared=True, written=True)
    assert 1 < len(list(FDS.iterdir())) - before <= 64
    memory.write(199 * pages.SEGMENT - 2, memoryview(b"1234"))
    assert memory.block[199 * pages.SEGMENT - 2 :][:4].tolist() == list(b"1234")
    memory.close()
    memory.close()


@pytest.mark.parametrize(("limit", "files"), [(1024, 64), (320, 20), (32, 2), (15, 0), (resource.RLIM_INFINITY, 64)])
def test_a_process_that_may_have_few_files(limit: int, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others need some as well. What is left is in fewer, longer ones, or in none."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    before = len(list(FDS.iterdir()))
    memory = Pages(200 * PAGE, shared=True, segment=PAGE, written=True)
    opened = len(list(FDS.iterdir())) - before
    assert opened <= files
    assert (opened > files // 2) == (files > 0) == memory.is_open
    memory.write(0, bytes_of(values(200 * PAGE)))
    memory.settle()
    assert torch.equal(memory.block, values(200 * PAGE))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_to_the_same_memory() -> None:
    memory = Pages(4 * PAGE, shared=True, segment=PAGE, written=True)
    memory.write(0, bytes_of(values(4 * PAGE)))
    memory.settle()
    child = os.fork()
    if child == 0:
        memory.block.fill_(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.block.tolist() == [7] * (4 * PAGE)


def refuse(*_: object) -> int:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("where", ["memfd_create", "ftruncate", "mapping", "advised", "third"])
def test_systems_without_such_files(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or with too few of them; or where files would cost huge pages. Then it is memory as any other."""
    if where == "advised":
        monkeypatch.setattr(pages, "_is_huge_if_advised", lambda: True)
    elif where == "mapping":
        monkeypatch.setattr(pages._libc(), "mmap", lambda *_: 0)
    elif where == "third":
        real, made = os.memfd_create, []
        monkeypatch.setattr(os, "memfd_create", lambda name: refuse() if len(made) == 2 else made.append(0) or real(name))
    else:
        monkeypatch.setattr(os, where, refuse)
    memory = Pages(8 * PAGE, shared=True, segment=PAGE, written=True)
    assert not memory.is_open
    memory.write(5, bytes_of(values(3 * PAGE)))
    memory.settle()
    assert torch.equal(memory.block[5 : 5 + 3 * PAGE], values(3 * PAGE))


def test_huge_pages_where_they_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "kernel/mm/transparent_hugepage/shmem_enabled"
    assert not pages._is_huge_if_advised.__wrapped__(tmp_path)
    file.parent.mkdir(parents=True)
    for text, expected in {
        "always within_size advise [never] deny force": False,
        "always within_size [advise] never": True,
    }.items():
        file.write_text(text)
        assert pages._is_huge_if_advised.__wrapped__(tmp_path) is expected


def test_no_memory_is_an_error(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is as it was, and nothing stays behind."""
    model, ids, device, written = build("qwen3_moe"), prompt(20), FakeDevice(), 0
    really = os.pwrite

    def full(*arguments: Any) -> int:
        nonlocal written
        written += 1
        if written > 30:
            raise OSError(28, "No space left on device")
        return really(*arguments)

    with torch.no_grad():
        expected = model(ids).logits
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(OSError, match="No space left"):
                enable_expert_prefetch(model, device=device, progress=False)
        assert torch.equal(model(ids).logits, expected)
        assert (device.registered_bytes, device.allocated_bytes) == (0, 0)
        enable_expert_prefetch(model, device=device, progress=False)
        assert torch.equal(model(ids).logits, expected)
    disable_expert_prefetch(model)


def test_writes_that_are_cut_short(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write less than it was given."""
    really = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: really(file, data[: max(1, len(data) // 2)], at))
    memory = Pages(8 * PAGE, shared=True, segment=3 * PAGE, written=True)
    memory.write(7, bytes_of(values(6 * PAGE)))
    assert torch.equal(memory.block[7 : 7 + 6 * PAGE], values(6 * PAGE))
    memory.close()


# -- values ------------------------------------------------------------------------------------------------------------


def odd() -> dict[str, tuple[torch.Tensor, torch.Tensor, bool]]:
    """Values, an empty tensor for them, and whether their bytes are what goes there."""
    weights, numbers = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24.0).view(4, 6)
    complex_ones = torch.complex(weights, numbers)
    return {
        "plain": (nn.Parameter(weights), torch.empty(4, 6), True),
        "bfloat16": (weights.bfloat16(), torch.empty(4, 6, dtype=torch.bfloat16), True),
        "transposed": (weights.t(), torch.empty(4, 6).t(), True),
        "a view": (torch.cat([numbers, weights])[4:], torch.empty(4, 6), True),
        "other strides": (weights.t().contiguous().t(), torch.empty(4, 6), False),
        "another type": (weights, torch.empty(4, 6, dtype=torch.bfloat16), False),
        "negative by a bit": (torch.imag(complex_ones.conj()), torch.empty(4, 6), False),
        "lazily negative": (torch._neg_view(weights), torch.empty(4, 6), False),
        "a scalar": (torch.tensor(3.0), torch.empty(()), True),
        "of no elements": (torch.empty(0, 3), torch.empty(0, 3), False),
    }


@pytest.mark.parametrize("kind", list(odd()))
def test_values_of_every_kind(kind: str) -> None:
    parameter, destination, by_bytes = odd()[kind]
    calls = []

    def put(there: torch.Tensor, source: memoryview) -> None:
        calls.append(len(source))
        flat = there.as_strided((there.numel(),), (1,)).view(torch.uint8)
        flat.copy_(torch.tensor(list(source), dtype=torch.uint8))

    copy_value(parameter, destination, put)
    assert torch.equal(destination, parameter.detach().to(destination.dtype))
    assert bool(calls) == by_bytes


# -- banks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_model_that_is_enabled(family: str, small: None, put: list[int]) -> None:
    """Every weight has its bits, and all of them were put there; `FakeDevice` finds pages that were locked too late or not."""
    model, ids, device = build(family), prompt(20), FakeDevice()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        expected = model(ids).logits
        enable_expert_prefetch(model, device=device, progress=False)
        assert sum(put) == bank_bytes(model)
        assert model.expert_prefetch.report().pinned_bytes == bank_bytes(model)
        assert torch.equal(model(ids).logits, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.stride() == before[name].stride(), name
    disable_expert_prefetch(model)
    assert device.registered_bytes == 0


@pytest.mark.parametrize("form", ["single", "sharded", "fused"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_that_is_loaded(form: str, dtype: torch.dtype | None, tmp_path: Path, small: None, put: list[int]) -> None:
    """As transformers gives it: read into its places, whose pages come by that."""
    folder = loading.save("qwen3_moe", tmp_path, shard="300KB" if form == "sharded" else "50GB", fused=form == "fused")
    options = {} if dtype is None else {"dtype": dtype}
    expected, device = loading.reference(folder, **options), FakeDevice()
    model = loading.load(folder, device=device, **options)
    assert put == []
    loading.assert_same(model, expected)
    disable_expert_prefetch(model)


# -- page locks beside ---------------------------------------------------------------------------------------------------


def wait_for(event: threading.Event, what: Callable[[], Any]) -> Callable[..., Any]:
    def act(*arguments: Any) -> Any:
        assert event.wait(20)
        return what(*arguments)

    return act


def test_one_task_goes_on_beside_what_comes_next() -> None:
    """And no more than one: the next one waits for it. At the end all is done."""
    beside, go_on, done = Beside(), threading.Event(), []
    with beside.meanwhile():
        beside.run(wait_for(go_on, lambda: done.append(0)))
        assert done == []
        threading.Timer(0.05, go_on.set).start()
        beside.run(lambda: done.append(1))
        assert done[:1] == [0]
        beside.run(lambda: done.append(2))
        assert done[:2] == [0, 1]
    assert done == [0, 1, 2]
    beside.run(lambda: done.append(threading.get_ident()))
    assert done[3] == threading.get_ident(), "elsewhere at once"


def fail() -> None:
    raise RuntimeError("so it is")


def test_its_error_comes_with_the_next_one_or_at_the_end() -> None:
    beside, done = Beside(), []

    def two() -> None:
        with beside.meanwhile():
            beside.run(fail)
            beside.run(lambda: done.append(0))

    def one() -> None:
        with beside.meanwhile():
            beside.run(fail)

    def both() -> None:
        with beside.meanwhile():
            beside.run(fail)
            raise KeyError("the error of the block is the one that is told")

    for act in (two, one):
        with pytest.raises(RuntimeError, match="so it is"):
            act()
    with pytest.raises(KeyError):
        both()
    with beside.meanwhile():
        beside.run(lambda: done.append(1))
    assert done == [1]


@pytest.mark.skipif(not STATUS.exists() or "RssAnon" not in STATUS.read_text(), reason="reads /proc")
def test_never_is_a_bank_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter's memory is free before the next one is copied, also while a bank before is being page-locked."""
    layers, most = 4, 0
    model = build("qwen3_moe", changes={"num_experts": 64, "moe_intermediate_size": 1024, "num_hidden_layers": layers})
    bank = bank_bytes(model) // layers
    assert bank > pages.SEGMENT
    before, really = HostMemory.now(), Arena.put
    assert before is not None

    def note(*arguments: Any) -> None:
        nonlocal most
        really(*arguments)
        most = max(most, (HostMemory.now() or 0) - before)

    monkeypatch.setattr(Arena, "put", note)
    device = FakeDevice()
    # So that nothing counts twice while it is mapped.
    monkeypatch.setattr(Arena, "settle", lambda arena: arena._pages.close())
    enable_expert_prefetch(model, device=device, progress=False)
    assert bank // 2 < most < 0.8 * bank
    disable_expert_prefetch(model)


def test_what_is_not_locked_yet_counts_as_locked() -> None:
    """A budget for two banks, of which none is locked when the third asks; and one that was given back is free for another."""
    device, go_on, locks, beside = FakeDevice(), threading.Event(), PageLocks(2 * 4 * PAGE), Beside()
    device.register = wait_for(go_on, device.register)  # type: ignore[method-assign]
    with beside.meanwhile():
        arenas = [locks.arena(index, 4 * PAGE, device, written=False) for index in range(2)]
        first, second = arenas
        assert first is not None
        assert second is not None
        beside.run(partial(locks.lock, 0, first, device))
        assert locks.arena(2, 4 * PAGE, device, written=False) is None
        go_on.set()
        beside.run(partial(locks.lock, 1, second, device))
    assert locks.arena(2, 4 * PAGE, device, written=False) is None
    first.unpin()
    locks.withdraw(0)
    assert locks.arena(2, 4 * PAGE, device, written=False) is not None
    second.unpin()


def test_a_refusal_is_told_once_and_takes_nothing_of_the_budget() -> None:
    device, locks = FakeDevice(refuse_pinning=True), PageLocks(100 * PAGE)
    for index in range(3):
        arena = locks.arena(index, 4 * PAGE, device, written=False)
        if arena is not None:
            locks.lock(index, arena, device)
    assert len(locks.refusals) == 1
    assert locks._granted == {}


def test_an_error_of_the_one_before_comes_with_the_next_one(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a driver raises while it locks: the model is as it was."""
    model, device, calls = build("qwen3_moe"), FakeDevice(), 0
    really = device.register

    def fails(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:  # the first is about segments
            raise RuntimeError("the driver has gone")
        return really(*arguments)

    device.register = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the driver has gone"):
        enable_expert_prefetch(model, device=device, progress=False)
    assert not hasattr(model, "expert_prefetch")
    assert (device.registered_bytes, device.allocated_bytes) == (0, 0)
    assert all(type(module.gate_up_proj) is nn.Parameter for module in experts_of(model).values())
