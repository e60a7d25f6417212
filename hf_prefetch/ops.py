"""The custom operator that stands for a prefetched experts module in compiled code.

Dynamo must not trace a hook: what it decides has to be decided at each call, and host weights must not enter a compiled region.
In compiled code the module is one opaque operator instead, so that nothing breaks the graph and `fullgraph=True` works. It
finds its module by a number in a table of weak references, the one thing here that is process-wide: it owns nothing.

[Note: what an opaque call depends on]
Compiled code is only used again while everything that was looked at while it was traced is the same. The operator runs
unseen, so what decides about its result is among its arguments: the experts implementation, and autocast, which is off
while compiled code runs.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import NoReturn, Protocol

import torch

from .scheduling.scheduler import PrefetchScheduler

__all__ = ["Runner", "check_not_transformed", "refuse_export", "refuse_trace", "register", "schedulers"]


class Runner(Protocol):
    """What runs an experts module, and the scheduler that it asks."""

    @property
    def scheduler(self) -> PrefetchScheduler: ...

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Hidden states (tokens x hidden) of the experts' weighted outputs."""


_runners: weakref.WeakValueDictionary[int, Runner] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(runner: Runner) -> int:
    """A number by which the operator finds `runner` for as long as that lives. No number is given twice."""
    number = next(_numbers)
    _runners[number] = runner
    return number


def schedulers() -> list[PrefetchScheduler]:
    """The schedulers of all models that are enabled in this process."""
    return list(dict.fromkeys(runner.scheduler for runner in list(_runners.values())))


def refuse_export() -> NoReturn:
    """Say why there is no exported program of a model that is enabled."""
    raise RuntimeError(
        "torch.export can't take prefetched experts along: what it writes could not find them again. Call "
        "disable_expert_prefetch(model) first."
    )


def refuse_trace() -> NoReturn:
    """Say why there is no trace of a model that is enabled."""
    raise RuntimeError(
        "torch.jit.trace, and torch.onnx.export by way of it, can't take prefetched experts along: they would note where these "
        "are during this call. Call disable_expert_prefetch(model) first."
    )


def check_not_transformed() -> None:
    """Say why nothing of torch.func, which takes whole functions of tensors apart, gets through prefetched experts."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() != torch._C._functorch.TransformType.Functionalize:
        raise RuntimeError(
            f"torch.func ({transform.key().name.lower()}) can't get through prefetched experts: their weights are on the device"
            " for the time of a call only. Call disable_expert_prefetch(model) first."
        )


@torch.library.custom_op("hf_prefetch::experts", mutates_args=())
def _experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    number: int,
    implementation: str,
    autocast: torch.dtype | None,
) -> torch.Tensor:
    runner = _runners.get(number)
    if runner is None:
        raise RuntimeError(
            "This compiled code was made while expert prefetching was enabled, and it has been disabled since. Call the model "
            "itself, which compiles anew, or torch.compile it again."
        )
    kind = hidden.device.type
    with torch.autocast(kind, dtype=autocast) if autocast is not None else contextlib.nullcontext():
        output = runner(hidden, ids, weights)
    if output.shape != hidden.shape or output.dtype != hidden.dtype:
        raise RuntimeError(
            f"These experts turn {tuple(hidden.shape)} {hidden.dtype} into {tuple(output.shape)} {output.dtype}; in compiled "
            "code prefetching needs them to keep both. Run this model without torch.compile, or disable prefetching."
        )
    # What is promised below: memory of its own, contiguous.
    return output.clone() if output.data_ptr() == hidden.data_ptr() else output.contiguous()


@_experts.register_fake
def _(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    number: int,
    implementation: str,
    autocast: torch.dtype | None,
) -> torch.Tensor:
    # Asked for here and not where a hook is traced: there, some versions of torch answer that everything is exported.
    if torch.compiler.is_exporting():
        refuse_export()
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)
