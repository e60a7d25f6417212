"""What the decode benchmark found: limits, ratios and the table. Pure: JSON values in and out.

`gather` is the rate of the kernel that reads page-locked memory, measured in the same run with half of a bank. A step can't be
shorter than the resident arm's and what its missed experts take at that rate.
"""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["SCHEMA", "derive", "table"]

SCHEMA = "decode/1"
CONTRACT = {"no cache": 1.10, "cached": 1.10, "prefill": 1.05, "gather": 0.90}

Json = dict[str, Any]


def derive(results: Json) -> Json:
    """Fill in everything that follows from what was measured. Returns the same object; idempotent."""
    link = results["link"]
    gather = link.get("gather_gb_per_s")
    for name, arm in results["decode"].items():
        batch = arm.get("batch")
        resident = results["decode"].get("resident" if batch == 1 else f"resident, batch {batch}", {})
        for kind in ("eager", "graph"):
            point = arm.get(kind)
            if point is None:
                continue
            point["median"] = statistics.median(point["seconds"])
            # The mean tells of misses, which come in bursts; limits are compared with it.
            point["mean"] = statistics.mean(point["seconds"])
            base = resident.get(kind, {}).get("mean")
            if gather and base and not name.startswith("resident"):
                moving = point["sent_bytes"] / gather / 1e9
                graph = resident.get("graph", {}).get("mean", base)
                point["limit"] = max(base, graph + moving) if kind == "eager" else base + moving
                point["ratio"] = point["mean"] / point["limit"]
    for ways in results["prefill"].values():
        for point in ways.values():
            point["median"] = statistics.median(point["seconds"])
        alone = [ways[way]["median"] for way in ("routed-only", "lookahead-only") if way in ways]
        if len(alone) == 2 and "policy" in ways:
            ways["policy"]["ratio"] = ways["policy"]["median"] / min(alone)
    return results


def table(results: Json) -> str:
    """Everything as text."""
    model, link = results["model"], results["link"]
    lines = [
        f"{model['name']}, {model['layers']} layers, {model['experts']} experts, top {model['top_k']}; "
        f"routing {model['profile']}",
        f"{results['machine']['name']}; torch {results['machine']['torch']}, transformers {results['machine']['transformers']}",
        "link "
        + ", ".join(f"{name.removesuffix('_gb_per_s')} {value:.1f} GB/s" for name, value in link.items() if "gb_per_s" in name),
        "",
        f"{'arm':<22} {'eager ms':>9} {'/ limit':>8} {'graph ms':>9} {'/ limit':>8} {'tokens/s':>9} {'hits':>6} "
        f"{'MB/token':>9}  equal",
    ]
    for name, arm in results["decode"].items():
        if "error" in arm:
            lines.append(f"{name:<22} {arm['error']}")
        if "eager" not in arm:
            continue
        eager, graph = arm["eager"], arm.get("graph", {})
        best = graph or eager
        cells = [
            f"{1e3 * eager['mean']:>9.2f}",
            _cell(eager.get("ratio"), 8, 3),
            _cell(1e3 * graph["mean"] if graph else None, 9, 2),
            _cell(graph.get("ratio"), 8, 3),
            f"{arm['batch'] / best['mean']:>9.1f}",
            _cell(best.get("hit_rate"), 6, 3),
            f"{best['sent_bytes'] / 1e6:>9.1f}",
        ]
        lines.append(f"{name:<22} {' '.join(cells)}  {_equality(arm.get('equal'))}{_waits(arm.get('synchronisations'))}")
    if results["prefill"]:
        lines += ["", f"{'tokens':>7} {'policy':>9} {'lookahead':>10} {'routed':>9} {'/ better':>9} {'routed MB':>10}"]
        for length, ways in results["prefill"].items():
            values = [ways.get(way, {}).get("median") for way in ("policy", "lookahead-only", "routed-only")]
            moved = ways.get("routed-only", {}).get("sent_bytes")
            lines.append(
                f"{length:>7} {_cell(values[0], 9, 4)} {_cell(values[1], 10, 4)} {_cell(values[2], 9, 4)} "
                f"{_cell(ways.get('policy', {}).get('ratio'), 9, 3)} {_cell(moved / 1e6 if moved else None, 10, 0)}"
            )
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def _equality(equal: Json | None) -> str:
    if equal is None:
        return "-"
    if equal["other_outputs"]:
        return f"NO: {equal['other_outputs']} of {equal['calls']} calls"
    return "yes" if not equal["other_inputs"] else f"for {equal['calls'] - equal['other_inputs']} of {equal['calls']} calls"


def _waits(found: Json | None) -> str:
    if found is None:
        return ""
    return "" if found["sync_debug_mode"] == "none" else f"; waits: {found['sync_debug_mode'][:60]}"
