"""Beside: work that another thread does meanwhile, one task after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..workers import Workers

__all__ = ["Beside"]


class Beside:
    """Runs tasks beside whatever comes next, inside of `meanwhile`; elsewhere at once.

    Never is there more than one: the next one waits for it, and raises what it has raised.
    """

    def __init__(self) -> None:
        self._worker: Workers | None = None
        self._await_last: Callable[[], None] = _nothing

    def run(self, task: Callable[[], None]) -> None:
        """Once the task before has ended, begin this one."""
        self._wait()
        if self._worker is None:
            task()
        else:
            self._await_last = self._worker.submit(task)

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """At the end of the block all is done, or will never be: no thread runs any more."""
        try:
            with Workers(1) as self._worker:
                yield
                self._wait()
        finally:
            self._worker, self._await_last = None, _nothing

    def _wait(self) -> None:
        wait, self._await_last = self._await_last, _nothing
        wait()


def _nothing() -> None:
    """What there is to wait for if there was no task."""
