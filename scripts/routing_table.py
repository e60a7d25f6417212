"""The tables of docs/routing.md, from docs/routing.json. Regions are marked as in scripts/render_docs.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_decode_report
from render_docs import grid

__all__ = ["TITLES", "default_title", "render"]

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent

TITLES = {
    "traces": "recorded, 13 kinds of text",
    "demo": "demonstration model",
    "qwen3-30b-a3b": "Qwen3-30B-A3B, synthetic",
    "qwen3-30b-a3b-wide": "Qwen3 shape, all experts in use",
    "mixtral-8x7b": "Mixtral-8x7B, synthetic",
    "gpt-oss-20b": "gpt-oss-20b, synthetic",
}
POLICIES = ("LRU", "LFU", "LFRU", "static", "static, other kinds", "default", "Belady")
_REGION = re.compile(r"(<!-- routing: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def default_title(results: Json) -> str:
    """What the default policy is called."""
    return f"decay {results['default']['decay']:g} (default)"


def render(text: str, results: Json) -> str:
    """The document with its regions filled.

    Raises:
        ValueError: a region has no end or an unknown name.
    """
    tables: dict[str, Callable[[Json], list[str]]] = {
        "command": _command,
        "half": _half,
        "sizes": _sizes,
        "decays": _decays,
        "left-out": _left_out,
        "prompt": _prompt,
        "ratio": _ratio,
        "foresight": _foresight,
        "ceiling": _ceiling,
    }
    if text.count("<!-- routing: ") != len(_REGION.findall(text)):
        raise ValueError("a region <!-- routing: NAME --> has no <!-- end -->")

    def fill(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise ValueError(f"there is no table {match[2]!r}")
        return match[1] + "\n".join(tables[match[2]](results)) + "\n" + match[4]

    return _REGION.sub(fill, text)


def _command(results: Json) -> list[str]:
    return ["```", f"python scripts/{results['command']}", "```", "", f"Measured on {results['date']}."]


def _half(results: Json) -> list[str]:
    head = ["routing", "experts", "k", "banks", *POLICIES[:-2], default_title(results), "optimum"]
    rows = []
    for name, origin in results["routing"].items():
        rates = origin["curves"][str(origin["half"])]
        counts = [str(origin[key]) for key in ("experts", "top_k", "streams")]
        rows.append([TITLES[name], *counts, *_strong([rates.get(policy) for policy in POLICIES[:-1]]), _rate(rates["Belady"])])
    return grid(head, rows)


def _sizes(results: Json) -> list[str]:
    head = ["routing", "rows", *POLICIES[:-2], default_title(results), "optimum"]
    rows = []
    for name, origin in results["routing"].items():
        for share in (0.25, 0.75):
            size = min(origin["curves"], key=lambda rows: abs(int(rows) - share * origin["experts"]))
            rows.append(_size_row(name, size, origin["curves"][size]))
    return grid(head, rows)


def _size_row(name: str, size: str, rates: Json) -> list[str]:
    return [TITLES[name], size, *_strong([rates.get(policy) for policy in POLICIES[:-1]]), _rate(rates["Belady"])]


def _decays(results: Json) -> list[str]:
    names = [name for name in next(iter(results["routing"].values()))["family"] if name.startswith("decay") or " x " in name]
    head = ["routing", *(name.removeprefix("decay ") for name in names)]
    rows = [
        [TITLES[name], *_strong([origin["family"][member] for member in names])] for name, origin in results["routing"].items()
    ]
    return grid(head, rows)


def _left_out(results: Json) -> list[str]:
    origin = results["routing"].get("traces")
    if origin is None:
        return ["*No traces were given to this run.*"]
    head = ["left out", "chosen on the others", "its hit rate", default_title(results), "LRU", "best there", "its hit rate"]
    rows = []
    for way in origin["leave_out"].values():
        for row in way:
            rates = [_rate(row[key]) for key in ("hit_rate", "default", "LRU", "best_hit_rate")]
            rows.append([row["held_out"], _title(row["chosen"]), *rates[:3], _title(row["best"]), rates[3]])
    return grid(head, rows)


def _title(name: str) -> str:
    return "the default" if name == "default" else name


def _prompt(results: Json) -> list[str]:
    ways = list(next(iter(next(iter(results["routing"].values()))["prompt"].values())))
    head = ["routing", "prompt", *ways]
    rows = []
    for name, origin in results["routing"].items():
        for tokens, rates in origin["prompt"].items():
            rows.append(
                [TITLES[name], f"{int(tokens):,}", *(" / ".join(f"{100 * rate:.1f}" for rate in rates[way]) for way in ways)]
            )
    return grid(head, rows)


def _ratio(results: Json) -> list[str]:
    """Where the default is furthest from the best policy that was compared, the optimum left aside."""
    worst = []
    for name, origin in results["routing"].items():
        best = max(origin["family"].values())
        half = origin["family"]["default"] / best
        ratios = {
            int(rows): rates["default"] / max(rate for policy, rate in rates.items() if policy != "Belady")
            for rows, rates in origin["curves"].items()
        }
        size = min(ratios, key=lambda rows: ratios[rows])
        kinds = origin["kinds"]
        each = min(rates / max(kinds[policy][kind] for policy in kinds) for kind, rates in kinds["default"].items())
        worst.append([TITLES[name], f"{half:.4f}", f"{each:.4f}", f"{ratios[size]:.4f}", f"{size} of {origin['experts']}"])
    head = ["routing", "half the rows, all policies", "the worst kind or seed", "any size, named policies", "at rows"]
    return grid(head, worst)


def _foresight(results: Json) -> list[str]:
    origins = results["routing"].items()
    names = list(next(iter(results["routing"].values()))["foresight"]["right"])
    head = ["routing", "missed a bank and token", *names]
    rows = [
        [TITLES[name], f"{origin['foresight']['misses']:.2f}", *_strong([origin["foresight"]["right"][n] for n in names])]
        for name, origin in origins
    ]
    return grid(head, rows)


def _ceiling(results: Json) -> list[str]:
    """What one guess a layer would save at most, of a step with half of the rows as a graph, if wrong guesses cost nothing.

    A right guess hides the smaller of two times: an expert's over the link, and a whole layer's on the GPU. A wrong one costs
    what is left of its transfer when the layer's own misses are known, so it pays only if it is right often enough.
    """
    best = max(results["routing"]["traces"]["foresight"]["right"].values()) if "traces" in results["routing"] else 0.0
    rows = []
    for path in sorted((ROOT / "docs" / "benchmarks" / "decode").glob("*-rows.json")):
        run = bench_decode_report.derive(json.loads(path.read_text(encoding="utf-8")))
        model, arms = run["model"], run["decode"]
        expert = model["row_bytes"] / model["layers"] / run["link"]["gather_gb_per_s"] / 1e9
        layer = arms["resident"]["graph"]["mean"] / model["layers"]
        own = max(results["routing"][model["profile"]]["foresight"]["right"].values())
        step = arms[f"{model['experts'] // 2} rows"]["graph"]["mean"] / model["layers"]
        needed = max(expert - layer, 0.0) / expert
        saved = [f"{100 * share * min(expert, layer) / step:.1f}%" for share in (own, best)]
        rows.append([model["name"], f"{1e6 * expert:,.0f}", f"{1e6 * layer:,.0f}", f"{100 * needed:.0f}%", *saved])
    head = ["shape", "an expert over the link, us", "a layer on the GPU, us", "must be right", "saved at most, its routing"]
    return grid([*head, "saved at most, recorded routing"], rows)


def _strong(rates: Sequence[float | None]) -> list[str]:
    """As percentages, the highest in bold."""
    best = max(rate for rate in rates if rate is not None)
    return [f"**{_rate(rate)}**" if rate == best else _rate(rate) for rate in rates]


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f}"
