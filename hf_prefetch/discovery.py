"""Which modules of a model are expert banks: found by what they hold and how they are called, never by a model's name."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from .banks.attributes import tensors_beside
from .banks.bank import ExpertBank
from .banks.candidates import Candidate, candidate_of, in_no_layout, is_stack, passes_on
from .banks.forms import parts_of
from .banks.layout import BankLayout

__all__ = [
    "Discovery",
    "ExpertBank",
    "Refusal",
    "find_banks",
    "implementation_of",
    "is_decorated",
    "one_of_each",
    "reads_only_routed_rows",
    "takes_other_ids",
]

_SPARSE = ("eager", "batched_mm", "grouped_mm")
_ANY_ORDER = ("batched_mm", "grouped_mm")


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
    found: dict[tuple[tuple[str, int], ...], list[Candidate]] = {}
    refusals: list[Refusal] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        candidate = candidate_of(name, module, modules)
        if isinstance(candidate, Candidate):
            found.setdefault(tuple((key, id(value)) for key, value in candidate.parameters.items()), []).append(candidate)
        elif candidate is not None:
            refusals.append(Refusal(name or "(the model itself)", type(module).__name__, candidate))
    holders = Counter(parameter for parameters in found for _, parameter in parameters)
    # What has its weights in a bank around it needs no word, and neither has an adapter around a bank.
    for one in tuple(refusals):
        module = modules.get(one.name, model)
        own = module.parameters() if passes_on(module) else module._parameters.values()
        if any(id(parameter) in holders for parameter in own):
            refusals.remove(one)
    refused = {id(parameter) for one in refusals for parameter in modules.get(one.name, model).parameters()}
    for name, module in modules.items():
        reason = in_no_layout(name, module)
        if reason is not None and not any(id(each) in holders or id(each) in refused for each in module.parameters()):
            refusals.append(Refusal(name or "(the model itself)", type(module).__name__, reason))
    for parameters in [key for key in found if any(holders[parameter] > 1 for _, parameter in key)]:
        reason = "it shares some of its weights, but not all, with another experts module"
        refusals += [Refusal(one.name, type(one.module).__name__, reason) for one in found.pop(parameters)]
    banks = tuple(_bank(index, candidates) for index, candidates in enumerate(found.values()))
    if not banks:
        raise ValueError(_nothing_found(model, refusals))
    return Discovery(banks, tuple(refusals))


def implementation_of(module: nn.Module) -> str | None:
    """Which of transformers' experts implementations a call of a module takes, if it is one that asks for that."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def is_decorated(module: nn.Module) -> bool:
    """Whether transformers' experts implementations take the place of a module's forward."""
    return "has_gate" in module.__dict__ and "is_transposed" in module.__dict__


def reads_only_routed_rows(module: nn.Module, forward: Callable[..., object], implementation: str | None) -> bool:
    """Whether a call of `forward`, the module's own, looks at no other experts than those whose ids it is given.

    transformers' implementations of a decorated experts class do, and which one runs is looked up at each call. Of others,
    a kernel that was put in its place for example, nothing is known.
    """
    own = getattr(forward, "__func__", None) is type(module).forward
    return own and implementation in _SPARSE and is_decorated(module)


def takes_other_ids(module: nn.Module, implementation: str | None, bank: ExpertBank) -> bool:
    """Whether a module that reads only routed rows gives the same bits when its experts are numbered otherwise.

    `eager` adds up the experts' outputs in the order of their ids; the others do so in the order in which a token lists them.
    What the module has for each expert besides its bank, a scale of its inputs say, would keep the old numbers.
    """
    if implementation not in _ANY_ORDER or "num_experts" not in module.__dict__ or bank.has_beside:
        return False
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if name not in bank.parameters and tensor is not None and tensor.dim() and tensor.shape[0] == bank.num_experts:
                return False
    return True


def _bank(index: int, candidates: list[Candidate]) -> ExpertBank:
    first = candidates[0]
    tensors = parts_of(first.parameters)
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors.values()}
    ours = {id(tensor) for tensor in tensors.values()}
    beside = (tensor for candidate in candidates for tensor in tensors_beside(candidate.module).values())
    return ExpertBank(
        index=index,
        name=first.name,
        # One may be found twice: as experts, and around a list of them.
        holders=tuple(map(weakref.ref, dict.fromkeys(candidate.module for candidate in candidates))),
        parameters=dict(first.parameters),
        num_experts=first.num_experts,
        ids_argument=first.ids_argument,
        layout=BankLayout.of(tensors.items(), stacked=first.stacked and rows == {first.num_experts}),
        has_beside=any(is_stack(tensor, first.num_experts) and id(tensor) not in ours for tensor in beside),
    )


def _nothing_found(model: nn.Module, refusals: list[Refusal]) -> str:
    kind = type(model).__name__
    works = (
        "What works: modules that keep all their experts stacked in 3-D parameters and are called with (hidden states, "
        "expert ids, routing weights), such as Mixtral, Qwen2/3-MoE, OLMoE, DeepSeek-V2/V3 and gpt-oss in transformers >= "
        "5.17, and lists of experts (a ModuleList or ModuleDict)."
    )
    if refusals:
        shown = "\n".join(f"  - {refusal}" for refusal in one_of_each(refusals))
        return f"{kind} has experts, but none in a layout that can be prefetched:\n{shown}\n{works}\nThe model is unchanged."
    largest = sorted({type(module).__name__ for module in model.modules() if module is not model})[:6]
    return (
        f"{kind} has no Mixture-of-Experts layers (it holds {', '.join(largest) or 'no modules'}), so there are no experts "
        f"to prefetch: it looks like a dense model. {works} The model is unchanged."
    )


def one_of_each(refusals: Iterable[Refusal]) -> Iterator[Refusal]:
    """The first refusal of each kind of module and reason: a model has as many as it has layers."""
    seen = set()
    for refusal in refusals:
        if (refusal.module, refusal.reason) not in seen:
            seen.add((refusal.module, refusal.reason))
            yield refusal
