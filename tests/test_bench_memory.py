"""The script that measures host memory: what it says of its results, and that cold files are cold."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    names = {name: f"bench_{name}" for name in ("memory", "memory_report", "memory_parts", "files", "load")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "scripts"))
        yield SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})


def test_what_is_dropped_from_the_page_cache_is_gone(scripts: SimpleNamespace, tmp_path: Path) -> None:
    files, file = scripts.files, tmp_path / "file"
    file.write_bytes(bytes(4 * 2**20 + 5))
    assert files.read_all([file]) == 4 * 2**20 + 5
    with file.open("rb") as stream:
        here, pages = files.resident_pages(stream.fileno(), file.stat().st_size)
    assert here == pages == 1025
    left = files.evict([file])
    if left == 1:
        pytest.skip("this file system has nothing but its cache")
    assert left == 0
    assert files.read_by_threads([file], 3, 2**20, False) == 4 * 2**20 + 5


def test_a_file_that_stays_in_the_page_cache_is_told(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one of many: containers take the request and do nothing."""
    sizes = {tmp_path / "one": 3 * 2**20, tmp_path / "two": 2**20}
    for file, size in sizes.items():
        file.write_bytes(bytes(size))
    drop = os.posix_fadvise

    def drop_one(descriptor: int, *rest: int) -> None:
        if os.fstat(descriptor).st_size > 2**20:
            drop(descriptor, *rest)

    monkeypatch.setattr(os, "posix_fadvise", drop_one)
    assert scripts.files.evict(list(sizes)) == 1
    assert "no figure is of cold files" in scripts.memory_report.text(results(disk={"still_cached": 1.0}))
    assert "no figure is of cold files" not in scripts.memory_report.text(results())


def test_each_part_comes_when_it_is_known(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """A process that dies or is silent has said what it knew before, and why it ended."""
    folder = scripts.load.make_checkpoint(tmp_path, 60 * 2**20, "separate", layers=2)
    parts = list(scripts.memory.parts_of("arms", str(folder), "cpu", ["0% in memory", "no such arm"]))
    assert [part for part, _ in parts] == ["0% in memory", "error"]
    assert parts[0][1]["file_bytes"] == parts[0][1]["bytes"] > 0
    assert "KeyError: 'no such arm'" in parts[1][1]["error"]
    (last,) = scripts.memory.parts_of("arms", str(folder), "cpu", ["0% in memory"], patience=0.2)
    assert (last[0], last[1]["error"].splitlines()[-1]) == ("error", "arms: it gave nothing for 0 s")


def test_what_fails_stops_nothing_else(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither an arm, nor a process, nor a disk that is full; and what is known is written down at once."""
    names, begun, out = list(scripts.memory.ARMS), [], tmp_path / "out.json"

    def parts_of(name: str, *arguments: Any, **_: Any) -> Iterator[tuple[str, Any]]:
        begun.append((name, *arguments[2:]))
        if name == "arms":
            yield arguments[2][0], results()["arms"]["one"]
        elif name == "disk":
            yield "disk", {"reads": [1e9], "tier": [1e9], "still_cached": 0.0}
        assert (name != "arms") or arguments[2][0] in json.loads(out.read_text())["arms"]
        yield "error", {"error": f"{name} is gone"}

    monkeypatch.setattr(scripts.memory, "parts_of", parts_of)
    monkeypatch.setattr(scripts.memory, "make_checkpoint", lambda folder, *_, **__: folder)
    arguments = ["--folder", str(tmp_path), "--out", str(out), "--device", "cpu", "--rounds", "2"]
    scripts.memory.main(arguments)
    assert begun[0] == ("disk", 2)
    assert [left[0] for name, left in begun[1:-1]] == names[::2]
    assert begun[-1] == ("load",)
    found = json.loads(out.read_text())
    # Where it was done is nobody's business.
    assert found["command"] == f"bench_memory.py --out {out} --device cpu --rounds 2"
    assert scripts.memory.without_folder(["--folder=there", "--make", "2GB", "--folder", "there"]) == ["--make", "2GB"]
    # The last one's process dies when it has told all of it.
    assert list(found["arms"]) == [*names, "their end"]
    assert ["error" in arm for arm in found["arms"].values()] == [bool(number % 2) for number in range(len(names) + 1)]
    assert (found["disk"]["tier"], found["disk"]["error"], found["load"]) == (
        [1e9],
        "disk is gone",
        [{"error": "load is gone"}],
    )
    assert "disk is gone" in (told := capsys.readouterr().out)
    assert "load is gone" in told

    def full(folder: Path, *_: Any, **__: Any) -> Path:
        raise OSError(28, "No space left on device")

    begun.clear()
    monkeypatch.setattr(scripts.memory, "make_checkpoint", full)
    scripts.memory.main(arguments)
    assert not begun
    assert "No space left on device" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("layout", ["separate", "fused"])
def test_enabling_takes_one_layer_more_than_the_model(layout: str, scripts: SimpleNamespace, tmp_path: Path) -> None:
    """Experts in pieces of less than 32 MiB too, which the C library would keep when they are freed."""
    size = 2 * 2**30
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if shutil.disk_usage(tmp_path).free < 2 * size or int(fields["MemAvailable"].split()[0]) * 1024 < 3 * size:
        pytest.skip("needs 4 GiB on disk and 6 GiB in memory")
    folder = scripts.load.make_checkpoint(tmp_path, size, layout)
    try:
        ((_, found),) = scripts.memory.parts_of("enable", str(folder), "cpu")
    finally:
        shutil.rmtree(folder)
    assert found["experts_bytes"] > 0.8 * size
    assert found["added_banks"] * found["bank_bytes"] <= found["bank_bytes"] + 0.05 * found["experts_bytes"]


def results(**changes: Any) -> dict[str, Any]:
    arm = {
        "logits": "a",
        "pass_seconds": [2.0, 1.0, 3.0],
        "bytes": 8e9,
        "host_bytes": 6e9,
        "pinned_bytes": 4e9,
        "file_bytes": 2e9,
        "messages": ["said"],
        "refused": True,
    }
    made = {
        "machine": {"device": "d", "cpus": 2, "memory_bytes": 2**34, "kernel": "k", "torch": "t", "transformers": "f"},
        "date": "today",
        "elapsed_seconds": 3.0,
        "skipped": [],
        "load": [{"bytes": 1e9, "reads_seconds": 1.0, "load_seconds": 1.1, "peak_ratio": 1.01, "still_cached": 0.0}],
        "enable": {"experts_bytes": 24e9, "dense_bytes": 0.0, "bank_bytes": 1e9, "seconds": 2.0, "added_banks": 1.5},
        "disk": {
            "reads": [1e9, 3e9, 2e9],
            "tier": [1.9e9],
            "by_threads": {"direct": "refused"},
            "arenas": {"as one": {"fill": 5e9}},
        },
        "arms": {"one": arm, "two": {**arm, "logits": "b"}, "three": {"error": "no\nroom"}},
    }
    made["machine"]["hf_prefetch"] = "0"
    return made | changes


def test_what_the_rows_say(scripts: SimpleNamespace) -> None:
    report = scripts.memory_report
    _, rows = report.arm_rows(results())
    assert rows[0] == ["one", "6.00 GB", "4.00 GB", "2.00 GB", "2.000 s", "4.0", "yes", "1"]
    assert [row[6] for row in rows] == ["yes", "**no**", "failed"]
    assert rows[2][-1] == "room"
    _, reads = report.read_rows(results())
    assert ["plain reads, one thread", "2.00 (1.00, 3.00, 2.00)"] in reads
    assert ["reads by threads: direct", "refused"] in reads
    assert ["writing to shared memory as one", "5.0"] in reads
    good = results(arms={"one": results()["arms"]["one"]})
    assert [row[3] for row in report.check_rows(good)[1]] == ["ok"] * 8
    silent = {**results()["arms"]["one"], "messages": []}
    assert [row[1:] for row in report.check_rows(results(arms={"one": good["arms"]["one"], "two": silent}))[1][-2:]] == [
        ["2", "= 2", "ok"],
        ["1", "= 2", "**missed**"],
    ]
    slow = results(
        load=[{"bytes": 1e9, "reads_seconds": 1.0, "load_seconds": 1.3, "peak_ratio": 1.06, "still_cached": 0.5}],
        enable={"experts_bytes": 24e9, "dense_bytes": 0.0, "bank_bytes": 1e9, "seconds": 3.0, "added_banks": 3.0},
        disk={"reads": [2e9], "tier": [1.7e9]},
    )
    assert {row[3] for row in report.check_rows(slow)[1]} == {"**missed**"}
    assert "today" in report.text(slow)
