"""Exactness: what goes into and comes out of every experts module, kept on the device and compared bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from bench_models import Subject

__all__ = ["Call", "Pass", "equality", "needed", "record"]


@dataclass(frozen=True)
class Call:
    """One call of an experts module: where, by which implementation, with which tensors, and what came out."""

    name: str
    implementation: str | None
    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor

    def to(self, device: torch.device) -> Call:
        """The same on another device."""
        inputs = tuple(tensor.to(device) for tensor in self.inputs)
        return Call(self.name, self.implementation, inputs, self.output.to(device))


@dataclass(frozen=True)
class Pass:
    """What one forward, or one generation, did at every experts module, and its logits at the end."""

    calls: tuple[Call, ...]
    logits: torch.Tensor

    def to(self, device: torch.device) -> Pass:
        """The same on another device."""
        return Pass(tuple(call.to(device) for call in self.calls), self.logits.to(device))


class Recorder:
    """Keeps copies of what goes into and comes out of every experts module.

    The copies stay on the device: a host that waited for each of them would hide missing waits between streams.
    """

    def __init__(self, subject: Subject) -> None:
        self.calls: list[Call] = []
        self._subject = subject
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        for name, module in self._subject.experts.items():
            self._handles.append(module.register_forward_hook(functools.partial(self._keep, name)))
        return self

    def _keep(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inputs = tuple(value.clone() for value in args if isinstance(value, torch.Tensor))
        # `generate` switches to another implementation for decode, and each has its own last bits.
        implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        self.calls.append(Call(name, implementation, inputs, output.clone()))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._handles:
            self._handles.pop().remove()


def record(subject: Subject, work: Callable[[], torch.Tensor]) -> Pass:
    """Run something that ends in logits, and keep what every experts module did."""
    with Recorder(subject) as recorder:
        logits = work()
    return Pass(tuple(recorder.calls), logits)


@torch.no_grad()
def equality(subject: Subject, reference: Pass, observed: Pass) -> dict[str, Any]:
    """Compare two passes call by call. Where inputs differ already (attention may), the module is run on the others."""
    same_calls = [call.name for call in reference.calls] == [call.name for call in observed.calls]
    inputs, outputs, replayed, first = 0, 0, 0, None if same_calls else "the calls"
    other: dict[str, Any] | None = None
    for there, here in zip(reference.calls, observed.calls, strict=False):
        expected = there.to(subject.device)
        same_inputs = len(expected.inputs) == len(here.inputs) and all(map(torch.equal, expected.inputs, here.inputs))
        output = here.output
        if not same_inputs:
            other = other or _difference(expected, here)
            output = _run(subject, expected)
            replayed += 1
        same_output = torch.equal(expected.output, output)
        inputs, outputs = inputs + same_inputs, outputs + same_output
        if not same_output and first is None:
            first = there.name
    return {
        "calls": len(reference.calls),
        "inputs_equal": inputs,
        "outputs_equal": outputs,
        "replayed": replayed,
        "experts_equal": first is None,
        "first_difference": first,
        "first_other_inputs": other,
        "logits_equal": torch.equal(reference.logits.to(subject.device), observed.logits),
    }


def _difference(expected: Call, observed: Call) -> dict[str, Any]:
    """Which of a call's inputs are others, and how far off: last bits, or something else altogether."""
    pairs = zip(expected.inputs, observed.inputs, strict=False)
    apart = {place: (there, here) for place, (there, here) in enumerate(pairs) if not torch.equal(there, here)}
    most = {
        str(place): float((there.double() - here.double()).abs().max() / there.double().abs().max().clamp(min=1e-30))
        for place, (there, here) in apart.items()
        if there.shape == here.shape
    }
    return {"name": expected.name, "inputs": sorted(apart), "relative": most}


def _run(subject: Subject, call: Call) -> torch.Tensor:
    """Run a module again on the inputs of an earlier call, the way it was run then."""
    usual = subject.model.get_experts_implementation()
    if call.implementation is not None:
        subject.model.set_experts_implementation(call.implementation)
    try:
        output: torch.Tensor = subject.experts[call.name](*call.inputs)
        return output
    finally:
        subject.model.set_experts_implementation(usual)


def needed(subject: Subject, reference: Pass, *, decode: bool) -> dict[str, Any]:
    """What a pass cannot do without: the rows of the experts that it routes to. In a generation: per decoded token."""
    calls = reference.calls
    if decode:
        calls = tuple(call for call in calls if call.inputs[0].shape[0] == 1)
    rows, banks = 0, subject.bank_bytes
    bytes_of_rows = dict.fromkeys(banks, 0)
    for call in calls:
        ids = next((tensor for tensor in call.inputs if not tensor.is_floating_point()), None)
        if ids is not None:
            distinct = int(torch.bincount(ids.flatten()).count_nonzero())
            rows += distinct
            bytes_of_rows[call.name] += distinct * banks[call.name] // subject.num_experts
    steps = len(calls) / len(banks) if decode else 1
    return {
        "distinct_rows": rows / steps,
        "rows_bytes": sum(bytes_of_rows.values()) / steps,
        "rows_bytes_of_banks": [nbytes / steps for nbytes in bytes_of_rows.values()],
    }
