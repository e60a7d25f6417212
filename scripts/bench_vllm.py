"""Compare ways of keeping a Mixture-of-Experts model's experts in host memory in vLLM, on one GPU.

From the root of the repository, with vLLM installed::

    python scripts/bench_vllm.py --out vllm.json
    python scripts/bench_vllm.py --smoke          # every arm once, on a tiny model: whether it works, in less than a minute

Every arm is a process of its own, with the same random weights, the same routing (scripts/routing_synthetic.py, put in the
place of the router's, whose own would be far too even), the same prompts, KV cache, attention and batch sizes. One that fails
or takes too long is told of, with what it had measured until then, and the others go on. The JSON file with all samples is
written anew after each arm. At the end comes a table, and each bound with whether it was met.

    resident              everything on the GPU
    uva                   vLLM's --cpu-offload-gb, experts only
    offload-prefetch      vLLM's --offload-backend prefetch, one layer ahead, experts only
    prefetch-3            this package's plugin with 3 slots (prefetch-4: 4)
    prefetch-3+cache      and half of the experts cached on the GPU
    prefetch-4+pack       experts packed
    prefetch-4+pack+cache

`equal` compares tokens and their log-probabilities with those of `resident`; that one against itself, asked again, stands in
its own row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS.parent), str(SCRIPTS)]

ARMS = ("resident", "prefetch-3", "prefetch-3+cache", "uva", "prefetch-4+pack", "offload-prefetch")
PROMPTS = (200, 2048, 8192, 32768)
GRAPHS = ("FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE")
# Seconds that an arm needs to be worth beginning.
_LEAST = 30.0
# Of --smoke: prompts on either side of where whole layers are sent.
_SMOKE_PROMPTS, _SMOKE_BATCH = (8, 100, 300), 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all arms, or one of them, in this process, for the process that runs all.

    Returns:
        How many arms failed, or gave another output than the resident one.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    options.prompts = [int(length) for length in options.prompts.split(",")] if options.prompts else list(PROMPTS)
    if options.smoke:
        options.tiny, options.samples, options.batch_tokens = True, 1, _SMOKE_BATCH
        options.prompts = list(_SMOKE_PROMPTS)
    options.compile |= "PIECEWISE" in options.graphs
    if options.arm is not None:
        from bench_vllm_arm import measure

        measure(options)
        return 0
    return _run(options, given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS), help="which, by name, with commas between")
    parser.add_argument("--layers", type=int, default=8, help="layers of Qwen3-30B-A3B's shape")
    parser.add_argument("--prompts", help=f"lengths in tokens, {','.join(map(str, PROMPTS))} if not given")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="vLLM's max_num_batched_tokens, of all arms")
    parser.add_argument("--samples", type=int, default=5, help="timed passes of each kind")
    parser.add_argument("--limit", type=float, default=390.0, help="seconds for all arms together")
    parser.add_argument("--arm-limit", type=float, default=120.0, help="seconds for one arm")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model, which takes longer to start")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--graphs", default=GRAPHS[0], choices=GRAPHS, help="vLLM's cudagraph_mode; some compile the model")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, everything once, arms beside each other: no figures"
    )
    parser.add_argument("--out", type=Path, default=Path("vllm.json"), help="the JSON file to write")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def _run(options: argparse.Namespace, given: list[str]) -> int:
    from bench_vllm_arm import prepare
    from bench_vllm_table import equality, table

    begin, results = time.monotonic(), {}
    shown = {name: value for name, value in vars(options).items() if name not in ("out", "folder", "arm")}
    with tempfile.TemporaryDirectory() as folder:
        prepare(options, Path(folder))

        def run(name: str) -> tuple[str, dict[str, Any]]:
            left = min(options.limit - (time.monotonic() - begin), options.arm_limit)
            return name, _arm(name, Path(folder), given, left)

        # Beside each other they share the GPU's memory and the cores, which the tiny model leaves free.
        together = max((os.cpu_count() or 2) // 2, 1) if options.smoke else 1
        for name, result in _all(run, options.arms.split(","), together):
            results[name] = result
            print(f"{name}: {result.get('error') or '{:.0f} s'.format(result['seconds'])}", flush=True)
            options.out.write_text(json.dumps({"options": shown, "arms": results}))
    results = {name: results[name] for name in options.arms.split(",")}
    words = {name: equality(name, results) for name in results}
    # Nothing that the smoke size takes is a figure.
    print("\n".join(f"{name}, output: {word}" for name, word in words.items()) if options.smoke else table(results))
    for name, result in results.items():
        if "error" in result:
            print(f"\n-- {name}\n{result.get('log', '')[-2000:]}")
    return sum("error" in result or words[name] not in (None, "yes") for name, result in results.items())


def _all(
    run: Callable[[str], tuple[str, dict[str, Any]]], names: Iterable[str], together: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    with ThreadPoolExecutor(together) as pool:
        yield from pool.map(run, names)


def _arm(name: str, folder: Path, given: list[str], limit: float) -> dict[str, Any]:
    """One arm, in a process of its own: what it has measured, and why not all, if so."""
    if limit < _LEAST:
        return {"error": "not begun: the time was up"}
    begin, out, log = time.monotonic(), folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, str(Path(__file__).resolve()), *given]
    command += ["--arm", name, "--folder", str(folder), "--out", str(out)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    error = None
    with log.open("w") as file:
        try:
            code = subprocess.run(command, env=environment, timeout=limit, stdout=file, stderr=file).returncode
        except subprocess.TimeoutExpired:
            error = f"took more than the {limit:.0f} s that it had"
    told = log.read_text(errors="replace")
    if error is None and code:
        lines = [line for line in told.splitlines() if line.strip()]
        error = lines[-1][:300] if lines else f"exit code {code}"
    measured = json.loads(out.read_text()) if out.is_file() else {}
    why = {} if error is None else {"error": error}
    return measured | why | {"seconds": time.monotonic() - begin, "log": told[-8000:]}


if __name__ == "__main__":
    sys.exit(main())
