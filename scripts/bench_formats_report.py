"""The rows of what `bench_formats.py` has found, for the terminal and the documents."""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["BOUND", "HEAD", "failures", "rows"]

Json = dict[str, Any]

# How a prefill may compare with its limit.
BOUND = 1.05
HEAD = ("arm", "tokens", "GPU", "link", "prefetched", "of limit", "bits", "kernels")


def rows(results: Json) -> list[list[str]]:
    """A row for each arm and length, with what is beyond the bound marked, as is what a model does not repeat by itself."""
    found = []
    for arm, result in results["arms"].items():
        if "error" in result:
            continue
        link = result["bank_bytes"] / result["link_bytes_per_second"]
        for length, seconds in result["resident"].items():
            on_gpu, prefetched = statistics.median(seconds), statistics.median(result["prefetched"][length])
            ratio = prefetched / max(on_gpu, link)
            bits = result["equal"][length] + ("" if result["repeats_itself"][length] else " *")
            times = [f"{time:.4f}" for time in (on_gpu, link, prefetched)]
            found.append([arm, length, *times, f"{ratio:.3f}{'' if ratio <= BOUND else ' !'}", bits, result["kernels"]])
    return found


def failures(results: Json) -> list[str]:
    """Arms that have not been measured, and why; and what the marks mean, if there are any."""
    found = [f"{arm} failed: {result['error']}" for arm, result in results["arms"].items() if "error" in result]
    if any(not all(result.get("repeats_itself", {}).values()) for result in results["arms"].values()):
        found.append("* with all of it on the GPU the model does not always give the same bits, either")
    return found
