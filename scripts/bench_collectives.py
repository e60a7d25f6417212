"""Measure whether copies of experts to GPUs hold up all-reduces between these, as tensor parallelism makes them.

On two GPUs of one host, from the root of the repository::

    python scripts/bench_collectives.py --out collectives.json

Each worker is a process of its own. All-reduces of activations, of one token to a whole batch, are timed on the compute stream,
alone and while banks are copied to slots one behind another on the copy stream, in turn; and the copies likewise. Without
GPUs (`--tiny`) it runs over gloo, where nothing runs beside anything else: to try the script.

An all-reduce counts as held up if it takes more than 1.1 times what it does alone, and 5 us.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from hf_prefetch.streams import StreamDevice, stream_device  # noqa: E402

# Tokens of an all-reduce, each of so many bfloat16.
_TOKENS, _WIDTH = (1, 8, 512, 8192), 2048
# A bank of Qwen3-30B-A3B, of which each of two workers has a half.
_BANK_BYTES = 128 * 3 * 2048 * 768
_SLOTS = 3
_RATIO, _SECONDS = 1.1, 5e-6
# All-reduces that are timed together, and how often. Before them the device is held for some milliseconds.
_BESIDE, _ROUNDS, _HOLD_CYCLES = 16, 20, 6_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workers, show what they have measured, and say whether anything was held up.

    Returns:
        How many bounds were missed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="how many GPUs")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="samples of each kind")
    parser.add_argument("--tiny", action="store_true", help="small tensors on the CPU, over gloo")
    parser.add_argument("--out", type=Path, default=Path("collectives.json"), help="the JSON file to write")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        workers = (options.workers, options.rounds, options.tiny, folder, str(out))
        processes.start_processes(_work, workers, nprocs=options.workers, start_method="spawn")
        measured = json.loads(out.read_text())
    options.out.write_text(json.dumps(measured))
    missed = 0
    for tokens, times in measured["all_reduce"].items():
        if not times["beside"]:
            print(f"all-reduce of {tokens} tokens: no copy was as long as these: MISSED")
            missed += 1
            continue
        alone, beside = statistics.median(times["alone"]), statistics.median(times["beside"])
        held_up = beside > _RATIO * alone + _SECONDS
        missed += held_up
        print(
            f"all-reduce of {tokens} tokens: {alone * 1e6:.1f} us alone, {beside * 1e6:.1f} us beside copies "
            f"({beside / alone:.2f} x, {len(times['beside'])} samples): {'MISSED' if held_up else 'ok'}"
        )
    rates = {name: measured["bank_bytes"] / statistics.median(times) / 1e9 for name, times in measured["copies"].items()}
    print(
        f"copies: {rates['alone']:.1f} GB/s alone, {rates['beside']:.1f} GB/s beside all-reduces, of each of {options.workers}"
    )
    return missed


def _work(rank: int, workers: int, rounds: int, tiny: bool, folder: str, out: str) -> None:
    """One worker. The first one writes what it has measured."""
    device = stream_device("cpu" if tiny else f"cuda:{rank}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not tiny:
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if tiny else "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=workers)
    try:
        measured = _Worker(device, (64 * 1024 if tiny else _BANK_BYTES)).measure((1, 8) if tiny else _TOKENS, rounds)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps(measured | {"workers": workers, "torch": torch.__version__}))


class _Worker:
    """Experts in page-locked memory, slots, and the streams of one device."""

    def __init__(self, device: StreamDevice, nbytes: int) -> None:
        self._device = device
        self._host = torch.ones(nbytes, dtype=torch.uint8)
        refused = device.register(self._host.data_ptr(), nbytes) if device.can_pin else None
        if refused is not None:
            raise RuntimeError(f"pageable memory is copied differently: {refused}")
        self._slots = [device.allocate(nbytes) for _ in range(_SLOTS)]

    def measure(self, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
        """Seconds of every all-reduce and copy, alone and beside each other."""
        copies: dict[str, list[float]] = {"alone": [], "beside": []}
        times: dict[str, dict[str, list[float]]] = {}
        for tokens in sizes:
            value = torch.ones(tokens, _WIDTH, dtype=torch.bfloat16, device=self._device.device)
            times[str(tokens)] = of_size = {"alone": [], "beside": []}
            self._round(value, copies=False)
            for _ in range(rounds):
                alone, _ = self._round(value, copies=False)
                _, copied = self._round(None, copies=True)
                beside, beside_copied = self._round(value, copies=True)
                of_size["alone"] += alone
                of_size["beside"] += beside
                copies["alone"] += copied
                copies["beside"] += beside_copied
        if self._device.can_pin:
            self._device.settle()
            self._device.unregister(self._host.data_ptr())
        return {"all_reduce": times, "copies": copies, "bank_bytes": self._host.numel()}

    def _round(self, value: torch.Tensor | None, *, copies: bool) -> tuple[list[float], list[float]]:
        """Seconds of an all-reduce, the mean of some, if copies outlasted them; and of each copy."""
        device = self._device
        compute, copying = device.compute_stream(), device.copy_stream()
        device.settle()
        dist.barrier()
        copied, reduced = [], []
        if copies:
            for slot in self._slots:
                begin = device.mark(copying)
                device.copy(copying, slot, self._host)
                copied.append((begin, device.mark(copying)))
        if value is not None:
            if device.device.type == "cuda":
                # What follows is on the stream before any of it begins, so that the host's pace is not what is measured.
                torch.cuda._sleep(_HOLD_CYCLES)
            # The first one waits for the other workers.
            dist.all_reduce(value)
            begin = device.mark(compute)
            for _ in range(_BESIDE):
                dist.all_reduce(value)
            reduced.append((begin, device.mark(compute)))
        device.settle()
        if copied and device.can_pin:
            reduced = [(begin, end) for begin, end in reduced if _seconds(device, end, copied[-1][1]) > 0.0]
        return [_seconds(device, *pair) / _BESIDE for pair in reduced], [_seconds(device, *pair) for pair in copied]


def _seconds(device: StreamDevice, begin: Any, end: Any) -> float:
    while (elapsed := device.elapsed(begin, end)) is None:
        time.sleep(1e-4)
    return elapsed


if __name__ == "__main__":
    sys.exit(main())
