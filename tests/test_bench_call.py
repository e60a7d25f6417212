"""The script that times calls: that it times this package, in the ways that it names, and what it makes of two trees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import bench_call

WORDS = ["--layers", "3", "--passes", "2", "--pairs", "2"]


@pytest.mark.slow
def test_two_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This one, and one that is slower."""
    shutil.copytree(bench_call.ROOT / "hf_prefetch", tmp_path / "slow" / "hf_prefetch")
    with (tmp_path / "slow" / "hf_prefetch" / "hooks.py").open("a") as hooks:
        hooks.write("\n\ndef _slow(forward):\n    def run(*args, **kwargs):\n        sum(range(20000))\n")
        hooks.write("        return forward(*args, **kwargs)\n    return run\n\n\n")
        hooks.write("ExpertPrefetchHook.run = _slow(ExpertPrefetchHook.run)\n")
    bench_call.main([*WORDS, "--tree", str(tmp_path / "slow"), "--out", str(tmp_path / "calls.json")])
    results = json.loads((tmp_path / "calls.json").read_text())
    assert set(results["calls"]) == set(bench_call.WAYS)
    for way, cells in results["calls"].items():
        assert list(cells)[1:] == ["slow", "difference"]
        assert (cells["difference"]["median"] < -50) is (way != "none"), way
    assert "cached" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["prefill", "routed", "cached"])
def test_a_call_takes_the_way_that_it_is_said_to_take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or there is an error."""
    monkeypatch.setattr(bench_call, "_WARM_UP", 2)
    subject = bench_call.Subject(way, 3)
    assert subject.run(2) > 0
    subject.check()
    subject.way = "routed" if way == "cached" else "cached"
    with pytest.raises(RuntimeError, match="only 0 of 12 calls"):
        subject.check()


@pytest.mark.slow
def test_a_tree_that_is_none(tmp_path: Path) -> None:
    """The package would come from somewhere else."""
    tree = bench_call.Tree(tmp_path, bench_call.parse(WORDS))
    with pytest.raises(RuntimeError, match=r"was asked for|has ended"):
        tree.wait()
    tree.close()


def test_the_table() -> None:
    """Trees side by side."""
    cell = bench_call.spread([1.0, 2.0, 3.0])
    assert cell == {"median": 2.0, "quartiles": [1.5, 2.5]}
    lines = bench_call.table({"calls": {"none": {"abc": cell, "difference": cell}}}).splitlines()
    assert lines[0].split() == ["us", "a", "call", "abc", "difference"]
    assert "2.00 (1.50 to 2.50)" in lines[1]
