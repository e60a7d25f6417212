"""The benchmark on the CPU stand-in: what it writes, that it finds wrong bytes, and that a failing arm stops nobody."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "bench.py"
ARMS = [
    "resident",
    "broken",
    "prefetch-3@0%",
    "prefetch-3@50%",
    "prefetch-3",
    "prefetch-2@860KiB",
    "pinned-serial",
    "diffusers",
    "accelerate",
]
OPTIONS = (
    "--device cpu --model tiny --layers 4 --lengths 24,40 --side-lengths 40 --share-lengths 40 --slow-lengths 40 "
    "--equal-lengths 24,40 --decode-prompt 24 --decode-tokens 2 --side-decode-tokens 1 --slow-decode-tokens 1 --repeats 2 "
    "--side-repeats 1 --slow-repeats 1 --warmups 1 --threads 1"
)
SMALL = OPTIONS.split()
# Banks of an arm that are in host memory; all four where nothing is said.
ON_HOST = {"prefetch-3@0%": 0, "prefetch-3@50%": 2, "prefetch-2@860KiB": 3}

Json = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, str]:
    """One run in a process of its own, through the command line: what it wrote and what it printed."""
    out = tmp_path_factory.mktemp("bench") / "sub" / "bench.json"
    command = [sys.executable, str(SCRIPT), *SMALL, "--arms", ",".join(ARMS), "--cap", "2MiB", "--out", str(out)]
    (hidden := out.parent.parent / "hidden").mkdir()
    (hidden / "diffusers.py").write_text("raise ImportError('hidden by a test')")
    paths = [str(hidden), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
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
    for name in set(ARMS) - {"broken", "diffusers"}:
        arm = results["arms"][name]
        assert arm["status"] == "ok"
        assert arm["weights_unchanged"]
        assert arm["tokens_equal"]
        main = name in ("resident", "prefetch-3", "prefetch-2@860KiB")
        assert set(arm["points"]) == set(arm["equality"]) == ({"24", "40", "decode"} if main else {"40", "decode"})
        for key, point in arm["points"].items():
            assert min(point["seconds"]) > 0
            assert point["min"] <= point["median"] <= point["max"]
            assert len(point["seconds"]) == (2 if main else 1)
            if name != "resident":
                assert point["ratio"] == pytest.approx(point["median"] / point["lim"])
                if key != "decode":
                    assert point["moved_bytes"] == ON_HOST.get(name, 4) * results["model"]["largest_bank_bytes"]
        for equality in arm["equality"].values():
            assert equality["calls"] == equality["inputs_equal"] == equality["outputs_equal"] > 0
            assert equality["experts_equal"]
            assert equality["logits_equal"]
            assert equality["replayed"] == 0


def test_the_packages_own_arms_are_checked(run: tuple[Json, str]) -> None:
    results, _ = run
    for name in ("prefetch-3@0%", "prefetch-3@50%", "prefetch-3", "prefetch-2@860KiB"):
        arm, banks = results["arms"][name], ON_HOST.get(name, 4)
        assert arm["enter"]["slots"] == arm["report"]["slots"] == int(name[9])
        assert len(arm["enter"]["host_banks"]) == arm["report"]["banks"] == banks
        assert arm["enter"]["host_bank_bytes"] == banks * results["model"]["largest_bank_bytes"]
        assert arm["points"]["40"].get("counters", {}).get("lookahead_calls", 0) == banks
        assert arm["points"]["40"]["needed_bytes"] == arm["enter"]["host_bank_bytes"]
    names = {check["name"] for check in results["checks"] if check["arm"] == "prefetch-3"}
    assert {"speed-up over accelerate", "time / pinned-serial", "enabling, GB/s", "every experts module equal"} <= names
    assert "speed-up over accelerate" not in {
        check["name"] for check in results["checks"] if check["arm"] in ("prefetch-3@50%", "prefetch-2@860KiB")
    }
    timed = [check for check in results["checks"] if check["relation"] != "is"]
    assert all(check["pass"] is None for check in timed), "the stand-in's times mean nothing"


def test_an_arm_that_is_not_installed_is_no_failure(run: tuple[Json, str]) -> None:
    results, printed = run
    assert results["arms"]["diffusers"]["status"] == "not installed"
    assert "hidden by a test" in results["arms"]["diffusers"]["error"]
    assert not [check for check in results["checks"] if check["arm"] == "diffusers"]
    assert "diffusers        not installed: " in printed


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
    assert any(line.startswith("PASS   every experts module equal ") for line in lines)


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
    other = wrong["first_other_inputs"]
    assert other["name"] == "model.layers.2.mlp.experts"
    assert 0 in other["inputs"]
    assert 0 < other["relative"]["0"] < 1
    assert [results["arms"][name]["weights_unchanged"] for name in results["arms"]] == [True, True, False]
    failed = {(check["name"], check["arm"]) for check in results["checks"] if check["pass"] is False}
    assert ("every experts module equal", "wrong") in failed
    assert ("weights the same after the arm", "spoiling") in failed


def test_an_error_at_one_length_leaves_the_others(
    scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench, passes = scripts("bench"), scripts("bench_passes")
    whole = passes.Passes.prefill

    def prefill(self: Any, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 40:
            raise torch.OutOfMemoryError("40 tokens do not fit")
        logits: torch.Tensor = whole(self, ids)
        return logits

    monkeypatch.setattr(passes.Passes, "prefill", prefill)
    out = tmp_path / "bench.json"
    bench.main([*SMALL, "--arms", "resident,prefetch-3", "--decode-tokens", "0", "--out", str(out)])
    arms = json.loads(out.read_text())["arms"]
    assert "40 tokens do not fit" in arms["resident"]["points"]["40"]["error"]
    assert arms["prefetch-3"]["points"]["40"]["error"] == "skipped: the resident arm failed here"
    assert all(arm["status"] == "ok" and arm["equality"]["24"]["experts_equal"] for arm in arms.values())


def test_the_demo_model_recalls_in_every_arm(scripts: Callable[[str], ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = "--device cpu --model demo --lengths 24 --equal-lengths 24 --decode-tokens 0 --repeats 1 --warmups 1 --threads 1"
    scripts("bench").main([*options.split(), "--recall-prompts", "1", "--arms", "resident,prefetch-3", "--out", str(out)])
    results = json.loads(out.read_text())
    assert results["model"]["name"] == "demo"
    assert all(arm["recall"]["correct"] == arm["recall"]["total"] == 1 for arm in results["arms"].values())
    names = [check["name"] for check in results["checks"] if check["name"].startswith("recall")]
    assert names == ["recall: 95% answered right"] * 2 + ["recall: the resident arm's answers"]
    _, other = results["arms"].values()
    other["recall"]["answers"] = ["no"]
    other["recall"]["correct"] = 0
    failed = {check["name"] for check in scripts("bench_report").derive(results)["checks"] if check["pass"] is False}
    assert failed == set(names)


def test_a_packed_arm_says_what_unpacking_takes(scripts: Callable[[str], ModuleType]) -> None:
    subject = scripts("bench_models").build("tiny", 2, None, torch.device("cpu"))
    options = Namespace(prefetch_from="host", cap=None)
    with scripts("bench_arms").make_arm("prefetch-3+pack", subject, options) as arm:
        found, weights = arm.entered["unpacking"], max(subject.bank_bytes.values())
        assert found["bytes"] < 0.8 * found["weight_bytes"] == 0.8 * weights
        assert min(found["copy"]) > 0
        assert min(found["unpack"]) > 0
    with scripts("bench_arms").make_arm("prefetch-3", subject, options) as arm:
        assert arm.entered["unpacking"] is None


def test_diffusers_gets_the_experts_and_nothing_else(
    scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hooks lie in the model's forward, and none is left afterwards."""
    passed: list[Any] = []

    def apply_group_offloading(root: torch.nn.Module, **options: Any) -> None:
        passed.extend([list(root.parameters()), options])
        for module in (root, *root.modules()):
            module.__dict__["_diffusers_hook"] = "a registry"
        forward = root.forward

        def counted(*args: Any, **more: Any) -> Any:
            passed.append("forward")
            return forward(*args, **more)

        root.forward = counted

    modules = {name: ModuleType(name) for name in ("diffusers", "diffusers.hooks", "diffusers.hooks.group_offloading")}
    modules["diffusers"].__version__ = "1"  # type: ignore[attr-defined]
    modules["diffusers.hooks"].apply_group_offloading = apply_group_offloading  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    subject = scripts("bench_models").build("tiny", 2, None, torch.device("cpu"))
    before = {module: set(module.__dict__) for module in subject.model.modules()}
    run = scripts("bench_passes").Passes(subject)
    expected = run.prefill(run.prompt(24))
    experts = [parameter for module in subject.experts.values() for parameter in module.parameters()]
    for name, held in (("diffusers", experts), ("diffusers-whole", list(subject.model.parameters()))):
        arm = scripts("bench_arms").make_arm(name, subject, None)
        passed.clear()
        assert arm.missing() is None
        with arm:
            assert torch.equal(run.prefill(run.prompt(24)), expected)
            assert run.generate(run.prompt(24), 2)
        parameters, options, *forwards = passed
        assert {id(parameter) for parameter in parameters} == {id(parameter) for parameter in held}
        assert options["offload_type"] == "leaf_level"
        assert forwards == ["forward"] * 3
        assert arm.moved() == 3 * sum(subject.bank_bytes.values())
        assert {module: set(module.__dict__) for module in subject.model.modules()} == before


@pytest.mark.parametrize(
    "arguments",
    [
        "--arms nothing",
        "--arms resident,resident",
        "--lengths 0",
        "--repeats 0",
        "--lengths x",
        "--cap 24GiB",
        "--cap much --arms prefetch-3@20GiB",
    ],
)
def test_what_cannot_work_is_refused_at_once(
    scripts: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    with pytest.raises(SystemExit):
        scripts("bench").main(arguments.split())
    assert "error:" in capsys.readouterr().err
