"""The script that measures host memory: what it says of its results, and that cold files are cold."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "scripts"))
        yield importlib.import_module("bench_memory"), importlib.import_module("bench_memory_report")


def test_what_is_dropped_from_the_page_cache_is_gone(scripts: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    bench, file = scripts[0], tmp_path / "file"
    file.write_bytes(bytes(4 * 2**20 + 5))
    assert bench.read_all([file]) == 4 * 2**20 + 5
    with file.open("rb") as stream:
        here, pages = bench.resident_pages(stream.fileno(), file.stat().st_size)
    assert here == pages == 1025
    left = bench.evict([file])
    if left == 1:
        pytest.skip("this file system has nothing but its cache")
    assert left == 0
    assert bench.read_by_threads([file], 3, 2**20, False) == 4 * 2**20 + 5


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_enabling_takes_one_layer_more_than_the_model(scripts: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    """Experts in pieces of less than 32 MiB too, which the C library would keep when they are freed."""
    bench = scripts[0]
    folder = bench.make_checkpoint(tmp_path, 640 * 2**20, "separate", layers=12)
    found = bench.child("enable", str(folder), "cpu")
    assert found["experts_bytes"] > 2**28
    assert found["added_banks"] < 1.5


def results(**changes: Any) -> dict[str, Any]:
    arm = {
        "logits": "a",
        "pass_seconds": [2.0, 1.0, 3.0],
        "bytes": 8e9,
        "host_bytes": 6e9,
        "pinned_bytes": 4e9,
        "file_bytes": 2e9,
        "messages": ["said"],
    }
    made = {
        "machine": {"device": "d", "cpus": 2, "memory_bytes": 2**34, "kernel": "k", "torch": "t", "transformers": "f"},
        "date": "today",
        "elapsed_seconds": 3.0,
        "skipped": [],
        "load": [{"bytes": 1e9, "reads_seconds": 1.0, "load_seconds": 1.1, "peak_ratio": 1.01}],
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


def test_what_the_rows_say(scripts: tuple[ModuleType, ModuleType]) -> None:
    report = scripts[1]
    _, rows = report.arm_rows(results())
    assert rows[0] == ["one", "6.00 GB", "4.00 GB", "2.00 GB", "2.000 s", "4.0", "yes", "1"]
    assert [row[6] for row in rows] == ["yes", "**no**", "failed"]
    assert rows[2][-1] == "room"
    _, reads = report.read_rows(results())
    assert ["plain reads, one thread", "2.00 (1.00, 3.00, 2.00)"] in reads
    assert ["reads by threads: direct", "refused"] in reads
    assert ["writing to shared memory as one", "5.0"] in reads
    assert {row[3] for row in report.check_rows(results())[1]} == {"yes"}
    slow = results(
        load=[{"bytes": 1e9, "reads_seconds": 1.0, "load_seconds": 1.3, "peak_ratio": 1.06}],
        enable={"experts_bytes": 24e9, "dense_bytes": 0.0, "bank_bytes": 1e9, "seconds": 3.0, "added_banks": 3.0},
        disk={"reads": [2e9], "tier": [1.7e9]},
    )
    assert {row[3] for row in report.check_rows(slow)[1]} == {"**no**"}
    assert "today" in report.text(slow)
