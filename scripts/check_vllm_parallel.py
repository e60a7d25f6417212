"""Check that the vLLM plugin changes nothing with several GPUs: tensor parallel, and with expert parallelism on top.

From the root of the repository::

    python scripts/check_vllm_parallel.py --gpus 2

Each engine is a process of its own on the same small checkpoint. Tokens and log-probabilities with the plugin are compared with
those of the same engine without it, asked twice, and what each worker has in host memory with its share of the experts.
On a GPU decoding replays CUDA graphs, unless --eager is given.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS.parent), str(SCRIPTS)]

_WAYS = {"tensor": {}, "expert": {"enable_expert_parallel": True}}
_OPTIONS = {"slots": 3}
# What differs from the shape of Qwen3-30B-A3B; and how long prompts are.
_SMALLER = {"num_hidden_layers": 6, "hidden_size": 1024, "vocab_size": 4096, "num_experts": 32, "moe_intermediate_size": 512}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_TINY = {**_SMALLER, **_HEADS, "hidden_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_PROMPTS, _TINY_PROMPTS = (1500, 40, 3), (90, 17, 3)
# What makes vLLM's workers, processes of their own, find the plugin where the package is not installed.
_METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: hf-prefetch\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\nhf_prefetch = hf_prefetch.integrations.vllm:register\n",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all engines, or one of them, in this process, for the process that runs all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=2, help="how many workers")
    parser.add_argument("--ways", default=",".join(_WAYS), help="which, by name, with commas between")
    parser.add_argument("--timeout", type=float, default=140.0, help="seconds for one engine")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a tiny checkpoint, to try the script on a CPU")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--plugin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.way is not None:
        options.out.write_text(json.dumps(_ask(options)))
        return 0
    different = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = _TINY if options.tiny else _SMALLER
        _write_checkpoint(folder, sizes)
        if not importlib.metadata.entry_points(group="vllm.general_plugins", name="hf_prefetch"):
            described = folder / "hf_prefetch-0.dist-info"
            described.mkdir()
            for file, text in _METADATA.items():
                (described / file).write_text(text)
        for way in options.ways.split(","):
            without, plugged = (_engine(options, way, folder, plugin=plugin) for plugin in (False, True))
            told, same = _judged(without, plugged, options.gpus, _mebibytes(sizes))
            different += not same
            print(f"{way} parallel, {options.gpus} workers: {told}", flush=True)
    return int(different > 0)


def _mebibytes(sizes: dict[str, int]) -> float:
    """What all experts take in bfloat16."""
    expert = 3 * sizes["hidden_size"] * sizes["moe_intermediate_size"] * 2
    return sizes["num_hidden_layers"] * sizes["num_experts"] * expert / 2**20


def _judged(without: dict[str, Any], plugged: dict[str, Any], workers: int, experts: float) -> tuple[str, bool]:
    """What there is to say of two engines, and whether all of it is as it has to be."""
    errors = [
        f"{name}: {result['error']}\n{result.get('log', '')}"
        for name, result in (("without", without), ("with", plugged))
        if "error" in result
    ]
    if errors:
        return "\n".join(errors), False
    same, share = without["answers"] == plugged["answers"], experts / workers
    moved = len(plugged["host"]) == workers and all(abs(host - share) < 0.05 * share for host in plugged["host"])
    return (
        f"output {'equal: ok' if same else 'different: MISSED'} (without the plugin, asked twice: "
        f"{'equal' if without['answers'][0] == without['answers'][1] else 'different'}); "
        f"MiB of experts a worker {plugged['host']}, of {experts:.2f}: {'ok' if moved else 'MISSED'}"
    ), same and moved


def _write_checkpoint(folder: Path, sizes: dict[str, int]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from bench_shapes import SHAPES

    shape = SHAPES["qwen3-30b-a3b"]
    config = AutoConfig.for_model(shape.model_type, **{**shape.config, **sizes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.05)
    model.save_pretrained(folder)


def _engine(options: argparse.Namespace, way: str, folder: Path, *, plugin: bool) -> dict[str, Any]:
    """One engine in a process of its own: what it has answered, or why it has not."""
    out = folder / f"{way}-{plugin}.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--gpus", str(options.gpus), "--way", way]
    command += ["--folder", str(folder), "--out", str(out)]
    command += [*(["--plugin"] if plugin else []), *(["--eager"] if options.eager else [])]
    command += ["--tiny"] if options.tiny else []
    # For a function that is sent to workers on this machine.
    environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    paths = (str(folder), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", ""))
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    log, error = folder / f"{way}-{plugin}.log", None
    # Workers have processes of their own, which end with the group and hold the log open until then.
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True) as one,
    ):
        try:
            code = one.wait(options.timeout)
        except subprocess.TimeoutExpired:
            error = f"took more than {options.timeout:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
    told = log.read_text(errors="replace")
    if error is None and (code or not out.is_file()):
        lines = [line for line in told.splitlines() if "Error" in line]
        error = lines[-1][-300:] if lines else f"exit code {code}"
    return {"error": error, "log": told[-3000:]} if error is not None else json.loads(out.read_text())


def _ask(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams

    from hf_prefetch.integrations.vllm.layers import worker_report

    on_gpu = torch.cuda.is_available()
    arguments: dict[str, Any] = {}
    if on_gpu:
        arguments = {"attention_backend": "TRITON_ATTN", "moe_backend": "triton", "kv_cache_memory_bytes": 2**30}
    if on_gpu and not options.eager:
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
        arguments["compilation_config"] = {"mode": 0, **graphs}
    llm = LLM(
        str(options.folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        tensor_parallel_size=options.gpus,
        distributed_executor_backend="mp",
        enforce_eager=options.eager or not on_gpu,
        enable_prefix_caching=False,
        additional_config={"hf_prefetch": _OPTIONS} if options.plugin else {},
        **_WAYS[options.way],
        **arguments,
    )
    settings = SamplingParams(max_tokens=16, temperature=0.0, logprobs=5, ignore_eos=True, detokenize=False)
    answers = []
    for _ in range(2):
        prompts = [
            {"prompt_token_ids": [(7 * place + length) % 4000 + 1 for place in range(length)]}
            for length in (_TINY_PROMPTS if options.tiny else _PROMPTS)
        ]
        given = []
        for result in llm.generate(prompts, settings, use_tqdm=False):
            steps = [sorted((token, value.logprob) for token, value in step.items()) for step in result.outputs[0].logprobs]
            given.append([list(result.outputs[0].token_ids), steps])
        answers.append(given)
    host = [round(report.host_bytes / 2**20, 2) for report in llm.collective_rpc(worker_report)] if options.plugin else []
    return {"answers": answers, "host": host}


if __name__ == "__main__":
    sys.exit(main())
