"""The table of the vLLM benchmark, whatever its arms have come to, and what is kept of an arm that fails."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_vllm_table")


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


def test_medians_limits_and_failures(table) -> None:
    results = {
        "resident": _arm(0.05, 0.002),
        "uva": {"error": "took more than the 40 s that it had"},
        "prefetch-3": _arm(0.21, 0.004, link=50e9),
        "prefetch-4+pack": _arm(0.15, 0.004, token=9, link=50e9),
    }
    lines = table.table(results).splitlines()
    rows = {line.split()[0]: line.split() for line in reversed(lines)}
    assert rows["resident"] == ["resident", "0.0500", "0.0020", "yes", "12"]
    assert rows["uva"] == ["uva", "-", "-", "-", "-"]
    assert rows["prefetch-4+pack"][-2:] == ["no", "12"]
    # 10 GB at 50 GB/s.
    assert any("max(resident, bytes/link)" in line and "0.2000" in line for line in lines)
    assert any("prefetch-3 / limit" in line and "1.050" in line for line in lines)
    assert "uva: took more than the 40 s that it had" in lines


def test_each_bound_is_told_with_its_figure(table) -> None:
    fast, slow = _arm(0.209, 0.004, link=50e9), _arm(0.211, 0.0061, link=50e9)
    results = {
        "resident": _arm(0.05, 0.002),
        "uva": _arm(0.9, 0.0080),
        "offload-prefetch": _arm(0.3, 0.0060),
        "prefetch-3": slow,
        "prefetch-3+cache": fast,
        "prefetch-4+pack": _arm(0.163, 0.0060, token=9, link=50e9),
    }
    told = {(what, bound): verdict for what, _, bound, verdict in table.bounds(results)}
    assert told == {
        ("prefetch-3, prefill 200", "<= 0.2100 (1.05 x max(resident, bytes/link))"): "MISSED",
        ("prefetch-3, decode x1", "<= 0.0080 (uva)"): "ok",
        ("prefetch-3, decode x1", "<= 0.0060 (offload-prefetch)"): "MISSED",
        ("prefetch-3, output", "equal to resident"): "ok",
        ("prefetch-3+cache, prefill 200", "<= 0.2100 (1.05 x max(resident, bytes/link))"): "ok",
        ("prefetch-3+cache, decode x1", "<= 0.0080 (uva)"): "ok",
        ("prefetch-3+cache, decode x1", "<= 0.0060 (offload-prefetch)"): "ok",
        ("prefetch-3+cache, decode x1", "<= 0.0040 (uva / 2)"): "ok",
        ("prefetch-3+cache, output", "equal to resident"): "ok",
        ("prefetch-4+pack, prefill 200", "<= 0.1640 (0.82 x bytes/link, or 1.05 x resident)"): "ok",
        ("prefetch-4+pack, decode x1", "<= 0.0080 (uva)"): "ok",
        ("prefetch-4+pack, decode x1", "<= 0.0060 (offload-prefetch)"): "ok",
        ("prefetch-4+pack, output", "equal to resident"): "MISSED",
    }


def test_packed_experts_are_held_against_the_gpu_where_that_is_slower(table) -> None:
    results = {"resident": _arm(0.3, 0.002), "prefetch-4+pack": _arm(0.31, 0.004, link=50e9)}
    bounds = [bound for what, _, bound, _ in table.bounds(results) if "prefill" in what]
    assert bounds == ["<= 0.3150 (0.82 x bytes/link, or 1.05 x resident)"]


def test_without_any_arm_that_worked(table) -> None:
    lines = table.table({"resident": {"error": "no GPU"}, "prefetch-3": {"error": "no GPU"}}).splitlines()
    assert lines[-2:] == ["resident: no GPU", "prefetch-3: no GPU"]


def test_log_probabilities_that_differ_are_no_equality(table) -> None:
    results = {"resident": _arm(0.05, 0.002), "prefetch-3": _arm(0.2, 0.004, link=50e9)}
    results["prefetch-3"]["answers"] = [{"tokens": [7, 8], "logprobs": [-0.5, -0.26]}]
    lines = table.table(results).splitlines()
    assert any(line.split()[:1] == ["prefetch-3"] and "tokens" in line.split() for line in lines)
    assert ("prefetch-3, output", "tokens", "equal to resident", "MISSED") in table.bounds(results)


# -- arms ---------------------------------------------------------------------------------------------------------------

# In the place of an arm's process: has measured something when it fails, or when its time is up.
_ARM = """
import json, pathlib, sys, time
out = pathlib.Path([after for before, after in zip(sys.argv, sys.argv[1:]) if before == "--out"][-1])
out.write_text(json.dumps({"start": 1.0, "samples": {"decode x1": [0.5]}}))
name = sys.argv[sys.argv.index("--arm") + 1]
if name == "resident":
    sys.exit(0)
time.sleep(60 if name == "uva" else 0)
sys.exit("out of memory")
"""


def test_arms_that_fail_do_not_stop_others_and_keep_what_they_measured(bench, monkeypatch, tmp_path, capsys) -> None:
    script = tmp_path / "arm.py"
    script.write_text(_ARM)
    monkeypatch.setattr(bench, "__file__", str(script))
    monkeypatch.setattr(bench, "_LEAST", 0.0)
    arm = importlib.import_module("bench_vllm_arm")
    monkeypatch.setattr(arm, "prepare", lambda options, folder: None)
    out = tmp_path / "out.json"
    arguments = ["--arms", "prefetch-3,uva,resident", "--arm-limit", "10", "--out", str(out)]
    assert bench.main(arguments) == 2
    arms = json.loads(out.read_text())["arms"]
    assert arms["prefetch-3"]["error"] == "out of memory"
    assert arms["uva"]["error"] == "took more than the 10 s that it had"
    assert "error" not in arms["resident"]
    assert all(arms[name]["samples"] == {"decode x1": [0.5]} for name in arms)
    told = capsys.readouterr().out
    assert told.index("prefetch-3: out of memory") < told.index("uva: took") < told.index("resident: ")
