"""The table of the vLLM benchmark, whatever its arms have come to."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_vllm")


def _arm(prefill: float, decode: float, token: int = 7, **more: Any) -> dict[str, Any]:
    answers = [{"tokens": [token, 8], "logprobs": [-0.5, -0.25]}]
    return {
        "samples": {"prefill 200": [prefill, prefill * 2, prefill], "decode x1": [decode]},
        "passes": {"prefill 200": 1},
        "expert_bytes": 10e9,
        "answers": answers,
        "again": answers,
        "start": 12.3,
        "seconds": 40.0,
        **more,
    }


def test_medians_limits_and_failures(bench) -> None:
    results = {
        "resident": _arm(0.05, 0.002),
        "uva": {"error": "took more than the 40 s that were left"},
        "prefetch-3": _arm(0.21, 0.004, link=50e9),
        "prefetch-4+pack": _arm(0.15, 0.004, token=9, link=50e9),
    }
    rows = {
        line.split("  ")[0].strip() or line.strip().split("  ")[0]: line.split() for line in bench.table(results).splitlines()
    }
    lines = bench.table(results).splitlines()
    assert rows["resident"] == ["resident", "0.0500", "0.0020", "yes", "12"]
    assert rows["uva"] == ["uva", "-", "-", "-", "-"]
    assert any(line.split()[0] == "prefetch-4+pack" and "no" in line.split() for line in lines)
    # 10 GB at 50 GB/s.
    assert any("max(resident, bytes/link)" in line and "0.2000" in line for line in lines)
    assert any("prefetch-3 / limit" in line and "1.050" in line for line in lines)
    assert "uva: took more than the 40 s that were left" in lines


def test_without_any_arm_that_worked(bench) -> None:
    lines = bench.table({"resident": {"error": "no GPU"}, "prefetch-3": {"error": "no GPU"}}).splitlines()
    assert lines[-2:] == ["resident: no GPU", "prefetch-3: no GPU"]


def test_log_probabilities_that_differ_are_no_equality(bench) -> None:
    results = {"resident": _arm(0.05, 0.002), "prefetch-3": _arm(0.2, 0.004, link=50e9)}
    results["prefetch-3"]["answers"] = [{"tokens": [7, 8], "logprobs": [-0.5, -0.26]}]
    assert any(line.split()[:1] == ["prefetch-3"] and "tokens" in line.split() for line in bench.table(results).splitlines())
