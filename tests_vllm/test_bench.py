"""The benchmark, on a tiny model: that its calls of vLLM are there, and that both arms route and answer alike."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def test_arms_run_and_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench, out = importlib.import_module("bench_vllm"), tmp_path / "vllm.json"
    assert bench.main(["--smoke", "--arms", "resident,prefetch-3+cache", "--out", str(out)]) == 0, capsys.readouterr().out
    arms = json.loads(out.read_text())["arms"]
    assert "prefetch-3+cache, output: yes" in capsys.readouterr().out
    kinds = ["decode x1", "decode x8", "prefill 8", "prefill 100", "prefill 300"]
    for arm in arms.values():
        assert list(arm["samples"]) == kinds
        assert arm["answers"] == arms["resident"]["again"]
    assert "5  in host memory" in arms["prefetch-3+cache"]["report"]
    assert arms["resident"]["passes"]["prefill 300"] == 3
