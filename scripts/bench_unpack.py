"""Unpacking and packing of one layer's experts, measured: which constants of the kernels are best, and what they cost.

    python scripts/bench_unpack.py                       # shapes of Qwen3-30B-A3B, under a minute
    TRITON_INTERPRET=1 python scripts/bench_unpack.py --experts 2 --hidden 32 --intermediate 32 --repeats 1

The second is for machines without a GPU: it only shows that everything runs.

Every time is a median. `share` is of the time in which the packed bytes cross the link; the bank is unpacked in no more than
8% of that. `TB/s` counts bytes read and written. Each result is compared with the weights that were packed, bit by bit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from bench_host import PinnedBlock
from hf_prefetch.banks.layout import BankLayout
from hf_prefetch.device.kernels import gather_rows, list_experts
from hf_prefetch.device.unpacking import unpack_rows
from hf_prefetch.device.uploads import uploaded
from hf_prefetch.memory.packing import PART_NBYTES, PackedRows, pack
from hf_prefetch.streams import stream_device

__all__ = ["main"]

# Blocks that a program unpacks, and its warps.
CHOICES = [(blocks, warps) for blocks in (1, 2, 4, 8) for warps in (2, 4, 8)]
BOUND = 0.08


class Bank:
    """One layer's experts: raw and packed on the device, and packed in page-locked memory."""

    def __init__(self, shapes: list[tuple[int, int]], device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        generator = torch.Generator(device).manual_seed(0)
        self.raw = [_normal(shape, generator) for shape in shapes]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        self.pack_seconds = self.seconds(lambda: [pack(rows) for rows in self.raw], most=3)
        peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        self.packed = [pack(rows) for rows in self.raw]
        pageable = [rows.cpu() for rows in self.raw] if device.type == "cuda" else self.raw
        home = stream_device(device)
        # As it is done while a model is enabled: with the way there, part by part.
        self.from_host_seconds = self.seconds(
            lambda: [pack(rows, lambda parts: uploaded(home, parts, PART_NBYTES)) for rows in pageable], most=3
        )
        self.pack_bytes = peak
        self.parts = {f"{n}.{part}": getattr(p, part) for n, p in enumerate(self.packed) for part in ("blocks", "escapes")}
        self.layout = BankLayout.of(self.parts.items())
        self.host = PinnedBlock(self.layout.nbytes, device)
        self.slot = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        for name, view in self.views(self.host.bytes).items():
            view.copy_(self.parts[name])
        self.out = [torch.empty_like(rows) for rows in self.raw]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, not packed."""
        return sum(rows.numel() * 2 for rows in self.raw)

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The packed tensors in a block of bytes."""
        return {spec.name: spec.view(block) for spec in self.layout.specs}

    def packed_in(self, block: torch.Tensor) -> list[PackedRows]:
        """The packed rows in a block of bytes."""
        views = self.views(block)
        return [PackedRows(p.weights, views[f"{n}.blocks"], views[f"{n}.escapes"]) for n, p in enumerate(self.packed)]

    def seconds(self, action: Callable[[], object], most: int | None = None) -> float:
        """What an action takes, on the device where there is one."""
        times = []
        for _ in range(2 + min(self.repeats, most or self.repeats)):
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                action()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            else:
                start = time.perf_counter()
                action()
                times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    def unpack(self, packed: list[PackedRows], choice: tuple[int, int], found: object = None) -> None:
        """Unpack all tensors, or the rows found, into `out`."""
        for rows, out in zip(packed, self.out, strict=True):
            unpack_rows(rows, out, found, blocks=choice[0], warps=choice[1])  # type: ignore[arg-type]

    def is_right(self, rows: list[int] | None = None) -> bool:
        """Whether `out` has the bits that were packed, and forget them."""
        pairs = [(raw, out) if rows is None else (raw[rows], out[rows]) for raw, out in zip(self.raw, self.out, strict=True)]
        same = all(torch.equal(raw.view(torch.int16), out.view(torch.int16)) for raw, out in pairs)
        for out in self.out:
            out.zero_()
        return same


def _normal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    rows = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    for row in rows.chunk(8):
        row.copy_(torch.randn(row.shape, generator=generator, device=generator.device) * 0.02)
    return rows


def whole_banks(bank: Bank) -> tuple[int, int]:
    """Print a line for each choice of constants. Returns the best one."""
    copy = bank.seconds(lambda: bank.slot.copy_(bank.host.bytes, non_blocking=True))
    moved = bank.layout.nbytes + bank.nbytes
    rate = bank.layout.nbytes / copy / 1e9
    print(f"copy of the packed bank: {bank.layout.nbytes / 1e9:.3f} GB in {copy * 1e3:.3f} ms, {rate:.1f} GB/s")
    print("\nunpacking it (bound: 8% of that)\nblocks warps      ms   TB/s  share")
    times = {}
    packed = bank.packed_in(bank.slot)
    for choice in CHOICES:
        times[choice] = bank.seconds(lambda choice=choice: bank.unpack(packed, choice))  # type: ignore[misc]
        if not bank.is_right():
            raise SystemExit(f"blocks={choice[0]} warps={choice[1]}: NOT the bits that were packed")
        print(
            f"{choice[0]:>6} {choice[1]:>5} {times[choice] * 1e3:>7.3f} {moved / times[choice] / 1e12:>6.2f} "
            f"{times[choice] / copy:>6.3f} {'ok' if times[choice] <= BOUND * copy else 'over the bound'}"
        )
    return min(times, key=lambda choice: times[choice])


def single_rows(bank: Bank, rows: int, best: tuple[int, int]) -> None:
    """As many experts as a token uses: gathered and unpacked, and unpacked straight from host memory."""
    experts = bank.raw[0].shape[0]
    chosen = torch.randperm(experts, generator=torch.Generator().manual_seed(0))[:rows]
    ids, bytes_each = chosen.to(bank.device), [view.nbytes // experts for view in bank.views(bank.slot).values()]
    table = torch.tensor(
        [[size, spec.offset, spec.offset] for size, spec in zip(bytes_each, bank.layout.specs, strict=True)], device=bank.device
    )
    found = list_experts(ids, experts, None, None)
    nbytes = rows * sum(bytes_each)
    there, here = bank.packed_in(bank.slot), bank.packed_in(bank.host.bytes)

    def gather() -> None:
        gather_rows(table, found, bank.host.bytes, bank.slot, bank.slot, to_rows=False)

    def both() -> None:
        gather()
        bank.unpack(there, best, found)

    ways = {"list experts": lambda: list_experts(ids, experts, None, None), "gather": gather, "gather, then unpack": both}
    for choice in dict.fromkeys([best, (1, 2), (1, 4), (2, 4), (4, 8)]):
        ways[f"unpack from host memory {choice}"] = lambda choice=choice: bank.unpack(here, choice, found)  # type: ignore[misc]
    print(f"\n{rows} experts of {experts}: {nbytes / 1e6:.1f} MB packed")
    print("way                                   ms   GB/s over the link")
    for name, way in ways.items():
        took = bank.seconds(way)
        if "unpack" in name and not bank.is_right(chosen.tolist()):
            raise SystemExit(f"{name}: NOT the bits that were packed")
        print(f"{name:<33} {took * 1e3:>6.3f} {'' if name.startswith('list') else f'{nbytes / took / 1e9:>6.1f}'}")


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 128), ("hidden", 2048), ("intermediate", 768), ("rows", 8), ("repeats", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [(options.experts, factor * options.hidden * options.intermediate) for factor in (2, 1)]
    bank = Bank(shapes, device, options.repeats)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU, interpreted'}, torch {torch.__version__}")
    print(f"one layer: {bank.nbytes / 1e9:.3f} GB in bfloat16, {bank.layout.nbytes / bank.nbytes:.4f} of it packed")
    print(f"packing it: {bank.pack_seconds * 1e3:.1f} ms, {bank.nbytes / bank.pack_seconds / 1e9:.2f} GB/s", end="; ")
    print(f"{bank.pack_bytes / 2**20:,.0f} MiB at most, {bank.layout.nbytes / 2**20:,.0f} of them the result")
    seconds = bank.from_host_seconds
    print(f"packing it from pageable host memory: {seconds * 1e3:.1f} ms, {bank.nbytes / seconds / 1e9:.2f} GB/s\n")
    best = whole_banks(bank)
    single_rows(bank, min(options.rows, options.experts), best)
    print(f"\nbest for whole banks: blocks={best[0]}, warps={best[1]}")
    bank.host.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
