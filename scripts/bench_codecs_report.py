"""What a file of scripts/bench_codecs.py says, as rows of a table. Knows nothing of torch: documents can be made anywhere."""

from __future__ import annotations

from typing import Any

__all__ = ["code_rows"]

Json = dict[str, Any]


def code_rows(results: Json) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table."""
    head = ["code", "bits a weight", "GB/s of weights", "a layer: link, then decoding, ms", "/ raw", "bits equal"]
    rows = []
    for name, arm in results["codes"].items():
        if "error" in arm:
            rows.append([name, "-", "-", "-", "-", arm["error"]])
            continue
        share = arm["layer_seconds"] / arm["layer_raw_seconds"]
        cells = [f"{arm['bits']:.2f}", f"{arm['gb_per_s']:,.0f}", f"{arm['layer_seconds'] * 1e3:.1f}", f"{share:.3f}"]
        rows.append([name, *cells, "yes" if arm["equal"] else "**no**"])
    return head, rows
