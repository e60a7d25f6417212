"""The tables of docs/routing.md, from docs/routing.json. Regions are marked as in scripts/render_docs.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from render_docs import grid

__all__ = ["TITLES", "default_title", "render"]

Json = dict[str, Any]

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


def _strong(rates: Sequence[float | None]) -> list[str]:
    """As percentages, the highest in bold."""
    best = max(rate for rate in rates if rate is not None)
    return [f"**{_rate(rate)}**" if rate == best else _rate(rate) for rate in rates]


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f}"
