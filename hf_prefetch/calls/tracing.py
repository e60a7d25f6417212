"""How a hooked forward looks to torch.compile: one operator where a call is the usual one, else a break of the graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..discovery import implementation_of
from ..ops import register

if TYPE_CHECKING:
    from ..hooks import ExpertPrefetchHook

__all__ = ["opaque", "traceable"]

_WHY_UNTRACED = (
    "prefetched experts enter compiled code as one operator only in calls without gradients (use torch.no_grad()), with hidden "
    "states, expert ids and weights as positional arguments"
)
_EVAL_FRAME = "torch._C._dynamo.eval_frame"


def traceable(hook: ExpertPrefetchHook, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that takes the original's place. In compiled code it is one operator, see `ops`."""
    run = functools.wraps(original)(functools.partial(hook.run, module, original))
    untraced, device = opaque(run), hook.device
    compiled = _Compiled(hook, run)
    number = register(compiled)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Only Dynamo: torch.export without it gets past here, and is refused with the weights' check.
        if torch.compiler.is_dynamo_compiling() and _fits_operator(args, kwargs, device):
            implementation = str(implementation_of(module))
            autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
            return torch.ops.hf_prefetch.experts(*args, number, implementation, autocast)
        return untraced(*args, **kwargs)

    # The table of operators holds it weakly.
    forward._hf_prefetch_compiled = compiled  # type: ignore[attr-defined]
    return forward


class _Compiled:
    """What the operator runs."""

    def __init__(self, hook: ExpertPrefetchHook, run: Callable[..., Any]) -> None:
        self.scheduler = hook.scheduler
        self._run = run

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with self.scheduler.in_compiled_code():
            return self._run(hidden, ids, weights)  # type: ignore[no-any-return]


def _fits_operator(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether a call is the usual one: hidden states, ids and weights, without gradients. Others break the graph."""
    if len(args) != 3 or kwargs or torch.is_grad_enabled():
        return False
    return all(isinstance(value, torch.Tensor) and value.device == device for value in args)


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from tracing the hook: it must run at each call, and host weights must not enter a compiled graph.

    Importing Dynamo only to tell it so would take seconds; nothing is traced before somebody else has imported it.
    """

    untraced: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_dynamo_at_work():
            return function(*args, **kwargs)
        if not untraced:
            untraced.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return untraced[0](*args, **kwargs)

    # A traced caller stops here; what is below must not be traced as a function of its own either, hence the above.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = _WHY_UNTRACED  # type: ignore[attr-defined]
    return call


def _is_dynamo_at_work() -> bool:
    """Whether what is called now would be looked at by Dynamo. Telling it not to takes a tenth of a millisecond."""
    if "torch._dynamo" not in sys.modules:
        return False
    callback: Callable[[], object] | None = getattr(sys.modules.get(_EVAL_FRAME), "get_eval_frame_callback", None)
    # None and False: nothing is traced, or nothing any more.
    return callback is None or callback() not in (None, False)
