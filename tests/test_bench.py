"""The benchmark on the CPU stand-in: what it writes, that it finds wrong bytes, and that a failing arm stops nobody."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "bench.py"
ARMS = ["resident", "broken", "prefetch-2", "prefetch-3", "pinned-serial", "accelerate"]
OPTIONS = (
    "--device cpu --model tiny --layers 4 --lengths 24,40 --slow-lengths 40 --equal-lengths 24,40 --decode-prompt 24 "
    "--decode-tokens 2 --slow-decode-tokens 1 --repeats 2 --slow-repeats 1 --warmups 1 --threads 1"
)
SMALL = OPTIONS.split()

Json = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, str]:
    """One run in a process of its own, through the command line: what it wrote and what it printed."""
    out = tmp_path_factory.mktemp("bench") / "sub" / "bench.json"
    command = [sys.executable, str(SCRIPT), *SMALL, "--arms", ",".join(ARMS), "--out", str(out)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of the benchmark."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module


def test_everything_is_written(run: tuple[Json, str]) -> None:
    results, _ = run
    assert results["schema"] == 1
    assert {"date", "command", "elapsed_seconds", "settings", "needed"} <= results.keys()
    assert {"name", "cpus", "ram_bytes", "python", "torch", "transformers", "accelerate", "hf_prefetch"} <= results[
        "machine"
    ].keys()
    assert results["model"]["banks"] == 4
    assert results["model"]["bank_bytes"] == 4 * results["model"]["largest_bank_bytes"]
    assert len(results["link"]["start"]) == len(results["link"]["end"]) == 10
    limit = results["model"]["bank_bytes"] / results["link"]["gb_per_s"] / 1e9
    assert results["link"]["limit_seconds"] == pytest.approx(limit)
    assert list(results["arms"]) == ARMS
    assert "/" not in results["command"], "a published file has no paths of the machine in it"


def test_every_arm_is_measured_and_equal(run: tuple[Json, str]) -> None:
    results, _ = run
    for name in ARMS:
        arm = results["arms"][name]
        if name == "broken":
            continue
        assert arm["status"] == "ok"
        assert arm["weights_unchanged"]
        assert arm["tokens_equal"]
        keys = {"40", "decode"} if name == "accelerate" else {"24", "40", "decode"}
        assert set(arm["points"]) == set(arm["equality"]) == keys
        for key, point in arm["points"].items():
            assert min(point["seconds"]) > 0
            assert point["min"] <= point["median"] <= point["max"]
            repeats = {"accelerate": 1}.get(name, 2)
            assert len(point["seconds"]) == repeats
            if name != "resident":
                assert point["ratio"] == pytest.approx(point["median"] / point["lim"])
                if key != "decode":
                    assert point["moved_bytes"] == results["model"]["bank_bytes"]
        for equality in arm["equality"].values():
            assert equality["calls"] == equality["inputs_equal"] == equality["outputs_equal"] > 0
            assert equality["experts_equal"]
            assert equality["logits_equal"]
            assert equality["replayed"] == 0


def test_the_packages_own_arms_are_checked(run: tuple[Json, str]) -> None:
    results, _ = run
    for slots in (2, 3):
        arm = results["arms"][f"prefetch-{slots}"]
        assert arm["enter"]["slots"] == arm["report"]["slots"] == slots
        assert arm["enter"]["gb_per_s"] > 0
        assert arm["points"]["40"]["counters"]["lookahead_calls"] == 4
    names = {check["name"] for check in results["checks"] if check["arm"] == "prefetch-3"}
    assert {"speed-up over accelerate", "time / pinned-serial", "enabling, GB/s", "every experts module equal"} <= names
    timed = [check for check in results["checks"] if check["relation"] != "is"]
    assert all(check["pass"] is None for check in timed), "the stand-in's times mean nothing"


def test_a_broken_arm_is_reported_and_the_others_go_on(run: tuple[Json, str]) -> None:
    results, printed = run
    assert results["arms"]["broken"]["status"] == "failed"
    assert "on purpose" in results["arms"]["broken"]["error"]
    failed = [check for check in results["checks"] if check["pass"] is False]
    assert [(check["name"], check["arm"]) for check in failed] == [("arm finished", "broken")]
    assert "RuntimeError: this arm fails on purpose" in printed


def test_the_table_is_short(run: tuple[Json, str]) -> None:
    _, printed = run
    lines = printed.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 128
    assert any(line.startswith("PASS every experts module equal ") for line in lines)


def test_show_prints_the_same_table(
    run: tuple[Json, str], scripts: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, printed = run
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps(results))
    scripts("bench").main(["--show", str(file)])
    assert capsys.readouterr().out == printed


def test_wrong_bytes_are_found(scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One weight of one module is off by a bit while the arm lasts; in the other arm it stays so."""
    bench, arms = scripts("bench"), scripts("bench_arms")

    class Wrong(arms.Arm):  # type: ignore[name-defined, misc]
        def enter(self) -> Json:
            self.module = list(self.subject.experts.values())[1]
            self.flip()
            return {}

        def flip(self) -> None:
            with torch.no_grad():
                self.module.down_proj.data.view(torch.int16)[:, 3, 5] ^= 64

        def leave(self) -> None:
            if self.name == "wrong":
                self.flip()

    monkeypatch.setitem(arms._ARMS, "wrong", Wrong)
    monkeypatch.setitem(arms._ARMS, "spoiling", Wrong)
    out = tmp_path / "bench.json"
    bench.main([*SMALL, "--arms", "wrong,resident,spoiling", "--decode-tokens", "0", "--out", str(out)])
    results = json.loads(out.read_text())
    assert list(results["arms"]) == ["resident", "wrong", "spoiling"]
    wrong = results["arms"]["wrong"]["equality"]["40"]
    assert not wrong["experts_equal"]
    assert wrong["first_difference"] == "model.layers.1.mlp.experts"
    assert wrong["outputs_equal"] == wrong["calls"] - 1, (
        "the modules after it are compared on the inputs that they should have had"
    )
    assert wrong["replayed"] == 2
    assert [results["arms"][name]["weights_unchanged"] for name in results["arms"]] == [True, True, False]
    failed = {(check["name"], check["arm"]) for check in results["checks"] if check["pass"] is False}
    assert ("every experts module equal", "wrong") in failed
    assert ("weights the same after the arm", "spoiling") in failed


def test_an_error_at_one_length_leaves_the_others(
    scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench, bench_run = scripts("bench"), scripts("bench_run")
    whole = bench_run.Bench.prefill

    def prefill(self: Any, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 40:
            raise torch.OutOfMemoryError("40 tokens do not fit")
        return whole(self, ids)

    monkeypatch.setattr(bench_run.Bench, "prefill", prefill)
    out = tmp_path / "bench.json"
    bench.main([*SMALL, "--arms", "resident,prefetch-3", "--decode-tokens", "0", "--out", str(out)])
    arms = json.loads(out.read_text())["arms"]
    assert "40 tokens do not fit" in arms["resident"]["points"]["40"]["error"]
    assert arms["prefetch-3"]["points"]["40"]["error"] == "skipped: the resident arm failed here"
    assert all(arm["status"] == "ok" and arm["equality"]["24"]["experts_equal"] for arm in arms.values())


def measured(seconds: float, **more: Any) -> Json:
    return {"tokens": 8192, "seconds": [seconds] * 5, "peak_bytes": None, "moved_bytes": None} | more


def results_of(prefetch: Json, device: str = "cuda") -> Json:
    """A run of 16 banks of 1 GB over a link of 50 GB/s, as `derive` gets it."""
    gigabyte = 10**9
    arms = {
        "resident": measured(0.1, peak_bytes=20 * gigabyte),
        "accelerate": measured(2.4),
        "pinned-serial": measured(0.42),
        "prefetch-3": prefetch,
    }
    return {
        "machine": {"device": device},
        "model": {"bank_bytes": 16 * gigabyte, "largest_bank_bytes": gigabyte},
        "link": {"bytes": gigabyte, "start": [0.02] * 10, "end": [0.021] * 10},
        "needed": {},
        "arms": {
            name: {
                "status": "ok",
                "looks_ahead": name == "prefetch-3",
                "enter": {"slots": 3, "gb_per_s": 12.0, "experts_host_bytes": {"after": 16 * gigabyte, "peak": 17 * gigabyte}},
                "points": {"8192": point},
                "equality": {},
                "report": {"fallbacks": 0},
            }
            for name, point in arms.items()
        },
    }


@pytest.mark.parametrize(
    ("prefetch", "failing"),
    [
        (measured(0.345, peak_bytes=7 * 10**9, moved_bytes=16 * 10**9), set()),
        (measured(0.350), {"prefill / lim"}),
        (measured(0.430), {"prefill / lim", "speed-up over accelerate", "time / pinned-serial"}),
        (measured(0.340, peak_bytes=7 * 10**9 + 65 * 2**20), {"device memory beyond the slots, MiB"}),
        (measured(0.340, moved_bytes=17 * 10**9), {"bytes moved / bytes of the banks"}),
    ],
)
def test_the_contract_is_held_against_the_numbers(
    scripts: Callable[[str], ModuleType], prefetch: Json, failing: set[str]
) -> None:
    results = scripts("bench_report").derive(results_of(prefetch))
    assert results["link"]["gb_per_s"] == pytest.approx(50)
    assert results["arms"]["prefetch-3"]["points"]["8192"]["lim"] == pytest.approx(16 / 50 + 1 / 50)
    failed = {check["name"] for check in results["checks"] if check["pass"] is False}
    assert failed == failing | {"host RAM while enabling / banks"}
    again = json.loads(json.dumps(results))
    assert scripts("bench_report").derive(again) == results


@pytest.mark.parametrize(
    "arguments", ["--arms nothing", "--arms resident,resident", "--lengths 0", "--repeats 0", "--lengths x"]
)
def test_what_cannot_work_is_refused_at_once(
    scripts: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    with pytest.raises(SystemExit):
        scripts("bench").main(arguments.split())
    assert "error:" in capsys.readouterr().err
