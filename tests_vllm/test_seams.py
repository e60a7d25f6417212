"""The list of what the plugin uses of vLLM is complete enough to find what is missing."""

from __future__ import annotations

import runpy
from pathlib import Path

import vllm

_CHECK = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "check_vllm_seams.py"))


def test_this_vllm_has_them(capsys) -> None:
    assert _CHECK["main"]([str(Path(vllm.__file__).parents[1])]) == 0
    assert "complete" in capsys.readouterr().out


def test_what_is_missing_is_named(tmp_path, capsys) -> None:
    source = Path(vllm.__file__).parent / "forward_context.py"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "forward_context.py").write_text(source.read_text().replace("attn_metadata:", "attention:"))
    assert _CHECK["main"]([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "vllm/forward_context.py: ForwardContext.attn_metadata" in told
    assert "vllm/forward_context.py: get_forward_context()" not in told
    assert "vllm/config/parallel.py: ParallelConfig.enable_eplb" in told
