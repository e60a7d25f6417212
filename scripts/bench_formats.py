"""Quantized experts, measured: prefill and tokens of fp8 and MXFP4 models, everything on the GPU and prefetched.

    PYTHONPATH=. python scripts/bench_formats.py --kernels build/kernels --out formats.json
    PYTHONPATH=. python scripts/bench_formats.py --device cpu --tiny

An arm is a shape and a format, `gpt-oss-20b:mxfp4` say, with random weights. It is the class of model that has this format in
transformers (Qwen3-MoE for fp8, gpt-oss for MXFP4) in this shape. Each runs in a process of its own: first with all experts on
the GPU, timed, the logits kept and what every block was given and gave; then prefetched, timed, compared; then off again. The
limit of a prefill is the greater of two times: with everything on the GPU, and of the experts' bytes over the link, as copies
from page-locked memory measure it in the same process.

`--kernels` is a folder with the packages that the Hub has for transformers; without it, or where one of them doesn't work here,
torch takes their place, and the table says so.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from bench_formats_report import BOUND, HEAD, failures, rows
from bench_host import PinnedBlock
from bench_models import describe_machine
from bench_passes import timed
from bench_shapes import SHAPES
from columns import columns
from hf_prefetch import disable_expert_prefetch, enable_expert_prefetch
from quantized import BUILDERS

__all__ = ["ARMS", "main", "measure", "table"]

Json = dict[str, Any]

ARMS = ("gpt-oss-20b:mxfp4", "qwen3-30b-a3b:fp8", "qwen3-30b-a3b:mxfp4", "gpt-oss-20b:fp8")
NEW_TOKENS = 4
# How often the model is compared with itself.
LOOKS = 4
TINY = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}


def build(shape: str, form: str, layers: int, device: torch.device, kernels: Path | None, *, tiny: bool) -> tuple[Any, str]:
    """A model of a shape whose experts have a format, on the device, and what multiplies them."""
    numbers = dict(SHAPES[shape].config)
    width = numbers.get("moe_intermediate_size", numbers["intermediate_size"])
    experts = numbers.pop("num_experts", None) or numbers.pop("num_local_experts")
    if tiny:
        numbers |= TINY
        experts, width = 8, 64
    model_type = {"fp8": "qwen3_moe", "mxfp4": "gpt_oss"}[form]
    if model_type == "qwen3_moe":
        numbers |= {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": True, "sliding_window": None}
    else:
        numbers |= {"num_local_experts": experts, "intermediate_size": width, "sliding_window": 128}
    if tiny:
        numbers["num_experts_per_tok"] = 2
    config = AutoConfig.for_model(model_type, **numbers, num_hidden_layers=layers, tie_word_embeddings=False)
    attention = next(each.attention for each in SHAPES.values() if each.model_type == model_type)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    with device:
        model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()
    multiplied = BUILDERS[form](model, device, kernels)
    return model, multiplied


@torch.no_grad()
def prefill(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last position."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].clone()


@dataclass
class Outputs:
    """What each block of experts was given and gave, for a prompt and a generation; and their logits and tokens."""

    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    results: list[torch.Tensor]

    def beside(self, expected: Outputs) -> str:
        """How they compare: "equal" in every bit; "experts" if every block of them that was given the same gave the same, but
        something outside (attention, say) did not; else "DIFFER"."""
        pairs = list(zip(self.blocks, expected.blocks, strict=True))
        results = all(map(torch.equal, self.results, expected.results))
        if results and all(torch.equal(one[1], other[1]) for one, other in pairs):
            return "equal"
        alike = [torch.equal(one[1], other[1]) for one, other in pairs if torch.equal(one[0], other[0])]
        return "experts" if alike and all(alike) else "DIFFER"


@torch.no_grad()
def outputs(model: nn.Module, ids: torch.Tensor) -> Outputs:
    """All of it, from a prompt and from a generation that begins with it."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        kept.append((inputs[0].clone(), (output if isinstance(output, torch.Tensor) else output[0]).clone()))

    blocks = [module for name, module in model.named_modules() if name.endswith(".mlp") and hasattr(module, "experts")]
    handles = [block.register_forward_hook(keep) for block in blocks]
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    try:
        logits = prefill(model, ids)
        given: Any = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True, **options
        )
    finally:
        for handle in handles:
            handle.remove()
    return Outputs(kept, [logits, *given.logits, given.sequences])


def measure(arm: str, options: argparse.Namespace) -> Json:
    """One arm, in this process."""
    device, lengths = options.device, options.lengths
    shape, form = arm.split(":")
    model, multiplied = build(shape, form, options.layers, device, options.kernels, tiny=options.tiny)
    generator = torch.Generator().manual_seed(1)
    prompts = {
        length: torch.randint(0, model.config.vocab_size, (1, length), generator=generator).to(device) for length in lengths
    }

    def times() -> dict[str, list[float]]:
        found = {}
        for length, ids in prompts.items():
            run = functools.partial(prefill, model, ids)
            found[str(length)] = [timed(device, run)[0] for _ in range(2 + options.repeats)][2:]
        return found

    resident = times()
    expected = {length: outputs(model, ids) for length, ids in prompts.items()}

    def compared() -> dict[str, str]:
        return {str(length): outputs(model, ids).beside(expected[length]) for length, ids in prompts.items()}

    # Some kernels of attention repeat themselves most of the time: one look is not enough to know them.
    rounds = [compared() for _ in range(LOOKS)]
    repeats = {str(length): all(each[str(length)] == "equal" for each in rounds) for length in lengths}
    seconds, _ = timed(
        device, lambda: enable_expert_prefetch(model, 3, device=None if device.type == "cuda" else device, progress=False)
    )
    prefetched = times()
    equal = compared()
    report = model.expert_prefetch.report()
    disable_expert_prefetch(model)
    off = compared()
    link = _link(report.host_bytes // report.banks, device)
    return {
        "kernels": multiplied,
        "layers": options.layers,
        "banks": report.banks,
        "bank_bytes": report.host_bytes,
        "enable_seconds": seconds,
        "link_bytes_per_second": link,
        "resident": resident,
        "prefetched": prefetched,
        # Whether the model gives the same bits twice by itself, prefetched, and when that is off again.
        "repeats_itself": repeats,
        "equal": equal,
        "equal_after": off,
        "report": {name: getattr(report, name) for name in ("lookahead_hits", "fallbacks", "bytes_to_device", "routed_calls")},
    }


def _link(nbytes: int, device: torch.device) -> float:
    """Bytes a second of copies of this size from page-locked memory."""
    block = PinnedBlock(nbytes, device)
    try:
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        seconds = [timed(device, lambda: target.copy_(block.bytes, non_blocking=True))[0] for _ in range(10)][3:]
    finally:
        block.release()
    return nbytes / statistics.median(seconds)


# -- processes and the table ----------------------------------------------------------------------------------------------


def in_a_process(arm: str, options: argparse.Namespace, kernels: Path | None, seconds: float) -> Json:
    """Measure an arm in a process of its own, whatever becomes of that."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "arm.json"
        words = [sys.executable, __file__, "--one", arm, "--out", str(out), "--layers", str(options.layers)]
        words += ["--lengths", ",".join(map(str, options.lengths)), "--repeats", str(options.repeats)]
        words += ["--device", str(options.device), *(["--tiny"] if options.tiny else [])]
        words += ["--kernels", str(kernels)] if kernels is not None else []
        try:
            done = subprocess.run(words, timeout=seconds, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {seconds:.0f} s"}
        if done.returncode or not out.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"ended with {done.returncode}"]
            print(f"{arm}:", *lines[-12:], sep="\n  ", flush=True)
            return {"error": lines[-1][:200]}
        result: Json = json.loads(out.read_text())
        return result


def table(results: Json) -> str:
    """What was found, a line for each arm and length."""
    lines = columns(HEAD, rows(results))
    lines.insert(1, "-" * len(lines[0]))
    for arm, result in results["arms"].items():
        if "report" in result and (result["report"]["fallbacks"] or not result["report"]["lookahead_hits"]):
            lines.append(f"{arm}: {result['report']}")
    machine = results["machine"]
    lines += failures(results)
    lines.append(f"{machine['name']}, torch {machine['torch']}, transformers {machine['transformers']}; bound {BOUND} of limit")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--arms", default=",".join(ARMS), help="shapes and formats, in this order")
    add("--layers", type=int, default=8, help="decoder layers")
    add("--lengths", type=lambda text: [int(part) for part in text.split(",")], default="200,2048", help="prompts, in tokens")
    add("--repeats", type=int, default=5, help="timed passes of each")
    add("--kernels", type=Path, help="a folder with packages of kernels")
    add("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    add("--tiny", action="store_true", help="small numbers in the place of the shapes', to try it")
    add("--time-limit", type=float, default=190, help="seconds for all of it")
    add("--out", type=Path, help="the JSON file to write")
    add("--one", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> Json:
    """Run it; the table comes last."""
    options, begin = parse(arguments), time.perf_counter()
    if options.one:
        options.out.write_text(json.dumps(measure(options.one, options)))
        return {}
    results: Json = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["bench_formats.py", *(Path(word).name if "/" in word else word for word in sys.argv[1:])]),
        "machine": describe_machine(options.device),
        "arms": {},
    }
    arms = options.arms.split(",")
    for number, arm in enumerate(arms):
        for kernels in dict.fromkeys((options.kernels, None)):
            # What is left is shared with the arms that come after.
            left = options.time_limit - (time.perf_counter() - begin)
            seconds = left * 2 / (len(arms) - number + 1)
            if left > 5:
                result = in_a_process(arm, options, kernels, seconds)
                before = results["arms"].get(arm, {}).get("error")
                results["arms"][arm] = result | ({"kernels_failed": before} if before else {})
            results["arms"].setdefault(arm, {"error": "no time left"})
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
            if "error" not in results["arms"][arm]:
                break
    print(table(results), flush=True)
    return results


if __name__ == "__main__":
    main()
