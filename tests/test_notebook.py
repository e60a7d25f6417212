"""The quickstart notebook runs from beginning to end, and what is saved of it is its output and nothing of the machine."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def code_cells(notebook: Any) -> list[Any]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook: Any, kind: str) -> list[str]:
    """What the cells show as `kind`, a MIME type."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def check_outputs(notebook: Any) -> None:
    """Nothing failed, the tokens are equal, and the report and the plot are there."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert [text for text in shown(notebook, "text/plain") if text in ("True", "False")] == ["True", "True"]
    assert any("expert prefetch" in html for html in shown(notebook, "text/html"))
    assert len(shown(notebook, "image/png")) == 1


def test_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    notebook = importlib.import_module("run_notebook").execute(NOTEBOOK, tmp_path, OMP_NUM_THREADS="1")
    check_outputs(notebook)


def test_what_is_saved_is_its_output() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    check_outputs(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert all(cell.outputs for cell in code_cells(notebook))


def test_what_is_saved_knows_nothing_of_the_machine() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    assert not any(cell.metadata for cell in notebook.cells)
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert not output.get("metadata")
            text = json.dumps({kind: data for kind, data in output.items() if kind != "data"})
            text += "".join(data for kind, data in output.get("data", {}).items() if kind.startswith("text/"))
            assert not re.findall(r"""(?:^|[\s='"(])/[A-Za-z]\S*""", text)
            if output.get("name") == "stderr":
                assert output.text.startswith("hf_prefetch: "), "no warnings, no progress bars"
