"""The benchmark's results as a short table."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from bench_packed import PACKED

__all__ = ["equality_word", "table"]

GIB = 2**30

Json = dict[str, Any]

_HEAD = "arm               tokens   seconds  spread   / lim x accel.   GB/s peak GiB  equal"


def table(results: Json) -> str:
    """A few lines about what was measured on, a line for each point, and one for each kind of check."""
    machine, model, link = results["machine"], results["model"], results["link"]
    lines = [
        f"hf_prefetch {machine['hf_prefetch']} on {machine['name']}; torch {machine['torch']}, transformers "
        f"{machine['transformers']}, accelerate {machine['accelerate']}, Python {machine['python']}; {results['date']}",
        f"{model['name']}, {model['layers']} layers: {model['banks']} banks, {model['bank_bytes'] / 1e9:,.2f} GB, the largest "
        f"{model['largest_bank_bytes'] / 1e9:,.3f} GB",
    ]
    if "gb_per_s" in link:
        ends = " and ".join(f"{link['bytes'] / statistics.median(link[w]) / 1e9:.1f}" for w in ("start", "end") if link.get(w))
        lines.append(
            f"pinned copies at {ends} GB/s (start, end): all banks {link['limit_seconds']:.4f} s, one "
            f"{link['bank_seconds']:.4f} s; lim = max(resident, those on the host) + one"
        )
    lines += ["", _HEAD, "-" * len(_HEAD)]
    for name, arm in results["arms"].items():
        lines += [_row(name, key, point, arm) for key, point in arm["points"].items()]
        if arm["status"] != "ok":
            lines.append(f"{name:<16} {arm['status']}: {arm.get('error') or ''}"[: len(_HEAD) + 20])
    recalls = {name: arm["recall"] for name, arm in results["arms"].items() if arm.get("recall")}
    if recalls:
        lines.append("recall: " + ", ".join(f"{name} {r['correct']}/{r['total']}" for name, r in recalls.items()))
    checks = results.get("checks", [])
    lines += ["", f"{'':6} {'check':<44} {'worst':>10} {'bound':>9}  where"]
    lines += [_check_line(name, group) for name, group in _by_name(checks)]
    return "\n".join([*lines, *_verdict(checks, results.get("elapsed_seconds", 0.0))])


def _verdict(checks: list[Json], seconds: float) -> list[str]:
    verdicts = [check["pass"] for check in checks]
    failed = [check for check in checks if check["pass"] is False and not check.get("aim")]
    missed = [check for check in checks if check["pass"] is False and check.get("aim")]
    counts = [f"{verdicts.count(True)} of {len(verdicts)} checks passed", f"{len(failed)} failed"]
    if missed:
        counts.append(f"{len(missed)} missed an aim")
    if None in verdicts:
        counts.append(f"{verdicts.count(None)} mean nothing for a tiny model or on the CPU stand-in")
    lines = [f"{', '.join(counts)}; {seconds:.0f} s in all"]
    names = dict.fromkeys(check["name"] for check in (*failed, *missed))
    if names:
        lines.append(f"not reached: {'; '.join(names)}")
    return lines


def _row(name: str, key: str, point: Json, arm: Json) -> str:
    what = "decode" if key == "decode" else f"{point['tokens']:,}"
    if not point.get("seconds"):
        return f"{name:<16} {what:>7} {point.get('error', 'not measured')}"[: len(_HEAD) + 20]
    equality = arm["equality"].get(key)
    peak = point.get("peak_bytes")
    cells = [
        f"{name:<16} {what:>7} {point['median']:>9.4f}",
        f"{(point['max'] - point['min']) / point['median']:>7.1%}",
        _cell(point.get("ratio"), 7, 3),
        _cell(point.get("speedup"), 8, 2),
        _cell(point.get("gb_per_s") or None, 6, 1),
        _cell(peak / GIB if peak is not None else None, 8, 2),
    ]
    return f"{' '.join(cells)}  {equality_word(equality)}"


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def equality_word(equality: Json | None) -> str:
    """`yes`: every experts module and the logits; `experts`: every experts module on equal inputs; else where it differs."""
    if equality is None:
        return "-"
    if "error" in equality:
        return f"failed: {equality['error']}"[:40]
    if not equality["experts_equal"]:
        return f"NO: {equality['first_difference']}"
    if equality["logits_equal"] and equality["inputs_equal"] == equality["calls"]:
        return "yes"
    other = equality.get("first_other_inputs")
    apart = f" (from {other['name']}, {max(other['relative'].values(), default=0):.0e})" if other else ""
    return f"experts{apart}"


def _by_name(checks: list[Json]) -> list[tuple[str, list[Json]]]:
    order = list(dict.fromkeys(check["name"] for check in checks))
    ranked = sorted(checks, key=lambda check: order.index(check["name"]))
    groups = [(name, list(group)) for name, group in itertools.groupby(ranked, key=lambda check: check["name"])]
    # Each figure of a packed arm has a line of its own.
    parts = ([[check] for check in group] if name in PACKED else [group] for name, group in groups)
    return [(group[0]["name"], group) for several in parts for group in several]


def _check_line(name: str, group: list[Json]) -> str:
    """One line for all checks of a name: that of the one that is furthest on the wrong side of its bound."""
    sign = 1 if group[0]["relation"] == "<=" else -1
    # What has missed its bound comes before what nobody judges.
    worst = max(group, key=lambda c: (c["pass"] is False, sign * (float(c["value"]) - float(c["bound"]))))
    missed = "MISSED" if worst.get("aim") else "FAIL"
    verdict = missed if worst["pass"] is False else "n/a" if worst["pass"] is None else "PASS"
    if worst["relation"] == "is":
        held = sum(check["value"] for check in group)
        value, bound = f"{held} of {len(group)}", "all"
    else:
        value, bound = f"{worst['value']:.3f}", f"{worst['relation']} {worst['bound']:.4g}"
    where = worst["arm"] + (f", {worst['at']}" if worst["at"] else "")
    if worst["relation"] == "is" and worst["pass"]:
        where = ""
    return f"{verdict:6} {name:<44} {value:>10} {bound:>9}  {where}".rstrip()
