"""A forward pass without a model: banks of known bytes, kernels that run late, and a check of what each of them saw."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable

import torch
from torch import nn

from hf_prefetch.config import PrefetchConfig
from hf_prefetch.discovery import ExpertBank, find_banks
from hf_prefetch.memory.store import HostStore
from hf_prefetch.scheduling.scheduler import PrefetchScheduler
from hf_prefetch.testing import FakeDevice, RaceChecker
from threads import staging_threads

FEW, MANY = 1, 1000
# Seconds that a read takes: longer than whatever does not wait for it.
SLOWLY = 0.002


class Experts(nn.Module):
    """An experts module in the layout that discovery looks for; its own forward is never called here."""

    def __init__(self, value: int, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.full((2, width, 4), float(value)))
        self.down = nn.Parameter(torch.full((2, 4, width), float(-value)))

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only the scheduler is under test")


class Streaming:
    """A scheduler over a `FakeDevice`, driven by hand.

    Every use of a bank launches a kernel that runs as late as the device's policy likes and compares what it reads with
    the bank's bytes. Before a slot is released it is poisoned on the compute stream, so nobody may live off leftovers.

    With `pinned` only the first so many banks are page-locked. The others go through the staging ring, whose reads take their
    time, and say what they write.
    """

    def __init__(
        self,
        banks: int,
        slots: int,
        device: FakeDevice,
        *,
        widths: Iterable[int] = (),
        cached_rows: int = 0,
        pinned: int | None = None,
    ) -> None:
        self.device = device
        self.reads = 0
        sizes = [*widths, *[8] * banks][:banks]
        self.model = nn.ModuleList(Experts(index + 1, width) for index, width in enumerate(sizes))
        self.banks: tuple[ExpertBank, ...] = find_banks(self.model).banks
        self.store = HostStore(None if pinned is None else sum(bank.nbytes for bank in self.banks[:pinned]))
        for bank in self.banks:
            self.store.adopt(bank, device)
            if pinned is not None:
                stored = self.store[bank]
                object.__setattr__(stored, "read", functools.partial(self._read, stored.read))
        budget = cached_rows * sum(bank.layout.row_nbytes for bank in self.banks)
        config = PrefetchConfig(slots=slots, expert_cache=budget)
        self.scheduler = PrefetchScheduler(config, self.store, dict.fromkeys(self.banks, device))
        self.uses = 0
        self.wrong: list[str] = []

    def _read(self, read, begin: int, destination: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
        self.reads += 1
        time.sleep(SLOWLY)
        with self.device.computing(writes=[destination], label="a read"):
            read(begin, destination)
        self.reads -= 1

    def use(self, index: int, routed_ids: int | None = MANY, *, fails: bool = False) -> None:
        """One call of an experts module, as its hook makes it."""
        bank = self.banks[index]
        try:
            tensors = self.scheduler.acquire(bank, routed_ids).tensors
            self.launch(index, dict(tensors))
            if fails:
                raise ValueError("from inside the forward")
            for tensor in tensors.values():
                self.device.poison(tensor)
        except ValueError:
            self.scheduler.break_off()
            raise
        finally:
            self.scheduler.release(bank)

    def use_rows(self, index: int, rows: list[int]) -> None:
        """One small call that reads nothing but some experts."""
        bank = self.banks[index]
        try:
            tensors = self.scheduler.acquire(bank, FEW, torch.tensor(rows)).tensors
            kept = {name: tensor[row] for name, tensor in tensors.items() for row in rows}
            self.launch(index, kept)  # type: ignore[arg-type]
            for tensor in tensors.values():
                self.device.poison(tensor)
        finally:
            self.scheduler.release(bank)

    def use_cached(self, index: int, experts: list[int]) -> None:
        """One small call of a forward that can be given other ids."""
        bank = self.banks[index]
        try:
            handout = self.scheduler.acquire(bank, FEW, torch.tensor(experts), remaps=True)
            assert handout.ids is not None, "the cache has room"
            kept = {name: tensor[row] for name, tensor in handout.tensors.items() for row in handout.ids.tolist()}
            self.launch(index, kept)  # type: ignore[arg-type]
        finally:
            self.scheduler.release(bank)

    def launch(self, index: int, tensors: dict[str, nn.Parameter]) -> None:
        """A kernel that reads a bank's tensors some time later."""
        self.uses += 1
        use = self.uses

        def kernel() -> None:
            for name, tensor in tensors.items():
                sign = 1 if name == "up" else -1
                if not torch.equal(tensor, torch.full_like(tensor, float(sign * (index + 1)))):
                    self.wrong.append(f"use {use} of bank {index} read {tensor.flatten()[:4].tolist()} as {name}")

        self.device.launch(kernel, reads=tensors.values(), label=f"use {use} of bank {index}")

    def run(self, order: Iterable[int], routed_ids: int | None = MANY) -> None:
        """One pass."""
        for index in order:
            self.use(index, routed_ids)

    def check(self) -> None:
        """Nobody read a wrong byte, nothing raced, and everything is given back in the end."""
        self.device.finish()
        assert not self.wrong, self.wrong
        RaceChecker().assert_clean(self.device.log)

    def close(self) -> None:
        """End the scheduler, then check, memory included."""
        self.scheduler.close()
        self.check()
        assert self.device.allocated_bytes == 0, "slots outlive the scheduler"
        assert self.device.registered_bytes == 0, "page locks outlive the scheduler"
        assert not staging_threads()
        RaceChecker().assert_clean(self.device.log)
