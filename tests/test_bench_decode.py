"""The decode benchmark on the CPU stand-in, and what documents make of its file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SIZES = "--rows 2,4,8 --batches 1,4 --prompt 24 --steps 9 --lengths 1,16 --repeats 1 --layers 3"
BESIDE = "--rows 4 --prompt 24 --steps 9 --layers 2 --pack both --lengths"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Callable[[str], ModuleType]]:
    """Import a script by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "scripts"))
        yield importlib.import_module


@pytest.fixture(scope="module")
def run(scripts: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of it, as it is written to its file."""
    path = tmp_path_factory.mktemp("decode") / "tiny.json"
    scripts("bench_decode").main(["--model", "tiny", "--device", "cpu", *SIZES.split(), "--out", str(path)])
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def test_every_arm_computes_what_the_resident_one_does(run: dict[str, Any]) -> None:
    """Each experts module in each step got the same and gave the same."""
    arms = run["decode"]
    half = [f"{name}{batch}" for batch in ("", ", batch 4") for name in ("resident", "no cache", "4 rows")]
    assert set(arms) == {*half, "2 rows", "8 rows"}
    for name, arm in arms.items():
        assert arm["equal"] == {"calls": 3 * 9, "other_inputs": 0, "other_outputs": 0}, name


def test_raw_and_packed_in_one_run(scripts: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """The same arms, the packed ones with fewer bytes."""
    path = tmp_path / "both.json"
    scripts("bench_decode").main(["--model", "tiny", "--device", "cpu", *BESIDE.split(), "", "--out", str(path)])
    arms = json.loads(path.read_text())["decode"]
    assert set(arms) == {"resident", "no cache", "4 rows", "packed, no cache", "packed, 4 rows"}
    assert all(arm["equal"] == {"calls": 2 * 9, "other_inputs": 0, "other_outputs": 0} for arm in arms.values())
    sent, raw = (arms[name]["eager"]["sent_bytes"] for name in ("packed, no cache", "no cache"))
    assert 0 < sent < 0.8 * raw


def test_packed_is_held_against_raw_where_the_link_decides(scripts: Callable[[str], ModuleType]) -> None:
    report = scripts("bench_decode_report")
    seconds = {
        "resident": (4.0, 30.0),
        "no cache": (28.0, 46.0),
        "packed, no cache": (24.0, 45.0),
        "packed, 4 rows": (5.0, 45.0),
    }
    results: dict[str, Any] = {
        "model": {"experts": 8, "bank_bytes": 8, "largest_bank_bytes": 1, "row_bytes": 1},
        "link": {},
        "decode": {
            name: {"batch": 1, "rows": None}
            | {kind: {"seconds": [time], "sent_bytes": 0} for kind, time in zip(("graph", "eager"), times, strict=True)}
            for name, times in seconds.items()
        },
        "prefill": {},
    }
    _, rows = report.check_rows(report.derive(results))
    name = "a token without a cache, packed / raw"
    assert rows == [[name, "0.857", "packed, no cache, graph", "<= 0.85", "**no**"]]
    results["decode"]["packed, no cache"]["graph"]["seconds"] = [23.5]
    _, rows = report.check_rows(report.derive(results))
    assert rows == [[name, "0.839", "packed, no cache, graph", "<= 0.85", "yes"]]


def test_bigger_caches_hit_more_and_send_less(run: dict[str, Any]) -> None:
    """Down to nothing, where all experts have a row."""
    arms = [run["decode"][f"{rows} rows"]["eager"] for rows in (2, 4, 8)]
    rates = [arm["hit_rate"] for arm in arms]
    assert rates == sorted(rates)
    assert rates[-1] == 1.0
    assert [arm["sent_bytes"] for arm in arms] == sorted((arm["sent_bytes"] for arm in arms), reverse=True)
    assert run["decode"]["no cache"]["eager"]["hit_rate"] == 0.0
    assert run["decode"]["no cache"]["eager"]["needed_rows"] == 3 * 2


def test_prompts_go_each_way(run: dict[str, Any]) -> None:
    """One token has two experts a layer; the lookahead sends them all."""
    ways = run["prefill"]["1"]
    assert ways["routed-only"]["sent_bytes"] == run["model"]["row_bytes"] * 2
    assert ways["lookahead-only"]["sent_bytes"] >= run["model"]["bank_bytes"]
    assert ways["policy"]["ratio"] > 0


def test_the_table_and_the_document(
    scripts: Callable[[str], ModuleType], run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each arm has a line in both."""
    folder = tmp_path / "docs" / "benchmarks" / "decode"
    folder.mkdir(parents=True)
    (folder / "tiny.json").write_text(json.dumps(run))
    scripts("bench_decode").main(["--show", str(folder / "tiny.json")])
    shown = capsys.readouterr().out
    text = scripts("render_docs").render("<!-- table: decode/tiny -->\n<!-- end -->\n", tmp_path, tmp_path / "docs")
    for name in run["decode"]:
        assert f"\n{name} " in shown
        assert f"| {name} |" in text


def test_what_is_asked_is_told_with_the_worst_figure(scripts: Callable[[str], ModuleType]) -> None:
    """A bound that is missed is said to be; what was left out for lack of time has a line of its own."""
    report = scripts("bench_decode_report")

    def arm(rows: int | None, graph: float, sent: int, peak: int, differing: int = 0) -> dict[str, Any]:
        held = {"batch": 1, "rows": rows, "held_bytes": 0, "peak_bytes": peak}
        timed = {"seconds": [graph], "sent_bytes": sent, "hit_rate": 0.5}
        equal = {"calls": 8, "other_inputs": 0, "other_outputs": differing}
        return held | {"eager": timed, "graph": dict(timed), "equal": equal}

    mib = 2**20
    results = {
        "model": {"experts": 8, "bank_bytes": 800 * mib, "largest_bank_bytes": 100 * mib, "row_bytes": 100 * mib},
        "link": {"gb_per_s": 50.0, "gather_half_gb_per_s": 40.0, "gather_gb_per_s": 40.0},
        "decode": {
            "resident": arm(None, 1.0, 0, 810 * mib),
            "no cache": arm(0, 2.1, 40 * 10**9, 310 * mib),
            "4 rows": arm(4, 1.8, 20 * 10**9, 780 * mib, differing=1),
            "8 rows": {"error": "skipped: out of time"},
        },
        "prefill": {
            "64": {way: {"seconds": [t]} for way, t in (("policy", 1.2), ("routed-only", 1.0), ("lookahead-only", 2.0))}
        },
    }
    _, rows = report.check_rows(report.derive(results))
    assert [(row[1], row[2], row[4]) for row in rows] == [
        ("1.050", "no cache", "yes"),
        ("1.200", "4 rows", "**no**"),
        ("1.200", "64 tokens", "**no**"),
        ("0.800", "half of a bank", "**no**"),
        ("70.000", "4 rows", "**no**"),
        ("3 arms", "4 rows", "**no**"),
    ]
    assert report.skipped(results) == ["8 rows"]
    assert "8 rows" not in [row[0] for row in report.arm_rows(results)[1]]


def test_an_arm_that_fails_does_not_stop_the_others(
    scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noted, and said in the table."""
    module = scripts("bench_decode")
    bench = module.DecodeBench(module.parse(["--model", "tiny", "--device", "cpu", "--layers", "2", "--pack", "both"]))

    def fails() -> None:
        raise RuntimeError("on purpose")

    bench.attempt("broken", fails)
    assert bench.results["decode"]["broken"]["error"] == "RuntimeError: on purpose"
    monkeypatch.setattr(module, "enable_expert_prefetch", lambda *_, **__: fails())
    monkeypatch.setattr(bench, "all_arms", lambda *_: None)
    bench.run()
    assert [bench.results["decode"][name]["error"] for name in ("enabled", "packed, enabled")] == [
        "RuntimeError: on purpose"
    ] * 2
    assert "on purpose" in module.bench_decode_report.table(bench.results)
