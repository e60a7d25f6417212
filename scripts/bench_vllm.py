"""Compare ways of keeping a Mixture-of-Experts model's experts in host memory in vLLM, on one GPU.

From the root of the repository, with vLLM installed::

    python scripts/bench_vllm.py --out vllm.json

Every arm is a process of its own, with the same random weights, the same routing (scripts/routing_synthetic.py, put in the
place of the router's, whose own would be far too even), the same prompts, KV cache, attention and batch sizes. One that fails
or takes too long is told of, and the others go on. At the end comes a table; all samples are in the JSON file.

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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS.parent), str(SCRIPTS)]

ARMS = ("resident", "uva", "offload-prefetch", "prefetch-3", "prefetch-3+cache", "prefetch-4+pack")
PROMPTS = (200, 2048, 8192, 32768)
BATCHES = (1, 8)
# Seconds that an arm needs to be worth beginning.
_LEAST = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all arms, or one of them, in this process, for the process that runs all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS), help="which, by name, with commas between")
    parser.add_argument("--layers", type=int, default=8, help="layers of Qwen3-30B-A3B's shape")
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)), help="lengths in tokens")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="vLLM's max_num_batched_tokens, of all arms")
    parser.add_argument("--samples", type=int, default=5, help="timed passes of each kind")
    parser.add_argument("--limit", type=float, default=390.0, help="seconds for all arms together")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model, which takes longer to start")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--out", type=Path, default=Path("vllm.json"), help="the JSON file to write")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.prompts = [int(length) for length in options.prompts.split(",")]
    if options.arm is not None:
        from bench_vllm_arm import measure

        options.out.write_text(json.dumps(measure(options)))
        return 0
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    from bench_vllm_arm import prepare

    begin, results = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(options, Path(folder))
        for name in options.arms.split(","):
            left = options.limit - (time.monotonic() - begin)
            results[name] = _arm(name, Path(folder), left)
            told = results[name].get("error") or f"{results[name]['seconds']:.0f} s"
            print(f"{name}: {told}", flush=True)
            options.out.write_text(json.dumps({"options": vars(options) | {"out": None, "folder": None}, "arms": results}))
    print(table(results))
    return 0


def _arm(name: str, folder: Path, left: float) -> dict[str, Any]:
    """One arm, in a process of its own: what it has measured, or why it has not."""
    if left < _LEAST:
        return {"error": "not begun: the time was up"}
    begin, out = time.monotonic(), folder / f"{name}.json"
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    command += ["--arm", name, "--folder", str(folder), "--out", str(out)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, env=environment, timeout=left, capture_output=True, text=True)
    except subprocess.TimeoutExpired as error:
        return {"error": f"took more than the {left:.0f} s that were left", "log": str(error.stderr or "")[-4000:]}
    if done.returncode or not out.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1][:200] if lines else f"exit code {done.returncode}", "log": done.stderr[-8000:]}
    return json.loads(out.read_text()) | {"seconds": time.monotonic() - begin, "log": done.stderr[-2000:]}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The medians, and the limits that they are held against."""
    measured = {name: arm for name, arm in results.items() if "error" not in arm}
    kinds = list(dict.fromkeys(kind for arm in measured.values() for kind in arm["samples"]))
    head = ["arm", *kinds, "equal", "start"]
    base = results.get("resident", {})
    rows = []
    for name, arm in results.items():
        if "error" in arm:
            rows.append([name, *["-"] * len(kinds), "-", "-"])
            continue
        medians = [f"{median:.4f}" if (median := _median(arm, kind)) is not None else "-" for kind in kinds]
        rows.append([name, *medians, _equal(name, arm, base), f"{arm['start']:.0f}"])
    if "samples" in base and any("link" in arm for arm in measured.values()):
        limits = [_limit(kind, measured, base) for kind in kinds]
        rows.append(["max(resident, bytes/link)", *[f"{limit:.4f}" if limit else "-" for limit in limits], "", ""])
        for name, arm in measured.items():
            if name.startswith("prefetch"):
                ratios = [
                    f"{_median(arm, kind) / limit:.3f}" if limit else "-" for kind, limit in zip(kinds, limits, strict=True)
                ]
                rows.append([f"{name} / limit", *ratios, "", ""])
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    lines += [f"{name}: {arm['error']}" for name, arm in results.items() if "error" in arm]
    link = next((arm["link"] for arm in measured.values() if "link" in arm), None)
    if link:
        lines.append(f"link {link / 1e9:.1f} GB/s; seconds: a prompt of so many tokens, a token of decode at so many sequences")
    return "\n".join(lines)


def _median(arm: dict[str, Any], kind: str) -> float | None:
    samples = arm["samples"].get(kind)
    return statistics.median(samples) if samples else None


def _limit(kind: str, measured: dict[str, Any], base: dict[str, Any]) -> float | None:
    """What a prompt can come to at best: every layer's experts over the link, once for each batch that it is cut into."""
    resident = _median(base, kind)
    if not kind.startswith("prefill") or resident is None:
        return None
    link = next(arm["link"] for arm in measured.values() if "link" in arm)
    return max(resident, base["passes"][kind] * base["expert_bytes"] / link)


def _equal(name: str, arm: dict[str, Any], base: dict[str, Any]) -> str:
    if "answers" not in base:
        return "-"
    mine, theirs = (arm["again"], arm["answers"]) if name == "resident" else (arm["answers"], base["answers"])
    if mine == theirs:
        return "yes"
    tokens = [[answer["tokens"] for answer in answers] for answers in (mine, theirs)]
    return "tokens" if tokens[0] == tokens[1] else "no"


if __name__ == "__main__":
    sys.exit(main())
