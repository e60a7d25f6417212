"""Measure prefill, decode, memory and exactness of ways to run a Mixture-of-Experts model whose experts are off the GPU.

From the root of the repository, on a machine with one GPU::

    PYTHONPATH=. python scripts/bench.py --model qwen3-30b-a3b --layers 16 --out bench.json

One model object goes through all arms, so all of them compute with the same weights. Each arm is timed first, medians
over repeats with the device synchronised at both ends, and then compared with the resident arm in passes of their own:
every argument and every output of every experts module must be equal bit for bit, and so must the logits. The file is
written again after every measurement. ``--show bench.json`` prints the table of an earlier run.

Behind the routers of random weights ids of synthetic routing are put, since such routers send all tokens to a few experts.

An arm ``prefetch-3@25%`` keeps the experts of a quarter of the layers in host memory, and ``prefetch-3@20GiB`` those that
this much device memory leaves no room for: with ``--cap 24GiB`` all that is timed has to do with so much altogether.

Without a GPU, ``--device cpu --model tiny`` goes the same way on the CPU stand-in.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# Read when the library is first used: a fixed workspace, so that its sums don't depend on what ran before.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import bench_report
import bench_table
from bench_arms import check_names
from bench_prefetch import Way
from bench_run import Bench
from bench_shapes import DEFAULT_LAYERS, DEMO, SHAPES
from hf_prefetch.config import PrefetchConfig
from hf_prefetch.demo import demo_model_path

ARMS = "resident,prefetch-3,prefetch-2,prefetch-4,pinned-serial,diffusers,diffusers-whole,accelerate"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line and refuse what can't work before anything is built."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    numbers = functools.partial(_numbers, parser)
    add = parser.add_argument
    add("--model", choices=[*SHAPES, DEMO], default="qwen3-30b-a3b", help="a shape (random weights) or the demo model")
    add("--layers", type=int, help=f"decoder layers of a shape; all of them, at most {DEFAULT_LAYERS}, if not given")
    add("--checkpoint", help="a folder or Hub name to load instead")
    add("--routing", help="of scripts/routing_synthetic.py; the model's own if not given, and none for a checkpoint")
    add("--arms", default=ARMS, help="in this order, but the resident one first")
    add("--prefetch-from", choices=["host", "device"], default="host", help="where prefetch-3 finds the experts")
    add("--cap", type=functools.partial(_size, parser), help="device memory that arms with a budget may not exceed, as 24GiB")
    add("--lengths", type=numbers, default="32,200,2048,8192,32768", help="prompt lengths, in tokens")
    add("--side-lengths", type=numbers, default="200,8192", help="those that arms beside resident and prefetch-3 get")
    add("--share-lengths", type=numbers, default="2048", help="those that arms with a share get")
    add("--slow-lengths", type=numbers, default="200,8192", help="those that slow arms (accelerate) get")
    add("--equal-lengths", type=numbers, default="200,2048,8192", help="those compared at every module")
    add("--repeats", type=int, default=5, help="timed passes of a length")
    add("--side-repeats", type=int, default=5, help="the same for those other arms")
    add("--slow-repeats", type=int, default=3, help="the same for slow arms")
    add("--warmups", type=int, default=2, help="passes before those; slow arms get one")
    add("--decode-tokens", type=int, default=8, help="timed tokens; 0 leaves decode out")
    add("--side-decode-tokens", type=int, default=3, help="the same for those other arms")
    add("--slow-decode-tokens", type=int, default=3, help="the same for slow arms")
    add("--decode-prompt", type=int, default=200, help="prompt length before them")
    add("--recall-prompts", type=int, default=20, help="prompts of the recall task, with the demo model")
    add("--device", help="cuda, cuda:1, cpu; the GPU if there is one")
    add("--threads", type=int, help="threads of torch on the host")
    add("--time-limit", type=float, default=0, help="seconds after which nothing new is started; 0 is none")
    add("--out", type=Path, help="the JSON file to write")
    add("--show", type=Path, help="print the table of a JSON file and do nothing else")
    options = parser.parse_args(arguments)
    try:
        options.arms = check_names([name.strip() for name in options.arms.split(",") if name.strip()])
    except ValueError as error:
        parser.error(str(error))
    if min(options.repeats, options.side_repeats, options.slow_repeats) < 1:
        parser.error("--repeats, --side-repeats and --slow-repeats must be at least 1")
    if options.model == DEMO:
        options.checkpoint = options.checkpoint or demo_model_path()
    if options.checkpoint and options.layers:
        parser.error("--layers cuts a random model; a checkpoint has the layers it has")
    if options.cap and not any(way.budget for way in map(Way.named, options.arms) if way):
        parser.error("--cap is for arms with a budget, such as prefetch-3@20GiB")
    options.equal_lengths = [length for length in options.equal_lengths if length in options.lengths]
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.device.type == "cuda" and options.device.index is None:
        options.device = torch.device("cuda", torch.cuda.current_device())
    options.command = _command(arguments)
    return options


def _numbers(parser: argparse.ArgumentParser, text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        parser.error(f"{text!r} is not a list of numbers such as 200,8192")
    if any(number < 1 for number in numbers):
        parser.error(f"lengths must be positive, got {text!r}")
    return numbers


def _size(parser: argparse.ArgumentParser, text: str) -> int | None:
    try:
        return PrefetchConfig(gpu_memory=text).device_budget
    except ValueError:
        parser.error(f"{text!r} is no size such as 24GiB")


def _command(arguments: Sequence[str]) -> str:
    """The command line without the paths of this machine."""
    shown = [Path(word).name if "/" in word else word for word in arguments]
    return " ".join(["bench.py", *shown])


def _stop(*_: Any) -> NoReturn:
    sys.exit("stopped")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; the table comes last, also after an interruption."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.show is not None:
        print(bench_table.table(bench_report.derive(json.loads(options.show.read_text()))))
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    bench = Bench(options)
    try:
        bench.run()
    finally:
        if bench.results["model"]:
            bench.save()
            print(bench_table.table(bench.results), flush=True)
        gc.unfreeze()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    main()
