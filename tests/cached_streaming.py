"""`Streaming` with row caches: every expert of every bank has bytes of its own, and weights may change in between."""

from __future__ import annotations

import torch
from torch import nn

from hf_prefetch.config import PrefetchConfig
from hf_prefetch.discovery import find_banks
from hf_prefetch.memory.store import HostStore
from hf_prefetch.scheduling.lane import Handout
from hf_prefetch.scheduling.scheduler import PrefetchScheduler
from hf_prefetch.testing import FakeDevice
from streaming import MANY, Streaming

EXPERTS = 5


class ManyExperts(nn.Module):
    """An experts module with more experts than `streaming.Experts`, so that rows can be mixed up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, width, 4))
        self.down = nn.Parameter(torch.empty(EXPERTS, 4, width))

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only the scheduler is under test")


class CachedStreaming(Streaming):
    """A scheduler with caches over a `FakeDevice`, driven by hand.

    Tables are torch's operators on the device's memory, so everything has to be called inside `device.watching()`.
    """

    def __init__(self, banks: int, slots: int, device: FakeDevice, rows: int) -> None:
        self.device = device
        self.model = nn.ModuleList(ManyExperts(width) for width in [8, 16, 4, 8, 8][:banks])
        self.banks = find_banks(self.model).banks
        self.values = [0.0] * banks
        for index in range(banks):
            self.write(index, 1.0)
        self.store = HostStore()
        for bank in self.banks:
            self.store.adopt(bank, device)
        config = PrefetchConfig(slots=slots, expert_cache=rows * sum(bank.layout.row_nbytes for bank in self.banks))
        self.scheduler = PrefetchScheduler(config, self.store, dict.fromkeys(self.banks, device))
        self.uses = 0
        self.wrong = []

    def write(self, index: int, value: float) -> None:
        """Give a bank other weights. Nothing must be reading them."""
        self.values[index] = value
        with torch.no_grad():
            for name, parameter in self.banks[index].parameters.items():
                for expert in range(EXPERTS):
                    parameter[expert].fill_(self.value(index, expert, name))

    def value(self, index: int, expert: int, name: str) -> float:
        """What the bank's weights of one expert are."""
        return (1 if name == "up" else -1) * (1000 * self.values[index] + 10 * index + expert)

    def call(self, index: int, ids: list[int], *, many: bool = False, remaps: bool = True, fails: bool = False) -> None:
        """One call that shows its ids, as a hook makes it: a prompt, or a token that may be given other ids, or may not."""
        bank, tensor = self.banks[index], torch.tensor(ids, dtype=torch.int64).view(-1, 1)
        try:
            handout = self.scheduler.acquire(bank, MANY if many else tensor.numel(), tensor, remaps=remaps)
            rows = tensor if handout.ids is None else handout.ids
            named = [(expert, row) for expert, row in zip(ids, rows.flatten().tolist(), strict=True) if 0 <= expert < EXPERTS]
            self.launch_rows(index, handout, named)
            if fails:
                raise ValueError("from inside the forward")
            if handout.ids is None:
                for parameter in handout.tensors.values():
                    self.device.poison(parameter)
        except ValueError:
            self.scheduler.break_off()
            raise
        finally:
            self.scheduler.release(bank)

    def launch_rows(self, index: int, handout: Handout, named: list[tuple[int, int]]) -> None:
        """A kernel that reads some experts at the rows where they are said to be."""
        self.uses += 1
        use = self.uses
        rows = {(name, expert): tensor[row] for name, tensor in handout.tensors.items() for expert, row in named}
        expected = {(name, expert): self.value(index, expert, name) for name, expert in rows}

        def kernel() -> None:
            for (name, expert), row in rows.items():
                if not torch.equal(row, torch.full_like(row, expected[name, expert])):
                    self.wrong.append(f"use {use} of bank {index} read {row.flatten()[:2].tolist()} as {name} of {expert}")

        self.device.launch(kernel, reads=rows.values(), label=f"use {use} of bank {index}")

    def run(self, order, routed_ids: int | None = MANY) -> None:  # type: ignore[no-untyped-def]
        """One pass of whole banks."""
        for index in order:
            self.call(index, list(range(EXPERTS)), many=routed_ids == MANY)
