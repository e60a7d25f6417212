"""The benchmark's arithmetic: limits, and checks of given numbers against the contract."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

Json = dict[str, Any]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of the benchmark."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


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
    assert failed == failing
    again = json.loads(json.dumps(results))
    assert scripts("bench_report").derive(again) == results


def test_a_missed_aim_is_no_failure_and_is_not_hidden(scripts: Callable[[str], ModuleType]) -> None:
    results = results_of(measured(0.345))
    results["arms"]["prefetch-3"]["enter"]["gb_per_s"] = 3.5
    checks = scripts("bench_report").derive(results)["checks"]
    assert [(check["name"], check["aim"]) for check in checks if check["pass"] is False] == [("enabling, GB/s", True)]
    lines = scripts("bench_table").table(results | described()).splitlines()
    assert any(line.startswith("MISSED enabling, GB/s ") and ">= 10" in line for line in lines)
    assert " 0 failed, 1 missed an aim" in lines[-2]
    assert lines[-1] == "not reached: enabling, GB/s"


def described() -> Json:
    """What the table says about the run."""
    versions = dict.fromkeys(["hf_prefetch", "torch", "transformers", "accelerate", "python"], "1")
    model = {"name": "m", "layers": 16, "banks": 16, "bank_bytes": 16 * 10**9, "largest_bank_bytes": 10**9}
    return {"machine": {"name": "GPU", "device": "cuda"} | versions, "model": model, "date": "today"}


def test_host_memory_may_hold_one_bank_twice_and_no_more(scripts: Callable[[str], ModuleType]) -> None:
    for peak, passes in ((17.7e9, True), (17.9e9, False)):
        results = results_of(measured(0.345))
        results["arms"]["prefetch-3"]["enter"]["experts_host_bytes"]["peak"] = peak
        checks = scripts("bench_report").derive(results)["checks"]
        assert [check["pass"] for check in checks if check["name"] == "host RAM while enabling / banks"] == [passes]


@pytest.mark.parametrize(
    ("banks", "seconds", "passes"), [(0, 0.104, True), (0, 0.106, False), (4, 0.162, True), (4, 0.164, False), (8, 0.220, True)]
)
def test_the_time_of_a_share_is_held_against_its_bytes(
    scripts: Callable[[str], ModuleType], banks: int, seconds: float, passes: bool
) -> None:
    """A resident pass takes 0.1 s, a bank 0.02 s."""
    results = results_of(measured(seconds, moved_bytes=banks * 10**9))
    share = {"share": banks / 16, "host_banks": list(range(banks)), "host_bank_bytes": banks * 10**9, "held_before_bytes": 0}
    results["arms"]["prefetch-3"]["enter"] |= share | {"experts_host_bytes": None}
    checks = scripts("bench_report").derive(results)["checks"]
    point = results["arms"]["prefetch-3"]["points"]["8192"]
    assert point["lim"] == pytest.approx(max(0.1, banks * 0.02) + (0.02 if banks else 0))
    found = {check["name"]: check["pass"] for check in checks if check["arm"] == "prefetch-3"}
    assert found.pop("time / in proportion to the bytes in host memory") is passes
    assert set(found) == {"arm finished", "bytes moved / bytes of the banks", "no fallbacks"}
    assert all(found.values())


@pytest.mark.parametrize(("reserved", "passes"), [(23.9, True), (24.1, False)])
def test_a_cap_is_held_against_what_was_reserved(scripts: Callable[[str], ModuleType], reserved: float, passes: bool) -> None:
    results = results_of(measured(0.345, reserved_bytes=reserved * 2**30))
    results["arms"]["prefetch-3"]["enter"] |= {"cap_bytes": 24 * 2**30, "reserved_bytes": 20 * 2**30}
    results["arms"]["prefetch-3"]["points"]["decode"] = {"tokens": 8192, "error": "OutOfMemoryError"}
    checks = scripts("bench_report").derive(results)["checks"]
    ran = {check["at"]: check["pass"] for check in checks if check["name"] == "ran within the cap"}
    assert ran == {"8192": True, "decode": False}
    assert [check["pass"] for check in checks if check["name"].startswith("reserved on the device")] == [passes]


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({}, set()),
        ({"8192": 0.26}, {"packed, prefill / all weights over the link"}),
        ({"32768": 0.561}, {"packed, prefill / raw where it computes longer"}),
        ({"seconds": 3.1}, {"packed, enabling / enabling raw"}),
        ({"after": 13 * 10**9}, {"packed, host RAM after enabling / raw weights", "host RAM after enabling / banks"}),
        ({"unpack": 0.0013}, {"packed, unpacking a bank / its copy"}),
    ],
)
def test_what_a_packed_arm_has_to_come_to(
    scripts: Callable[[str], ModuleType], changed: dict[str, float], failing: set[str]
) -> None:
    """A link that takes 0.32 s for everything. A prompt that computes for longer than that is no slower than raw."""
    results, gigabyte = results_of(measured(0.345)), 10**9
    of = {"8192": 0.25, "32768": 0.56, "seconds": 2.9, "after": 12 * gigabyte, "unpack": 0.0012} | changed
    arms = results["arms"]
    arms["resident"]["points"]["32768"] = measured(0.55)
    arms["prefetch-3"]["points"]["32768"] = measured(0.56)
    arms["prefetch-3"]["enter"]["seconds"] = 2.0
    arms["prefetch-3+pack"] = arms["prefetch-3"] | {
        "points": {length: measured(of[length]) for length in ("8192", "32768")},
        "enter": {
            "slots": 3,
            "seconds": of["seconds"],
            "host_bank_bytes": 12 * gigabyte,
            "host_weight_bytes": 16 * gigabyte,
            "held_before_bytes": 16 * gigabyte,
            "experts_host_bytes": {"after": of["after"], "peak": 16 * gigabyte},
            "unpacking": {"copy": [0.016, 0.0155], "unpack": [of["unpack"], 0.002]},
        },
    }
    results = scripts("bench_report").derive(results)
    checks = [check for check in results["checks"] if check["arm"] == "prefetch-3+pack"]
    assert {check["name"] for check in checks if check["pass"] is False} == failing
    packed = [check for check in checks if check["name"].startswith("packed, ")]
    assert {check["name"] for check in packed} == set(scripts("bench_packed").PACKED)
    lines = scripts("bench_table").table(results | described()).splitlines()
    for check in packed:
        verdict = "FAIL" if check["name"] in failing else "PASS"
        assert any(line.startswith(f"{verdict}   {check['name']} ") and "<=" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("prefetch-2", (2, None, None)),
        ("prefetch-3@0%", (3, 0.0, None)),
        ("prefetch-4@12.5%", (4, 12.5, None)),
        ("prefetch-3@20GiB", (3, None, "20GiB")),
        ("prefetch-3+pack", (3, None, None)),
        ("prefetch-4+pack@50%", (4, 50.0, None)),
        ("prefetch-3@101%", None),
        ("prefetch-5", None),
        ("prefetch-3@20", None),
    ],
)
def test_an_arms_name_says_what_it_does(
    scripts: Callable[[str], ModuleType], name: str, way: tuple[int, float | None, str | None] | None
) -> None:
    found = scripts("bench_prefetch").Way.named(name)
    assert (found and (found.slots, found.share, found.budget)) == way
    assert found is None or found.pack == ("+pack" in name)
