"""The table of bench_vllm.py: medians, what they are held against, and whether each bound was met."""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["bounds", "equality", "table"]

Results = dict[str, dict[str, Any]]

# Of a prompt: at most so many times what the GPU or the link takes, and with packed experts at most so many times the link's.
_PREFILL, _PACKED = 1.05, 0.82
# How many times as fast as vLLM's UVA offloading a decoded token has to be, half of the experts being cached.
_CACHED = 2.0
_OTHERS = ("uva", "offload-prefetch")
_LIMIT = "max(resident, bytes/link)"


def table(results: Results) -> str:
    """The medians in seconds, the limits of prompts, and each bound: the figure, what it must be, and ok or MISSED."""
    measured = {name: arm for name, arm in results.items() if arm.get("samples")}
    kinds = list(dict.fromkeys(kind for arm in measured.values() for kind in arm["samples"]))
    rows = []
    for name, arm in results.items():
        medians = [_figure(_median(arm, kind)) for kind in kinds]
        rows.append([name, *medians, equality(name, results) or "-", f"{arm['start']:.0f}" if "start" in arm else "-"])
    limits = [_limit(kind, results) for kind in kinds]
    if any(limits):
        rows.append([_LIMIT, *map(_figure, limits), "", ""])
    for name, arm in measured.items():
        pairs = [(_median(arm, kind), limit) for kind, limit in zip(kinds, limits, strict=True)]
        if name.startswith("prefetch") and any(limits):
            rows.append([f"{name} / limit", *[f"{one / limit:.3f}" if one and limit else "-" for one, limit in pairs], "", ""])
    lines = _columns([["arm", *kinds, "equal", "start"], *rows])
    link = _link(results)
    if link:
        lines.append(f"link {link / 1e9:.1f} GB/s; seconds: a prompt of so many tokens, a token of decode at so many sequences")
    lines += _columns([[what, figure, bound, verdict] for what, figure, bound, verdict in bounds(results)])
    lines += [f"{name}: {arm['error']}" for name, arm in results.items() if "error" in arm]
    return "\n".join(lines)


def bounds(results: Results) -> list[tuple[str, str, str, str]]:
    """Each bound that can be looked at: what it is of, the figure, what that must be, and "ok" or "MISSED"."""
    found = []
    for name in (one for one in results if one.startswith("prefetch")):
        arm = results[name]
        for kind in arm.get("samples", {}):
            figure = _median(arm, kind)
            if figure is None:
                continue
            for bound, why in _bounds_of(name, kind, results):
                verdict = "ok" if figure <= bound else "MISSED"
                found.append((f"{name}, {kind}", f"{figure:.4f}", f"<= {bound:.4f} ({why})", verdict))
        equal = equality(name, results)
        if equal is not None:
            found.append((f"{name}, output", equal, "equal to resident", "ok" if equal == "yes" else "MISSED"))
    return found


def equality(name: str, results: Results) -> str | None:
    """How an arm's answers compare with the resident ones; None if either has none."""
    arm, base = results[name], results.get("resident", {})
    if "answers" not in base or "answers" not in arm or (name == "resident" and "again" not in arm):
        return None
    mine, theirs = (arm["again"], arm["answers"]) if name == "resident" else (arm["answers"], base["answers"])
    if mine == theirs:
        return "yes"
    tokens = [[answer["tokens"] for answer in answers] for answers in (mine, theirs)]
    return "tokens" if tokens[0] == tokens[1] else "no"


def _bounds_of(name: str, kind: str, results: Results) -> list[tuple[float, str]]:
    resident = _median(results.get("resident", {}), kind)
    if kind.startswith("prefill"):
        limit, bytes_over_link = _limit(kind, results), _over_link(kind, results)
        if limit is None or resident is None or bytes_over_link is None:
            return []
        if "+pack" in name:
            packed = max(_PREFILL * resident, _PACKED * bytes_over_link)
            return [(packed, f"{_PACKED} x bytes/link, or {_PREFILL} x resident")]
        return [(_PREFILL * limit, f"{_PREFILL} x {_LIMIT}")]
    others = {other: _median(results.get(other, {}), kind) for other in _OTHERS}
    known = {other: value for other, value in others.items() if value is not None}
    found = [(value, other) for other, value in known.items()]
    if "+cache" in name and "uva" in known:
        found.append((known["uva"] / _CACHED, f"uva / {_CACHED:.0f}"))
    return found


def _over_link(kind: str, results: Results) -> float | None:
    """What a prompt's experts take over the link: every layer's, once for each batch that the prompt is cut into."""
    link = _link(results)
    arm = next((one for one in results.values() if kind in one.get("passes", {})), None)
    if link is None or arm is None:
        return None
    return float(arm["passes"][kind] * arm["expert_bytes"] / link)


def _limit(kind: str, results: Results) -> float | None:
    """What a prompt can come to at best."""
    resident, bytes_over_link = _median(results.get("resident", {}), kind), _over_link(kind, results)
    if not kind.startswith("prefill") or resident is None or bytes_over_link is None:
        return None
    return max(resident, bytes_over_link)


def _link(results: Results) -> float | None:
    """The link is as fast as the fastest copy that any arm has seen."""
    return max((arm["link"] for arm in results.values() if "link" in arm), default=None)


def _median(arm: dict[str, Any], kind: str) -> float | None:
    samples = arm.get("samples", {}).get(kind)
    return statistics.median(samples) if samples else None


def _figure(value: float | None) -> str:
    return f"{value:.4f}" if value is not None else "-"


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
