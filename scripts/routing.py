"""Study how experts are routed and which of them a cache should keep; the results are docs/routing.md.

From the root of the repository::

    python scripts/routing.py study --traces TRACES.npz   # measure; writes docs/routing.json
    python scripts/routing.py plot                        # draw docs/images/routing-hit-rate.png from it
    python scripts/routing.py render                      # fill the tables of docs/routing.md from it (--check: only look)

Traces are arrays (layers, sequences, tokens, k) of expert ids of 64, one a kind of text. Without them the study has the
demonstration model and synthetic routing only. It takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "docs" / "routing.json"
IMAGE = ROOT / "docs" / "images" / "routing-hit-rate.png"
DOCUMENT = ROOT / "docs" / "routing.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    measure = actions.add_parser("study", help="measure hit rates")
    measure.add_argument("--traces", type=Path, help="recorded traces, a .npz file")
    measure.add_argument("--out", type=Path, default=RESULTS, help="the JSON file to write")
    draw = actions.add_parser("plot", help="draw hit rates against cache sizes")
    draw.add_argument("--out", type=Path, default=IMAGE, help="the image to write")
    fill = actions.add_parser("render", help="fill the tables of the document")
    fill.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the document is not current")
    options = parser.parse_args(arguments)
    # What only one of them needs is imported there: drawing wants matplotlib, measuring a model.
    if options.action == "study":
        return _study(options.traces, options.out)
    if options.action == "plot":
        from routing_plot import plot

        plot(json.loads(RESULTS.read_text(encoding="utf-8")), options.out)
        print(options.out)
        return 0
    from routing_table import render

    text = DOCUMENT.read_text(encoding="utf-8")
    current = render(text, json.loads(RESULTS.read_text(encoding="utf-8")))
    if options.check:
        return int(current != text)
    DOCUMENT.write_text(current, encoding="utf-8")
    return 0


def _study(traces: Path | None, out: Path) -> int:
    from routing_study import study

    if traces is not None and not traces.is_file():
        print(f"there is no file {traces}", file=sys.stderr)
        return 1
    results = study(traces, lambda text: print(text, flush=True))
    about = {"command": "routing.py study" + (f" --traces {traces.name}" if traces else "")}
    about["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    out.write_text(json.dumps(about | results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
