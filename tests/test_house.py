"""The package's rooms, from the ground up: a file imports what stands below it, and nothing in a circle."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_prefetch

ROOT = Path(hf_prefetch.__file__).parent
TOP = "hf_prefetch"
REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

# Each line is a floor. A file in the package's own folder counts as a room of its own.
FLOORS = [
    {"config", "sizes", "progress", "workers"},
    {"memory.pages"},
    {"streams", "banks"},
    {"demo", "discovery", "timeline", "memory"},
    {"device"},
    {"report", "routing"},
    {"scheduling"},
    {"calls", "hooks", "ops"},
    {"model"},
    {"api"},
    {"checkpoints"},
    {"command"},
    {"cli", "testing", "integrations"},
]


def modules() -> dict[str, Path]:
    """Every module by its name without the package's."""
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in ROOT.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def imports(name: str, path: Path) -> Iterator[str]:
    """The modules that one imports when it is imported itself; what is for type checkers only is not."""
    package = [TOP, *name.split(".")][: None if path.name == "__init__.py" else -1]
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".") * bool(node.module)
            for alias in node.names:
                yield ".".join([*base[1:], alias.name])


def graph() -> dict[str, set[str]]:
    known, edges = modules(), defaultdict(set)
    for name, path in known.items():
        for target in imports(name, path):
            edges[name].add(target if target in known else target.rpartition(".")[0])
        edges[name].discard("")  # the version of the package
    return edges


def floor(module: str) -> int:
    """Of the module itself if it has a place of its own, else of its room."""
    place = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    return place.get(module, place.get(module.split(".")[0], len(FLOORS)))


def test_imports_go_down_only() -> None:
    edges = graph()
    assert sum(map(len, edges.values())) > 200, "it sees them"
    up = [f"{module} -> {target}" for module, targets in edges.items() for target in targets if floor(target) > floor(module)]
    assert up == []


def test_nothing_is_imported_in_a_circle() -> None:
    graphlib.TopologicalSorter({name: targets - {name} for name, targets in graph().items()}).prepare()


def test_the_document_names_every_room() -> None:
    """With a word on each, in the order of the floors; and each module is in a room."""
    text = (REPOSITORY / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| .+ \|$", text.partition("## Where what is")[2], re.MULTILINE)
    named = [row.strip("/").removesuffix(".py").replace("/", ".") for row in rows]
    assert sorted(named) == sorted(set().union(*FLOORS))
    assert [floor(room) for room in named] == sorted(map(floor, named))
    assert all((ROOT / row).exists() for row in rows)
    assert {module.split(".")[0] for module in modules()} - {"__init__", "__main__"} <= set(named)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_are_there(document: Path) -> None:
    """By their paths in the repository or in the package."""
    named = re.findall(r"`([\w/.]+\.py)`", document.read_text(encoding="utf-8"))
    assert [name for name in named if not any((place / name).is_file() for place in (REPOSITORY, ROOT))] == []
