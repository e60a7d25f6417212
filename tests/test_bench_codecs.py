"""The comparison of codes: the package's own runs on the CPU, nvCOMP's go through a stand-in that keeps bytes as they are."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_codecs")


def test_taken_apart_and_put_together_all_patterns_are_the_same(bench: Any) -> None:
    weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    again = bench.together(bench.exponents_of(weights), bench.rests_of(weights))
    assert torch.equal(again.view(torch.int16), weights.view(torch.int16))


def stand_in(loses: bool) -> ModuleType:
    """nvCOMP, as far as it is used: a code that keeps all bytes, or loses one."""

    class Codec:
        def __init__(self, algorithm: str, **_: Any) -> None:
            self.algorithm = algorithm

        def encode(self, given: torch.Tensor) -> Any:
            return SimpleNamespace(given=given.clone(), buffer_size=given.numel())

        def decompression_config(self, coded: Any) -> None:
            return None

        def decode(self, coded: Any, out: torch.Tensor, decompression_config: None) -> None:
            out.copy_(coded.given)
            out[0] ^= int(loses)

    module: Any = ModuleType("nvidia.nvcomp")
    module.Codec, module.as_array = Codec, lambda tensor, **_: tensor
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize("loses", [False, True])
def test_every_code_is_told(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], loses: bool
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", stand_in(loses))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    # The kernel needs a GPU, or an interpreter that is chosen before anything is imported.
    monkeypatch.setattr(bench, "own", lambda weights: (weights.nbytes // 2, lambda: weights))
    monkeypatch.setattr(bench, "describe_machine", lambda device: {"name": "a machine"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "codecs" / "tiny.json"
    assert bench.main(["--weights", "4096", "--repeats", "1", "--out", str(out)]) == int(loses)
    results = json.loads(out.read_text())
    assert [arm["equal"] for arm in results["codes"].values()] == [True] + [not loses] * len(bench.NVCOMP)
    first, *others = results["codes"].values()
    assert first["bits"] == 8
    assert {arm["bits"] for arm in others} == {16}
    told = capsys.readouterr().out
    assert ("**no**" in told) == loses
    document = importlib.import_module("render_docs").codecs_table(results)
    assert "4,096 weights; a machine" in document
    assert document.count("| nvCOMP ") == len(bench.NVCOMP)


def test_what_is_not_there_is_said(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(bench, "own", lambda weights: (weights.nbytes, lambda: weights))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--weights", "4096", "--repeats", "1"]) == 0
    assert capsys.readouterr().out.count("ModuleNotFoundError") == len(bench.NVCOMP)
