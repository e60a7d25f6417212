"""Which modules of a model are expert banks: found by what they hold and how they are called, never by a model's name.

An expert bank is a module that keeps the weights of all its experts stacked in its own parameters (first dimension =
expert) and is called with hidden states, expert ids and routing weights. That is the layout of nearly every
Mixture-of-Experts model in transformers 5: Mixtral, Qwen-MoE, OLMoE, DeepSeek, gpt-oss with its biases and others.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .layout import BankLayout, is_dense

__all__ = ["Discovery", "ExpertBank", "Refusal", "find_banks", "implementation_of", "reads_only_routed_rows", "takes_other_ids"]

_SPARSE = ("eager", "batched_mm", "grouped_mm")


@dataclass(frozen=True, eq=False)
class ExpertBank:
    """The weights of one experts module, or of several modules that share the same Parameters.

    Attributes:
        index: position among the model's banks, in the order of `named_modules`.
        name: path of the first module that holds it.
        holders: every module that holds it, in weak references: whoever keeps a bank must not keep its model.
        parameters: the Parameters that travel, by name. While the bank is prefetched they stay the same objects; what
            they point at is host memory.
        num_experts: rows of each parameter.
        ids_argument: name and position of the expert ids among the arguments of `forward`.
        layout: where each parameter lies in the bank's block of bytes.
    """

    index: int
    name: str
    holders: tuple[weakref.ref[nn.Module], ...]
    parameters: dict[str, nn.Parameter]
    num_experts: int
    ids_argument: tuple[str, int]
    layout: BankLayout

    @property
    def nbytes(self) -> int:
        """Size of the block that travels, in bytes."""
        return self.layout.nbytes

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Every module that holds it and is still there."""
        return tuple(module for holder in self.holders if (module := holder()) is not None)

    def rebind(self) -> None:
        """Look the Parameters up again: accelerate puts new ones in place when it attaches or detaches a hook."""
        self.parameters.update(_stacked_parameters(self.modules[0]))
        for module in self.modules:
            module._parameters.update(self.parameters)

    def ids(self, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor | None:
        """The expert ids of a call (tokens x top-k), or None where the call does not show them."""
        name, position = self.ids_argument
        ids = args[position] if len(args) > position else kwargs.get(name)
        return ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None

    def with_ids(
        self, args: tuple[object, ...], kwargs: dict[str, object], ids: torch.Tensor
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of a call with other expert ids."""
        name, position = self.ids_argument
        if len(args) > position:
            return (*args[:position], ids, *args[position + 1 :]), kwargs
        return args, kwargs | {name: ids}


@dataclass(frozen=True)
class Refusal:
    """A module that looks like experts but can't be prefetched, and why."""

    name: str
    module: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.module}): {self.reason}"


@dataclass(frozen=True)
class Discovery:
    """What a search found."""

    banks: tuple[ExpertBank, ...]
    refusals: tuple[Refusal, ...]


def find_banks(model: nn.Module) -> Discovery:
    """Search a model for expert banks.

    Raises:
        ValueError: there is none. The message says what was found and what would work.
    """
    found: dict[tuple[int, ...], list[tuple[str, nn.Module]]] = {}
    refusals: list[Refusal] = []
    for name, module in model.named_modules():
        stacked = _stacked_parameters(module)
        reason = _why_not(module, stacked)
        if reason is None:
            found.setdefault(tuple(id(parameter) for parameter in stacked.values()), []).append((name, module))
        elif _resembles_experts(name, module, stacked):
            refusals.append(Refusal(name or "(the model itself)", type(module).__name__, reason))
    holders = Counter(parameter for parameters in found for parameter in parameters)
    for parameters in [key for key in found if any(holders[parameter] > 1 for parameter in key)]:
        reason = "it shares some of its weights, but not all, with another experts module"
        refusals += [Refusal(name, type(module).__name__, reason) for name, module in found.pop(parameters)]
    banks = tuple(_bank(index, holders) for index, holders in enumerate(found.values()))
    if not banks:
        raise ValueError(_nothing_found(model, refusals))
    return Discovery(banks, tuple(refusals))


def implementation_of(module: nn.Module) -> str | None:
    """Which of transformers' experts implementations a call of a module takes, if it is one that asks for that."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def reads_only_routed_rows(module: nn.Module, forward: Callable[..., object], implementation: str | None) -> bool:
    """Whether a call of `forward`, the module's own, looks at no other experts than those whose ids it is given.

    transformers' implementations of a decorated experts class do, and which one runs is looked up at each call. Of others,
    a kernel that was put in its place for example, nothing is known.
    """
    own = getattr(forward, "__func__", None) is type(module).forward
    return own and implementation in _SPARSE and "has_gate" in module.__dict__ and "is_transposed" in module.__dict__


def takes_other_ids(module: nn.Module, implementation: str | None) -> bool:
    """Whether a module that reads only routed rows gives the same bits when its experts are numbered otherwise.

    `eager` adds up the experts' outputs in the order of their ids; the others do so in the order in which a token lists them.
    """
    return implementation != "eager" and "num_experts" in module.__dict__


def _bank(index: int, holders: list[tuple[str, nn.Module]]) -> ExpertBank:
    name, module = holders[0]
    parameters = _stacked_parameters(module)
    return ExpertBank(
        index=index,
        name=name,
        holders=tuple(weakref.ref(module) for _, module in holders),
        parameters=parameters,
        num_experts=next(iter(parameters.values())).shape[0],
        ids_argument=(_positional_arguments(module)[1], 1),
        layout=BankLayout.of(parameters.items()),
    )


def _stacked_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own parameters that have a row for each expert: every stack of matrices, and what has as many rows."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    rows = {parameter.shape[0] for parameter in own.values() if parameter.dim() == 3}
    return {name: parameter for name, parameter in own.items() if parameter.dim() >= 2 and parameter.shape[0] in rows}


def _why_not(module: nn.Module, stacked: dict[str, nn.Parameter]) -> str | None:
    """Why a module is not an expert bank, or None if it is one."""
    matrices = [parameter for parameter in stacked.values() if parameter.dim() == 3]
    if len(matrices) < 2:
        return "its experts are not stacked in at least two 3-D parameters of its own"
    rows = sorted({parameter.shape[0] for parameter in matrices})
    if len(rows) > 1:
        return f"its stacked parameters differ in their number of experts ({', '.join(map(str, rows))})"
    if rows[0] < 2:
        return "it has a single expert, so there is nothing to route"
    declared = getattr(module, "num_experts", rows[0])
    if declared != rows[0]:
        return f"its parameters have {rows[0]} rows, but its num_experts is {declared}"
    if len(_positional_arguments(module)) < 3:
        return (
            f"its forward takes ({', '.join(_positional_arguments(module))}); prefetching needs one that is called "
            "with hidden states, expert ids and routing weights"
        )
    for name, parameter in stacked.items():
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            return f"{name} is a {type(parameter.data).__name__}, a tensor type that can't be re-pointed yet"
        if parameter.layout != torch.strided or parameter.is_quantized or not is_dense(parameter):
            return f"{name} is not a dense strided tensor"
    return None


def _positional_arguments(module: nn.Module) -> list[str]:
    signature = inspect.signature(type(module).forward)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds][1:]


def _resembles_experts(name: str, module: nn.Module, stacked: dict[str, nn.Parameter]) -> bool:
    """For messages only: would a reader of the model call this module experts?"""
    holds_weights = bool(stacked) or len(list(module.children())) > 1
    return holds_weights and ("expert" in type(module).__name__.lower() or name.rpartition(".")[2] == "experts")


def _nothing_found(model: nn.Module, refusals: list[Refusal]) -> str:
    kind = type(model).__name__
    works = (
        "What works: modules that keep all their experts stacked in 3-D parameters and are called with (hidden states, "
        "expert ids, routing weights), such as Mixtral, Qwen2/3-MoE, OLMoE, DeepSeek-V2/V3 and gpt-oss in transformers >= 5.17."
    )
    if refusals:
        shown = "\n".join(f"  - {refusal}" for refusal in _one_of_each(refusals))
        return f"{kind} has experts, but none in a layout that can be prefetched:\n{shown}\n{works}\nThe model is unchanged."
    largest = sorted({type(module).__name__ for module in model.modules() if module is not model})[:6]
    return (
        f"{kind} has no Mixture-of-Experts layers (it holds {', '.join(largest) or 'no modules'}), so there are no experts "
        f"to prefetch: it looks like a dense model. {works} The model is unchanged."
    )


def _one_of_each(refusals: list[Refusal]) -> Iterator[Refusal]:
    seen = set()
    for refusal in refusals:
        if (refusal.module, refusal.reason) not in seen:
            seen.add((refusal.module, refusal.reason))
            yield refusal
