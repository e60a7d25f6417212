"""The gate: nobody computes with experts while their weights are moved and their hooks change.

[Note: one state for each call]
A call chooses a forward before it can wait for anybody, and reads its weights one after the other. So weights that change under
it give errors from somewhere inside, or wrong results: a Parameter that is made of another kind of tensor is for a moment of
the new kind with the old content. Therefore

    calls that begin while the gate is closed are refused
    those that are inside already are waited for; the threads' stacks show them, since a module without a hook tells nobody
    those that come from compiled code, which no stack shows, find a hook whose scheduler has ended, if they were slower
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, TypeVar

from torch import nn

__all__ = ["behind_gate", "busy"]

Result = TypeVar("Result")

# Seconds that are waited for calls, and between two looks.
_PATIENCE = 300.0
_PAUSE = 0.001
_CALL = nn.Module._call_impl.__code__


def behind_gate(modules: Collection[nn.Module], work: Callable[[], Result]) -> Result:
    """Do some work while no thread is inside one of these experts modules.

    Raises:
        RuntimeError: another thread is at such work on one of them, or stays inside one.
    """
    if not modules:
        return work()
    gate = _Gate(modules)
    try:
        try:
            gate.close()
            return work()
        finally:
            gate.open()
    finally:
        # Once more, for an interrupt that came in the middle of the one above.
        gate.open()


def busy() -> RuntimeError:
    """What is raised where another thread is faster."""
    return RuntimeError(
        "Another thread is enabling or disabling expert prefetching on this model. Try again when it has finished."
    )


class _Gate:
    def __init__(self, modules: Collection[nn.Module]) -> None:
        self._modules = modules
        self._is_closed = False

    def close(self) -> None:
        with _one_at_a_time:
            if any(isinstance(hook, _Gate) and hook._is_closed for each in self._modules for hook in _hooks(each)):
                raise busy()
            self._is_closed = True
            for module in self._modules:
                module.register_forward_pre_hook(self, prepend=True)
        patience = time.monotonic() + _PATIENCE
        while _is_another_thread_inside({*map(id, self._modules)}):
            if time.monotonic() > patience:
                raise RuntimeError(
                    f"Another thread has been inside the experts for {_PATIENCE:g} seconds, so their weights can't be moved. "
                    "The model is unchanged."
                )
            time.sleep(_PAUSE)

    def open(self) -> None:
        """Let calls through again. Idempotent."""
        self._is_closed = False
        for module in self._modules:
            for key in [key for key, hook in module._forward_pre_hooks.copy().items() if hook is self]:
                module._forward_pre_hooks.pop(key, None)

    def __call__(self, module: nn.Module, args: Any) -> None:
        # A call has looked up its hooks before it comes to them.
        if self._is_closed:
            raise busy()


_one_at_a_time = threading.Lock()


def _hooks(module: nn.Module) -> list[Any]:
    return list(module._forward_pre_hooks.copy().values())


def _is_another_thread_inside(modules: Collection[int]) -> bool:
    """Whether one of these modules, by their ids, is being called."""
    frames = sys._current_frames()
    # A frame that is kept in one of its own variables keeps all that its callers know: a whole model, until the collector runs.
    del frames[threading.get_ident()]
    for frame in frames.values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is _CALL and id(at.f_locals.get("self")) in modules:
                return True
            at = at.f_back
    return False
