"""Run the commands of benchmark files again, with the code as it is, and hold every median against the file's.

    PYTHONPATH=. python scripts/bench_again.py docs/benchmarks/qwen3-30b-a3b.json docs/benchmarks/decode/*.json --out again

Each result goes to --out under its own name (files of docs/benchmarks/decode into decode/, and so on). One that fails or takes
more than twice its time does not stop the others. At the end: medians that differ by more than --tolerance, and checks that
passed in the file and don't now. Exits with 1 if there is such a check, or a command failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]

SCRIPTS = Path(__file__).resolve().parent
RECORDS = "benchmarks"


def command(source: Path, destination: Path) -> list[str]:
    """What a file says that it was made with, writing to another place.

    Raises:
        ValueError: the file does not say.
    """
    words = shlex.split(json.loads(source.read_text(encoding="utf-8")).get("command") or "")
    if not words:
        raise ValueError(f"{source} does not say by which command it was written")
    while "--out" in words:
        del words[(place := words.index("--out")) : place + 2]
    return [sys.executable, str(SCRIPTS / words[0]), *words[1:], "--out", str(destination)]


def place(source: Path, folder: Path) -> Path:
    """Where the new results of a file go: as deep under the folder as the file lies under `benchmarks`."""
    parts = source.parts
    below = parts[len(parts) - parts[::-1].index(RECORDS) :] if RECORDS in parts else parts[-1:]
    return folder.joinpath(*below)


def medians(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every median in a file, by where it stands."""
    if isinstance(value, dict):
        if isinstance(value.get("median"), float):
            yield path, value["median"]
        for key, child in value.items():
            yield from medians(child, f"{path}/{key}" if path else key)


def checks(results: Json) -> dict[tuple[str, str, str], Json]:
    """The checks of a file, by what they are of."""
    return {(check["name"], check["arm"], str(check["at"])): check for check in results.get("checks", [])}


def differences(before: Json, now: Json, tolerance: float) -> list[str]:
    """Lines about medians that are further apart than the tolerance, the slowest first, or that are missing."""
    old, new = dict(medians(before)), dict(medians(now))
    ratios = {path: new[path] / old[path] for path in old if path in new and old[path] > 0}
    apart = sorted((ratio, path) for path, ratio in ratios.items() if abs(ratio - 1) > tolerance)
    lines = [f"{ratio:6.3f} x  {path}: {old[path]:.4g} s, now {new[path]:.4g} s" for ratio, path in reversed(apart)]
    return lines + [f"missing   {path}" for path in old if path not in new]


def worse(before: Json, now: Json) -> list[str]:
    """Lines about checks that passed and don't now."""
    new = checks(now)
    lines = []
    for key, check in checks(before).items():
        if check["pass"] and not new.get(key, {"pass": False})["pass"]:
            value = new[key]["value"] if key in new else "not there"
            lines.append(f"{' '.join(key)}: {value} ({check['relation']} {check['bound']}; it was {check['value']})")
    return lines


def run(source: Path, destination: Path) -> str | None:
    """Run a file's command. Returns what went wrong."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    limit = 2 * json.loads(source.read_text(encoding="utf-8")).get("elapsed_seconds", 300) + 60
    log = destination.with_suffix(".txt")
    with log.open("w", encoding="utf-8") as output:
        try:
            status = subprocess.run(command(source, destination), stdout=output, stderr=output, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return f"ended after {limit:.0f} s, see {log}"
    return f"ended with {status.returncode}, see {log}" if not destination.is_file() else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="files that a benchmark has written")
    parser.add_argument("--out", type=Path, required=True, help="folder for the new ones")
    parser.add_argument("--tolerance", type=float, default=0.03, help="by how much a median may differ (0.03)")
    options = parser.parse_args(arguments)
    sources = {source: place(source, options.out) for source in options.files}
    wrong = {source: run(source, destination) for source, destination in sources.items()}
    is_worse = False
    for source, destination in sources.items():
        if wrong[source]:
            print(f"{source}: {wrong[source]}")
            continue
        before, now = (json.loads(path.read_text(encoding="utf-8")) for path in (source, destination))
        lost = worse(before, now)
        is_worse |= bool(lost)
        print(f"{source}: {len(dict(medians(before)))} medians, {len(checks(before))} checks")
        for line in (*(f"worse: {line}" for line in lost), *differences(before, now, options.tolerance)):
            print(f"  {line}")
    return int(is_worse or any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
