"""What lossless codes make of bfloat16 weights; the results are the table of docs/packing.md.

From the root of the repository::

    PYTHONPATH=. python scripts/packing_study.py            # measure, write docs/packing.json, and fill the table
    PYTHONPATH=. python scripts/packing_study.py --render   # only fill the table (--check: only look whether it is current)

The table is in docs/packing.md.

Bits a weight of the experts of the demonstration model, and of weights drawn at random. How fast a code can be undone on a GPU
is not measured here.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_prefetch.demo import load_demo_model
from hf_prefetch.memory.packing import BLOCK, pack
from render_docs import grid

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCUMENT = ROOT / "docs" / "packing.json", ROOT / "docs" / "packing.md"
BEGIN, END = "<!-- candidates -->\n", "<!-- end -->"


def weights() -> dict[str, torch.Tensor]:
    """Rows of bfloat16, by what they are."""
    generator = torch.Generator().manual_seed(0)
    shape = (16, 128 * BLOCK)
    demo = [value for key, value in load_demo_model().state_dict().items() if ".experts." in key and value.dim() == 3]
    width = min(value[0].numel() for value in demo)
    normal = torch.randn(shape, generator=generator)
    # Student's t with 4 degrees of freedom: many more outliers than normal weights have.
    chi = torch.stack([torch.randn(shape, generator=generator) ** 2 for _ in range(4)]).mean(0)
    return {
        "demonstration model": torch.cat([value.reshape(-1, width) for value in demo]).contiguous(),
        "normal, sigma 0.02": (normal * 0.02).bfloat16(),
        "heavy-tailed": (normal / chi.sqrt() * 0.02).bfloat16(),
    }


def chosen(rows: torch.Tensor) -> float:
    """`hf_prefetch.memory.packing`."""
    return 16 * pack(rows).ratio


def three_bits(rows: torch.Tensor) -> float:
    """Codes of three bits for seven neighbouring exponents of each block; others are listed, a byte each."""
    exponents = _exponents(rows)
    blocks = exponents[: exponents.numel() // BLOCK * BLOCK].view(-1, BLOCK).long()
    counts = torch.zeros(blocks.shape[0], 257, dtype=torch.int64).scatter_add_(1, blocks + 1, torch.ones_like(blocks)).cumsum(1)
    covered = (counts[:, 7:] - counts[:, :-7]).amax(1)
    # A block's header has its first exponent, and where its list begins.
    return 8 + 3 + 8 * float((BLOCK - covered).double().mean()) / BLOCK + 8 * 8 / BLOCK


def huffman(rows: torch.Tensor) -> float:
    """A Huffman code of all exponents, as DFloat11 has it: the codes have different lengths, so no row can be addressed."""
    counts = torch.bincount(_exponents(rows).long()).tolist()
    heap = [(count, number, [number]) for number, count in enumerate(counts) if count]
    lengths = dict.fromkeys((number for _, number, _ in heap), 0)
    heapq.heapify(heap)
    while len(heap) > 1:
        (few, _, left), (more, tie, right) = heapq.heappop(heap), heapq.heappop(heap)
        for number in (*left, *right):
            lengths[number] += 1
        heapq.heappush(heap, (few + more, tie, [*left, *right]))
    return 8 + sum(counts[number] * length for number, length in lengths.items()) / sum(counts)


def entropy(rows: torch.Tensor) -> float:
    """What no code of single exponents can beat."""
    shares = torch.bincount(_exponents(rows).long()).double()
    shares = shares[shares > 0] / shares.sum()
    return 8 - float((shares * shares.log2()).sum())


def deflated(rows: torch.Tensor) -> float:
    """zlib over the exponents, a byte each; signs and mantissas as they are."""
    exponents = _exponents(rows).byte().numpy().tobytes()
    return 8 + 8 * len(zlib.compress(exponents, 6)) / len(exponents)


def deflated_whole(rows: torch.Tensor) -> float:
    """zlib over the weights as they lie there."""
    raw = rows.view(torch.uint8).numpy().tobytes()
    return 16 * len(zlib.compress(raw, 6)) / len(raw)


def _exponents(rows: torch.Tensor) -> torch.Tensor:
    return (rows.view(torch.int16).flatten().int() >> 7) & 0xFF


# Name, what it costs, and whether any row can be found and undone by itself, by a fixed address.
CANDIDATES: dict[str, tuple[Callable[[torch.Tensor], float], str]] = {
    "4 bits for 14 exponents, escapes listed (chosen)": (chosen, "yes"),
    "3 bits for 7 exponents, others listed": (three_bits, "blocks have different sizes"),
    "Huffman, as DFloat11": (huffman, "no"),
    "zlib over exponents": (deflated, "no"),
    "zlib over everything": (deflated_whole, "no"),
    "entropy of exponents (a bound)": (entropy, "-"),
}


def measure() -> Json:
    """Bits a weight, by candidate and weights."""
    rates: Json = {name: {} for name in CANDIDATES}
    for kind, rows in weights().items():
        for name, (rate, _) in CANDIDATES.items():
            rates[name][kind] = round(rate(rows), 3)
            print(f"{kind}: {name}: {rates[name][kind]}", flush=True)
    return {"torch": torch.__version__, "bits": rates}


def render(text: str, results: Json) -> str:
    """The document with its table filled."""
    begin = text.index(BEGIN) + len(BEGIN)
    end = text.index(END, begin)
    kinds = list(next(iter(results["bits"].values())))
    rows = [[name, *(f"{bits[kind]:.2f}" for kind in kinds), CANDIDATES[name][1]] for name, bits in results["bits"].items()]
    return text[:begin] + "\n".join(grid(["bits a weight", *kinds, "a row by itself"], rows)) + "\n" + text[end:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and fill the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="only fill the table")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is not current")
    options = parser.parse_args(arguments)
    if not options.render and not options.check:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    current = render(text, json.loads(RESULTS.read_text(encoding="utf-8")))
    if options.check:
        return int(current != text)
    DOCUMENT.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
