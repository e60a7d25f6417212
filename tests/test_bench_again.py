"""Running recorded benchmarks again: what is run, where it goes, and what is said of the difference."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORDS = sorted((ROOT / "docs" / "benchmarks").rglob("*.json"))

# Stands for a benchmark: takes as long as it is told, or fails after it has written, as one does whose checks fail.
BENCH = """
import json, sys
out, seconds, passes = sys.argv[-1], float(sys.argv[1]), sys.argv[2] == "yes"
checks = [{"name": "prefill / lim", "arm": "a", "at": "200", "value": seconds, "relation": "<=", "bound": 2, "pass": passes}]
json.dump({"arms": {"a": {"200": {"median": seconds, "min": 0.5}}}, "checks": checks}, open(out, "w"))
sys.exit(not passes)
"""


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("bench_again")


def record(folder: Path, command: str, seconds: float = 1.0) -> Path:
    path = folder / "docs" / "benchmarks" / "decode" / "a.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    check = {"name": "prefill / lim", "arm": "a", "at": "200", "value": 1, "relation": "<=", "bound": 2, "pass": True}
    arms: dict[str, Any] = {"a": {"200": {"median": seconds}}}
    path.write_text(json.dumps({"command": command, "elapsed_seconds": 1, "arms": arms, "checks": [check]}))
    return path


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.relative_to(ROOT / "docs" / "benchmarks")))
def test_every_record_names_a_script_that_is_there(again: ModuleType, path: Path) -> None:
    words = again.command(path, Path("elsewhere.json"))
    assert Path(words[1]).is_file()
    assert words[-2:] == ["--out", "elsewhere.json"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("1.0 yes", 0, ["1 medians, 1 checks"]),
        ("1.02 yes", 0, ["1 medians, 1 checks"]),
        ("1.5 yes", 0, ["1 medians, 1 checks", " 1.500 x  arms/a/200: 1 s, now 1.5 s"]),
        ("3.0 no", 1, ["1 medians, 1 checks", "worse: prefill / lim a 200: 3.0 (<= 2; it was 1)", " 3.000 x "]),
        ("what yes", 1, ["ended with 1, see "]),
    ],
)  # fmt: skip
def test_what_is_said(
    again: ModuleType,
    arguments: str,
    status: int,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(again, "SCRIPTS", tmp_path)
    (tmp_path / "bench.py").write_text(BENCH)
    source = record(tmp_path, f"bench.py {arguments} --out a.json")
    assert again.main([str(source), "--out", str(tmp_path / "new")]) == status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))
    assert (tmp_path / "new" / "decode" / "a.json").is_file() == ("ended with" not in said[0])


def test_what_is_not_there_any_more_is_said(again: ModuleType) -> None:
    check = {"name": "n", "arm": "a", "at": None, "value": True, "relation": "is", "bound": True, "pass": True}
    before = {"arms": {"a": {"median": 1.0}, "b": {"median": 1.0}}, "checks": [check]}
    now = {"arms": {"a": {"median": 1.0}}}
    assert again.differences(before, now, 0.03) == ["missing   arms/b"]
    assert again.worse(before, now) == ["n a None: not there (is True; it was True)"]


def test_a_record_without_its_command_is_refused(again: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.json does not say"):
        again.command(record(tmp_path, ""), tmp_path / "out.json")
