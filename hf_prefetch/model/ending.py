"""What is left to do when a model that was never disabled is gone, or the interpreter exits.

[Note: garbage collections come at any time]
A model is part of reference cycles, so it is the garbage collector who finds that it is gone, in the middle of whatever runs
then. Where that is the capture of a CUDA graph, waiting for the device would make the capture fail. So the end is put off, and
looked at again when the next collection is over.
"""

from __future__ import annotations

import _thread
import gc
import os
import threading
import weakref
from typing import Any

from torch import nn

from ..scheduling.scheduler import PrefetchScheduler

__all__ = ["end_with"]

# Seconds that an exiting interpreter waits for a thread that is inside an experts module.
_PATIENCE = 5.0
# Seconds after which a finalizer is surely over.
_MOMENT = 0.05


def end_with(model: nn.Module, scheduler: PrefetchScheduler) -> weakref.finalize[..., Any]:
    """Have a scheduler give back what it holds once its model is gone, or the interpreter exits."""
    return _Ending(model, scheduler)


class _Ending(weakref.finalize):  # type: ignore[type-arg] # when it runs it takes none
    """A finalizer in front of another that does the same, which is no harm.

    A Ctrl-C that comes during a garbage collection is raised where the next Python function begins. That is often the
    finalizer, before it has done anything, and Python only prints it. The other one is not hit by the same Ctrl-C.
    """

    __slots__ = ("_other",)

    def __init__(self, model: nn.Module, scheduler: PrefetchScheduler) -> None:
        arguments = scheduler, weakref.ref(model), os.getpid()
        self._other = weakref.finalize(model, _end, *arguments)
        self._other.atexit = False
        super().__init__(model, _end, *arguments)

    def detach(self) -> Any:
        """Neither of them has anything to do any more."""
        self._other.detach()
        return super().detach()


def _end(scheduler: PrefetchScheduler, model: weakref.ref[nn.Module], owner: int) -> None:
    """Give memory back, unless this is a fork of the process that took it."""
    if os.getpid() != owner:
        return
    # If the model is still there, the interpreter exits, and threads may be at work that nobody waits for: they stop
    # at the lock, which nobody gives back. One that doesn't get there soon keeps its slots: the system takes them.
    exits = model() is not None
    if exits:
        if scheduler.lock.acquire(timeout=_PATIENCE):
            scheduler.close()
    elif scheduler.runs_here():
        # A collection that came in one of the scheduler's own threads, which would wait for itself.
        threading.Thread(target=_close, args=(scheduler,), daemon=True).start()
    elif scheduler.is_capturing():
        _Later.close(scheduler)
    else:
        _close(scheduler)


def _close(scheduler: PrefetchScheduler) -> None:
    """Close it to the end. Nobody above a finalizer sees a Ctrl-C that comes in it: it comes again when that is over."""
    try:
        scheduler.close()
    except KeyboardInterrupt:
        scheduler.close()
        again = threading.Timer(_MOMENT, _thread.interrupt_main)
        again.daemon = True
        again.start()


class _Later:
    """Closes a scheduler when a collection is over and no graph is captured there; see the note above."""

    def __init__(self, scheduler: PrefetchScheduler) -> None:
        self._scheduler = scheduler

    @classmethod
    def close(cls, scheduler: PrefetchScheduler) -> None:
        """Close it then. Idempotent."""
        if not any(isinstance(later, cls) and later._scheduler is scheduler for later in gc.callbacks):
            gc.callbacks.append(cls(scheduler))

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and not self._scheduler.is_capturing():
            gc.callbacks.remove(self)
            _close(self._scheduler)
