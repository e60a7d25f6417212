"""Measure decode and prompts of every length where experts are routed as in published models.

From the root of the repository, on a machine with one GPU::

    PYTHONPATH=. python scripts/bench_decode.py --model qwen3-30b-a3b --layers 16 --out decode.json

Random weights, and expert ids from scripts/routing_synthetic.py, injected behind the router. One model object goes through
all arms: everything on the GPU, no cache, and caches of several sizes, each run step by step and as a replayed CUDA graph,
and every input and output of every experts module in every step is compared with the resident arm's, bit for bit. Prompts of
many lengths take the routed way only, the lookahead only, and the one that the package chooses. ``--show`` prints the table
of a file.

Without a GPU, ``--device cpu --model tiny`` goes the same way, without graphs.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench_decode_report
from bench_decode_prompts import Ways
from bench_decode_steps import Recorder, Steps
from bench_host import PinnedBlock
from bench_models import Subject, build, describe_machine
from bench_passes import Passes, synchronize, timed
from bench_routing import profile_of
from bench_shapes import SHAPES
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from hf_prefetch.routing import RoutingInjection, inject_routing
from routing_synthetic import synthetic_ids

Json = dict[str, Any]

# Whether experts are packed, in turn, by what --pack says.
_FORMS = {"no": (False,), "yes": (True,), "both": (False, True)}
# Launches of the gather kernel that are timed together.
IN_A_ROW = 4


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=list(SHAPES), default="qwen3-30b-a3b")
    add("--layers", type=int, default=16)
    add("--profile", help="of scripts/routing_synthetic.py; the model's own if not given")
    add("--rows", type=_numbers, default="8,16,32,64,96,128", help="rows of the caches, each")
    add(
        "--batches",
        type=_numbers,
        default="1",
        help="sequences; the first one gets all sizes of caches, the others half the rows",
    )
    add("--prompt", type=int, default=256, help="tokens before the steps")
    add("--steps", type=int, default=96, help="decoded tokens of a graph; a third of them step by step")
    add("--side-steps", type=int, default=24, help="the same where there are several sequences")
    add("--lengths", type=_numbers, default="1,16,64,200,512,1024,2048,4096,16384", help="prompts of the last part")
    add("--repeats", type=int, default=5, help="passes of such a prompt, each way")
    add("--warmups", type=int, default=2, help="passes before those")
    add("--generate", type=int, default=0, help="tokens that the resident model generates, eagerly and compiled; 0 is none")
    add(
        "--pack", nargs="?", const="yes", default="no", choices=list(_FORMS), help="keep experts packed, or raw and then packed"
    )
    add("--device", help="cuda, cpu; the GPU if there is one")
    add("--time-limit", type=float, default=0, help="seconds after which nothing new is started; 0 is none")
    add("--out", type=Path)
    add("--show", type=Path)
    options = parser.parse_args(arguments)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.device.type == "cuda" and options.device.index is None:
        options.device = torch.device("cuda", torch.cuda.current_device())
    options.command = " ".join(["bench_decode.py", *(Path(word).name if "/" in word else word for word in arguments)])
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


class DecodeBench:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.perf_counter()
        self.device: torch.device = options.device
        self.subject: Subject = build(options.model, options.layers, None, self.device)
        self.profile = profile = profile_of(self.subject, options.profile or options.model)
        config = self.subject.model.config
        self.layers = len(self.subject.experts)
        sizes = self.subject.bank_bytes
        self.results: Json = {
            "schema": bench_decode_report.SCHEMA,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "command": options.command,
            "machine": describe_machine(self.device),
            "model": {
                "name": options.model,
                "layers": self.layers,
                "experts": self.subject.num_experts,
                "top_k": config.num_experts_per_tok,
                "bank_bytes": sum(sizes.values()),
                "largest_bank_bytes": max(sizes.values()),
                "row_bytes": sum(sizes.values()) // self.subject.num_experts,
                "profile": profile if isinstance(profile, str) else "default",
            },
            "link": {},
            "generate": {},
            "decode": {},
            "prefill": {},
        }
        self.references: dict[int, Recorder] = {}
        self.steps: dict[int, Steps] = {}

    def run(self) -> None:
        """Everything, in order. What fails is noted and the rest goes on."""
        self.link()
        if self.options.generate:
            self.attempt("generate", self.generations)
        with self.injected() as injection:
            self.all_arms("resident", injection, None)
            self.subject.place_experts(torch.device("cpu"))
            forms = _FORMS[self.options.pack]
            for pack in forms:
                # Beside raw ones, packed arms have names of their own; prompts and the gather kernel are not measured again.
                name = "packed, " if pack and len(forms) > 1 else ""
                self.attempt(f"{name}enabled", lambda pack=pack, name=name: self.enabled(injection, pack, name))  # type: ignore[misc]

    def enabled(self, injection: RoutingInjection, pack: bool, name: str) -> None:
        """The arms with experts in host memory, packed or not; `name` comes before theirs."""
        enable_expert_prefetch(
            self.subject.model, bench_decode_report.SLOTS, device=self.device, expert_cache=1, pack=pack, progress=False
        )
        try:
            if not name:
                self.attempt("gather", self.gather)
                self.prompts(injection)
            self.all_arms(f"{name}no cache", injection, 0)
            for rows in self.options.rows:
                self.all_arms(f"{name}{rows} rows", injection, rows)
        finally:
            disable_expert_prefetch(self.subject.model)

    # -- decode -----------------------------------------------------------------------------------------------------

    def injected(self) -> Any:
        """Expert ids for prompts and steps, of independent sequences side by side where there are several."""
        tokens = max(self.options.prompt + self.options.steps + 16, max(self.options.lengths, default=1))
        ids = synthetic_ids(self.profile, self.layers, tokens)
        self.tables = {1: ids}
        for batch in self.options.batches:
            if batch > 1:
                length = self.options.prompt + self.options.steps + 16
                parts = [synthetic_ids(self.profile, self.layers, length, seed=seed) for seed in range(batch)]
                # A prompt is called as one sequence after the other, a step as one token of each.
                prompt = torch.cat([part[:, : self.options.prompt] for part in parts], dim=1)
                steps = torch.stack([part[:, self.options.prompt :] for part in parts], dim=2).flatten(1, 2)
                self.tables[batch] = torch.cat([prompt, steps], dim=1)
        return inject_routing(self.subject.model, ids)

    def all_arms(self, name: str, injection: RoutingInjection, rows: int | None) -> None:
        """One arm at every batch that it gets."""
        half = self.subject.num_experts // 2
        for number, batch in enumerate(self.options.batches):
            if number and rows not in (None, 0, half):
                continue
            key = name if batch == 1 else f"{name}, batch {batch}"
            self.attempt(key, lambda batch=batch, key=key: self.arm(key, injection, rows, batch))  # type: ignore[misc]

    def attempt(self, name: str, work: Callable[[], Any]) -> None:
        """Do a part; an error ends it and nothing else."""
        if self.options.time_limit and time.perf_counter() - self.begin > self.options.time_limit:
            self.results["decode"].setdefault(name, {})["error"] = "skipped: out of time"
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - out of memory in one arm, say
            self.results["decode"].setdefault(name, {})["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[
                :400
            ]
            self.say(f"{name}: {self.results['decode'][name]['error']}")
        self.save()

    def arm(self, name: str, injection: RoutingInjection, rows: int | None, batch: int) -> None:
        """Steps one by one and as a graph, timed and then compared."""
        self.results["decode"][name] = result = {"batch": batch, "rows": rows}
        self.use(injection, batch)
        if batch not in self.steps:
            self.steps[batch] = Steps(self.subject, injection, batch, self.options.prompt, self.options.steps + 8)
        steps = self.steps[batch]
        result["held_bytes"] = self.set_rows(rows)
        count = self.options.steps if batch == 1 else min(self.options.steps, self.options.side_steps)
        steps.begin()
        steps.step()
        before = self.report()
        result["eager"] = {"seconds": steps.seconds(steps.step, count // 3)} | self.cost(before, count // 3)
        self.say(f"{name}: step by step {sorted(result['eager']['seconds'])[count // 6]:.4f} s")
        if self.device.type == "cuda":
            result["synchronisations"] = self.synchronisations(steps)
            graph = steps.capture()
            steps.begin()
            before = self.report()
            result["graph"] = {"seconds": steps.seconds(graph.replay, count)} | self.cost(before, count)
            result["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            del graph
            self.say(
                f"{name}: graph {sorted(result['graph']['seconds'])[count // 2]:.4f} s, hits {result['graph']['hit_rate']}"
            )
        recorder = self.record(steps, count)
        if rows is None:
            self.references[batch] = recorder
        result["equal"] = recorder.differences(self.references[batch])
        self.say(f"{name}: {result['equal']}")

    def record(self, steps: Steps, count: int) -> Recorder:
        """All steps once more, on a GPU as a graph.

        Fused attention picks its kernels by what else lies in memory and would give the same experts other inputs.
        """
        recorder = Recorder(steps, count)
        with recorder.recording(), sdpa_kernel(SDPBackend.MATH):
            if self.device.type != "cuda":
                steps.begin()
                for _ in range(count):
                    steps.step()
                return recorder
            graph = steps.capture()
            steps.begin()
            recorder.rewind()
            for _ in range(count):
                graph.replay()
            synchronize(self.device)
        return recorder

    def generations(self) -> None:
        """`generate` of the resident model, routed by its own routers: eagerly, and compiled, as for a static cache."""
        passes, count = Passes(self.subject), self.options.generate
        prompt = passes.prompt(self.options.prompt)
        for name, more in (("eager", {}), ("compiled", {"cache_implementation": "static"})):
            _, stamps = passes.generate(prompt, 2 * count + 1, **more)
            # The first half warms up, compiles and captures.
            seconds = [end - begin for begin, end in itertools.pairwise(stamps)][-count:]
            self.results["generate"][name] = {"seconds": seconds}
            self.say(f"generate, {name}: {sorted(seconds)[count // 2]:.4f} s")
        self.subject.model.__dict__.pop("_compiled_call", None)
        torch.compiler.reset()
        self.subject.tidy()

    def prompts(self, injection: RoutingInjection) -> None:
        """Prompts of every length, each way, without a row cache."""
        self.use(injection, 1)
        self.set_rows(0)
        ways = Ways(self.subject, injection, self.report, self.cost)
        for length in self.options.lengths:

            def work(length: int = length) -> None:
                points = ways.measure(length, self.options.warmups, self.options.repeats)
                self.results["prefill"][str(length)] = points
                medians = (f"{way} {statistics.median(point['seconds']):.4f} s" for way, point in points.items())
                self.say(f"{length} tokens: {', '.join(medians)}")

            self.attempt(f"{length} tokens", work)

    def use(self, injection: RoutingInjection, batch: int) -> None:
        """Have the injection hand out the ids for so many sequences."""
        injection.table = self.tables[batch]
        injection._lanes.clear()

    def set_rows(self, rows: int | None) -> int:
        """Give the caches another size, which graphs must not know of any more. No experts are moved for that.

        Returns the device memory that is held beside experts, slots and caches, in bytes.
        """
        if rows is not None:
            for lane in {id(lane): lane for lane in self.subject.model.expert_prefetch._lane_of.values()}.values():
                lane.caches.shrink(rows)
        self.subject.tidy()
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        own = self.report()
        experts = self.results["model"]["bank_bytes"] if own is None else own.device_bytes + own.cache_bytes
        return torch.cuda.memory_allocated(self.device) - experts

    def report(self) -> Any:
        """What is counted so far."""
        scheduler = getattr(self.subject.model, "expert_prefetch", None)
        return scheduler.report() if scheduler is not None else None

    def cost(self, before: Any, count: int) -> Json:
        """Experts needed, and bytes sent, of one step."""
        after = self.report()
        if after is None:
            return {"hit_rate": None, "sent_bytes": 0}
        hits, sent = after.cache_hits - before.cache_hits, after.routed_rows - before.routed_rows
        rate = round(hits / (hits + sent), 4) if hits + sent else None
        moved = after.bytes_to_device - before.bytes_to_device
        return {"hit_rate": rate, "sent_bytes": moved // count, "needed_rows": (hits + sent) / count}

    def synchronisations(self, steps: Steps) -> Json:
        """Does a step wait for the device? By torch's own watch, and by what the driver is called for."""
        synchronize(self.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps.step()
            found = "none"
        except RuntimeError as error:
            found = " ".join(str(error).split())[:200]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        synchronize(self.device)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            steps.step()
            inside = time.perf_counter()
        names = [event.name for event in profile.events() if "ynchronize" in event.name]
        # Stopping the profiler synchronises the device once.
        return {"sync_debug_mode": found, "driver_calls": sorted(set(names)), "count": len(names), "ended": inside > 0}

    # -- the link ---------------------------------------------------------------------------------------------------

    def link(self) -> None:
        """Copies of one bank from page-locked memory."""
        if self.device.type != "cuda":
            self.results["link"] = {"gb_per_s": 1.0, "gather_gb_per_s": 1.0}
            return
        size = self.results["model"]["largest_bank_bytes"]
        block = PinnedBlock(size, self.device)
        there = torch.empty(size, dtype=torch.uint8, device=self.device)

        def copy() -> None:
            there.copy_(block.bytes, non_blocking=True)

        seconds = [timed(self.device, copy)[0] for _ in range(6)]
        self.results["link"] = {"bytes": size, "copy_seconds": seconds, "gb_per_s": size / sorted(seconds)[2] / 1e9}
        block.release()

    def gather(self) -> None:
        """The kernel that reads page-locked memory: half of a bank's experts, and as many as one token uses."""
        scheduler = self.subject.model.expert_prefetch
        bank = scheduler.banks[0]
        lane = scheduler._lane_of[bank]
        if self.device.type != "cuda":
            return
        for name, count in (("half", bank.num_experts // 2), ("token", self.results["model"]["top_k"])):
            ids = torch.randperm(bank.num_experts)[:count].to(self.device).view(1, -1)

            def run(ids: torch.Tensor = ids) -> None:
                # Several in a row: what the host takes to launch one is hidden behind the one before it.
                for _ in range(IN_A_ROW):
                    lane.use_slot(bank, ids)
                    lane.hand_out_slot(bank, ids, routed=True)
                    lane.release(bank)

            run()
            seconds = [timed(self.device, run)[0] for _ in range(9)]
            rate = IN_A_ROW * count * bank.layout.row_nbytes / sorted(seconds)[4] / 1e9
            self.results["link"][f"gather_{name}_gb_per_s"] = rate
            self.say(f"gather, {name}: {rate:.1f} GB/s")
        self.results["link"]["gather_gb_per_s"] = self.results["link"]["gather_half_gb_per_s"]

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write everything so far."""
        self.results["elapsed_seconds"] = time.perf_counter() - self.begin
        bench_decode_report.derive(self.results)
        if self.options.out is not None:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.options.out.write_text(json.dumps(self.results, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; the table comes last, also after an interruption."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.show is not None:
        print(bench_decode_report.table(bench_decode_report.derive(json.loads(options.show.read_text()))))
        return
    bench = DecodeBench(options)
    try:
        bench.run()
    finally:
        bench.save()
        print(bench_decode_report.table(bench.results), flush=True)


if __name__ == "__main__":
    main()
