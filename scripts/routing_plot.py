"""Draw hit rates against cache sizes, a panel an origin of routing, with the optimum that knows the future."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from plot_bench import BLACK, BLUE, DASHED, GREEN, GREY, ORANGE, PURPLE, VERMILION
from routing_table import TITLES, default_title

__all__ = ["plot"]

Json = dict[str, Any]

STYLES: dict[str, dict[str, Any]] = {
    "Belady": {"color": BLACK, **DASHED},
    "default": {"color": BLUE, "marker": "o", "linewidth": 2.6, "zorder": 4},
    "LFRU": {"color": GREEN, "marker": "^"},
    "LFU": {"color": ORANGE, "marker": "D"},
    "LRU": {"color": VERMILION, "marker": "X"},
    "static": {"color": PURPLE, "marker": "P"},
}
NAMES = {"Belady": "optimum (knows the future)", "static": "static hot set"}


def plot(results: Json, out: Path) -> None:
    """Write the image. Sizes are shares of the experts, from those of one token up to all."""
    origins = results["routing"]
    columns = 3
    lines = -(-len(origins) // columns)
    drawing, grid = pyplot.subplots(lines, columns, figsize=(11.5, 3.5 * lines + 0.6), layout="constrained", sharey=True)
    panels = grid.flat
    for axes, (name, origin) in zip(panels, origins.items(), strict=False):
        _panel(axes, name, origin, results)
    for axes in panels:
        axes.set_visible(False)
    for row in grid if lines > 1 else [grid]:
        row[0].set_ylabel("hit rate (%)")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    drawing.savefig(out, dpi=110, metadata={"Software": None})
    pyplot.close(drawing)


def _panel(axes: Axes, name: str, origin: Json, results: Json) -> None:
    sizes = [int(rows) for rows in origin["curves"]]
    for policy, style in STYLES.items():
        rates = [100 * origin["curves"][str(rows)][policy] for rows in sizes]
        label = default_title(results) if policy == "default" else NAMES.get(policy, policy)
        shares = [100 * rows / origin["experts"] for rows in sizes]
        axes.plot(shares, rates, label=label, markeredgecolor="white", markersize=5.5, **{"linewidth": 1.6, **style})
    axes.axvline(50, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_title(TITLES[name], fontsize=11)
    axes.set(xlim=(0, 103), ylim=(25, 101), xlabel=f"rows in the cache (% of {origin['experts']} experts)")
    axes.grid(visible=True)
    axes.set_axisbelow(True)
