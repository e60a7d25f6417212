"""Undo: the way back from what was done step by step, which neither an error nor an interrupt cuts short."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Undo"]


class Undo:
    """Steps back, each added before what it undoes is done.

    Steps are idempotent: one may run although what it undoes was not done, and one that is interrupted runs again.

    Attributes:
        modules: whose weights and hooks the steps change, so that nobody may be inside them.
    """

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self._steps: list[Callable[[], object]] = []

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to take back, or not any more."""
        return not self._steps

    def add(self, step: Callable[..., object], *arguments: Any) -> None:
        """Add a step, to be taken before those that were added earlier."""
        self._steps.append(functools.partial(step, *arguments))

    def add_below(self, step: Callable[..., object], *arguments: Any) -> None:
        """Add a step, to be taken after all that were added so far but the first."""
        self._steps.insert(1, functools.partial(step, *arguments))

    def run(self) -> None:
        """Take all steps back, the last one first. The first error or interrupt of any of them is raised at the end.

        Steps that raise an error don't keep others from being taken. They, and the one that was added first, are left for the
        next time.
        """
        first: BaseException | None = None
        failed: list[Callable[[], object]] = []
        while self._steps and not (failed and len(self._steps) == 1):
            try:
                self._steps[-1]()
                self._steps.pop()
            except BaseException as error:  # noqa: BLE001, PERF203 - it is raised below
                if first is not None or isinstance(error, Exception):
                    failed.append(self._steps.pop())
                first = first or error
        self._steps.extend(reversed(failed))
        try:
            if first is not None:
                raise first
        finally:
            del first  # or the error would keep this frame, and this frame the error
