"""Candidates: modules that hold the experts of a layer, by what they hold and how they are called.

[Note: what is a bank]
*Stacked*: a module that keeps the weights of all its experts in its own parameters (first dimension = expert) and is called
with hidden states, expert ids and routing weights. That is the layout of nearly every Mixture-of-Experts model in transformers
5: Mixtral, Qwen-MoE, OLMoE, DeepSeek, gpt-oss with its biases and others. Where a module says that it has as many experts as
its parameters have rows (`num_experts`, or another number of experts), one such parameter will do, and it need not be given
ids.
*Wrapped*: a module of experts that is called in the same way and whose weights are those of the module inside it, or whose
weights are all stacks of one height in modules inside it.
*Listed*: a ModuleList or ModuleDict of experts. It, or what it lists, is called experts; or it lists modules of one kind beside
a router that has a row for each. What reads it is its own forward, or that of the module around it. Or several ParameterLists
of one length, read by the module that has them.
*Kept beside*: a module of experts whose stacks are among its attributes, in objects that its kernels want. What reads them is
the module around it, by whatever method.

Single experts are sent of the stacked ones only, if it shows which of them are read; the others get whole banks. So do stacked
ones inside an adapter: a module around them that has Parameters of its own and passes on what it is given. It may look at their
weights before it calls them, so it is the one that is hooked. And so do those in a block whose forward somebody has replaced by
another, as kernels of the Hub are: that one may read the weights by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from .attributes import tensors_beside
from .forms import unfit

__all__ = ["Candidate", "candidate_of", "in_no_layout", "is_stack", "passes_on"]

_IN_BUFFERS = (
    "its weights are buffers and not Parameters, as those of some quantizations are, whose kernels may know them by their "
    "addresses. Load the model dequantized, or with a quantization that keeps Parameters"
)
_IN_A_ROW = "its experts' weights lie one after the other in matrices, without a dimension for the expert"
_IN_NO_LAYOUT = (
    "its weights are in no layout that is known: neither in tensors with a row for each expert, nor in a list of modules"
)
_KEPT_ELSEWHERE = (
    "its weights are neither among its Parameters nor tensors among its attributes with a row for each expert: a quantization "
    "keeps them elsewhere. Load the model dequantized, with Mxfp4Config(dequantize=True) for example"
)


@dataclass(frozen=True)
class Candidate:
    """A module that is a bank, or shares one: its holder, and its weights by their names there."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    num_experts: int
    ids_argument: tuple[str, int] | None = None
    stacked: bool = False


def candidate_of(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> Candidate | str | None:
    """What a module of a model holds; why it can't be prefetched, if it looks like experts; None if it doesn't.

    Args:
        name: of the module.
        module: that is looked at.
        modules: all of the model, by name.
    """
    found = (
        _stacked(name, module)
        or _in_parameter_lists(name, module)
        or _beside(name, module, modules)
        or _wrapped(name, module)
        or _listed(name, module, modules)
    )
    if not isinstance(found, Candidate):
        return found
    for each in found.module.modules():
        if not isinstance(each._parameters, dict):
            return f"a {type(each._parameters).__name__} keeps its Parameters, and brings them to the device itself"
    return _in_replaced(_in_adapters(found, modules), modules)


def in_no_layout(name: str, module: nn.Module) -> str | None:
    """Why a module that is no candidate can't be prefetched, if its name says that it has experts and it has weights."""
    called = (name.rpartition(".")[2].lower(), type(module).__name__.lower())
    if "experts" not in (called[0], called[1][-7:]) or any("shared" in each for each in called):
        return None
    if all(parameter.dim() < 2 for parameter in module.parameters()):
        return None
    return _IN_NO_LAYOUT


def _stacked(name: str, module: nn.Module) -> Candidate | str | None:
    """A bank of stacked parameters; why it is none, if it looks like one; None if it doesn't."""
    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    # Blocks of a quantized matrix may have more dimensions than it has; in other modules such are convolutions.
    dims = range(3, 6 if _is_called_experts(name, module) else 4)
    matrices = [parameter for parameter in own.values() if parameter.dim() in dims]
    if not matrices:
        return None
    rows = {parameter.shape[0] for parameter in matrices}
    # Every stack of matrices, and what has as many rows.
    stacked = {key: parameter for key, parameter in own.items() if parameter.dim() >= 2 and parameter.shape[0] in rows}
    declared, arguments = getattr(module, "num_experts", None), _arguments(module)
    says_so = len(rows) == 1 and (declared in rows or _counts_experts(module, max(rows)))
    reason = None
    if len(matrices) < 2 and not says_so:
        reason = "its experts are not stacked in at least two 3-D parameters of its own"
    elif len(rows) > 1 and not _is_called_experts(name, module):
        reason = f"its stacked parameters differ in their number of experts ({', '.join(map(str, sorted(rows)))})"
    elif max(rows) < 2:
        reason = "it has a single expert, so there is nothing to route"
    elif declared is not None and declared not in rows:
        reason = f"its parameters have {max(rows)} rows, but its num_experts is {declared}"
    elif len(arguments) < 3 and not says_so:
        reason = (
            f"its forward takes ({', '.join(arguments)}); prefetching needs one that is called "
            "with hidden states, expert ids and routing weights"
        )
    reason = reason or _unfit(stacked)
    if reason is not None:
        return reason if _is_called_experts(name, module) or len(matrices) > 1 else None
    ids = (arguments[1], 1) if len(arguments) >= 3 else None
    return Candidate(name, module, stacked, max(rows), ids, stacked=len(rows) == 1 and ids is not None)


def _beside(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> Candidate | str | None:
    """A bank of stacks that a module keeps among its attributes, or why it is none, if it has no weights anywhere else."""
    if not _is_called_experts(name, module) or _lists_modules(module) or not _has_forward(module):
        return None
    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    if any(parameter.dim() > 2 for parameter in own.values()) or any(
        True for each in module.children() for _ in each.parameters()
    ):
        return None
    tensors = {**tensors_beside(module), **own}
    heights = {tensor.shape[0] for tensor in tensors.values() if tensor.dim() > 2}
    count = getattr(module, "num_experts", max(heights) if len(heights) == 1 else None)
    rows = {key: tensor for key, tensor in tensors.items() if is_stack(tensor, count, 2)}
    if sum(tensor.dim() > 2 for tensor in rows.values()) < 2:
        matrices = sum(parameter.dim() == 2 and not is_stack(parameter, count) for parameter in own.values())
        if any(buffer.dim() > 2 for buffer in module.buffers()):
            return _IN_BUFFERS
        # One matrix is a router's.
        return _KEPT_ELSEWHERE if not matrices else _IN_A_ROW if matrices > 1 else None
    parent, _, here = name.rpartition(".")
    around, prefix = (modules[parent], f"{here}.") if name and _has_forward(modules[parent]) else (module, "")
    inside = {prefix + key: cast(nn.Parameter, tensor) for key, tensor in rows.items()}
    return _unfit(inside) or Candidate(name, around, inside, next(iter(rows.values())).shape[0])


def is_stack(tensor: torch.Tensor, rows: object, dims: int = 1) -> bool:
    """Whether it has this many rows, and at least so many dimensions."""
    return tensor.dim() >= dims and tensor.shape[0] == rows


def _wrapped(name: str, module: nn.Module) -> Candidate | str | None:
    """A bank whose weights are those of modules inside."""
    if not _is_called_experts(name, module) or _lists_modules(module) or not _has_forward(module):
        return None
    if any(parameter is not None for parameter in module._parameters.values()):
        return None
    if any(isinstance(_stacked(key, each), Candidate) for key, each in module.named_modules() if key):
        return None
    inside = dict(module.named_parameters())
    heights = {parameter.shape[0] if parameter.dim() == 3 else 0 for parameter in inside.values()}
    if len(inside) > 1 and len(heights) == 1 and (rows := max(heights)) > 1:
        return _unfit(inside) or Candidate(name, module, inside, rows)
    of_one = len({key.partition(".")[0] for key in inside}) == 1
    if not of_one or len(_arguments(module)) < 3:
        return None
    count = getattr(module, "num_experts", None)
    return _unfit(inside) or Candidate(name, module, inside, count if isinstance(count, int) else 2)


def _in_adapters(candidate: Candidate, modules: dict[str, nn.Module]) -> Candidate:
    """The same as the outermost adapter around it holds it."""
    name, prefix, adapted = candidate.name, "", candidate
    weights = set(map(id, candidate.parameters.values()))
    while name and candidate.module is modules[candidate.name]:
        name, _, inner = name.rpartition(".")
        around, prefix = modules[name], f"{inner}.{prefix}"
        if not passes_on(around):
            break
        if any(id(parameter) not in weights for parameter in around.parameters()):
            parameters = {prefix + key: parameter for key, parameter in candidate.parameters.items()}
            adapted = replace(candidate, name=name, module=around, parameters=parameters)
    return adapted


def _in_replaced(candidate: Candidate, modules: dict[str, nn.Module]) -> Candidate:
    """The same as the block around it holds it, if that has another forward than its class."""
    parent, _, own = candidate.name.rpartition(".")
    if not candidate.name or candidate.module is not modules[candidate.name]:
        return candidate
    forward = inspect.unwrap(modules[parent].forward)
    if not inspect.ismethod(forward) or forward.__func__ is type(modules[parent]).forward:
        return candidate
    parameters = {f"{own}.{key}": parameter for key, parameter in candidate.parameters.items()}
    return replace(candidate, module=modules[parent], parameters=parameters, ids_argument=None)


def passes_on(module: nn.Module) -> bool:
    """Whether its forward takes any arguments, as that of a module does which only passes them on."""
    signature = inspect.signature(type(module).forward)
    return _has_forward(module) and any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values())


def _in_parameter_lists(name: str, module: nn.Module) -> Candidate | str | None:
    """A bank of lists of matrices, one an expert in each."""
    lists = {key: child for key, child in module._modules.items() if isinstance(child, nn.ParameterList)}
    inside = {f"{key}.{own}": value for key, child in lists.items() for own, value in child._parameters.items()}
    lengths = {len(child._parameters) for child in lists.values()}
    if len(lists) < 2 or len(lengths) > 1 or max(lengths) < 2 or not _has_forward(module):
        return None
    if any(value is None or value.dim() != 2 for value in inside.values()):
        return None
    parameters = cast(dict[str, nn.Parameter], inside)
    return _unfit(parameters) or Candidate(name, module, parameters, max(lengths))


def _listed(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> Candidate | str | None:
    """A bank that is a list of modules, one an expert."""
    if not _lists_modules(module) or not _lists_experts(name, module, modules):
        return None
    inside_it = [(f"{name}.{key}".strip("."), each) for key, each in module.named_modules() if key]
    if any(isinstance(_stacked(*each) or _listed(*each, modules), Candidate) for each in inside_it):
        # A list of layers.
        return None
    if _nbytes(module.buffers()) > _nbytes(module.parameters()):
        return _IN_BUFFERS
    experts = [child for child in module.children() if next(child.parameters(), None) is not None]
    if len(experts) < 2:
        return "there are no two of its experts with weights" if experts else None
    parent, _, own = name.rpartition(".")
    holder, prefix = (module, "") if _has_forward(module) else (modules[parent], f"{own}.")
    if not name or not _has_forward(holder):
        return "nothing around it has a forward that could be hooked"
    inside = {prefix + key: parameter for key, parameter in module.named_parameters()}
    if len(inside) < sum(1 for child in experts for _ in child.parameters()):
        return "some of its experts share weights"
    return _unfit(inside) or Candidate(name, holder, inside, len(experts))


def _lists_experts(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> bool:
    """Would a reader of the model call what it lists experts?"""
    own = name.rpartition(".")[2].lower()
    named = (own, *(type(each).__name__.lower() for each in (module, *module.children())))
    # Those that are shared are read by every token.
    return "shared" not in own and (any("expert" in each for each in named) or _is_routed_to(name, module, modules))


def _is_routed_to(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> bool:
    """Whether it lists modules of one kind beside a router: something small with as many rows."""
    count, around = len(module._modules), modules[name.rpartition(".")[0]]
    if not name or count < 2 or len({type(child) for child in module.children()}) > 1:
        return False
    small = _nbytes(module.parameters()) // count
    beside = [list(child.parameters()) for child in around.children() if child is not module]
    beside.append([value for value in around._parameters.values() if value is not None])
    return any(_nbytes(held) < small and any(is_stack(each, count, 2) for each in held) for held in beside)


def _counts_experts(module: nn.Module, rows: int) -> bool:
    """Whether it says, by whatever name, that it has so many experts, all of them routed to."""
    return any(
        value == rows and type(value) is int and "expert" in key and "shared" not in key for key, value in vars(module).items()
    )


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _unfit(parameters: dict[str, nn.Parameter]) -> str | None:
    """Why some of them can't be moved as bytes, if so."""
    return next(filter(None, (unfit(name, parameter) for name, parameter in parameters.items())), None)


def _is_called_experts(name: str, module: nn.Module) -> bool:
    """Would a reader of the model call this module experts?"""
    return "expert" in type(module).__name__.lower() or name.rpartition(".")[2] == "experts"


def _lists_modules(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _arguments(module: nn.Module) -> list[str]:
    signature = inspect.signature(type(module).forward)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind not in several][1:]
