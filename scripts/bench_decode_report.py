"""What the decode benchmark found: limits, ratios and the table. Pure: JSON values in and out.

`gather` is the rate of the kernel that reads page-locked memory, measured in the same run with half of a bank. A step can't be
shorter than the resident arm's and what its missed experts take at that rate.
"""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["SCHEMA", "arm_rows", "check_rows", "derive", "prompt_rows", "skipped", "table"]

SCHEMA = "decode/1"
# What is asked of the figures, and the device memory that may be taken besides slots and caches, in MiB.
CONTRACT = {"no cache": 1.10, "half the rows": 1.10, "prompts": 1.05, "gather": 0.90, "memory": 64.0, "packed": 0.85}

# Where a token takes so many times what it takes with all experts on the device, three quarters of it are the link's.
_LINK_BOUND = 4.0
# That the benchmark enables with.
SLOTS = 3

Json = dict[str, Any]


def derive(results: Json) -> Json:
    """Fill in everything that follows from what was measured. Returns the same object; idempotent."""
    link = results["link"]
    gather = link.get("gather_gb_per_s")
    for name, arm in results["decode"].items():
        batch = arm.get("batch")
        resident = results["decode"].get("resident" if batch == 1 else f"resident, batch {batch}", {})
        model = results["model"]
        if arm.get("rows") is not None and "held_bytes" in arm and {"peak_bytes", "held_bytes"} <= resident.keys():
            # What a step takes besides experts, as the resident arm shows it, and what slots and caches take.
            step = resident["peak_bytes"] - resident["held_bytes"] - model["bank_bytes"]
            own = SLOTS * model["largest_bank_bytes"] + arm["rows"] * model["row_bytes"]
            arm["more_bytes"] = arm["peak_bytes"] - arm["held_bytes"] - step - own
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
    head = [
        "arm",
        "eager, ms",
        "/ limit",
        "graph, ms",
        "/ limit",
        "tokens/s",
        "hit rate",
        "MB a token",
        "more MiB",
        "equal",
        "waits",
    ]
    rows = []
    generate = {name: point["mean"] for name, point in results.get("generate", {}).items()}
    if generate:
        best = min(generate.values())
        times = [_cell(1e3 * generate[name] if name in generate else None, 2) for name in ("eager", "compiled")]
        rows.append(["resident, `generate`", times[0], "-", times[1], "-", _cell(1 / best, 1), *["-"] * 5])
    for name, arm in results["decode"].items():
        if name in skipped(results):
            continue
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
                _cell(arm["more_bytes"] / 2**20 if "more_bytes" in arm else None, 1),
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


def skipped(results: Json) -> list[str]:
    """Arms that were left out for lack of time."""
    return [name for name, arm in results["decode"].items() if str(arm.get("error", "")).startswith("skipped")]


def check_rows(results: Json) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of what is asked: the worst figure of each kind, its bound, and whether it is met."""
    arms, link, half = results["decode"], results["link"], results["model"]["experts"] // 2
    graphs = {name: arm["graph"]["ratio"] for name, arm in arms.items() if "ratio" in arm.get("graph", {})}

    def of_rows(rows: int) -> dict[str, float]:
        return {name: ratio for name, ratio in graphs.items() if arms[name]["rows"] == rows}

    found: list[tuple[str, str, dict[str, float], str]] = [
        ("a token without a cache, graph / limit", "no cache", of_rows(0), "<="),
        ("half of the experts cached, graph / limit", "half the rows", of_rows(half), "<="),
        ("prompts as chosen / the better way", "prompts", _prompt_ratios(results), "<="),
        ("the gather kernel / copies", "gather", _gather_share(link), ">="),
        ("more device memory than slots and caches, MiB", "memory", _more_memory(arms), "<="),
        ("a token without a cache, packed / raw", "packed", _packed_ratios(arms), "<="),
    ]
    rows = []
    for what, name, values, relation in found:
        if values:
            where = (max if relation == "<=" else min)(values, key=lambda key: values[key])
            met = values[where] <= CONTRACT[name] if relation == "<=" else values[where] >= CONTRACT[name]
            rows.append([what, f"{values[where]:.3f}", where, f"{relation} {CONTRACT[name]:g}", "yes" if met else "**no**"])
    compared = [name for name, arm in arms.items() if "equal" in arm]
    if compared:
        wrong = [name for name in compared if arms[name]["equal"]["other_outputs"]]
        rows.append(
            ["same bits in every call", f"{len(compared)} arms", ", ".join(wrong) or "-", "", "**no**" if wrong else "yes"]
        )
    return ["what", "worst", "where", "asked", "met"], rows


def _prompt_ratios(results: Json) -> dict[str, float]:
    ways = results["prefill"].items()
    return {f"{int(length):,} tokens": way["policy"]["ratio"] for length, way in ways if "ratio" in way.get("policy", {})}


def _packed_ratios(arms: Json) -> dict[str, float]:
    """Packed against raw without a cache, where most of a token's time goes to the link."""
    ratios = {}
    for name, arm in arms.items():
        raw, resident = arms.get(name.removeprefix("packed, "), {}), arms.get(name.replace("packed, no cache", "resident"), {})
        for kind in ("graph", "eager"):
            if not name.startswith("packed, no cache") or not all(kind in each for each in (arm, raw, resident)):
                continue
            if raw[kind]["mean"] >= _LINK_BOUND * resident[kind]["mean"]:
                ratios[f"{name}, {kind}"] = arm[kind]["mean"] / raw[kind]["mean"]
    return ratios


def _gather_share(link: Json) -> dict[str, float]:
    if "gather_half_gb_per_s" not in link:
        return {}
    return {"half of a bank": link["gather_half_gb_per_s"] / link["gb_per_s"]}


def _more_memory(arms: Json) -> dict[str, float]:
    return {name: arm["more_bytes"] / 2**20 for name, arm in arms.items() if "more_bytes" in arm}


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
    for head, rows in (arm_rows(results), prompt_rows(results), check_rows(results)):
        if rows:
            widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
            lines += ["", *(_line(row, widths) for row in (head, *rows))]
    if skipped(results):
        lines += ["", f"left out for lack of time: {', '.join(skipped(results))}"]
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
