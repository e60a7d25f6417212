"""Loading, measured: seconds and the peak of host memory of `hf_prefetch.from_pretrained` and of other ways to the same model.

    python scripts/bench_load.py --model Qwen/Qwen3-30B-A3B --out load.json
    python scripts/bench_load.py --make 2GB --layout both

Each way runs in a process of its own. Host memory is anonymous and shared pages (RssAnon + RssShmem of /proc/self/status),
looked at every few milliseconds, beyond what the process held when it had loaded a tiny model. `reads` is the plain thing
that nothing can beat by much: the same files, from the first byte to the last, into one small buffer. `copy` reads them
into memory that stays. Files are in the page cache unless `--cold` asks the system to forget them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.utils import cached_file

import hf_prefetch
from bench_host import HostMemory, host_block
from hf_prefetch.demo import demo_model_path
from hf_prefetch.memory.checkpoint import read_headers
from hf_prefetch.sizes import in_bytes

__all__ = ["ARMS", "LAYOUTS", "experts_share", "files_of", "main", "make_checkpoint", "measure", "table"]

Json = dict[str, Any]

LAYOUTS = ("separate", "fused")
_BUFFER = 16 * 2**20
# Files that are written at a time.
_WRITERS = 4


def make_checkpoint(folder: Path, nbytes: int, layout: str, *, layers: int = 24, shard_bytes: int = 2**28) -> Path:
    """Write a Qwen3-MoE checkpoint of about `nbytes` with random bf16 weights, its experts one by one or already fused.

    Returns its folder. Hardly any of it is ever in memory.
    """
    hidden, experts, vocabulary = 1024, 32, 8192
    dense = 2 * vocabulary * hidden * 2 + layers * 4 * hidden * hidden * 2
    # A multiple of 8, as every kernel for experts wants it.
    intermediate = max(8, (nbytes - dense) // (layers * experts * 3 * hidden * 2) // 8 * 8)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=4,
        moe_intermediate_size=intermediate,
        intermediate_size=2048,
        mlp_only_layers=[],
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    # An odd number, so that no two tensors that wrap around in it are the same.
    noise = torch.randn(2**22 + 1, generator=generator, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
    shards: list[list[_Stored]] = [[]]
    for key, shape in _stored_shapes(model, layout):
        if sum(stored.nbytes for stored in shards[-1]) > shard_bytes:
            shards.append([])
        shards[-1].append(_Stored(key, shape, int(torch.randint(noise.numel(), (1,), generator=generator))))
    files = [folder / f"model-{number:05}.safetensors" for number in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(lambda file, shard: _write(file, shard, noise), files, shards))
    weights = {stored.key: file.name for file, shard in zip(files, shards, strict=True) for stored in shard}
    index = {"metadata": {"total_size": sum(file.stat().st_size for file in files)}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@dataclass(frozen=True)
class _Stored:
    """A tensor of the checkpoint in bfloat16: its values are those of the noise from `begin` on, around and around."""

    key: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return 2 * torch.Size(self.shape).numel()


def _write(file: Path, shard: list[_Stored], noise: torch.Tensor) -> None:
    """A safetensors file, from memory that is there already: `save_file` wants copies, and takes several times as long."""
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for stored in shard:
        header[stored.key] = {"dtype": "BF16", "shape": stored.shape, "data_offsets": [end, end + stored.nbytes]}
        end += stored.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    plain, ones = (memoryview(values.view(torch.uint8).numpy()) for values in (noise, noise + 1))  # type: ignore[arg-type]
    with file.open("wb", buffering=0) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for stored in shard:
            values, at, left = ones if stored.key.endswith("norm.weight") else plain, 2 * stored.begin, stored.nbytes
            while left:
                written = stream.write(values[at : at + left])
                at, left = (at + written) % len(values), left - written


def _stored_shapes(model: Any, layout: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if layout == "separate" and key.endswith("experts.gate_up_proj"):
            for expert in range(shape[0]):
                for name in ("gate_proj", "up_proj"):
                    yield f"{key.removesuffix('gate_up_proj')}{expert}.{name}.weight", (shape[1] // 2, shape[2])
        elif layout == "separate" and key.endswith("experts.down_proj"):
            for expert in range(shape[0]):
                yield f"{key.removesuffix('down_proj')}{expert}.down_proj.weight", shape[1:]
        else:
            yield key, shape


def files_of(name: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint, in a folder or in the cache of the Hub."""
    folder = Path(name) if Path(name).is_dir() else Path(cached_file(str(name), "config.json")).parent
    return sorted(folder.glob("*.safetensors"))


def experts_share(name: str | Path) -> float:
    """The experts' part of a checkpoint's bytes."""
    stored = read_headers(files_of(name))
    experts = sum(tensor.nbytes for key, tensor in stored.items() if ".experts." in key)
    return experts / sum(tensor.nbytes for tensor in stored.values())


def _reads(name: str, device: str | None) -> None:
    buffer = memoryview(bytearray(_BUFFER))
    for file in files_of(name):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _copy(name: str, device: str | None) -> list[torch.Tensor]:
    blocks = []
    for file in files_of(name):
        blocks.append(host_block(file.stat().st_size))
        view, done = memoryview(blocks[-1].numpy()), 0
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(view[done : done + _BUFFER]):
                done += count
    return blocks


def _direct(name: str, device: str | None) -> Any:
    return hf_prefetch.from_pretrained(name, device=device, progress=False)


def _in_files(name: str, device: str | None) -> Any:
    return hf_prefetch.from_pretrained(name, device=device, host_memory=0, progress=False)


def _enabled(name: str, device: str | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return hf_prefetch.enable_expert_prefetch(model, device=device, progress=False)


ARMS: dict[str, Callable[[str, str | None], Any]] = {
    "reads": _reads,
    "copy": _copy,
    "from_pretrained": _direct,
    "from files": _in_files,
    "transformers + enable": _enabled,
}


def run_arm(arm: str, name: str, device: str | None) -> Json:
    """Run one way in this process."""
    transformers.utils.logging.disable_progress_bar()
    if torch.cuda.is_available():
        torch.zeros(1, device=device or "cuda")  # the context is not the loader's
    # Importing what loading needs takes time and 100 MB; neither depends on the checkpoint.
    ARMS[arm](str(demo_model_path()), device)
    result: list[Any] = []
    begin = time.perf_counter()
    memory = HostMemory.during(lambda: result.append(ARMS[arm](name, device)))
    seconds = time.perf_counter() - begin
    pinned = getattr(getattr(result[0], "expert_prefetch", None), "report", None)
    return {"seconds": seconds, **memory, "pinned_bytes": pinned().pinned_bytes if pinned else None}


def measure(arm: str, name: str | Path, device: str | None = None, *, environment: dict[str, str] | None = None) -> Json:
    """Run one way in a process of its own.

    Returns seconds, host memory in bytes before, at the peak and after, and `ratio`: what the peak added, by the checkpoint.
    """
    command = [sys.executable, __file__, "--arm", arm, "--model", str(name), *(["--device", device] if device else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{arm} failed:\n{done.stderr[-2000:]}")
    result: Json = json.loads(done.stdout.splitlines()[-1])
    total = sum(file.stat().st_size for file in files_of(name))
    result["bytes"] = total
    if result["peak"] is not None:
        result["ratio"] = (result["peak"] - result["before"]) / total
    return result


def _forget(files: list[Path]) -> None:
    """Ask the system to drop files from its cache."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _subjects(options: argparse.Namespace) -> Iterator[dict[str, str | Path]]:
    if options.model:
        yield {options.model: options.model}
        return
    nbytes = in_bytes(options.make)
    layouts = LAYOUTS if options.layout == "both" else (options.layout,)
    folder = Path(tempfile.mkdtemp(prefix="bench_load_", dir=options.folder))
    try:
        yield {f"{options.make}, {layout}": make_checkpoint(folder / layout, nbytes, layout) for layout in layouts}
    finally:
        shutil.rmtree(folder)


def table(results: Json) -> str:
    """The results as text."""
    machine = results["machine"]
    lines = [
        f"hf_prefetch {machine['hf_prefetch']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"{machine['name']}; files {'cold' if results['cold'] else 'in the page cache'}"
    ]
    for name, arms in results["checkpoints"].items():
        size = next(iter(arms.values()))[0]["bytes"]
        lines += ["", f"{name}: {size / 1e9:.2f} GB", f"{'':<24}{'seconds':>9}{'GB/s':>8}{'peak GiB':>10}{'/ weights':>11}"]
        for arm, runs in arms.items():
            seconds = statistics.median(run["seconds"] for run in runs)
            peaks = [run for run in runs if run["peak"] is not None]
            worst = max(peaks, key=lambda run: run["ratio"], default=None)
            memory = f"{(worst['peak'] - worst['before']) / 2**30:>10.2f}{worst['ratio']:>11.3f}" if worst else ""
            lines.append(f"{arm:<24}{seconds:>9.2f}{size / seconds / 1e9:>8.2f}{memory}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a folder with a checkpoint, or a model in the cache of the Hub")
    what.add_argument(
        "--make", metavar="SIZE", help="write a checkpoint of this size first, such as 2GB; it is deleted at the end"
    )
    parser.add_argument("--layout", choices=[*LAYOUTS, "both"], default="both", help="how --make stores experts")
    parser.add_argument("--folder", type=Path, help="where --make writes")
    parser.add_argument("--device", help="where to compute")
    parser.add_argument("--arms", default=",".join(ARMS), help="which ways, separated by commas")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="ask the system to drop the files from its cache before each run")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.arm:
        print(json.dumps(run_arm(options.arm, options.model, options.device)))
        return
    cuda = torch.cuda.is_available() and options.device != "cpu"
    results: Json = {
        "machine": {
            "name": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_prefetch": hf_prefetch.__version__,
        },
        "cold": options.cold,
        "checkpoints": {},
    }
    with _subjects(options) as subjects:
        for name, path in subjects.items():
            arms: dict[str, list[Json]] = {arm: [] for arm in options.arms.split(",")}
            results["checkpoints"][name] = arms
            for _ in range(options.repeats):
                for arm, runs in arms.items():
                    if options.cold:
                        _forget(files_of(path))
                    runs.append(measure(arm, path, options.device))
                    if options.out:
                        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
