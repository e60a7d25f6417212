"""The profile of a step of decode, on the CPU stand-in."""

from __future__ import annotations

import pytest

import profile_step
from columns import columns

STEPS, LAYERS = 4, 3


@pytest.fixture(scope="module")
def profile() -> profile_step.Profile:
    sizes = ["--rows", "4", "--steps", str(STEPS), "--layers", str(LAYERS), "--most", "200"]
    return profile_step.main(["--model", "tiny", "--device", "cpu", *sizes])


def test_each_arm_is_taken_apart(profile: profile_step.Profile) -> None:
    """Every layer's call of each step is counted, and takes time."""
    assert list(profile.found) == ["resident", "no cache", "4 rows"]
    for name, (seconds, python, torch) in profile.found.items():
        assert seconds > 0
        acquired = [calls for part, (calls, _) in python.items() if part.endswith(" acquire")]
        assert acquired == ([] if name == "resident" else [STEPS * LAYERS])
        assert torch["aten::linear"][0] >= STEPS * LAYERS
        assert sum(own for _, own in python.values()) > 0


def test_what_is_shown_is_beyond_the_resident_model(profile: profile_step.Profile) -> None:
    """Operators that both run as often are not there, those that only one runs are, with as many calls a layer."""
    text = profile.text()
    assert "4 rows, torch: what it does beyond resident" in text
    (line,) = [line for line in text.splitlines() if line.split("  ")[0].endswith(" acquire")][:1]
    assert line.split()[-2] == "1.00"


def test_differences() -> None:
    parts, resident = {"a": (4, 2e-6), "b": (2, 1e-6), "c": (8, 9e-6)}, {"a": (4, 3e-6), "b": (2, 1e-6), "c": (4, 1e-6)}
    assert profile_step.difference(parts, resident, 4) == [("c", 1.0, 2.0)]
    assert profile_step.difference(resident, {}, 1)[0] == ("a", 4.0, 3.0)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert columns(["a", "bb"], [["ccc", "d"]]) == ["a    bb", "ccc  d "]
