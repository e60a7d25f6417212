"""The host's time for one call of a hooked experts module, in microseconds, in this tree and in another one.

    python scripts/bench_call.py
    git worktree add ../old 3b5a980 && python scripts/bench_call.py --tree ../old --out calls.json

A model of tiny experts is called layer by layer, on the CPU stand-in and one thread. What experts compute is taken out (they
give back what they are given), and so is what sends single experts, which on a GPU is two launches of kernels. What is left is
what Python does from layer to layer, and for a prompt the copy of a bank of a few KiB.

- none: the module without a hook, which is part of the others
- prefill: a prompt, whose whole banks are sent ahead
- routed: a token, whose experts are sent after the router
- cached: a token, with a row cache

Time is what the calling thread has spent on a CPU, so others on the machine count little. Each tree is a process of its own;
they take turns, a few passes each, and the difference is that of each pair of turns.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("none", "prefill", "routed", "cached")
_EXPERTS, _TOP_K, _WIDTH = 8, 2, 8
# Passes after which nothing is new any more: slots and caches are there, and nobody looks for kept views.
_WARM_UP = 70


# -- in a tree ----------------------------------------------------------------------------------------------------------


class Subject:
    """A model whose experts are called in one of the ways."""

    def __init__(self, way: str, layers: int) -> None:
        from hf_prefetch import enable_expert_prefetch

        config = transformers.MixtralConfig(
            vocab_size=8,
            hidden_size=_WIDTH,
            intermediate_size=_WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=1,
            num_key_value_heads=1,
            num_local_experts=_EXPERTS,
            num_experts_per_tok=_TOP_K,
            experts_implementation="batched_mm",
        )
        self.way = way
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        if way != "none":
            experts = sum(value.nbytes for name, value in self.model.named_parameters() if ".experts." in name)
            cache = experts // 2 if way == "cached" else 0
            enable_expert_prefetch(self.model, device="cpu", slots=3, expert_cache=cache, progress=False)
        self.modules = [module for name, module in self.model.named_modules() if name.endswith(".experts")]
        tokens = 2 * _EXPERTS if way == "prefill" else 1
        ids = torch.arange(tokens * _TOP_K).view(tokens, _TOP_K) % _EXPERTS
        self.given = torch.randn(tokens, _WIDTH), ids, torch.full(ids.shape, 1 / _TOP_K)
        self.passes = 0
        self.run(_WARM_UP)

    @torch.no_grad()
    def run(self, passes: int) -> float:
        """Microseconds of a call: the median of some passes."""
        spent = []
        gc.disable()
        for _ in range(passes):
            begin = time.thread_time_ns()
            for module in self.modules:
                module(*self.given)
            spent.append(time.thread_time_ns() - begin)
        gc.enable()
        gc.collect(0)
        self.passes += passes
        return statistics.median(spent) / len(self.modules) / 1e3

    def check(self) -> None:
        """Whether all calls took the way that they were meant to take, whatever the passes before the last one have learned."""
        if self.way == "none":
            return
        report = self.model.expert_prefetch.report()
        calls = {"prefill": report.lookahead_calls, "routed": report.routed_calls, "cached": report.cached_calls}[self.way]
        if calls != self.passes * len(self.modules) or report.fallbacks:
            raise RuntimeError(f"only {calls} of {self.passes * len(self.modules)} calls were {self.way}: {report}")


def _leave_out_the_work() -> None:
    from hf_prefetch.device.rows import RowSender

    interface: Any = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    interface.register("batched_mm", lambda module, hidden, ids, weights: hidden)
    sender: Any = RowSender
    sender.send_to_slot = lambda *args, **kwargs: None
    sender.send_to_cache = lambda self, stored, table, layout, rows, ids, counter: ids


def serve(layers: int, passes: int) -> None:
    """Read a way, run it for a few passes, say what a call took; until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    # Whatever others print is no answer.
    os.dup2(2, 1)
    torch.set_num_threads(1)
    _leave_out_the_work()
    subjects = {way: Subject(way, layers) for way in WAYS}
    import hf_prefetch

    print(hf_prefetch.__file__, file=answers, flush=True)
    for way in map(str.strip, sys.stdin):
        print(subjects[way].run(passes), file=answers, flush=True)
        subjects[way].check()


# -- the trees ----------------------------------------------------------------------------------------------------------


class Tree:
    """A checkout of the package, timed in a process of its own."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path = path.resolve()
        words = ["--serve", "--layers", str(options.layers), "--passes", str(options.passes)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(self.path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )

    def wait(self) -> None:
        """Until it is ready.

        Raises:
            RuntimeError: it has failed, or imports the package from elsewhere.
        """
        found = Path(self._answer())
        if found.parent.parent != self.path:
            raise RuntimeError(f"{self.path} was asked for, and {found} was imported")

    def time(self, way: str) -> float:
        """Microseconds of a call."""
        assert self._process.stdin is not None
        print(way, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the process of {self.path} has ended: see above")
        return line

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    @property
    def commit(self) -> str:
        """What is checked out there, with a + where files were changed since."""
        git: Callable[..., Any] = subprocess.run
        words = ["git", "-C", str(self.path)]
        commit, changed = (
            git([*words, *rest], capture_output=True, text=True, check=False).stdout.strip()
            for rest in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno", "--", "hf_prefetch"])
        )
        return f"{commit or self.path.name}{'+' if changed else ''}"


def compare(trees: Sequence[Tree], pairs: int) -> Json:
    """Microseconds of a call, by way and tree, and how many more the first takes than the last."""
    spent: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(pairs):
        for way, turns in spent.items():
            # Who comes second finds the caches of the CPU as the first has left them.
            order = trees if number % 2 else trees[::-1]
            turn = {tree: tree.time(way) for tree in order}
            turns.append([turn[tree] for tree in trees])
    results: Json = {}
    for way, turns in spent.items():
        results[way] = {tree.commit: spread([turn[place] for turn in turns]) for place, tree in enumerate(trees)}
        if len(trees) > 1:
            results[way]["difference"] = spread([turn[0] - turn[-1] for turn in turns])
    return results


def spread(values: Sequence[float]) -> Json:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}


def table(results: Json) -> str:
    """All of it, a line for each way."""
    columns = list(results["calls"]["none"])
    lines = [f"{'us a call':<10}" + "".join(f"{column:>26}" for column in columns)]
    for way, cells in results["calls"].items():
        shown = ("{:.2f} ({:.2f} to {:.2f})".format(cell["median"], *cell["quartiles"]) for cell in cells.values())
        lines.append(f"{way:<10}" + "".join(f"{cell:>26}" for cell in shown))
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="another checkout of the package, to compare this one with")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--passes", type=int, default=9, help="passes of a turn")
    parser.add_argument("--pairs", type=int, default=100, help="turns of each tree and way")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the results, print them."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(words)
    if options.serve:
        serve(options.layers, options.passes)
        return
    trees = [Tree(path, options) for path in (ROOT, options.tree) if path is not None]
    try:
        for tree in trees:
            tree.wait()
        calls = compare(trees, options.pairs)
    finally:
        for tree in trees:
            tree.close()
    results: Json = {
        "command": shlex.join(["bench_call.py", *words]),
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "machine": {
            "device": "CPU stand-in",
            "cpu": platform.processor() or platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "calls": calls,
    }
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
