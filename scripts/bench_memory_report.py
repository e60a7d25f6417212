"""What a file of scripts/bench_memory.py says, as rows of tables. Knows nothing of torch, so documents can be made anywhere."""

from __future__ import annotations

import statistics
from typing import Any

from columns import columns

__all__ = ["arm_rows", "check_rows", "head_lines", "read_rows", "text"]

Json = dict[str, Any]

GIB = 2**30


def head_lines(results: Json) -> list[str]:
    """Where and when."""
    machine = results["machine"]
    return [
        f"{machine['device']}, {machine['cpus']} CPU cores, {machine['memory_bytes'] / GIB:,.0f} GiB of memory, Linux "
        f"{machine['kernel']}; torch {machine['torch']}, transformers {machine['transformers']}, hf_prefetch "
        f"{machine['hf_prefetch']}",
        f"{results['date']}, {results['elapsed_seconds']:,.0f} s in all",
    ]


def arm_rows(results: Json) -> tuple[list[str], list[list[str]]]:
    """A row an arm: where its experts are, and how fast they come."""
    head = ["arm", "in memory", "page-locked", "in files", "a pass", "GB/s", "logits equal", "messages"]
    arms = {} if "error" in results.get("arms", {}) else results.get("arms", {})
    first = next((arm["logits"] for arm in arms.values() if "logits" in arm), None)
    rows = []
    for name, arm in arms.items():
        if "error" in arm:
            rows.append([name, *["-"] * 5, "failed", arm["error"].strip().splitlines()[-1]])
            continue
        seconds = statistics.median(arm["pass_seconds"])
        sizes = [f"{arm[kind] / 1e9:.2f} GB" for kind in ("host_bytes", "pinned_bytes", "file_bytes")]
        equal = "yes" if arm["logits"] == first else "**no**"
        rows.append([name, *sizes, f"{seconds:.3f} s", f"{arm['bytes'] / seconds / 1e9:.1f}", equal, str(len(arm["messages"]))])
    return head, rows


def check_rows(results: Json) -> tuple[list[str], list[list[str]]]:
    """What was to be reached, and what was."""
    rows = []

    def add(what: str, value: float | None, sign: str, bound: float, unit: str, passed: bool) -> None:
        if value is not None:
            rows.append([what, f"{value:.3g}{unit}", f"{sign} {bound:g}{unit}", "ok" if passed else "**missed**"])

    loads = [load for load in results.get("load", []) if "error" not in load]
    disk = results.get("disk", {})
    cached = [part["still_cached"] for part in (*loads, disk) if "still_cached" in part]
    if cached:
        worst = 100 * max(cached)
        add("most of a file that was still cached when it was to be cold", worst, "<=", 1, "%", worst <= 1)
    if loads:
        ratio = statistics.median(load["load_seconds"] / load["reads_seconds"] for load in loads)
        peaks = [load["peak_ratio"] for load in loads if load["peak_ratio"] is not None]
        total = loads[0]["bytes"] / 1e9
        add(f"from_pretrained of {total:.1f} GB, cold, / plain reads of its files", ratio, "<=", 1.2, "", ratio <= 1.2)
        if peaks:
            add("most memory while it loads / checkpoint", max(peaks), "<=", 1.05, "", max(peaks) <= 1.05)
    enable = results.get("enable", {})
    if "seconds" in enable:
        rate = enable["experts_bytes"] / enable["seconds"] / 1e9
        add("enabling a model in memory", rate, ">=", 10, " GB/s", rate >= 10)
        banks = enable["added_banks"]
        if banks is not None:
            bound = 1 + 0.05 * (enable["experts_bytes"] + enable["dense_bytes"]) / enable["bank_bytes"]
            add("most memory while it is enabled: layers more than the model", banks, "<=", round(bound, 2), "", banks <= bound)
    if disk.get("tier"):
        share = statistics.median(disk["tier"]) / statistics.median(disk["reads"])
        add("disk tier, cold, / plain reads of the same files", share, ">=", 0.9, "", share >= 0.9)
    arms = results.get("arms", {})
    if arms and "error" not in arms:
        logits = [arm.get("logits") for arm in arms.values()]
        first = next((one for one in logits if one is not None), None)
        equal = sum(one is not None and one == first for one in logits)
        add("arms with the same logits", equal, "=", len(arms), "", equal == len(arms))
        told = [arm for arm in arms.values() if "refused" in arm]
        right = sum(len(arm["messages"]) == arm["refused"] for arm in told)
        if told:
            add("arms that say once what the system refused, or nothing", right, "=", len(arms), "", right == len(arms))
    return ["what", "measured", "bound", ""], rows


def read_rows(results: Json) -> tuple[list[str], list[list[str]]]:
    """Cold reads by several threads, and the parts of getting memory."""
    rows, disk = [], results.get("disk", {})
    if disk.get("tier"):
        rows.append(["plain reads, one thread", _rates(disk["reads"])])
        rows.append(["disk tier", _rates(disk["tier"])])
    for name, rates in disk.get("by_threads", {}).items():
        rows.append([f"reads by threads: {name}", _rates(rates)])
    for kind, parts in disk.get("arenas", {}).items():
        for name, title in {"touch": "bringing in", "fill": "writing to", "map": "mapping", "lock": "page-locking"}.items():
            if parts.get(name):
                rows.append([f"{title} shared memory {kind}", f"{parts[name] / 1e9:.1f}"])
        if parts.get("refusal"):
            rows.append([f"page-locking shared memory {kind}", parts["refusal"]])
    return ["what", "GB/s"], rows


def _rates(rates: list[float] | str) -> str:
    if isinstance(rates, str):
        return rates
    each = ", ".join(f"{rate / 1e9:.2f}" for rate in rates)
    return f"{statistics.median(rates) / 1e9:.2f} ({each})"


def text(results: Json) -> str:
    """All of it for a terminal."""
    lines = head_lines(results)
    for head, rows in (arm_rows(results), read_rows(results), check_rows(results)):
        lines += ["", *columns(head, rows)]
    errors = [f"{name}: {part['error']}" for name, part in results.items() if isinstance(part, dict) and "error" in part]
    errors += [load["error"] for load in results["load"] if "error" in load]
    skipped = [f"left out for lack of time: {', '.join(results['skipped'])}"] if results["skipped"] else []
    cached = max([part.get("still_cached", 0) for part in (*results["load"], results.get("disk", {}))], default=0)
    warm = ["the system did not drop files from the page cache, or does not say so: no figure is of cold files"]
    return "\n".join([*lines, "", *(warm if cached > 0.01 else []), *skipped, *errors])
