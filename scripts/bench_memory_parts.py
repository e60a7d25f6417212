"""What scripts/bench_memory.py measures, each in a process of its own.

Each gives its figures one after the other: the name of a part, and what is known of it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

import hf_prefetch
from bench_files import evict, read_all, read_by_threads
from bench_host import HostMemory
from bench_load import experts_share, files_of
from hf_prefetch.demo import demo_model_path
from hf_prefetch.memory.pages import SEGMENT, bytes_of
from hf_prefetch.memory.pinned import Arena
from hf_prefetch.streams import stream_device

__all__ = ["ARMS", "CHILDREN", "Parts", "run_child"]

Json = dict[str, Any]
Parts = Iterator[tuple[str, Json]]

_ARENAS = 4
# As many ids as make a call a prompt, for any number of experts.
MANY = 10**6
PROMPT = 24
# Passes of an arm: no more once they have taken ENOUGH seconds.
LEAST, MOST, ENOUGH = 2, 5, 3.0
# Bytes that are read in each of several ways.
SOME = 2 * 2**30

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


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that it took, and what it gave."""
    begin = time.perf_counter()
    result = action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def load(folder: str, device: str | None) -> Parts:
    """Cold: sequential reads, then `from_pretrained`. Then the model is disabled, so it is in memory, and enabled again."""
    files = files_of(folder)
    left = evict(files)
    reads, total = timed(lambda: read_all(files))
    left = max(left, evict(files))
    kept: list[Any] = []

    def act() -> None:
        kept.extend(timed(lambda: hf_prefetch.from_pretrained(folder, device=device, progress=False)))

    memory = HostMemory.during(act)
    seconds, model = kept
    yield (
        "load",
        {
            "bytes": total,
            "still_cached": left,
            "reads_seconds": reads,
            "load_seconds": seconds,
            "pinned_bytes": model.expert_prefetch.report().pinned_bytes,
            "peak_ratio": None if memory["peak"] is None else (memory["peak"] - (memory["before"] or 0)) / total,
        },
    )
    hf_prefetch.disable_expert_prefetch(model)
    gc.collect()
    yield "enable", enabled(model, device)


def enable(folder: str, device: str | None) -> Parts:
    """A model that transformers has loaded into memory is enabled."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # none of it may be a mapped file
    yield "enable", enabled(model, device)


def enabled(model: Any, device: str | None) -> Json:
    """How long a model's experts take into page-locked memory, and in how much memory beyond their own."""
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


def arms(folder: str, device: str | None, names: list[str]) -> Parts:
    """Some of the arms, one after the other."""
    for name in names:
        try:
            yield name, arm(folder, device, ARMS[name])
        except (RuntimeError, ValueError, OSError) as error:
            yield name, {"error": str(error)}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def arm(folder: str, device: str | None, options: Json) -> Json:
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
    times: list[float] = []
    while len(times) < LEAST or (len(times) < MOST and sum(times) < ENOUGH):
        times.append(timed(lambda: one_pass(scheduler))[0])
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
        "refused": bool(scheduler.store.refusals),
        "messages": ours,
    }


def one_pass(scheduler: Any) -> None:
    """Ask for each layer's experts once, as a prompt does."""
    with torch.no_grad():
        for bank in scheduler.banks:
            scheduler.acquire(bank, MANY)
            scheduler.release(bank)


def disk(folder: str, device: str | None, rounds: int) -> Parts:
    """Cold, in turn: plain reads of all files, and a pass with all experts in them; then reads in other ways, and memory."""
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
        yield "disk", {"reads": reads, "tier": tier, "still_cached": left, "bytes": nbytes}
    yield "disk", {"arenas": arenas(scheduler.banks[0].nbytes, device)}
    sizes = list(accumulate(file.stat().st_size for file in files))
    few = [file for file, end in zip(files, sizes, strict=True) if end <= max(SOME, sizes[0])]
    rates: Json = {}
    for _ in range(rounds):
        read_in_each_way(few, rates)
        yield "disk", {"by_threads": rates}


def read_in_each_way(files: list[Path], rates: Json) -> None:
    """Cold reads in several ways, in turn: bytes a second of each are added to `rates`, or why not."""
    for threads, mib, direct in READS:
        name = f"{threads} x {mib} MiB{', direct' if direct else ''}"
        evict(files)
        try:
            seconds, total = timed(lambda: read_by_threads(files, threads, mib * 2**20, direct))  # noqa: B023
            rates.setdefault(name, []).append(total / seconds)
        except OSError as error:
            rates[name] = str(error)


def arenas(nbytes: int, device: str | None) -> Json:
    """How fast memory of a bank's size comes, is filled and is page-locked, one after the other. Bytes a second.

    In segments whose pages come by writing, as it is taken for banks; in segments and as one shared mapping, brought in before.
    """
    found: Json
    home, source, found = stream_device(device), torch.ones(nbytes, dtype=torch.uint8), {}
    kinds: dict[str, Json] = {
        "in segments, by writing": {"segment": SEGMENT, "written": True},
        "in segments": {"segment": SEGMENT},
        "as one": {"segment": None},
    }
    for kind, options in kinds.items():
        seconds: dict[str, float] = dict.fromkeys(("touch", "fill", "map", "lock"), 0.0)
        kept, refusal = [], None
        for _ in range(_ARENAS):
            arena = Arena(nbytes, **options)
            kept.append(arena)
            if not arena.comes_by_put:
                seconds["touch"] += timed(arena.touch)[0]
            put = (
                partial(arena.put, arena.block, bytes_of(source)) if arena.comes_by_put else partial(arena.block.copy_, source)
            )
            seconds["fill"] += timed(put)[0]
            if arena.comes_by_put:
                seconds["map"] += timed(arena.settle)[0]
            if home.can_pin:
                took, refusal = timed(partial(arena.pin, home))
                seconds["lock"] += took
        for arena in kept:
            arena.unpin()
        found[kind] = {name: _ARENAS * nbytes / time for name, time in seconds.items() if time}
        if refusal:
            found[kind]["refusal"] = refusal
    return found


CHILDREN: dict[str, Callable[..., Parts]] = {"load": load, "enable": enable, "arms": arms, "disk": disk}


def run_child(name: str, *arguments: Any) -> None:
    """In that process: print each part on a line of its own. Nothing else is printed there."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context is not what is measured
    if name in ("load", "enable"):
        # Nor is importing what loading needs.
        hf_prefetch.disable_expert_prefetch(hf_prefetch.from_pretrained(demo_model_path(), device=arguments[1], progress=False))
        gc.collect()
    for part in CHILDREN[name](*arguments):
        print(json.dumps(part), file=out, flush=True)
