"""Draw files of scripts/bench_decode.py: time of a token and hit rate against the size of the row cache.

    python scripts/plot_decode.py docs/benchmarks/decode/*.json --out docs/images/

Of `NAME.json` comes `decode-NAME.png`, if it has caches of several sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

import bench_decode_report
from plot_bench import BLACK, BLUE, DASHED, GREY, VERMILION

Json = dict[str, Any]

LEAST_SIZES = 3


def plot(results: Json) -> Figure:
    """Two panels over the number of rows: milliseconds a token with the limit, and the share of experts that were there."""
    arms = results["decode"]
    cached = _cached(results)
    experts, resident, none = results["model"]["experts"], arms["resident"], arms.get("no cache", {})
    drawing, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8.4, 6.2), layout="constrained", sharex=True, height_ratios=(1.6, 1.0)
    )
    share = [100 * rows / experts for rows, _ in cached]
    model = results["model"]
    top.set_title("A decoded token against the size of the row cache", pad=26)
    about = f"{model['name']}, {model['layers']} layers, routing {model['profile']}; {results['machine']['name']}"
    top.text(0, 1.035, about, transform=top.transAxes, color="#555555", fontsize=10, va="bottom")
    top.plot(
        share, [1e3 * arm["graph"]["mean"] for _, arm in cached], color=BLUE, marker="o", label="CUDA graph", linewidth=2.6
    )
    top.plot(share, [1e3 * arm["graph"]["limit"] for _, arm in cached], color=BLACK, label="its limit", **DASHED)
    for arm, name, colour in ((resident, "all on the GPU", GREY), (none, "no cache", VERMILION)):
        for kind, style, word in (("eager", ":", "eager"), ("graph", "-", "graph")):
            if kind in arm:
                top.axhline(1e3 * arm[kind]["mean"], color=colour, linestyle=style, linewidth=1.4, label=f"{name}, {word}")
    top.set(ylabel="milliseconds", yscale="log")
    low, high = top.get_ylim()
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200) if low <= tick <= high]
    top.yaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    top.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    bottom.plot(share, [100 * arm["graph"]["hit_rate"] for _, arm in cached], color=BLUE, marker="o", linewidth=2.6)
    bottom.set(ylabel="hit rate (%)", xlabel=f"rows in the cache (% of {experts} experts)", ylim=(0, 105), xlim=(0, 105))
    for axes in (top, bottom):
        axes.grid(visible=True)
        axes.set_axisbelow(True)
    return drawing


def _cached(results: Json) -> list[tuple[int, Json]]:
    """Arms with a cache, one sequence and a graph, by the number of rows."""
    arms = [arm for arm in results["decode"].values() if arm.get("rows") and arm["batch"] == 1 and "graph" in arm]
    return sorted(((arm["rows"], arm) for arm in arms), key=lambda pair: pair[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw each file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args(arguments)
    for path in options.files:
        results = bench_decode_report.derive(json.loads(path.read_text(encoding="utf-8")))
        if len(_cached(results)) < LEAST_SIZES:
            print(f"{path.name}: caches of fewer than {LEAST_SIZES} sizes make no curve")
            continue
        drawing = plot(results)
        target = options.out / f"decode-{path.stem}.png"
        drawing.savefig(target, dpi=200)
        pyplot.close(drawing)
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
