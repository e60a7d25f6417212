"""The measurement of copies beside all-reduces, over gloo: that it runs to its end and judges by its bound."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_collectives")


def test_two_workers_measure_all_reduces_and_copies(bench, tmp_path, capsys) -> None:
    out = tmp_path / "collectives.json"
    bench.main(["--tiny", "--rounds", "2", "--out", str(out)])
    measured = json.loads(out.read_text())
    assert measured["workers"] == 2
    assert list(measured["all_reduce"]) == ["1", "8"]
    for times in measured["all_reduce"].values():
        assert [len(times[kind]) for kind in ("alone", "beside")] == [2, 2]
    # Three slots, two rounds, two sizes.
    assert [len(measured["copies"][kind]) for kind in ("alone", "beside")] == [12, 12]
    told = capsys.readouterr().out
    assert "all-reduce of 8 tokens" in told
    assert "GB/s beside all-reduces" in told


@pytest.mark.parametrize(("beside", "verdict"), [([1.0e-4], "ok"), ([1.3e-4], "MISSED"), ([], "MISSED")])
def test_what_is_held_up_is_told(bench, monkeypatch, tmp_path, capsys, beside, verdict) -> None:
    def work(function: Any, args: tuple[Any, ...], **options: Any) -> None:
        copies = {"alone": [0.01], "beside": [0.02]}
        measured = {"all_reduce": {"8": {"alone": [1.0e-4], "beside": beside}}, "copies": copies, "bank_bytes": 10**8}
        Path(args[-1]).write_text(json.dumps(measured))

    monkeypatch.setattr(bench.processes, "start_processes", work)
    assert bench.main(["--out", str(tmp_path / "out.json")]) == (verdict == "MISSED")
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("all-reduce of 8 tokens")
    assert told[0].endswith(verdict)
    assert told[1].startswith("copies: 10.0 GB/s alone, 5.0 GB/s beside")
