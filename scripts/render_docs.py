"""Fill the tables of README.md and docs/benchmarks.md from the benchmark files in docs/benchmarks/.

    python scripts/render_docs.py            # write what has changed
    python scripts/render_docs.py --check    # exit with 1 if anything would

A region begins with a line `<!-- table: NAME -->` and ends with a line `<!-- end -->`. NAME is `readme` for the short table of
the README, or the name of a file in docs/benchmarks/ without its suffix, those in its folders as decode/NAME, memory/NAME,
codecs/NAME and formats/NAME.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_codecs_report
import bench_decode_report
import bench_formats_report
import bench_memory_report
from bench_table import equality_word
from published import IMAGES, MAIN_ARM, image_name, machine_line, model_line, read, size

Json = dict[str, Any]

DOCUMENTS = ("README.md", "docs/architectures.md", "docs/benchmarks.md", "docs/decode.md", "docs/memory.md", "docs/packing.md")
# The file that the README shows, the prompts, and the arms beside what the link allows.
README_FILE = "qwen3-30b-a3b"
README_LENGTHS = (200, 2048, 8192, 32768)
README_ARMS = {
    "resident": "all on the GPU",
    "": "all experts over the link",
    MAIN_ARM: "**prefetch, 3 slots**",
    "accelerate": "accelerate",
    "diffusers": "diffusers, experts only",
    "diffusers-whole": "diffusers",
}
# What a decoded token takes: whole layers over the link, in two ways, and only the experts in use.
README_DECODE = {
    MAIN_ARM: "prefetch",
    "pinned-serial": "page-locked copies without overlap",
    "diffusers": "diffusers, experts only",
}
NOTHING = "*No measurement is recorded here yet.*"
ALT = {
    "prefill": "Prefill time against prompt length, one line an arm",
    "bars": "Prefill time of 8,192 tokens as bars, one an arm",
    "share": "Prefill time against the share of the experts in host memory",
}
GIB = 2**30
_REGION = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def render(text: str, root: Path, folder: Path) -> str:
    """A document with its regions filled. `folder`: where the document is, for links to images.

    Raises:
        ValueError: a region has no end, or a file can't be read.
    """
    if text.count("<!-- table: ") != len(_REGION.findall(text)):
        raise ValueError("a region <!-- table: NAME --> has no <!-- end -->")

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        short = {"readme": README_FILE, "readme-decode": f"decode/{README_FILE}"}
        source = root / "docs" / "benchmarks" / f"{short.get(name, name)}.json"
        if not source.is_file():
            body = NOTHING
        elif name == "readme-decode":
            body = decode_line(bench_decode_report.derive(json.loads(source.read_text(encoding="utf-8"))))
        elif name.startswith("decode/"):
            results = bench_decode_report.derive(json.loads(source.read_text(encoding="utf-8")))
            body = decode_table(results, source.stem, root, folder)
        elif name.startswith("memory/"):
            body = memory_table(json.loads(source.read_text(encoding="utf-8")))
        elif name.startswith("codecs/"):
            body = codecs_table(json.loads(source.read_text(encoding="utf-8")))
        elif name.startswith("formats/"):
            body = formats_table(json.loads(source.read_text(encoding="utf-8")))
        elif name == "readme":
            body = readme_table(read(source), image_links(root, folder, source.stem, ("prefill",)))
        else:
            body = full_table(read(source), image_links(root, folder, source.stem, IMAGES))
        return f"{match[1]}{body}\n{match[4]}"

    return _REGION.sub(fill, text)


def image_links(root: Path, folder: Path, stem: str, images: Sequence[str]) -> list[str]:
    """Lines that show the images which are there."""
    paths = {image: root / "docs" / "images" / image_name(stem, image) for image in images}
    return [f"![{ALT[image]}]({path.relative_to(folder).as_posix()})" for image, path in paths.items() if path.is_file()]


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A table in Markdown, its first `left` columns aligned to the left."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, rule, *rows)]
    return ["| " + " | ".join(row) + " |" for row in cells]


def command(results: Json) -> str:
    """How to measure it again, from the root of the repository."""
    return f"PYTHONPATH=. python scripts/{results['command']}"


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


# -- the README's table -------------------------------------------------------------------------------------------------


def readme_table(results: Json, images: list[str]) -> str:
    """Seconds of a prefill: a row a prompt length, a column an arm that was measured."""
    points = {arm: result["points"] for arm, result in results["arms"].items()}
    lengths = [length for length in README_LENGTHS if any(_median(at, length) for at in points.values())]
    limit = results["link"].get("limit_seconds")
    known = {arm: title for arm, title in README_ARMS.items() if (limit if arm == "" else _measured(points.get(arm), lengths))}
    rows = []
    for length in lengths:
        times = [limit if arm == "" else _median(points[arm], length) for arm in known]
        rows.append([f"{length:,} tokens", *(number(seconds, 3, " s") for seconds in times)])
    weights = ", random weights" if results["model"].get("random_weights") else ""
    lines = [f"Time of a prefill; {model_line(results)}{weights}:", ""]
    lines += grid(["prompt", *known.values()], rows)
    decode = {title: points.get(arm, {}).get("decode", {}).get("median") for arm, title in README_DECODE.items()}
    told = ", ".join(f"{title} {number(seconds, 3, ' s')}" for title, seconds in decode.items() if seconds is not None)
    if told:
        lines += ["", f"A decoded token after a prompt of 200, batch 1: {told}."]
    lines += ["", f"{machine_line(results)}; {results['date']}: `{command(results)}`"]
    return "\n".join([*lines, *(line for image in images for line in ("", image))])


def _measured(points: Json | None, lengths: Sequence[int]) -> bool:
    return any(_median(points or {}, length) is not None for length in lengths)


def _median(points: Json, length: int) -> float | None:
    median: float | None = points.get(str(length), {}).get("median")
    return median


# -- everything in a file -----------------------------------------------------------------------------------------------


def full_table(results: Json, images: list[str]) -> str:
    """Where it was measured, every point of every arm, and every kind of check with what it missed."""
    model, link = results["model"], results["link"]
    weights = "random weights" if model.get("random_weights") else "trained weights"
    if model.get("routing"):
        weights += f", routing `{model['routing']}`"
    lines = [
        f"- {model_line(results)}, {weights}; the largest layer's experts are {size(model['largest_bank_bytes'])}",
        f"- {machine_line(results)}",
    ]
    if link.get("limit_seconds"):
        lines.append(
            f"- all experts once over the link: {link['limit_seconds']:.4f} s; one layer's: {link['bank_seconds']:.4f} s"
        )
    lines += [f"- {results['date']}, {results['elapsed_seconds']:,.0f} s in all, by:", "", "```", command(results), "```"]
    for image in images:
        lines += ["", image]
    head = ["arm", "tokens", "seconds", "/ lim", "x accelerate", "peak GiB", "equal"]
    rows = [
        _row(name, key, point, arm["equality"].get(key))
        for name, arm in results["arms"].items()
        for key, point in arm["points"].items()
    ]
    lines += ["", *grid(head, rows), ""]
    for name, arm in results["arms"].items():
        if arm["status"] != "ok":
            lines.append(f"- `{name}`: {arm['status']}{': ' + arm['error'] if arm.get('error') else ''}")
    recalls = {name: arm["recall"] for name, arm in results["arms"].items() if arm.get("recall")}
    if recalls:
        scores = ", ".join(f"`{name}` {score['correct']} of {score['total']}" for name, score in recalls.items())
        lines.append(f"- recall task: {scores}")
    return "\n".join([*lines, "", *_check_lines(results.get("checks", []))]).replace("\n\n\n", "\n\n")


# -- decode -------------------------------------------------------------------------------------------------------------


def decode_line(results: Json) -> str:
    """What half of the experts in a cache make of a token."""
    arms, model = results["decode"], results["model"]
    half = next(arm for arm in arms.values() if arm["batch"] == 1 and arm["rows"] == model["experts"] // 2)
    times = {name: number(1e3 * arms[name]["graph"]["mean"], 1, " ms") for name in ("resident", "no cache")}
    eager = number(1e3 * arms["resident"]["eager"]["mean"], 0, " ms")
    return (
        f"A decoded token as a CUDA graph, {model['layers']} layers of {model['name']}, with routing "
        "in which all experts are in use: all on the GPU "
        f"{times['resident']}, from host memory without a cache {times['no cache']}, **with half of the experts in a row cache "
        f"{number(1e3 * half['graph']['mean'], 1, ' ms')}** ({number(100 * half['graph']['hit_rate'], 0)}% of the experts were "
        f"there). Step by step from Python everything on the GPU takes {eager}."
    )


def decode_table(results: Json, stem: str, root: Path, folder: Path) -> str:
    """A file of scripts/bench_decode.py: every arm, and prompts of every length."""
    model, link = results["model"], results["link"]
    lines = [
        f"- {model['name']}, {model['layers']} layers of {model['experts']} experts, top {model['top_k']}, "
        f"{model['bank_bytes'] / 1e9:,.1f} GB of them; routing `{model['profile']}`",
        f"- {results['machine']['name']}; torch {results['machine']['torch']}, transformers "
        f"{results['machine']['transformers']}, hf_prefetch {results['machine']['hf_prefetch']}",
        f"- copies from page-locked memory {link['gb_per_s']:.1f} GB/s, the gather kernel {link['gather_gb_per_s']:.1f} GB/s",
        f"- {results['date']}, {results['elapsed_seconds']:,.0f} s in all, by:",
        "",
        "```",
        command(results),
        "```",
        "",
    ]
    image = root / "docs" / "images" / f"decode-{stem}.png"
    if image.is_file():
        lines += [f"![Time of a token and hit rate against the size of the cache]({image.relative_to(folder).as_posix()})", ""]
    lines += grid(*bench_decode_report.arm_rows(results))
    if bench_decode_report.skipped(results):
        lines += ["", f"Left out for lack of time: {', '.join(bench_decode_report.skipped(results))}."]
    if results["prefill"]:
        lines += ["", *grid(*bench_decode_report.prompt_rows(results))]
    lines += ["", *grid(*bench_decode_report.check_rows(results))]
    return "\n".join(lines)


# -- host memory --------------------------------------------------------------------------------------------------------


def memory_table(results: Json) -> str:
    """A file of scripts/bench_memory.py: every arm, cold reads, and what was to be reached."""
    lines = [*(f"- {line}" for line in bench_memory_report.head_lines(results)), "- by:", "", "```", command(results), "```"]
    for rows in (bench_memory_report.arm_rows, bench_memory_report.read_rows, bench_memory_report.check_rows):
        lines += ["", *grid(*rows(results))]
    if results["skipped"]:
        lines += ["", f"Left out for lack of time: {', '.join(results['skipped'])}."]
    return "\n".join(lines)


# -- codes --------------------------------------------------------------------------------------------------------------


def codecs_table(results: Json) -> str:
    """A file of scripts/bench_codecs.py: every code."""
    return "\n".join(
        [
            f"- {results['weights']:,} weights; {results['machine']['name']}, {results['link_gb_per_s']:.1f} GB/s from "
            "page-locked memory",
            f"- {results['date']}, by `{command(results)}`",
            "",
            *grid(*bench_codecs_report.code_rows(results)),
        ]
    )


def formats_table(results: Json) -> str:
    """A file of scripts/bench_formats.py: every arm and prompt."""
    machine, layers = results["machine"], {arm["layers"] for arm in results["arms"].values() if "layers" in arm}
    return "\n".join(
        [
            f"- {machine['name']}; torch {machine['torch']}, transformers {machine['transformers']}, hf_prefetch "
            f"{machine['hf_prefetch']}; {', '.join(map(str, sorted(layers)))} layers, random weights; seconds",
            f"- {results['date']}, by `{command(results)}`",
            *(f"- {line}".replace("*", "\\*") for line in bench_formats_report.failures(results)),
            "",
            *grid(bench_formats_report.HEAD, bench_formats_report.rows(results)),
        ]
    )


# -- one row, one check -------------------------------------------------------------------------------------------------


def _row(name: str, key: str, point: Json, equality: Json | None) -> list[str]:
    what = f"decode after {point['tokens']:,}" if key == "decode" else f"{point['tokens']:,}"
    if not point.get("median"):
        return [f"`{name}`", what, point.get("error", "not measured"), "-", "-", "-", "-"]
    peak = point.get("peak_bytes")
    return [
        f"`{name}`",
        what,
        number(point["median"], 4),
        number(point.get("ratio"), 3),
        number(point.get("speedup"), 2),
        number(None if peak is None else peak / GIB, 2),
        equality_word(equality),
    ]


def _check_lines(checks: list[Json]) -> list[str]:
    order = list(dict.fromkeys(check["name"] for check in checks))
    ranked = sorted(checks, key=lambda check: order.index(check["name"]))
    groups = [list(group) for _, group in itertools.groupby(ranked, key=lambda check: check["name"])]
    head = ["check", "worst value", "bound", "where", "passed"]
    lines = grid(head, [_check_row(group) for group in groups])
    failed = [check for check in checks if check["pass"] is False]
    unjudged = sum(check["pass"] is None for check in checks)
    judged = len(checks) - unjudged
    lines += [
        "",
        f"{judged - len(failed)} of {judged} checks passed" + (f"; {unjudged} say nothing here." if unjudged else "."),
    ]
    if failed:
        lines += ["", "Missed:", ""]
        lines += [f"- {'an aim, ' if check.get('aim') else ''}{_describe(check)}" for check in failed]
    return lines


def _check_row(group: list[Json]) -> list[str]:
    sign = 1 if group[0]["relation"] == "<=" else -1
    worst = max(group, key=lambda c: (c["pass"] is False, sign * (float(c["value"]) - float(c["bound"]))))
    judged = [check["pass"] for check in group if check["pass"] is not None]
    passed = f"{judged.count(True)} of {len(judged)}" if judged else "-"
    if worst["relation"] == "is":
        return [worst["name"], "yes" if worst["value"] else "**no**", "yes", "" if worst["value"] else _where(worst), passed]
    value = f"{worst['value']:.3f}"
    value = f"**{value}**" if worst["pass"] is False else value
    return [worst["name"], value, f"{worst['relation']} {worst['bound']:.4g}", _where(worst), passed]


def _describe(check: Json) -> str:
    if check["relation"] == "is":
        return f"{check['name']}: {_where(check)}" + (f": {check['error']}" if check.get("error") else "")
    return f"{check['name']}: {check['value']:.3f}, bound {check['relation']} {check['bound']:.4g}; {_where(check)}"


def _where(check: Json) -> str:
    return f"`{check['arm']}`" + (f", {check['at']}" if check["at"] else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the documents, or say which of them are not current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a document is not current")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="root of the repository")
    options = parser.parse_args(arguments)
    stale = []
    for name in DOCUMENTS:
        document = options.root / name
        text = document.read_text(encoding="utf-8")
        try:
            new = render(text, options.root, document.parent)
        except (KeyError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if new != text:
            stale.append(name)
            if not options.check:
                document.write_text(new, encoding="utf-8")
    if stale:
        print(f"{', '.join(stale)}: " + ("not current; run python scripts/render_docs.py" if options.check else "written"))
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
