"""Where the host's time goes in a step of decode that Python runs: what prefetching adds to the resident model, part by part.

From the root of the repository, on a machine with one GPU::

    PYTHONPATH=. python scripts/profile_step.py --model qwen3-30b-a3b --layers 4

A step is called and not waited for, so this is the time of Python, of torch's operators and of launches. Each arm's steps are
run three times: timed, under Python's profiler, and under torch's. Both profilers make everything slower, Python's own calls
most of all: their figures say which parts there are, the first one how long all of it takes. Without a GPU, ``--device cpu
--model tiny`` goes the same way.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench_decode import DecodeBench
from bench_decode import parse as parse_decode
from bench_decode_steps import Steps
from bench_passes import synchronize
from columns import columns
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch

__all__ = ["Parts", "difference", "main"]

# Of each part, by its name: calls, and seconds of its own, of all steps.
Parts = dict[str, tuple[float, float]]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="qwen3-30b-a3b")
    add("--layers", type=int, default=4)
    add("--rows", type=int, default=64, help="rows of the cache")
    add("--steps", type=int, default=48, help="of each kind")
    add("--device", help="cuda, cpu; the GPU if there is one")
    add("--most", type=int, default=25, help="parts to show")
    return parser.parse_args(arguments)


def seconds_of(step: Callable[[], Any], count: int, device: torch.device) -> float:
    """The host's time of one step."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    took = time.perf_counter() - begin
    synchronize(device)
    return took / count


def python_parts(step: Callable[[], Any], count: int, device: torch.device) -> Parts:
    """What Python's profiler finds: functions, by file and name."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(count):
        step()
    profile.disable()
    synchronize(device)
    parts: Parts = {}
    for (file, line, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        where = name if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"
        before = parts.get(where, (0, 0.0))
        parts[where] = before[0] + calls, before[1] + own
    return parts


def torch_parts(step: Callable[[], Any], count: int, device: torch.device) -> Parts:
    """What torch's profiler finds: operators, and calls of the driver's runtime."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            step()
        synchronize(device)
    return {
        event.key: (event.count, event.self_cpu_time_total / 1e6)
        for event in profile.key_averages()
        if "ynchronize" not in event.key
    }


def difference(parts: Parts, resident: Parts, calls: int) -> list[tuple[str, float, float]]:
    """What an arm does beyond the resident one: names, calls and microseconds of each of `calls` calls, the longest first."""
    rows = []
    for name, (count, seconds) in parts.items():
        count_before, seconds_before = resident.get(name, (0, 0.0))
        if count != count_before or seconds > seconds_before:
            rows.append((name, (count - count_before) / calls, (seconds - seconds_before) / calls * 1e6))
    return sorted(rows, key=lambda row: -row[2])


class Profile:
    """Three arms, one after the other, on one model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        given = ["--model", options.model, "--layers", str(options.layers), "--rows", str(options.rows), "--lengths", ""]
        count = 3 * options.steps + 16
        self.bench = DecodeBench(parse_decode([*given, "--steps", str(count), *_device(options)]))
        self.found: dict[str, tuple[float, Parts, Parts]] = {}

    def run(self) -> None:
        """Measure all of them."""
        bench, model = self.bench, self.bench.subject.model
        with bench.injected() as injection:
            self.arm("resident", injection, None)
            bench.subject.place_experts(torch.device("cpu"))
            enable_expert_prefetch(model, device=bench.device, expert_cache=1, progress=False)
            try:
                self.arm("no cache", injection, 0)
                self.arm(f"{self.options.rows} rows", injection, self.options.rows)
            finally:
                disable_expert_prefetch(model)

    def arm(self, name: str, injection: Any, rows: int | None) -> None:
        """One of them."""
        bench, count = self.bench, self.options.steps
        bench.use(injection, 1)
        steps = Steps(bench.subject, injection, 1, bench.options.prompt, bench.options.steps)
        bench.set_rows(rows)
        steps.begin()
        for _ in range(8):
            steps.step()
        took = seconds_of(steps.step, count, bench.device)
        self.found[name] = (
            took,
            python_parts(steps.step, count, bench.device),
            torch_parts(steps.step, count, bench.device),
        )

    def text(self) -> str:
        """All of it as tables."""
        layers, resident = self.bench.layers, self.found["resident"]
        rows = []
        for name, (took, _, _) in self.found.items():
            beyond = (took - resident[0]) / layers * 1e6
            rows.append([name, f"{took * 1e3:.2f}", "-" if name == "resident" else f"{beyond:.0f}"])
        lines = columns(["arm", "the host's time of a step, ms", "beyond resident, us a layer"], rows)
        for name, (_, *kinds) in self.found.items():
            for kind, parts, before in zip(("Python", "torch"), kinds, resident[1:], strict=True):
                if name == "resident":
                    continue
                some = difference(parts, before, self.options.steps * layers)[: self.options.most]
                shown = [[part, f"{calls:.2f}", f"{micro:.1f}"] for part, calls, micro in some]
                lines += ["", *columns([f"{name}, {kind}: what it does beyond resident", "calls a layer", "us a layer"], shown)]
        return "\n".join(lines)


def _device(options: argparse.Namespace) -> list[str]:
    return ["--device", options.device] if options.device else []


def main(arguments: Sequence[str] | None = None) -> Profile:
    """Measure and print."""
    import sys

    profile = Profile(parse(sys.argv[1:] if arguments is None else arguments))
    profile.run()
    print(profile.text())
    return profile


if __name__ == "__main__":
    main()
