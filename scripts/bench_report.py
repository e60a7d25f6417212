"""What the benchmark found: limits and ratios, and checks against the contract. Pure: JSON values in and out.

All times are medians in seconds. `link` is the measured rate of pinned copies; `limit` is what the bytes that have to
travel take at that rate, and `lim` the best that can be asked for: max(resident, limit) and one bank over the link,
which nothing can hide because the first bank is needed before anything computes. Where an arm keeps only some of the
experts in host memory, only those have to travel.
"""

from __future__ import annotations

import statistics
from typing import Any

from bench_packed import PACKED, packed_figures

__all__ = ["AIMS", "CONTRACT", "SCHEMA", "derive", "host_bank_bytes"]

SCHEMA = 1
MIB, GIB = 2**20, 2**30

CONTRACT = {
    "prefill / lim": 1.02,
    **PACKED,
    "time / in proportion to the bytes in host memory": 1.05,
    "speed-up over accelerate": 6.5,
    "speed-up over diffusers": 1.25,
    "speed-up over diffusers, whole model": 1.25,
    "time / pinned-serial": 1.0,
    "device memory beyond the slots, MiB": 64.0,
    "bytes moved / bytes of the banks": 1.001,
    "host RAM after enabling / banks": 1.05,
    "host RAM while enabling / banks": 1.05,
    "enabling, GB/s": 10.0,
}
# Of these the number says how far it is; a run has not failed where one isn't reached.
AIMS = {"enabling, GB/s"}
RIVALS = {
    "accelerate": "speed-up over accelerate",
    "diffusers": "speed-up over diffusers",
    "diffusers-whole": "speed-up over diffusers, whole model",
}
# From this prompt length on the contract binds the time of a prefill.
_SHORTEST = 200
# Banks of fewer bytes in all take less time on the way than Python takes to send them.
_SMALLEST = 10**9
# The share of the recall prompts that must be answered right.
_RECALL = 0.95

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


def host_bank_bytes(results: Json, name: str) -> int:
    """Bytes of the banks that an arm keeps in host memory: all of them, unless it says otherwise."""
    enter = results["arms"][name].get("enter") or {}
    return int(enter.get("host_bank_bytes", results["model"]["bank_bytes"]))


def _derive_link(results: Json) -> None:
    """The link's rate: the best of what copies alone and whole prefills have shown, which gives the shortest limit.

    Copies alone can be slow at the start of a run, and the ones at its end are missing where it was stopped.
    """
    link, model = results["link"], results["model"]
    rates = {when: link["bytes"] / statistics.median(link[when]) for when in ("start", "end") if link.get(when)}
    for name, arm in results["arms"].items():
        for key, point in arm["points"].items():
            if key != "decode" and point.get("seconds") and point.get("moved_bytes"):
                rates[f"{name}, {key} tokens"] = point["moved_bytes"] / statistics.median(point["seconds"])
    if rates:
        link["shown_by"] = max(rates, key=lambda name: rates[name])
        link["gb_per_s"] = max(rates.values()) / 1e9
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
        needed, first = _needed_rows(results, name), 0.0
    else:
        needed = host_bank_bytes(results, name)
        first = link["bank_seconds"] if needed else 0.0
    if needed is not None:
        point["needed_bytes"] = needed
        point["limit"] = needed / link["gb_per_s"] / 1e9
        point["lim"] = max(resident or 0.0, point["limit"]) + first
        # Nothing to compare with: no resident time, and nothing that has to travel.
        point["ratio"] = point["median"] / point["lim"] if point["lim"] else None


def _needed_rows(results: Json, name: str) -> float | None:
    """Bytes of the routed rows of one decoded token, in the banks that an arm keeps in host memory."""
    needed = results["needed"].get("decode", {})
    banks = (results["arms"][name].get("enter") or {}).get("host_banks")
    if banks is not None and "rows_bytes_of_banks" in needed:
        return float(sum(needed["rows_bytes_of_banks"][index] for index in banks))
    rows: float | None = needed.get("rows_bytes")
    return rows


def _median(results: Json, arm: str, key: str) -> float | None:
    seconds = results["arms"].get(arm, {}).get("points", {}).get(key, {}).get("seconds")
    return statistics.median(seconds) if seconds else None


# -- checks ---------------------------------------------------------------------------------------------------------


def _checks(results: Json) -> list[Json]:
    checks = [
        _flag("arm finished", name, None, arm["status"] == "ok", error=arm.get("error"))
        for name, arm in results["arms"].items()
        if arm["status"] not in ("running", "not installed")
    ]
    for name, arm in results["arms"].items():
        checks += _exactness(name, arm)
        checks += _recall(results, name, arm)
        if arm.get("looks_ahead"):
            for key, point in arm["points"].items():
                if point.get("seconds"):
                    checks += _point_checks(results, name, arm, key, point)
            checks += _enabling(results, name, arm)
            checks += _packing(results, name, arm)
            checks += _within_cap(name, arm)
    _leave_unjudged(results, checks)
    if results["machine"]["device"] == "cpu" or results["model"]["bank_bytes"] < _SMALLEST:
        # The stand-in has no link and no memory of its own, and a tiny model's time goes elsewhere: they say nothing.
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


def _leave_unjudged(results: Json, checks: list[Json]) -> None:
    """Where the resident arm did not repeat its own logits, nobody's tell anything: experts modules still do."""
    equality = results["arms"].get("resident", {}).get("equality", {})
    noisy = {key for key, found in equality.items() if not found.get("logits_equal", True)}
    for check in checks:
        if check["at"] in noisy and check["name"].startswith(("logits equal", "generated tokens equal")):
            check["pass"] = None


def _recall(results: Json, name: str, arm: Json) -> list[Json]:
    recall = arm.get("recall")
    if not recall:
        return []
    at = f"{recall['correct']}/{recall['total']}"
    checks = [_flag(f"recall: {_RECALL:.0%} answered right", name, at, recall["correct"] >= _RECALL * recall["total"])]
    resident = results["arms"].get("resident", {}).get("recall")
    if resident and name != "resident":
        checks.append(_flag("recall: the resident arm's answers", name, at, recall["answers"] == resident["answers"]))
    return checks


def _point_checks(results: Json, name: str, arm: Json, key: str, point: Json) -> list[Json]:
    model, enter = results["model"], arm["enter"]
    host = host_bank_bytes(results, name)
    resident = results["arms"].get("resident", {}).get("points", {}).get(key, {})
    checks = []
    if point.get("peak_bytes") is not None and resident.get("peak_bytes") is not None:
        over = point["peak_bytes"] - (resident["peak_bytes"] - enter.get("host_weight_bytes", host))
        over -= enter["slots"] * model["largest_bank_bytes"] if host else 0
        checks.append(_check("device memory beyond the slots, MiB", name, key, over / MIB, "<="))
    if key == "decode":
        return checks
    if enter.get("share") is not None:
        checks += _proportion(results, name, key, point, host)
    elif point.get("ratio") is not None and point["tokens"] >= _SHORTEST and resident.get("seconds"):
        checks.append(_check("prefill / lim", name, key, point["ratio"], "<="))
    packed = host < enter.get("host_weight_bytes", host)
    if packed and point["tokens"] >= _SHORTEST and resident.get("seconds") and "limit_seconds" in results["link"]:
        raw = enter["host_weight_bytes"] / results["link"]["gb_per_s"] / 1e9
        other = _median(results, name.replace("+pack", ""), key)
        if statistics.median(resident["seconds"]) < CONTRACT["packed, prefill / all weights over the link"] * raw:
            checks.append(_check("packed, prefill / all weights over the link", name, key, point["median"] / raw, "<="))
        elif other is not None:
            checks.append(_check("packed, prefill / raw where it computes longer", name, key, point["median"] / other, "<="))
    if enter.get("host_weight_bytes", host) == model["bank_bytes"]:
        for rival, check in RIVALS.items():
            other = _median(results, rival, key)
            if other is not None:
                checks.append(_check(check, name, key, other / point["median"], ">="))
        serial = _median(results, "pinned-serial", key)
        if serial is not None:
            checks.append(_check("time / pinned-serial", name, key, point["median"] / serial, "<="))
    if point.get("moved_bytes") is not None:
        # Where nothing has to travel, one byte is too much.
        checks.append(_check("bytes moved / bytes of the banks", name, key, point["moved_bytes"] / max(host, 1), "<="))
    return checks


def _proportion(results: Json, name: str, key: str, point: Json, host: int) -> list[Json]:
    """Does the time fall with the bytes in host memory, from that of all of them to that of none?

    Only for prompts that take less time than all the bytes would.
    """
    link, resident = results["link"], _median(results, "resident", key)
    if resident is None or resident > link.get("limit_seconds", 0.0):
        return []
    whole = _median(results, "prefetch-3@100%", key) or link["limit_seconds"]
    allowed = resident + host / results["model"]["bank_bytes"] * (whole - resident)
    return [_check("time / in proportion to the bytes in host memory", name, key, point["median"] / allowed, "<=")]


def _enabling(results: Json, name: str, arm: Json) -> list[Json]:
    enter, banks, checks = arm.get("enter") or {}, results["model"]["bank_bytes"], []
    host = host_bank_bytes(results, name)
    held = enter.get("held_before_bytes", banks)
    if "gb_per_s" in enter and held == host == banks:
        checks.append(_check("enabling, GB/s", name, None, enter["gb_per_s"], ">="))
    if enter.get("experts_host_bytes") and host:
        most = max(held, host)
        # While a bank is moved it is there twice.
        in_flight = results["model"]["largest_bank_bytes"] / most
        for key, when, weights, more in (("after", "after", host, 0.0), ("peak", "while", most, in_flight)):
            ratio = enter["experts_host_bytes"][key] / weights
            checks.append(_check(f"host RAM {when} enabling / banks", name, None, ratio, "<=", more=more))
    if arm.get("report"):
        checks.append(_flag("no fallbacks", name, None, arm["report"]["fallbacks"] == 0))
    return checks


def _packing(results: Json, name: str, arm: Json) -> list[Json]:
    """What a packed arm takes of host memory and of time besides prompts."""
    if "+pack" not in name:
        return []
    figures = packed_figures(arm, results["arms"].get(name.replace("+pack", "")))
    return [_check(figure, name, None, value, "<=") for figure, value in figures.items()]


def _within_cap(name: str, arm: Json) -> list[Json]:
    """With a cap: did all that was timed stay below it, decode included?"""
    enter, points = arm.get("enter") or {}, arm["points"]
    if not enter.get("cap_bytes"):
        return []
    checks = [_flag("ran within the cap", name, key, bool(point.get("seconds"))) for key, point in points.items()]
    reserved = [enter.get("reserved_bytes"), *(point.get("reserved_bytes") for point in points.values())]
    most = max((nbytes for nbytes in reserved if nbytes is not None), default=0)
    cap = enter["cap_bytes"] / GIB
    return [*checks, _check("reserved on the device within the cap, GiB", name, None, most / GIB, "<=", bound=cap)]


def _check(
    name: str, arm: str, at: str | None, value: float, relation: str, *, bound: float | None = None, more: float = 0.0
) -> Json:
    bound = (CONTRACT[name] if bound is None else bound) + more
    passed = value <= bound if relation == "<=" else value >= bound
    check = {"name": name, "arm": arm, "at": at, "value": value, "relation": relation, "bound": bound, "pass": passed}
    return check | ({"aim": True} if name in AIMS else {})


def _flag(name: str, arm: str, at: str | None, value: bool, error: str | None = None) -> Json:
    check = {"name": name, "arm": arm, "at": at, "value": value, "relation": "is", "bound": True, "pass": value}
    return check | ({"error": error} if error else {})
