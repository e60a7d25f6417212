"""The documents show what was measured: their tables are current, and are filled from whatever the files hold."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = "# Package\n\n<!-- table: readme -->\nold\n<!-- end -->\n\nThe end.\n"
BENCHMARKS = "# Benchmarks\n\n<!-- table: qwen3-30b-a3b -->\n<!-- end -->\n\n<!-- table: other -->\n<!-- end -->\n"

Json = dict[str, Any]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with documents and no measurement."""
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs" / "benchmarks.md").write_text(BENCHMARKS)
    (tmp_path / "docs" / "decode.md").write_text("# Decode\n\n<!-- table: decode/tiny -->\n<!-- end -->\n")
    (tmp_path / "docs" / "memory.md").write_text("# Memory\n\n<!-- table: memory/tiny -->\n<!-- end -->\n")
    (tmp_path / "docs" / "packing.md").write_text("# Packing\n\n<!-- table: packed -->\n<!-- end -->\n")
    (tmp_path / "docs" / "architectures.md").write_text("# Formats\n\n<!-- table: formats/tiny -->\n<!-- end -->\n")
    return tmp_path


def point(tokens: int, seconds: float, **more: Any) -> Json:
    """A point as the benchmark measures it."""
    return {"tokens": tokens, "seconds": [seconds] * 3, "moved_bytes": None, "peak_bytes": 2**31} | more


def results() -> Json:
    """Measurements of a few arms: one was only begun, one failed, one length ran out of memory, decode is there."""
    equal = {"calls": 4, "inputs_equal": 4, "outputs_equal": 4, "experts_equal": True, "logits_equal": True}
    arms: Json = {
        "resident": {"200": point(200, 0.02), "8192": point(8192, 0.1)},
        "prefetch-3": {
            "200": point(200, 0.33),
            "8192": point(8192, 0.34),
            "32768": {"tokens": 32768, "error": "OutOfMemoryError: a | b"},
            "decode": point(200, 0.3),
        },
        "prefetch-3@25%": {"200": point(200, 0.083), "8192": point(8192, 0.11)},
        "prefetch-3@50%": {"200": point(200, 0.163), "8192": point(8192, 0.165)},
        "accelerate": {"8192": point(8192, 1.7)},
        "broken": {},
    }
    machine = {"device": "cuda", "name": "Some GPU", "torch": "2.13", "transformers": "5.24", "hf_prefetch": "0.1.0"}
    model = {"name": "qwen3-30b-a3b", "class": "Qwen3MoeForCausalLM", "random_weights": True, "dtype": "bfloat16", "layers": 16}
    enter: Json = {"slots": 3, "gb_per_s": 3.0}
    parts: Json = {name: {"share": share, "host_bank_bytes": share * 16 * 10**9} for name, share in shares().items()}
    return {
        "schema": 1,
        "date": "2026-01-02 03:04 UTC",
        "command": "bench.py --model qwen3-30b-a3b",
        "elapsed_seconds": 12.0,
        "machine": machine,
        "model": model | {"bank_bytes": 16 * 10**9, "largest_bank_bytes": 10**9},
        "link": {"bytes": 10**9, "start": [0.02] * 3, "end": [0.021] * 3},
        "needed": {},
        "arms": {
            name: {
                "status": "failed" if name == "broken" else "ok",
                "looks_ahead": name.startswith("prefetch"),
                "enter": enter | parts.get(name, {}) if name.startswith("prefetch") else {},
                "points": points,
                "equality": {"200": equal} if "200" in points else {},
                "report": {"fallbacks": 0},
            }
            | ({"error": "RuntimeError: on purpose"} if name == "broken" else {})
            for name, points in arms.items()
        },
    }


def shares() -> dict[str, float]:
    """What the arms with a part of the experts in host memory keep there."""
    return {"prefetch-3@25%": 0.25, "prefetch-3@50%": 0.5}


def measured(scripts: Callable[[str], ModuleType], root: Path) -> Path:
    """Put a measurement where the documents look for it."""
    path = root / "docs" / "benchmarks" / "qwen3-30b-a3b.json"
    path.write_text(json.dumps(scripts("bench_report").derive(results())))
    return path


def test_the_documents_are_current(scripts: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts("render_docs").main(["--check"]) == 0, capsys.readouterr()


def test_nothing_that_is_published_holds_a_path_of_the_machine_it_came_from() -> None:
    for path in (ROOT / "docs" / "benchmarks").rglob("*.json"):
        assert not re.findall(r"""(?:^|[\s='"(])/[A-Za-z]\S*""", path.read_text(encoding="utf-8")), path


def test_without_a_measurement_the_tables_say_so(scripts: Callable[[str], ModuleType], root: Path) -> None:
    render = scripts("render_docs")
    assert render.main(["--root", str(root), "--check"]) == 1
    assert (root / "README.md").read_text() == README, "--check writes nothing"
    assert render.main(["--root", str(root)]) == 0
    assert "No measurement is recorded here yet" in (root / "README.md").read_text()
    assert (root / "docs" / "benchmarks.md").read_text().count("No measurement is recorded here yet") == 2
    assert render.main(["--root", str(root), "--check"]) == 0


def test_a_measurement_fills_the_tables(scripts: Callable[[str], ModuleType], root: Path) -> None:
    render, path = scripts("render_docs"), measured(scripts, root)
    assert render.main(["--root", str(root)]) == 0
    readme = (root / "README.md").read_text()
    assert readme.startswith("# Package\n\n<!-- table: readme -->\n")
    assert readme.endswith("<!-- end -->\n\nThe end.\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in readme.splitlines() if line.startswith("|")]
    assert rows[0] == ["prompt", "all on the GPU", "all experts over the link", "**prefetch, 3 slots**", "accelerate"]
    assert rows[2:] == [
        ["200 tokens", "0.020 s", "0.320 s", "0.330 s", "-"],
        ["8,192 tokens", "0.100 s", "0.320 s", "0.340 s", "1.700 s"],
    ]
    assert "Some GPU, 50.0 GB/s" in readme
    assert "`PYTHONPATH=. python scripts/bench.py --model qwen3-30b-a3b`" in readme
    full = (root / "docs" / "benchmarks.md").read_text()
    assert "| `prefetch-3` | 8,192 | 0.3400 | 1.000 | 5.00 | 2.00 | - |" in full
    assert "| `prefetch-3` | 32,768 | OutOfMemoryError: a \\| b |" in full
    assert "| `prefetch-3` | decode after 200 | 0.3000 |" in full
    assert "- `broken`: failed: RuntimeError: on purpose" in full
    assert "- speed-up over accelerate: 5.000, bound >= 6.5; `prefetch-3`, 8192" in full
    assert "- an aim, enabling, GB/s: 3.000, bound >= 10; `prefetch-3`" in full
    assert full.count("No measurement is recorded here yet") == 1
    # A number that changes makes the documents stale.
    path.write_text(path.read_text().replace("0.34", "0.35"))
    assert render.main(["--root", str(root), "--check"]) == 1


@pytest.mark.parametrize("text", ["<!-- table: readme -->\nno end\n", "<!-- table: a -->\n<!-- table: b -->\n<!-- end -->\n"])
def test_a_region_without_an_end_is_an_error(scripts: Callable[[str], ModuleType], root: Path, text: str) -> None:
    (root / "README.md").write_text(text)
    assert scripts("render_docs").main(["--root", str(root)]) == 1
    assert (root / "README.md").read_text() == text


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"schema": 2, "model": {}}'])
def test_a_file_of_another_kind_is_an_error(
    scripts: Callable[[str], ModuleType], root: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = root / "docs" / "benchmarks" / "qwen3-30b-a3b.json"
    path.write_text(text)
    assert scripts("render_docs").main(["--root", str(root)]) == 1
    assert "qwen3-30b-a3b.json" in capsys.readouterr().err
    assert (root / "README.md").read_text() == README


def test_images_are_drawn_and_shown(scripts: Callable[[str], ModuleType], root: Path) -> None:
    pytest.importorskip("matplotlib")
    path, images = measured(scripts, root), root / "docs" / "images"
    assert scripts("plot_bench").main([str(path), "--out", str(images)]) == 0
    names = [f"qwen3-30b-a3b-{image}.png" for image in ("prefill", "bars", "share")]
    assert sorted(image.name for image in images.iterdir()) == sorted(names)
    assert scripts("render_docs").main(["--root", str(root)]) == 0
    assert "(docs/images/qwen3-30b-a3b-prefill.png)" in (root / "README.md").read_text()
    full = (root / "docs" / "benchmarks.md").read_text()
    assert all(f"(images/{name})" in full for name in names)


def test_what_was_not_measured_is_not_drawn(scripts: Callable[[str], ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    few = results()
    few["arms"] = {"prefetch-3": few["arms"]["prefetch-3"] | {"points": {"200": point(200, 0.3)}}}
    few["link"] = {"bytes": 10**9}
    path = tmp_path / "few.json"
    path.write_text(json.dumps(scripts("bench_report").derive(few)))
    assert scripts("plot_bench").main([str(path), "--out", str(tmp_path)]) == 0
    assert [image.name for image in tmp_path.glob("*.png")] == ["few-prefill.png"]
