"""The benchmark of quantized experts, tried small on the CPU: what it finds, and what it makes of an arm that fails."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import finegrained_fp8

import bench_formats

WORDS = ["--device", "cpu", "--tiny", "--layers", "3", "--lengths", "24", "--repeats", "1", "--time-limit", "250"]


def assert_exact(result: dict[str, Any]) -> None:
    """The same bits, ahead of use."""
    assert result["equal"] == result["equal_after"] == {"24": "equal"}
    assert result["repeats_itself"] == {"24": True}
    assert result["report"]["fallbacks"] == 0
    assert result["report"]["lookahead_hits"] > 0
    assert result["kernels"] == "torch in its place"


def test_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as in one of its own."""
    monkeypatch.setattr(finegrained_fp8, "load_finegrained_fp8_kernel", None)
    assert_exact(bench_formats.measure("qwen3-30b-a3b:fp8", bench_formats.parse(WORDS)))


@pytest.mark.slow
def test_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels that are not there are replaced, an arm that there is none of fails, and both are said."""
    out, arms = tmp_path / "formats.json", "olmoe:int3,gpt-oss-20b:mxfp4"
    bench_formats.main([*WORDS, "--arms", arms, "--kernels", str(tmp_path), "--out", str(out)])
    failed, result = json.loads(out.read_text())["arms"].values()
    assert "int3" in failed["error"]
    assert_exact(result)
    assert "ModuleNotFoundError" in result["kernels_failed"]
    shown = capsys.readouterr().out
    assert "olmoe:int3 failed: " in shown
    assert "equal" in shown


def test_the_table_tells_what_is_missed() -> None:
    """A prefill beyond its bound, bits that differ, and bits that the model itself does not repeat."""
    result = {
        "kernels": "some",
        "bank_bytes": 10,
        "link_bytes_per_second": 10,
        "resident": {"7": [0.5], "8": [2.0]},
        "prefetched": {"7": [1.2], "8": [2.0]},
        "equal": {"7": "DIFFER", "8": "experts"},
        "repeats_itself": {"7": True, "8": False},
        "report": {"fallbacks": 0, "lookahead_hits": 1},
    }
    machine = {"name": "it", "torch": "2", "transformers": "5", "hf_prefetch": "0"}
    results = {"arms": {"some:fp8": {**result, "layers": 3}, "other:fp8": {"error": "no time"}}, "machine": machine}
    lines = bench_formats.table(results).splitlines()
    assert "1.200 !   DIFFER" in lines[2]
    assert "1.000     experts *" in lines[3]
    assert "other:fp8 failed: no time" in lines[4]
    assert "does not always give the same bits" in lines[5]
    document = importlib.import_module("render_docs").formats_table({**results, "date": "today", "command": "bench_formats.py"})
    assert "3 layers" in document
    assert "| some:fp8 | 7 | 0.5000 | 1.0000 | 1.2000 | 1.200 ! | DIFFER | some |" in document
    assert "- other:fp8 failed: no time" in document


def test_experts_are_told_from_what_is_around_them() -> None:
    """A block that was given something else is not judged."""
    one, two = torch.ones(2), torch.zeros(2)
    expected = bench_formats.Outputs([(one, one), (one, two)], [one])
    assert bench_formats.Outputs([(one, one), (one, two)], [one]).beside(expected) == "equal"
    assert bench_formats.Outputs([(one, one), (two, one)], [two]).beside(expected) == "experts"
    assert bench_formats.Outputs([(one, one), (one, two)], [two]).beside(expected) == "experts"
    assert bench_formats.Outputs([(one, two), (two, one)], [two]).beside(expected) == "DIFFER"
    assert bench_formats.Outputs([(two, one), (two, one)], [two]).beside(expected) == "DIFFER", "nothing could be compared"
