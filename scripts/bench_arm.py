"""An arm of the benchmark: one way in which a model's experts can reach the device that computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, ClassVar, Literal

from bench_models import Subject

__all__ = ["Arm", "Rank"]

Rank = Literal["main", "share", "side", "slow"]


class Arm(ABC):
    """One way to run the model: a context manager around the same model object.

    `enter` finds the experts in their home, prepares the model and returns what that cost. `leave` undoes it and may leave
    the experts wherever they are; afterwards they are moved home.

    Attributes:
        name: what tables call it.
        rank: how much of it is measured. "main": everything; "share", "side" and "slow" have prompt lengths of their own.
        looks_ahead: it is the package's own, so the contract's bounds are checked.
        decodes: it is timed and compared in generations too.
    """

    rank: Rank = "main"
    looks_ahead: ClassVar[bool] = False
    decodes: bool = True

    def __init__(self, name: str, subject: Subject) -> None:
        self.name = name
        self.subject = subject
        self.entered: dict[str, Any] = {}

    def missing(self) -> str | None:
        """What has to be installed first, if anything."""
        return None

    @abstractmethod
    def enter(self) -> dict[str, Any]:
        """Prepare the model. Returns what there is to say about that."""

    @abstractmethod
    def leave(self) -> None:
        """Undo `enter`, also after it failed half-way: no hook of this arm is left, and the model has its own weights."""

    def relax(self) -> None:
        """The timed passes are over: lift what was a condition for them only."""
        self.subject.tidy()

    def moved(self) -> int | None:
        """Bytes of experts sent to the device since `enter`, or None where nobody counts."""
        return None

    def report(self) -> dict[str, Any]:
        """What the arm itself has counted since `enter`."""
        return {}

    def __enter__(self) -> Arm:
        try:
            self.entered = self.enter()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()
        self.subject.tidy()
        self.subject.place_experts(self.subject.home)
