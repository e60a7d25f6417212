"""Host memory, measured: what loading, page-locking and every budget costs, and whether the disk tier keeps up with the disk.

    python scripts/bench_memory.py --name cpu --make 2GB --arms-size 1GB
    python scripts/bench_memory.py --name h200 --make 40GB --arms-size 8GB --rounds 2 --folder /somewhere/with/50GB

It writes checkpoints of random weights, with experts one by one, and deletes them at the end. Figures come from processes of
their own, are written as they come, and whatever fails is told and stops nothing else. `cold` files were dropped from the page
cache before, which is verified for each of them (mincore); where the system would not, the results say so. What is measured:

- loading: `hf_prefetch.from_pretrained`, beside reading the same files from the first byte to the last into one small buffer
- enabling that model when it has been disabled, and so is in memory: how fast its experts get into page-locked memory
- arms: budgets for page-locked memory and for memory, and page-locking refused. A pass asks for each layer's experts once, as a
  prompt does, without computing anything; logits of a short prompt are compared with those of the first arm, bit by bit
- the disk tier, cold: a pass with all experts in files, in turn with plain sequential reads of the same files
- reads: cold reads with several threads, through the page cache and past it (O_DIRECT), which is what chose how files are read
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_prefetch
from bench_load import make_checkpoint
from bench_memory_parts import ARMS, Parts, run_child
from bench_memory_report import text
from hf_prefetch.sizes import in_bytes

Json = dict[str, Any]

# Seconds after which a process that gives nothing more is ended.
PATIENCE = 120.0


def parts_of(name: str, *arguments: Any, patience: float = PATIENCE) -> Parts:
    """Run one of them in a process of its own, and give what it gives as it comes.

    A process that dies, or gives nothing for `patience` seconds, is ended; the last part is then `error`.
    """
    command = [sys.executable, __file__, "--child", json.dumps([name, *arguments])]
    silent = threading.Event()
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):

        def give_up() -> None:
            silent.set()
            process.kill()

        def watch() -> threading.Timer:
            timer = threading.Timer(patience, give_up)
            timer.daemon = True
            timer.start()
            return timer

        assert process.stdout is not None
        timer = watch()
        try:
            for line in process.stdout:
                timer.cancel()
                part, value = json.loads(line)
                yield part, value
                timer = watch()
            process.wait()
        finally:
            timer.cancel()
            process.kill()
        if process.returncode:
            said.seek(0)
            why = f"it gave nothing for {patience:.0f} s" if silent.is_set() else f"it ended with {process.returncode}"
            yield "error", {"error": f"{said.read()[-1500:]}\n{name}: {why}"}


def machine(device: str | None) -> Json:
    """Where it was measured."""
    cuda = torch.cuda.is_available() and device != "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    thp = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "shared_huge_pages": thp.read_text().strip() if thp.is_file() else "unknown",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_prefetch": hf_prefetch.__version__,
    }


def without_folder(arguments: list[str]) -> list[str]:
    """What can be published of the arguments: not where files are on the machine."""
    kept = [argument for argument in arguments if not argument.startswith("--folder=")]
    if "--folder" in kept:
        at = kept.index("--folder")
        del kept[at : at + 2]
    return kept


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="of the file in docs/benchmarks/memory/")
    parser.add_argument("--make", default="2GB", metavar="SIZE", help="of the checkpoint for loading and enabling")
    parser.add_argument("--arms-size", metavar="SIZE", help="of the one for everything else; the same, if not given")
    parser.add_argument("--folder", type=Path, help="where to write them")
    parser.add_argument("--device", help="where to compute")
    parser.add_argument("--repeats", type=int, default=1, help="of loading")
    parser.add_argument("--rounds", type=int, default=3, help="of passes and reads")
    parser.add_argument("--time-limit", type=float, default=200, help="seconds after which nothing more is begun")
    parser.add_argument("--out", type=Path, help="instead of docs/benchmarks/memory/NAME.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_child(*json.loads(options.child))
        return
    begin = time.perf_counter()
    results: Json = {
        "command": " ".join(["bench_memory.py", *without_folder(sys.argv[1:] if arguments is None else arguments)]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(options.device),
        "load": [],
        "skipped": [],
    }
    root = Path(__file__).resolve().parent.parent
    out = options.out or (root / "docs" / "benchmarks" / "memory" / f"{options.name}.json" if options.name else None)
    folder = Path(tempfile.mkdtemp(prefix="bench_memory_", dir=options.folder))

    def has_time(name: str) -> bool:
        if time.perf_counter() - begin > options.time_limit:
            results["skipped"].append(name)
            return False
        print(f"{time.perf_counter() - begin:6.1f} s  {name}", file=sys.stderr, flush=True)
        return True

    def note() -> None:
        results["elapsed_seconds"] = time.perf_counter() - begin
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    def checkpoint(name: str, size: str) -> str | None:
        try:
            made = make_checkpoint(folder / name, in_bytes(size), "separate", shard_bytes=2**30)
        except OSError as error:
            results[f"writing {size}"] = {"error": str(error)}
            note()
            return None
        return str(made)

    try:
        note()
        small = checkpoint("small", options.arms_size or options.make) if has_time("writing") else None
        if small and has_time("disk"):
            for _, value in parts_of("disk", small, options.device, options.rounds):
                results.setdefault("disk", {}).update(value)
                note()
        left = list(ARMS) if small and has_time("arms") else []
        while left:
            for part, value in parts_of("arms", small, options.device, left):
                # Whoever dies takes no other with it: those that are left begin in another process.
                name = part if part in left else (left or ["their end"])[0]
                left = [other for other in left if other != name]
                results.setdefault("arms", {})[name] = value
                note()
        big = small
        if options.arms_size and options.arms_size != options.make and has_time("writing"):
            shutil.rmtree(folder / "small", ignore_errors=True)
            big = checkpoint("big", options.make)
        for number in range(options.repeats):
            if big and has_time(f"load and enable {number + 1}"):
                for part, value in parts_of("load", big, options.device, patience=2 * PATIENCE):
                    if part == "enable":
                        results["enable"] = value
                    else:
                        results["load"].append(value)
                    note()
    finally:
        note()
        shutil.rmtree(folder, ignore_errors=True)
    print(text(results))


if __name__ == "__main__":
    main()
