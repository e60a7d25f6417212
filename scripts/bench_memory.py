"""Host memory, measured: what loading, page-locking and every budget costs, and whether the disk tier keeps up with the disk.

    python scripts/bench_memory.py --name cpu --make 2GB --arms-size 1GB
    python scripts/bench_memory.py --name h200 --make 40GB --arms-size 10GB --folder /somewhere/with/60GB

It writes checkpoints of random weights, with experts one by one, and deletes them at the end. Each figure comes from a process
of its own. `cold` files were dropped from the page cache before, which is verified (mincore). What is measured:

- loading: `hf_prefetch.from_pretrained`, beside reading the same files from the first byte to the last into one small buffer
- enabling a model that transformers has loaded: how fast its experts get into page-locked memory
- arms: budgets for page-locked memory and for memory, and page-locking refused. A pass asks for each layer's experts once, as a
  prompt does, without computing anything; logits of a short prompt are compared with those of the first arm, bit by bit
- the disk tier, cold: a pass with all experts in files, in turn with plain sequential reads of the same files
- reads: cold reads with several threads, through the page cache and past it (O_DIRECT), which is what chose how files are read
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import hashlib
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import convert_file_size_to_int
from transformers import AutoModelForCausalLM

import hf_prefetch
from bench_host import HostMemory
from bench_load import experts_share, files_of, make_checkpoint
from bench_memory_report import text
from hf_prefetch.demo import demo_model_path
from hf_prefetch.memory.pages import SEGMENT
from hf_prefetch.memory.pinned import Arena
from hf_prefetch.streams import stream_device

Json = dict[str, Any]

_ARENAS = 4
BUFFER = 16 * 2**20
# As many ids as make a call a prompt, for any number of experts.
MANY = 10**6
PROMPT = 24
# Options of each arm; shares are of the bytes of all experts.
ARMS: dict[str, Json] = {
    "all page-locked": {},
    "50% page-locked": {"pin_memory": 0.5},
    "0% page-locked": {"pin_memory": 0.0},
    "50% in memory": {"host_memory": 0.5},
    "0% in memory": {"host_memory": 0.0},
    "page-locking refused": {"refuse": True},
    "RLIMIT_MEMLOCK 1 MiB": {"memlock": 2**20},
}
# Threads, bytes of a read, and whether past the page cache.
READS = [(1, 16, False), (4, 4, False), (8, 4, False), (4, 16, False), (1, 16, True), (4, 4, True), (4, 16, True), (8, 4, True)]


# -- files --------------------------------------------------------------------------------------------------------------


def evict(files: list[Path]) -> float:
    """Have the system drop files from its cache. Returns the share of their pages that is still there."""
    here = total = 0
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            one, all_ = resident_pages(stream.fileno(), file.stat().st_size)
            here, total = here + one, total + all_
    return here / max(total, 1)


def resident_pages(descriptor: int, nbytes: int) -> tuple[int, int]:
    """Pages of a file in the page cache, and in all (mincore)."""
    pages = -(-nbytes // mmap.PAGESIZE)
    with mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        vector = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), vector) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        gc.collect()
    return sum(byte & 1 for byte in bytes(vector)), pages


def read_all(files: list[Path]) -> int:
    """Plain sequential reads: each file from its first byte to its last into one buffer. Returns the bytes."""
    buffer, total = memoryview(bytearray(BUFFER)), 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                total += count
    return total


def read_by_threads(files: list[Path], threads: int, piece: int, direct: bool) -> int:
    """The same by several threads, in pieces."""
    buffers = threading.local()

    def read(job: tuple[int, int, int]) -> int:
        descriptor, offset, size = job
        if not hasattr(buffers, "pages"):
            buffers.pages = memoryview(mmap.mmap(-1, piece))
        done = 0
        while done < min(piece, size - offset):
            count = os.preadv(descriptor, [buffers.pages[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    opened = [os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files]
    try:
        sizes = [file.stat().st_size for file in files]
        jobs = [(fd, offset, size) for fd, size in zip(opened, sizes, strict=True) for offset in range(0, size, piece)]
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(read, jobs))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that it took, and what it gave."""
    begin = time.perf_counter()
    result = action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


# -- what runs in a process of its own ----------------------------------------------------------------------------------


def load(folder: str, device: str | None) -> Json:
    """Cold: sequential reads, then `from_pretrained`."""
    files = files_of(folder)
    left = evict(files)
    reads, total = timed(lambda: read_all(files))
    left = max(left, evict(files))
    kept: list[Any] = []

    def act() -> None:
        seconds, model = timed(lambda: hf_prefetch.from_pretrained(folder, device=device, progress=False))
        kept.extend((seconds, model))

    memory = HostMemory.during(act)
    report = kept[1].expert_prefetch.report()
    peak = None if memory["peak"] is None else (memory["peak"] - (memory["before"] or 0)) / total
    return {
        "bytes": total,
        "still_cached": left,
        "reads_seconds": reads,
        "load_seconds": kept[0],
        "pinned_bytes": report.pinned_bytes,
        "peak_ratio": peak,
    }


def enable(folder: str, device: str | None) -> Json:
    """A model in memory: how long its experts take into page-locked memory."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # none of it may be a mapped file
    experts = sum(parameter.nbytes for name, parameter in model.named_parameters() if ".experts." in name)
    dense = sum(parameter.nbytes for parameter in model.parameters()) - experts
    seconds: list[float] = []

    def act() -> None:
        seconds.append(timed(lambda: hf_prefetch.enable_expert_prefetch(model, device=device, progress=False))[0])

    memory = HostMemory.during(act)
    report = model.expert_prefetch.report()
    bank = experts // max(report.banks, 1)
    added = None if memory["peak"] is None else memory["peak"] - (memory["before"] or 0)
    return {
        "experts_bytes": experts,
        "dense_bytes": dense,
        "bank_bytes": bank,
        "seconds": seconds[0],
        "pinned_bytes": report.pinned_bytes,
        "added_banks": None if added is None else added / bank,
    }


def arenas(nbytes: int, device: str | None) -> Json:
    """How fast memory of a bank's size comes, is filled and is page-locked, one after the other. Bytes a second.

    In segments, as it is taken for banks, and as one shared mapping.
    """
    found: Json
    home, source, found = stream_device(device), torch.ones(nbytes, dtype=torch.uint8), {}
    for kind, segment in {"in segments": SEGMENT, "as one": None}.items():
        seconds: dict[str, float] = dict.fromkeys(("touch", "lock", "fill"), 0.0)
        kept, refusal = [], None
        for _ in range(_ARENAS):
            arena = Arena(nbytes, segment=segment)
            kept.append(arena)
            seconds["touch"] += timed(arena.touch)[0]
            if home.can_pin:
                took, refusal = timed(lambda: arena.pin(home))  # noqa: B023 - it runs at once
                seconds["lock"] += took
            seconds["fill"] += timed(lambda: arena.block.copy_(source))[0]  # noqa: B023
        for arena in kept:
            arena.unpin()
        found[kind] = {name: _ARENAS * nbytes / time for name, time in seconds.items() if time}
        if refusal:
            found[kind]["refusal"] = refusal
    return found


def arms(folder: str, device: str | None, passes: int) -> Json:
    """All arms, one after the other, and what memory of a layer's size costs."""
    found: Json = {}
    for name, options in ARMS.items():
        try:
            found[name] = arm(folder, device, options, passes)
        except (RuntimeError, ValueError, OSError) as error:
            found[name] = {"error": str(error)}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def arm(folder: str, device: str | None, options: Json, passes: int) -> Json:
    """Load with some options, compare logits, and time passes over all experts."""
    home = stream_device(device)
    if options.get("memlock"):
        import resource

        resource.setrlimit(resource.RLIMIT_MEMLOCK, (options["memlock"], options["memlock"]))
    if options.get("refuse"):
        home.register = lambda address, nbytes: "it was made to refuse"  # type: ignore[method-assign]
    experts = experts_share(folder) * sum(file.stat().st_size for file in files_of(folder))
    budgets = {name: int(share * experts) for name, share in options.items() if name in ("pin_memory", "host_memory")}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seconds, model = timed(lambda: hf_prefetch.from_pretrained(folder, device=home, progress=False, **budgets))
    scheduler = model.expert_prefetch
    ids = torch.arange(PROMPT).view(1, -1).to(home.device) % 1000 + 5
    with torch.no_grad():
        logits = model(ids).logits.float().cpu()
    one_pass(scheduler)
    times = [timed(lambda: one_pass(scheduler))[0] for _ in range(passes)]
    report = scheduler.report()
    ours = [str(warning.message) for warning in told if str(warning.message).startswith("hf_prefetch: ")]
    return {
        "load_seconds": seconds,
        "logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "pass_seconds": times,
        "bytes": sum(bank.nbytes for bank in scheduler.banks),
        "host_bytes": report.host_bytes,
        "pinned_bytes": report.pinned_bytes,
        "file_bytes": report.file_bytes,
        "staging_bytes": report.staging_bytes,
        "messages": ours,
    }


def one_pass(scheduler: Any) -> None:
    """Ask for each layer's experts once, as a prompt does."""
    with torch.no_grad():
        for bank in scheduler.banks:
            scheduler.acquire(bank, MANY)
            scheduler.release(bank)


def disk(folder: str, device: str | None, rounds: int) -> Json:
    """Cold, in turn: plain reads of all files, and a pass with all experts in them; then reads in other ways."""
    files = files_of(folder)
    model = hf_prefetch.from_pretrained(folder, device=device, host_memory=0, progress=False)
    scheduler = model.expert_prefetch
    nbytes = sum(bank.nbytes for bank in scheduler.banks)
    one_pass(scheduler)
    reads, tier, left = [], [], 0.0
    for _ in range(rounds):
        left = max(left, evict(files))
        seconds, total = timed(lambda: read_all(files))
        reads.append(total / seconds)
        left = max(left, evict(files))
        tier.append(nbytes / timed(lambda: one_pass(scheduler))[0])
    return {
        "reads": reads,
        "tier": tier,
        "still_cached": left,
        "bytes": nbytes,
        "by_threads": ways_to_read(files, rounds),
        "arenas": arenas(scheduler.banks[0].nbytes, device),
    }


def ways_to_read(files: list[Path], rounds: int) -> Json:
    """Cold reads in several ways, in turn. Bytes a second of each, or why not."""
    rates: Json = {}
    for _ in range(rounds):
        for threads, mib, direct in READS:
            name = f"{threads} x {mib} MiB{', direct' if direct else ''}"
            evict(files)
            try:
                seconds, total = timed(lambda: read_by_threads(files, threads, mib * 2**20, direct))  # noqa: B023
                rates.setdefault(name, []).append(total / seconds)
            except OSError as error:
                rates[name] = str(error)
    return rates


CHILDREN: dict[str, Callable[..., Json]] = {
    "load": load,
    "enable": enable,
    "arms": arms,
    "disk": disk,
}


def child(name: str, *arguments: Any) -> Json:
    """Run one of them in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps([name, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-1500:]}
    result: Json = json.loads(done.stdout.splitlines()[-1])
    return result


def run_child(name: str, *arguments: Any) -> None:
    """In that process: print what it gives."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context is not what is measured
    if name in ("load", "enable"):
        # Nor is importing what loading needs.
        hf_prefetch.disable_expert_prefetch(hf_prefetch.from_pretrained(demo_model_path(), device=arguments[1], progress=False))
        gc.collect()
    print(json.dumps(CHILDREN[name](*arguments)))


# -- all of it ----------------------------------------------------------------------------------------------------------


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
    parser.add_argument("--time-limit", type=float, default=240, help="seconds after which nothing more is begun")
    parser.add_argument("--out", type=Path, help="instead of docs/benchmarks/memory/NAME.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_child(*json.loads(options.child))
        return
    begin = time.perf_counter()
    given = sys.argv[1:] if arguments is None else arguments
    results: Json = {
        "command": " ".join(["bench_memory.py", *given]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(options.device),
        "load": [],
        "skipped": [],
    }
    root = Path(__file__).resolve().parent.parent
    out = options.out or (root / "docs" / "benchmarks" / "memory" / f"{options.name}.json" if options.name else None)
    folder = Path(tempfile.mkdtemp(prefix="bench_memory_", dir=options.folder))

    def step(name: str, store: Callable[[Json], None], *what: Any) -> None:
        if time.perf_counter() - begin > options.time_limit:
            results["skipped"].append(name)
            return
        print(f"{time.perf_counter() - begin:6.1f} s  {name}", file=sys.stderr, flush=True)
        store(child(*what))
        results["elapsed_seconds"] = time.perf_counter() - begin
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    try:
        size = convert_file_size_to_int(options.make)
        small = convert_file_size_to_int(options.arms_size or options.make)
        big = make_checkpoint(folder / "big", size, "separate", shard_bytes=2**30)
        for number in range(options.repeats):
            step(f"load {number + 1}", results["load"].append, "load", str(big), options.device)
        step("enable", lambda found: results.update(enable=found), "enable", str(big), options.device)
        if small != size:
            shutil.rmtree(big)
            big = make_checkpoint(folder / "small", small, "separate", shard_bytes=2**30)
        step("disk", lambda found: results.update(disk=found), "disk", str(big), options.device, options.rounds)
        step("arms", lambda found: results.update(arms=found), "arms", str(big), options.device, 5)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(text(results))


if __name__ == "__main__":
    main()
