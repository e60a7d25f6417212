"""How fast lossless codes of bfloat16 weights are undone on a GPU, and what that makes of a layer's way there.

    python scripts/bench_codecs.py --out docs/benchmarks/codecs/h200.json
    TRITON_INTERPRET=1 python scripts/bench_codecs.py --weights 8192 --repeats 1      # without a GPU: that it runs

One of them is the package's own; the others are nvCOMP's, for which `nvidia-nvcomp-cu13` has to be there (what is not is said,
and left out). nvCOMP knows no bfloat16: `exponents` gives it the exponents, a byte each, and leaves sign and mantissa as they
are, whose putting together again is part of the time; `floats` gives it the weights as if they were float16.

`a layer` is what one of Qwen3-30B-A3B needs: its bytes over the link, measured here, and then its decoding. Each result is
compared with the weights bit by bit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from bench_codecs_report import code_rows
from bench_host import PinnedBlock
from bench_models import describe_machine
from bench_passes import timed
from columns import columns
from hf_prefetch.device.unpacking import unpack_rows
from hf_prefetch.memory.packing import BLOCK, pack

__all__ = ["main"]

Json = dict[str, Any]
# The bytes that a code makes of weights, and what undoes it.
Coded = tuple[int, Callable[[], torch.Tensor]]

LAYER_BYTES = 128 * 3 * 768 * 2048 * 2
# nvCOMP's codes that are made for bytes like exponents, and what each is given besides.
NVCOMP: dict[str, Json] = {
    "ANS, exponents": {"algorithm": "ANS", "data_type": "|u1"},
    "ANS, floats": {"algorithm": "ANS", "data_type": "<f2"},
    "Bitcomp, exponents": {"algorithm": "Bitcomp", "data_type": "|u1"},
    "Bitcomp, floats": {"algorithm": "Bitcomp", "data_type": "<f2"},
    "GDeflate, exponents": {"algorithm": "GDeflate", "algorithm_type": 0},
    "Zstd, exponents": {"algorithm": "Zstd"},
}


def seconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of an action. The first two do not count."""
    return statistics.median([timed(device, action)[0] for _ in range(2 + repeats)][2:])


def own(weights: torch.Tensor) -> Coded:
    """`hf_prefetch.memory.packing`: the bytes that it makes of weights, and what undoes it."""
    packed, out = pack(weights.view(-1, min(weights.numel(), 128 * BLOCK))), torch.empty_like(weights)

    def undo() -> torch.Tensor:
        unpack_rows(packed, out.view(packed.blocks.shape[0], -1))
        return out

    return packed.nbytes, undo


def exponents_of(weights: torch.Tensor) -> torch.Tensor:
    """A byte a weight."""
    return (weights.view(torch.int16) >> 7).to(torch.uint8)


def rests_of(weights: torch.Tensor) -> torch.Tensor:
    """Sign and mantissa, a byte a weight."""
    bits = weights.view(torch.int16)
    return ((bits >> 8) & 0x80 | (bits & 0x7F)).to(torch.uint8)


def together(exponents: torch.Tensor, rests: torch.Tensor) -> torch.Tensor:
    """The weights."""
    rests = rests.to(torch.int16)
    return ((rests & 0x80) << 8 | exponents.to(torch.int16) << 7 | rests & 0x7F).view(torch.bfloat16)


def nvcomp(weights: torch.Tensor, name: str) -> Coded:
    """The same of one of nvCOMP's codes.

    Raises:
        ImportError: nvCOMP is not there.
    """
    library: Any = importlib.import_module("nvidia.nvcomp")
    stream = torch.cuda.current_stream(weights.device).cuda_stream
    codec = library.Codec(**NVCOMP[name], cuda_stream=stream)
    split = name.endswith("exponents")
    given = exponents_of(weights) if split else weights.view(torch.uint8)
    rests = rests_of(weights) if split else None
    coded = codec.encode(library.as_array(given, cuda_stream=stream))
    torch.cuda.synchronize(weights.device)
    # Made once, so that decoding does not wait for the host in between.
    config = codec.decompression_config(coded)
    out = torch.empty_like(given)
    merge = torch.compile(together) if split else None

    def undo() -> torch.Tensor:
        codec.decode(coded, out=library.as_array(out, cuda_stream=stream), decompression_config=config)
        return out.view(torch.bfloat16) if merge is None else merge(out, rests)

    return int(coded.buffer_size) + (0 if rests is None else rests.numel()), undo


def measure(made: Callable[[], Coded], weights: torch.Tensor, repeats: int, link: float) -> Json:
    """One code: its rate, its speed, and whether all bits came back."""
    nbytes, undo = made()
    same = torch.equal(undo().view(torch.int16), weights.view(torch.int16))
    took = seconds(undo, weights.device, repeats)
    ratio, speed = nbytes / weights.nbytes, weights.nbytes / took
    return {
        "bits": 16 * ratio,
        "gb_per_s": speed / 1e9,
        "equal": same,
        "layer_seconds": LAYER_BYTES * (ratio / link + 1 / speed),
        "layer_raw_seconds": LAYER_BYTES / link,
    }


def attempt(made: Callable[[], Coded], weights: torch.Tensor, repeats: int, link: float) -> Json:
    """The same, or why it did not run: that must not keep others from it."""
    try:
        return measure(made, weights, repeats, link)
    except Exception as error:  # noqa: BLE001 - whatever a library that was never here before comes up with
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:120]}


def link_rate(device: torch.device, nbytes: int, repeats: int) -> float:
    """Bytes that are copied from page-locked memory in a second."""
    block, there = PinnedBlock(nbytes, device), torch.empty(nbytes, dtype=torch.uint8, device=device)
    took = seconds(lambda: there.copy_(block.bytes, non_blocking=True), device, repeats)
    block.release()
    return nbytes / took


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the file. Returns 1 if a code that ran lost a bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=2**28, help="how many, normally distributed with sigma 0.02")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.empty(options.weights, dtype=torch.bfloat16, device=device)
    for part in weights.split(2**24):
        part.copy_(torch.randn(part.shape, generator=generator, device=device) * 0.02)
    link = link_rate(device, min(2**30, 2 * weights.nbytes), options.repeats)
    results: Json = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["bench_codecs.py", *(Path(word).name if "/" in word else word for word in given)]),
        "machine": describe_machine(device),
        "weights": options.weights,
        "link_gb_per_s": link / 1e9,
        "codes": {},
    }
    arms: dict[str, Callable[[], Coded]] = {"4 bits, escapes listed (chosen)": lambda: own(weights)}
    arms |= {f"nvCOMP {name}": lambda name=name: nvcomp(weights, name) for name in NVCOMP}  # type: ignore[misc]
    results["codes"] = {name: attempt(made, weights, options.repeats, link) for name, made in arms.items()}
    head, rows = code_rows(results)
    print("\n".join(columns(head, rows)))
    print(f"link: {results['link_gb_per_s']:.1f} GB/s; {results['machine']['name']}, {results['date']}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(not arm.get("equal", True) for arm in results["codes"].values()))


if __name__ == "__main__":
    sys.exit(main())
