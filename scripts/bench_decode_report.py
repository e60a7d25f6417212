"""What the decode benchmark found: limits, ratios and the table. Pure: JSON values in and out.

`gather` is the rate of the kernel that reads page-locked memory, measured in the same run with half of a bank. A step can't be
shorter than the resident arm's and what its missed experts take at that rate.
"""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["SCHEMA", "arm_rows", "derive", "prompt_rows", "table"]

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
    for point in results.get("generate", {}).values():
        point["mean"] = statistics.mean(point["seconds"])
    for ways in results["prefill"].values():
        for point in ways.values():
            point["median"] = statistics.median(point["seconds"])
        alone = [ways[way]["median"] for way in ("routed-only", "lookahead-only") if way in ways]
        if len(alone) == 2 and "policy" in ways:
            ways["policy"]["ratio"] = ways["policy"]["median"] / min(alone)
    return results


def arm_rows(results: Json) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of arms."""
    head = ["arm", "eager, ms", "/ limit", "graph, ms", "/ limit", "tokens/s", "hit rate", "MB a token", "equal", "waits"]
    rows = []
    generate = {name: point["mean"] for name, point in results.get("generate", {}).items()}
    if generate:
        best = min(generate.values())
        times = [_cell(1e3 * generate[name] if name in generate else None, 2) for name in ("eager", "compiled")]
        rows.append(["resident, `generate`", times[0], "-", times[1], "-", _cell(1 / best, 1), *["-"] * 4])
    for name, arm in results["decode"].items():
        if "eager" not in arm:
            rows.append([name, str(arm.get("error", "not measured")), *["-"] * (len(head) - 2)])
            continue
        eager, graph = arm["eager"], arm.get("graph")
        best = graph or eager
        rows.append(
            [
                name,
                _cell(1e3 * eager["mean"], 2),
                _cell(eager.get("ratio"), 3),
                _cell(1e3 * graph["mean"] if graph else None, 2),
                _cell(graph.get("ratio") if graph else None, 3),
                _cell(arm["batch"] / best["mean"], 1),
                _cell(best.get("hit_rate"), 3),
                _cell(best["sent_bytes"] / arm["batch"] / 1e6, 1),
                _equality(arm.get("equal")),
                _waits(arm.get("synchronisations")),
            ]
        )
    return head, rows


def prompt_rows(results: Json) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of prompts."""
    head = ["tokens", "as chosen, s", "lookahead only, s", "routed only, s", "/ better", "routed MB"]
    rows = []
    for length, ways in results["prefill"].items():
        values = [ways.get(way, {}).get("median") for way in ("policy", "lookahead-only", "routed-only")]
        moved = ways.get("routed-only", {}).get("sent_bytes")
        ratio = ways.get("policy", {}).get("ratio")
        rows.append(
            [f"{int(length):,}", *(_cell(v, 4) for v in values), _cell(ratio, 3), _cell(moved / 1e6 if moved else None, 0)]
        )
    return head, rows


def table(results: Json) -> str:
    """Everything as text."""
    model, link = results["model"], results["link"]
    rates = ", ".join(
        f"{name.removesuffix('_gb_per_s')} {value:.1f} GB/s" for name, value in link.items() if "gb_per_s" in name
    )
    lines = [
        f"{model['name']}, {model['layers']} layers, {model['experts']} experts, top {model['top_k']}; "
        f"routing {model['profile']}",
        f"{results['machine']['name']}; torch {results['machine']['torch']}, transformers {results['machine']['transformers']}",
        f"link: {rates}",
    ]
    for head, rows in (arm_rows(results), prompt_rows(results)):
        if rows:
            widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
            lines += ["", *(_line(row, widths) for row in (head, *rows))]
    return "\n".join(lines)


def _line(row: list[str], widths: list[int]) -> str:
    cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join([f"{row[0]:<{widths[0]}}", *cells]).rstrip()


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _equality(equal: Json | None) -> str:
    if equal is None:
        return "-"
    if equal["other_outputs"]:
        return f"NO: {equal['other_outputs']} of {equal['calls']} calls"
    return "yes" if not equal["other_inputs"] else f"{equal['calls'] - equal['other_inputs']:,} of {equal['calls']:,}"


def _waits(found: Json | None) -> str:
    return "-" if found is None else found["sync_debug_mode"][:60]
