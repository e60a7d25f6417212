"""LayerBank: the experts of one `RoutedExperts` layer as a bank.

[Note: what a kernel keeps]
A kernel gets a layer's weights at each call, but their scales and biases once, when it is made: they lie in its quantization
config. What is there by identity, and has a row for each expert, is a part of the bank like the weights are, and for a call
the config is pointed at what has arrived as the layer is. So scales and weights can't get apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...banks.bank import ExpertBank
from ...banks.forms import unfit
from ...banks.layout import BankLayout
from .refusals import refuse

__all__ = ["LayerBank", "bank_of", "stacks"]

# Parts of a quantization config that describe weights.
_DESCRIPTIONS = ("_w1", "_w2")
_FIELDS = ("scale", "alpha_or_gscale", "zp", "bias")


@dataclass(frozen=True, eq=False)
class LayerBank(ExpertBank):
    """A bank whose layer's kernel keeps some of it.

    Attributes:
        kept: where the kernel has them: what describes them, the attribute there, name in the bank.
        takes_other_ids: whether a call gives the same bits when its experts are numbered otherwise.
    """

    kept: tuple[tuple[Any, str, str], ...] = ()
    takes_other_ids: bool = False

    def point(self, module: nn.Module, tensors: dict[str, nn.Parameter]) -> None:
        """Make the layer and its kernel read these tensors."""
        super().point(module, tensors)
        for description, own, name in self.kept:
            setattr(description, own, tensors[name])

    def with_ids(
        self, args: tuple[object, ...], kwargs: dict[str, object], ids: torch.Tensor
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of a call with other ids in their place, of the type that its kernel wants."""
        own = self.ids(args, kwargs)
        return super().with_ids(args, kwargs, ids if own is None else ids.to(own.dtype))


def stacks(layer: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Those Parameters of a layer that are a matrix for each of its experts: what its size is made of."""
    for name, parameter in layer._parameters.items():
        if parameter is not None and parameter.dim() == 3 and parameter.shape[0] == layer.local_num_experts:
            yield name, parameter


def bank_of(index: int, layer: Any) -> LayerBank:
    """The bank of a layer whose weights have been loaded.

    Raises:
        NotImplementedError: its weights can't be moved as bytes.
    """
    experts = layer.local_num_experts
    parameters, config = dict(stacks(layer)), layer.quant_method.moe_quant_config
    names = {id(parameter): name for name, parameter in layer._parameters.items() if parameter is not None}
    kept, left = [], []
    for description in (getattr(config, one) for one in _DESCRIPTIONS):
        for own in _FIELDS:
            value = getattr(description, own, None)
            if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != experts:
                continue
            name = names.get(id(value))
            if name is None:
                left.append(own)
                continue
            kept.append((description, own, name))
            parameters[name] = layer._parameters[name]
    if not parameters:
        refuse([f"{layer.layer_name} has no weights among its Parameters: its kernel keeps them in a form of its own."])
    reasons = [reason for name, parameter in parameters.items() if (reason := unfit(name, parameter))]
    refuse([f"{layer.layer_name}: {reason}." for reason in reasons])
    return LayerBank(
        index=index,
        name=layer.layer_name,
        holders=(weakref.ref(layer),),
        parameters=parameters,
        num_experts=experts,
        ids_argument=("topk_ids", 2),
        layout=BankLayout.of(parameters.items()),
        kept=tuple(kept),
        # What the kernel has for each expert besides its bank would keep the old numbers; a map from global ids would as well.
        takes_other_ids=not left and layer.expert_map is None,
    )
