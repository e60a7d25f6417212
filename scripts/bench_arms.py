"""The arms of the benchmark by name."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from bench_arm import Arm
from bench_models import Subject
from bench_others import Accelerate, Diffusers, DiffusersWhole, PinnedSerial
from bench_prefetch import Prefetch, Way

__all__ = ["check_names", "make_arm"]


class Resident(Arm):
    """Everything on the device: what the others are compared with."""

    def enter(self) -> dict[str, Any]:
        self.subject.place_experts(self.subject.device)
        return {}

    def leave(self) -> None:
        """Nothing to undo."""

    def moved(self) -> int:
        return 0


class Broken(Arm):
    """An arm that fails, for testing the benchmark itself."""

    def enter(self) -> dict[str, Any]:
        raise RuntimeError("this arm fails on purpose")

    def leave(self) -> None:
        """Nothing to undo."""


_ARMS: dict[str, type[Arm]] = {
    "resident": Resident,
    "pinned-serial": PinnedSerial,
    "accelerate": Accelerate,
    "diffusers": Diffusers,
    "diffusers-whole": DiffusersWhole,
    "broken": Broken,
}


def check_names(names: list[str]) -> list[str]:
    """Sort the resident arm to the front: the others are compared with it.

    Raises:
        ValueError: an arm of this name doesn't exist, or is named twice.
    """
    for name in names:
        if name not in _ARMS and Way.named(name) is None:
            known = ", ".join(known for known in _ARMS if known != "broken")
            own = (
                "prefetch-2 to prefetch-4, packed, with a share in host memory, or a budget: prefetch-3+pack, -3@25%, -3@20GiB"
            )
            raise ValueError(f"there is no arm {name!r}; there are {known}, {own}")
    if len(set(names)) != len(names):
        raise ValueError(f"an arm is named twice: {', '.join(names)}")
    return sorted(names, key=lambda name: name != "resident")


def make_arm(name: str, subject: Subject, options: Namespace) -> Arm:
    """The arm of this name, not entered yet."""
    way = Way.named(name)
    if way is not None:
        return Prefetch(name, subject, way, start=options.prefetch_from, cap=options.cap)
    return _ARMS[name](name, subject)
