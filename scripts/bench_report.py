"""What the benchmark found: limits and ratios, checks against the contract, and a short table. Pure: JSON values in and out.

All times are medians in seconds. `link` is the measured rate of pinned copies; `limit` is what the bytes that have to
travel take at that rate, and `lim` the best that can be asked for: max(resident, limit) and one bank over the link,
which nothing can hide because the first bank is needed before anything computes.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

__all__ = ["CONTRACT", "SCHEMA", "derive", "table"]

SCHEMA = 1
MIB, GIB = 2**20, 2**30

CONTRACT = {
    "prefill / lim": 1.02,
    "speed-up over accelerate": 6.5,
    "time / pinned-serial": 1.0,
    "device memory beyond the slots, MiB": 64.0,
    "bytes moved / bytes of the banks": 1.001,
    "host RAM after enabling / banks": 1.05,
    "host RAM while enabling / banks": 1.05,
    "enabling, GB/s": 10.0,
}
# From this prompt length on the contract binds the time of a prefill.
_SHORTEST = 200

Json = dict[str, Any]


def derive(results: Json) -> Json:
    """Fill in everything that follows from what was measured, and the checks. Returns the same object; idempotent."""
    _derive_link(results)
    for name, arm in results["arms"].items():
        for key, point in arm["points"].items():
            if point.get("seconds"):
                _derive_point(results, name, key, point)
    results["checks"] = _checks(results)
    return results


def _derive_link(results: Json) -> None:
    link, model = results["link"], results["model"]
    medians = [statistics.median(link[when]) for when in ("start", "end") if link.get(when)]
    if medians:
        # The faster one: it gives the shorter limit.
        link["gb_per_s"] = link["bytes"] / min(medians) / 1e9
        link["bank_seconds"] = model["largest_bank_bytes"] / link["gb_per_s"] / 1e9
        link["limit_seconds"] = model["bank_bytes"] / link["gb_per_s"] / 1e9


def _derive_point(results: Json, name: str, key: str, point: Json) -> None:
    link = results["link"]
    seconds = point["seconds"]
    point.update(median=statistics.median(seconds), min=min(seconds), max=max(seconds))
    if point.get("moved_bytes") is not None:
        point["gb_per_s"] = point["moved_bytes"] / point["median"] / 1e9
    resident = _median(results, "resident", key)
    accelerate = _median(results, "accelerate", key)
    if accelerate is not None:
        point["speedup"] = accelerate / point["median"]
    if "gb_per_s" not in link or name == "resident":
        return
    if key == "decode":
        needed, first = results["needed"].get("decode", {}).get("rows_bytes"), 0.0
    else:
        needed, first = results["model"]["bank_bytes"], link["bank_seconds"]
    if needed is not None:
        point["needed_bytes"] = needed
        point["limit"] = needed / link["gb_per_s"] / 1e9
        point["lim"] = max(resident or 0.0, point["limit"]) + first
        point["ratio"] = point["median"] / point["lim"]


def _median(results: Json, arm: str, key: str) -> float | None:
    seconds = results["arms"].get(arm, {}).get("points", {}).get(key, {}).get("seconds")
    return statistics.median(seconds) if seconds else None


# -- checks ---------------------------------------------------------------------------------------------------------


def _checks(results: Json) -> list[Json]:
    checks = [
        _flag("arm finished", name, None, arm["status"] == "ok", error=arm.get("error"))
        for name, arm in results["arms"].items()
        if arm["status"] != "running"
    ]
    for name, arm in results["arms"].items():
        checks += _exactness(name, arm)
        if arm.get("looks_ahead"):
            for key, point in arm["points"].items():
                if point.get("seconds"):
                    checks += _point_checks(results, name, arm, key, point)
            checks += _enabling(results, name, arm)
    if results["machine"]["device"] == "cpu":
        # The stand-in has no link and no memory of its own: its times and sizes say nothing.
        for check in checks:
            if check["relation"] != "is":
                check["pass"] = None
    return checks


def _exactness(name: str, arm: Json) -> list[Json]:
    control = " (resident again)" if name == "resident" else ""
    checks = []
    for key, equality in arm["equality"].items():
        if "error" in equality:
            checks.append(_flag("comparison ran", name, key, False, error=equality["error"]))
            continue
        checks.append(_flag(f"every experts module equal{control}", name, key, equality["experts_equal"]))
        checks.append(_flag(f"logits equal{control}", name, key, equality["logits_equal"]))
    if arm.get("tokens_equal") is not None and name != "resident":
        checks.append(_flag("generated tokens equal", name, "decode", arm["tokens_equal"]))
    if arm.get("weights_unchanged") is not None:
        checks.append(_flag("weights the same after the arm", name, None, arm["weights_unchanged"]))
    return checks


def _point_checks(results: Json, name: str, arm: Json, key: str, point: Json) -> list[Json]:
    model, checks = results["model"], []
    resident = results["arms"].get("resident", {}).get("points", {}).get(key, {})
    if point.get("peak_bytes") is not None and resident.get("peak_bytes") is not None:
        over = point["peak_bytes"] - (resident["peak_bytes"] - model["bank_bytes"])
        over -= arm["enter"]["slots"] * model["largest_bank_bytes"]
        checks.append(_check("device memory beyond the slots, MiB", name, key, over / MIB, "<="))
    if key == "decode":
        return checks
    if "ratio" in point and point["tokens"] >= _SHORTEST and resident.get("seconds"):
        checks.append(_check("prefill / lim", name, key, point["ratio"], "<="))
    if "speedup" in point:
        checks.append(_check("speed-up over accelerate", name, key, point["speedup"], ">="))
    serial = _median(results, "pinned-serial", key)
    if serial is not None:
        checks.append(_check("time / pinned-serial", name, key, point["median"] / serial, "<="))
    if point.get("moved_bytes") is not None:
        moved = point["moved_bytes"] / model["bank_bytes"]
        checks.append(_check("bytes moved / bytes of the banks", name, key, moved, "<="))
    return checks


def _enabling(results: Json, name: str, arm: Json) -> list[Json]:
    enter, banks, checks = arm.get("enter") or {}, results["model"]["bank_bytes"], []
    if "gb_per_s" in enter:
        checks.append(_check("enabling, GB/s", name, None, enter["gb_per_s"], ">="))
    if enter.get("experts_host_bytes"):
        for key, when in (("after", "after"), ("peak", "while")):
            ratio = enter["experts_host_bytes"][key] / banks
            checks.append(_check(f"host RAM {when} enabling / banks", name, None, ratio, "<="))
    if arm.get("report"):
        checks.append(_flag("no fallbacks", name, None, arm["report"]["fallbacks"] == 0))
    return checks


def _check(name: str, arm: str, at: str | None, value: float, relation: str) -> Json:
    bound = CONTRACT[name]
    passed = value <= bound if relation == "<=" else value >= bound
    return {"name": name, "arm": arm, "at": at, "value": value, "relation": relation, "bound": bound, "pass": passed}


def _flag(name: str, arm: str, at: str | None, value: bool, error: str | None = None) -> Json:
    check = {"name": name, "arm": arm, "at": at, "value": value, "relation": "is", "bound": True, "pass": value}
    return check | ({"error": error} if error else {})


# -- the table ------------------------------------------------------------------------------------------------------

_HEAD = "arm             tokens   seconds  spread   / lim x accel.   GB/s peak GiB  equal"


def table(results: Json) -> str:
    """At most sixty lines for a run of all arms and five lengths."""
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
            f"{link['bank_seconds']:.4f} s; lim = max(resident, all banks) + one"
        )
    lines += ["", _HEAD, "-" * len(_HEAD)]
    for name, arm in results["arms"].items():
        lines += [_row(name, key, point, arm) for key, point in arm["points"].items()]
        if arm["status"] != "ok":
            lines.append(f"{name:<14} {arm['status']}: {arm.get('error') or ''}"[: len(_HEAD) + 20])
    checks = results.get("checks", [])
    lines += ["", f"{'':4} {'check':<44} {'worst':>10} {'bound':>9}  where"]
    lines += [_check_line(name, group) for name, group in _by_name(checks)]
    verdicts = [check["pass"] for check in checks]
    lines.append(
        f"{verdicts.count(True)} of {len(verdicts)} checks passed, {verdicts.count(False)} failed"
        + (f", {verdicts.count(None)} mean nothing on the CPU stand-in" if None in verdicts else "")
        + f"; {results.get('elapsed_seconds', 0.0):.0f} s in all"
    )
    return "\n".join(lines)


def _row(name: str, key: str, point: Json, arm: Json) -> str:
    what = "decode" if key == "decode" else f"{point['tokens']:,}"
    if not point.get("seconds"):
        return f"{name:<14} {what:>7} {point.get('error', 'not measured')}"[: len(_HEAD) + 20]
    equality = arm["equality"].get(key)
    peak = point.get("peak_bytes")
    cells = [
        f"{name:<14} {what:>7} {point['median']:>9.4f}",
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
    return "yes" if equality["logits_equal"] and equality["inputs_equal"] == equality["calls"] else "experts"


def _by_name(checks: list[Json]) -> list[tuple[str, list[Json]]]:
    order = list(dict.fromkeys(check["name"] for check in checks))
    ranked = sorted(checks, key=lambda check: order.index(check["name"]))
    return [(name, list(group)) for name, group in itertools.groupby(ranked, key=lambda check: check["name"])]


def _check_line(name: str, group: list[Json]) -> str:
    worst = (max if group[0]["relation"] == "<=" else min)(group, key=lambda check: float(check["value"]))
    verdict = "n/a" if worst["pass"] is None else "PASS" if all(check["pass"] for check in group) else "FAIL"
    if worst["relation"] == "is":
        held = sum(check["value"] for check in group)
        value, bound = f"{held} of {len(group)}", "all"
    else:
        value, bound = f"{worst['value']:.3f}", f"{worst['relation']} {worst['bound']:g}"
    where = worst["arm"] + (f", {worst['at']}" if worst["at"] else "")
    if worst["relation"] == "is" and worst["pass"]:
        where = ""
    return f"{verdict:4} {name:<44} {value:>10} {bound:>9}  {where}".rstrip()
