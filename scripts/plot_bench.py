"""Draw benchmark files: prefill against prompt length, one length as bars, and time against the share in host memory.

    python scripts/plot_bench.py docs/benchmarks/*.json --out docs/images/

Of `NAME.json` come `NAME-prefill.png`, `NAME-bars.png` and, if there are arms with a part of the experts in host memory,
`NAME-share.png`. What a file has no numbers for is not drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from published import HEADLINE, MAIN_ARM, arm_title, image_name, model_line, read

Json = dict[str, Any]

# Okabe and Ito's palette: told apart with every common kind of colour vision. Markers tell the lines apart as well.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = "#1a1a1a", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#7a7a7a"
STYLES: dict[str, dict[str, Any]] = {
    "resident": {"color": GREY, "marker": "s"},
    "prefetch-3": {"color": BLUE, "marker": "o", "linewidth": 2.6, "zorder": 4},
    "prefetch-3+pack": {"color": GREEN, "marker": "*", "markersize": 10},
    "prefetch-2": {"color": SKY, "marker": "v"},
    "prefetch-4": {"color": GREEN, "marker": "^"},
    "pinned-serial": {"color": ORANGE, "marker": "D"},
    "accelerate": {"color": VERMILION, "marker": "X"},
    "diffusers": {"color": PURPLE, "marker": "P"},
    "diffusers-whole": {"color": PURPLE, "marker": "p", "linestyle": ":"},
}
# Lines this close to the package's own are not drawn beside it: they could not be seen.
_SAME = 0.03
_WIDTH, _DPI = 8.4, 200
DASHED: dict[str, Any] = {"linestyle": (0, (4, 2.5)), "linewidth": 1.5}
# A legend right of the axes.
BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False, "labelspacing": 0.7}

mpl.rcParams.update(
    {
        "font.size": 11,
        "axes.titlesize": 12.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#555555",
        "grid.color": "#e2e2e2",
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.8,
        "lines.markersize": 6.5,
        "lines.markeredgewidth": 0.7,
        "figure.facecolor": "white",
    }
)


def medians(results: Json, arm: str) -> dict[int, float]:
    """Seconds of a prefill by prompt length."""
    points = results["arms"].get(arm, {}).get("points", {})
    found = {point["tokens"]: point["median"] for key, point in points.items() if key != "decode" and point.get("median")}
    return dict(sorted(found.items()))


def whole_arms(results: Json) -> list[str]:
    """The arms that were measured with all experts in one place."""
    return [name for name in results["arms"] if "@" not in name and medians(results, name)]


def figure(results: Json, title: str, height: float = 4.2) -> tuple[Figure, Axes]:
    """Axes under a title that says what was measured and on what."""
    drawing, axes = pyplot.subplots(figsize=(_WIDTH, height), layout="constrained")
    axes.set_title(title, pad=26)
    about = f"{model_line(results)}; {results['machine']['name']}"
    axes.text(0, 1.035, about, transform=axes.transAxes, color="#555555", fontsize=10, va="bottom")
    axes.set_axisbelow(True)
    return drawing, axes


def words(tokens: float) -> str:
    """200, 2k, 32k; 1,000 is none of 1,024."""
    return f"{tokens / 1024:.0f}k" if tokens and tokens % 1024 == 0 else f"{tokens:,.0f}"


# -- against prompt length ----------------------------------------------------------------------------------------------


def plot_prefill(results: Json) -> Figure | None:
    """Seconds against prompt length, both logarithmic; the legend is in the order of the lines' right ends."""
    lines = {arm: medians(results, arm) for arm in whole_arms(results)}
    if MAIN_ARM not in lines:
        return None
    drawing, axes = figure(results, "Prefill against prompt length")
    same = [arm for arm in lines if arm.startswith("prefetch-") and arm != MAIN_ARM and _close(lines[arm], lines[MAIN_ARM])]
    lengths = sorted({length for line in lines.values() for length in line})
    low = min(min(line.values()) for line in lines.values())
    high = max(max(line.values()) for line in lines.values())
    drawn = []
    for arm, line in lines.items():
        if arm not in same:
            name = _slots(same) if arm == MAIN_ARM and same else arm_title(arm)
            style = STYLES.get(arm, {"color": BLACK, "marker": "*"})
            drawn += axes.plot(list(line), list(line.values()), markeredgecolor="white", label=name, **style)
    points = results["arms"][MAIN_ARM]["points"]
    limits = {length: points[str(length)]["lim"] for length in lines[MAIN_ARM] if points[str(length)].get("lim")}
    if limits:
        name = "lim: max(all on the GPU, link)\n+ one layer over the link"
        drawn += axes.plot(list(limits), list(limits.values()), color=BLACK, label=name, **DASHED)
    axes.set(xscale="log", yscale="log", xlabel="prompt length (tokens)", ylabel="seconds", ylim=(low * 0.8, high * 1.35))
    axes.xaxis.set(major_locator=FixedLocator(lengths), minor_locator=NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    steps = [step * 10.0**power for power in range(-5, 4) for step in (1, 2, 5)]
    axes.yaxis.set(major_locator=FixedLocator(steps), minor_locator=NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(visible=True)
    drawn.sort(key=lambda line: -line.get_ydata()[-1])
    axes.legend(handles=drawn, **BESIDE)
    return drawing


def _slots(same: list[str]) -> str:
    slots = sorted(arm.removeprefix("prefetch-") for arm in [*same, MAIN_ARM])
    return f"prefetch, {', '.join(slots[:-1])} or {slots[-1]} slots"


def _close(line: dict[int, float], other: dict[int, float]) -> bool:
    return all(length in other and abs(seconds / other[length] - 1) <= _SAME for length, seconds in line.items())


# -- one length as bars -------------------------------------------------------------------------------------------------


def plot_bars(results: Json) -> Figure | None:
    """Seconds of one prompt length in every arm, beside the time that the link alone needs."""
    bars = {arm: line[HEADLINE] for arm in whole_arms(results) if HEADLINE in (line := medians(results, arm))}
    if MAIN_ARM not in bars:
        return None
    drawing, axes = figure(results, f"Prefill of {HEADLINE:,} tokens", height=1.6 + 0.36 * len(bars))
    order = sorted(bars, key=lambda arm: _rank(arm, bars[arm]))
    colours = [BLUE if arm.startswith("prefetch") else GREY if arm == "resident" else "#c9a36b" for arm in order]
    axes.barh([arm_title(arm) for arm in order], [bars[arm] for arm in order], color=colours, height=0.64, zorder=2)
    most = max(bars.values())
    limit = results["link"].get("limit_seconds")
    if limit:
        axes.axvline(limit, color=VERMILION, zorder=3, **DASHED)
        name = f" all experts once over the link: {limit:.3f} s"
        axes.text(limit, -0.85, name, color=VERMILION, fontsize=10.5, va="center")
    for row, arm in enumerate(order):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        axes.text(bars[arm] + most * 0.013, row, f"{bars[arm]:.3f} s", va="center", fontsize=10.5, bbox=box, zorder=4)
    axes.set(xlim=(0, most * 1.13), ylim=(len(bars) - 0.45, -1.25 if limit else -0.6), xlabel="seconds")
    axes.tick_params(axis="y", length=0)
    return drawing


def _rank(arm: str, seconds: float) -> tuple[int, str, float]:
    """Resident first, then the package's own in the order of their slots, then the others, the fastest first."""
    if arm.startswith("prefetch"):
        return 1, arm, 0.0
    return (0, "", 0.0) if arm == "resident" else (2, "", seconds)


# -- a part in host memory ----------------------------------------------------------------------------------------------


def plot_share(results: Json) -> Figure | None:
    """Seconds against the share of the experts in host memory, one line a prompt length, with what the bytes allow.

    Prompts that compute for longer than all bytes would travel are left out: nothing depends on the share there.
    """
    lines: dict[int, dict[float, float]] = {}
    limit, resident = results["link"].get("limit_seconds", 0.0), medians(results, "resident")
    everything = results["model"]["bank_bytes"]
    for arm, result in results["arms"].items():
        if arm == MAIN_ARM or arm.startswith(f"{MAIN_ARM}@"):
            share = result.get("enter", {}).get("host_bank_bytes", everything) / everything
            for length, seconds in medians(results, arm).items():
                if resident.get(length, limit) < limit:
                    lines.setdefault(length, {})[100 * share] = seconds
    lines = {length: dict(sorted(line.items())) for length, line in sorted(lines.items()) if len(line) > 2}
    if not lines:
        return None
    drawing, axes = figure(results, "Prefill against the share of the experts in host memory")
    looks = [(BLUE, "o"), (ORANGE, "s"), (GREEN, "D"), (PURPLE, "^")]
    for index, (length, line) in enumerate(lines.items()):
        colour, marker = looks[index % len(looks)]
        shares = [step / 2 for step in range(201)]
        ideal = [max(resident[length], share / 100 * limit) for share in shares]
        axes.plot(shares, ideal, color=colour, **DASHED)
        name = f"{words(length)} tokens"
        axes.plot(list(line), list(line.values()), color=colour, marker=marker, markeredgecolor="white", label=name)
    axes.plot([], [], color=GREY, label="ideal: max(all on the GPU,\nshare over the link)", **DASHED)
    axes.set(xlabel="share of the experts in host memory (%)", ylabel="seconds", xlim=(-2, 102), ylim=(0, None))
    axes.grid(visible=True)
    axes.legend(**BESIDE)
    return drawing


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what there is and say what was written."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the images")
    options = parser.parse_args(arguments)
    try:
        read_files = {path: read(path) for path in options.files}
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for path, results in read_files.items():
        for image, plot in (("prefill", plot_prefill), ("bars", plot_bars), ("share", plot_share)):
            drawing = plot(results)
            if drawing is not None:
                target = options.out / image_name(path.stem, image)
                drawing.savefig(target, dpi=_DPI, metadata={"Software": None})
                pyplot.close(drawing)
                print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
