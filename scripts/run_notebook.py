"""Run docs/quickstart.ipynb and keep its output, without anything that belongs to the machine it ran on.

    python scripts/run_notebook.py [NOTEBOOK.ipynb ...]

It runs in an empty folder; the package is found where it is installed, or in this repository. Progress bars are switched
off: their text would stay in the output.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Said by tqdm where its widgets are not installed.
    "PYTHONWARNINGS": "ignore:IProgress not found",
}


def execute(path: Path, folder: Path, *, timeout: int = 120, **environment: str) -> Any:
    """A notebook after it has run in `folder`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has failed.
    """
    notebook = nbformat.read(path, as_version=4)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return notebook


def strip(notebook: Any) -> Any:
    """Take out when and where it ran; what the cells say and show stays."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells, start=1):
        cell.metadata, cell["id"] = {}, f"cell-{number}"
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = {}
    return notebook


def main(arguments: Sequence[str] | None = None) -> int:
    """Run notebooks in place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=[NOTEBOOK])
    for path in parser.parse_args(arguments).notebooks:
        with tempfile.TemporaryDirectory() as folder:
            notebook = strip(execute(path, Path(folder)))
        nbformat.validate(notebook)
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
